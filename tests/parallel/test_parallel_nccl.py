"""Expert parallelism with NCCL on one GPU: a group of one rank with real collectives, and a CUDA graph."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scenes import batches, checkpoint, close, load, run_layer
from torch import Tensor

from lancebill.backends.base import Plan
from lancebill.backends.reference import Reference, run_expert
from lancebill.moe.dispatch import Dispatch, Indexed
from lancebill.moe.layout import Packed
from lancebill.moe.placement import Placement
from lancebill.parallel import ExpertParallel, Mesh, all_to_all, gather
from lancebill.parallel.replicas import Assignment, ReplicaTables

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=GPU)
        yield Mesh.make()
        dist.destroy_process_group()


def _on_gpu(given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = (tensor.to(GPU) for tensor in given)
    return x, ids, weights


def test_both_forms_with_nccl(mesh: Mesh) -> None:
    made = checkpoint("gptq", "int4-g64:fp16-zp")
    layer = load(made, device="cuda:0", backend="reference")
    x, ids, weights = _on_gpu(batches(layer, (9,), range(8))[0])
    want = run_layer(layer, (x, ids, weights))
    tables = ReplicaTables(Assignment.of(Placement(), 8), GPU)
    indexed = Indexed(tables.choose(ids), weights)
    out = all_to_all.forward(layer, mesh.ep, tables, x, indexed, torch.empty_like(x), torch.float32)
    assert torch.equal(out, want)
    assert torch.equal(gather.forward(layer, mesh.ep, 16, x, indexed, torch.float32).to(x.dtype), want)
    nothing = Indexed(indexed.ids[:0], weights[:0])
    empty = all_to_all.forward(layer, mesh.ep, tables, x[:0], nothing, torch.empty_like(x[:0]), torch.float32)
    assert empty.shape == (0, 128)


def test_moves_with_nccl(mesh: Mesh) -> None:
    made = checkpoint("gptq", "int4-g64:fp16-zp", experts=6)
    placement = mesh.placement(redundant=2)
    layer = load(made, placement, device="cuda:0", backend="reference", order="batch-invariant")
    experts = ExpertParallel(layer, mesh, placement)
    given = _on_gpu(batches(layer, (9,), range(6))[0])
    before = run_layer(experts, given)
    experts.arrange(experts.assignment.arranged([[5, 4, 3, 2, 1, 0, 3, 3]]))
    assert torch.equal(run_layer(experts, given), before)
    experts.resize(mesh, redundant=0)
    assert torch.equal(run_layer(experts, given), before)


class Unbranched(Reference):
    """Computes every expert on every row and masks: slow, but the host reads nothing back."""

    name = "unbranched"

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        assert isinstance(dispatch, Indexed)
        total = torch.zeros(x.shape, device=x.device)
        for expert in range(plan.problem.experts):
            share = torch.where(dispatch.ids == expert, dispatch.weights, 0.0).sum(1, keepdim=True)
            total += share * run_expert(plan.problem, x, weights, expert)
        return out.copy_(total)


def test_the_gather_form_can_be_captured_in_a_graph(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoint("dense")
    layer = load(made, device="cuda:0", backend="reference")
    monkeypatch.setattr(type(layer.choice), "backend", property(lambda choice: Unbranched()))
    tables = ReplicaTables(Assignment.of(Placement(), 8), GPU)
    first, second = (_on_gpu(given) for given in batches(layer, (9, 9), range(8)))
    static_inputs = tuple(tensor.clone() for tensor in first)

    def step() -> Tensor:
        x, ids, weights = static_inputs
        return gather.forward(layer, mesh.ep, 16, x, Indexed(tables.choose(ids), weights), torch.float32)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for given in (first, second):
        for target, tensor in zip(static_inputs, given):
            target.copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, run_layer(layer, given))
