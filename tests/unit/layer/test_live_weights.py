"""A layer computes with the weights it has now, whatever was done to them between two calls.

Fast calls hold addresses, and no version counter sees `parameter.data = ...`. So for every tensor a layer holds, and
every way to replace it, the call after must equal that of a fresh layer with the same weights.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lancebill.backends import oracle
from lancebill.backends.registry import registry
from lancebill.checkpoint.resolve.naming import TABLE
from lancebill.errors import MissingTensor
from lancebill.layer import packed_module
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device
from lancebill.moe.layout import Layout, MatrixShape, Packed
from lancebill.testing.checkpoints import Geometry, generate, save
from lancebill.testing.conformance import all_examples
from lancebill.testing.layers import layer_problem, make_layer, routing

CPU = Device("cpu")
PROBLEM = layer_problem("int4-g32-zp", "int8", hidden=128, intermediate=64, experts=4, top_k=2, bias=True)
BACKEND = "cpu" if not list(registry()["cpu"].check(PROBLEM, CPU)) else "torch-cpu"


def fresh() -> RoutedExperts:
    return RoutedExperts(LayerParts(oracle.select(PROBLEM, CPU, BACKEND), make_layer(PROBLEM, BACKEND, "cpu").weights))


def compute(layer: RoutedExperts, tokens: int = 3) -> Tensor:
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
    routed = routing(PROBLEM, tokens, 0, "cpu")
    return layer(x, topk_ids=routed.ids, topk_weights=routed.weights)


def warm(layer: RoutedExperts) -> Tensor:
    """Two calls: the second is a fast one, where the backend has such."""
    compute(layer)
    return compute(layer)


def changed(tensor: Tensor) -> Tensor:
    """Other bits that are valid weights: the rows of the experts in another order."""
    return tensor.flip(0).clone()


def by_data(layer: RoutedExperts, name: str, value: Tensor) -> None:
    layer.get_parameter(name).data = value


def by_parameter(layer: RoutedExperts, name: str, value: Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))


def by_dictionary(layer: RoutedExperts, name: str, value: Tensor) -> None:
    """As torch.func.functional_call and parametrizations do it."""
    layer._parameters[name] = nn.Parameter(value, requires_grad=False)


def in_place(layer: RoutedExperts, name: str, value: Tensor) -> None:
    layer.get_parameter(name).data.copy_(value)


def by_adopting(layer: RoutedExperts, name: str, value: Tensor) -> None:
    packed = layer.packed
    matrix, _, own = name.partition("_")
    packed[matrix][own] = value
    layer.adopt(layer.choice, packed)


WAYS = (by_data, by_parameter, by_dictionary, in_place, by_adopting)
NAMES = [name for name, _ in fresh().named_parameters()]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_may_be_replaced(name: str, way: Callable[[RoutedExperts, str, Tensor], None]) -> None:
    layer, expected = fresh(), fresh()
    before = warm(layer)
    value = changed(layer.get_parameter(name).data)
    way(layer, name, value.clone())
    in_place(expected, name, value)
    want = compute(expected)
    assert torch.equal(compute(layer), want) and torch.equal(compute(layer), want)
    assert torch.equal(value, layer.get_parameter(name).data)
    if not torch.equal(value, fresh().get_parameter(name).data):
        assert not torch.equal(before, want), "the test must notice a stale tensor"


@pytest.mark.parametrize("name", NAMES)
def test_a_deleted_tensor_is_missed(name: str) -> None:
    layer = fresh()
    warm(layer)
    del layer._parameters[name]
    with pytest.raises(MissingTensor, match=name):
        compute(layer)


def test_moves_and_copies() -> None:
    layer = fresh()
    want = warm(layer)
    layer.to(torch.float16)  # integer storage: nothing is rounded
    assert torch.equal(compute(layer), want)
    twin = copy.deepcopy(layer)
    for parameter in layer.parameters():
        parameter.data.zero_()
    assert torch.equal(warm(twin), want) and not torch.equal(compute(layer), want)


def test_a_layer_can_be_sent_to_another_process() -> None:
    layer = fresh()
    want = warm(layer)
    assert torch.equal(warm(pickle.loads(pickle.dumps(layer))), want)


def test_rehoming_takes_other_buffers() -> None:
    layer, other = fresh(), fresh()
    warm(layer)
    for parameter in other.parameters():
        parameter.data = changed(parameter.data)
    want = warm(other)
    layer.rehome(other.packed, range(4), range(4))
    assert torch.equal(compute(layer), want)


def test_a_refit_is_computed_with(tmp_path: Path) -> None:
    old, new, tensors = _old_and_new(tmp_path)
    layer, fresh_layer = RoutedExperts.from_checkpoint(old, layer=0), RoutedExperts.from_checkpoint(new, layer=0)
    x = torch.randn(3, 128).bfloat16()
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32), torch.full((3, 2), 0.5)
    for _ in range(2):
        layer(x, topk_ids=ids, topk_weights=weights)
    layer.load_weights(tensors.items())
    layer.finish()
    want = fresh_layer(x, topk_ids=ids, topk_weights=weights)
    assert torch.equal(layer(x, topk_ids=ids, topk_weights=weights), want)


def test_a_router_is_refitted_in_place() -> None:
    """Captured graphs read it where it is. Also one that was taken under `inference_mode`."""
    layer = fresh()
    with torch.inference_mode():
        layer.take_router("correction", torch.zeros(4))
    layer.take_router("table", torch.arange(4))
    before = {name: layer._buffers[name].data_ptr() for name in ("router_correction", "router_table")}  # type: ignore[union-attr]
    layer.take_router("correction", torch.arange(4, dtype=torch.bfloat16))
    layer.take_router("table", torch.arange(4).flip(0))
    assert before == {name: layer._buffers[name].data_ptr() for name in before}  # type: ignore[union-attr]
    assert layer.router_correction.tolist() == [0, 1, 2, 3] and layer.router_table.tolist() == [3, 2, 1, 0]
    layer.take_router("correction", torch.zeros(5))  # of another size: nothing captured could have read it
    assert layer.router_correction.shape == (5,)


def _old_and_new(folder: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """Folders of two checkpoints of the same model, and the tensors of the second."""
    example = next(example for fmt, example in all_examples() if fmt.name == "gptq")
    row = next(row for row in TABLE if row.family == "qwen3_moe")
    size = Geometry(experts=4, hidden=128, intermediate=128, top_k=2)
    old, new = (generate(example, row, row.forms[0], size, seed=seed) for seed in (1, 2))
    return save(old, folder / "old"), save(new, folder / "new"), dict(new.tensors)


def test_a_layer_that_moves_during_a_refit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts pushed after the move are packed in the layout of the new backend; the report names that backend."""
    old, new, tensors = _old_and_new(tmp_path)
    layer, fresh_layer = (
        RoutedExperts.from_checkpoint(old, 0),
        RoutedExperts.from_checkpoint(new, 0, backend="reference"),
    )
    before = [name for name in tensors if ".experts.0." in name or ".experts.1." in name]
    layer.load_weights((name, tensors[name]) for name in before)
    gpu = Device("cuda", 75)  # older than our GPU kernels
    monkeypatch.setattr(packed_module, "parse_device", lambda name: gpu)
    layer.to("cpu")
    assert layer.choice.backend.name == "reference"
    layer.load_weights((name, tensor) for name, tensor in tensors.items() if name not in before)
    layer.finish()
    assert layer.report is not None and layer.report.choice.device == gpu
    x = torch.randn(3, 128).bfloat16()
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32), torch.full((3, 2), 0.5)
    want = fresh_layer(x, topk_ids=ids, topk_weights=weights)
    assert torch.equal(layer(x, topk_ids=ids, topk_weights=weights), want)


def test_a_moved_layer_is_repacked_matrix_by_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """From our GPUs' layout to the CPU's: the same bits as packed at once. When a matrix gets its new memory, those
    before it have given up their old one."""
    problem = layer_problem("mxfp4", "bf16", hidden=128, intermediate=64, experts=4, top_k=2)
    sample, cpu = make_layer(problem, "hopper", "cpu"), oracle.select(problem, "cpu")
    old, new = sample.backend.layout(problem), cpu.backend.layout(problem)
    want = {}
    for matrix, shape in problem.matrices.items():
        want[matrix] = new.allocate(shape, 4, torch.device("cpu"))
        new.pack(shape, old.unpack(shape, sample.weights[matrix]), want[matrix])
    layer = RoutedExperts(LayerParts(cpu, {m: dict(tensors) for m, tensors in sample.weights.items()}))
    storages = {name: StorageWeakRef(parameter.untyped_storage()) for name, parameter in layer.named_parameters()}
    del sample
    alive: list[set[str]] = []
    original = type(new).allocate

    def allocate(self: Layout, shape: MatrixShape, experts: int, device: torch.device) -> Packed:
        alive.append({name.split("_")[0] for name, storage in storages.items() if not storage.expired()})
        return original(self, shape, experts, device)

    monkeypatch.setattr(type(new), "allocate", allocate)
    layer._repack(old, new, torch.device("cpu"))
    assert alive == [{"w13", "w2"}, {"w2"}]
    assert all(torch.equal(layer.packed[m][name], tensor) for m in want for name, tensor in want[m].items())


def test_a_layer_loaded_with_a_progress_bar_can_be_copied(tmp_path: Path) -> None:
    class Bar:
        def __init__(self) -> None:
            self.lock, self.done = threading.Lock(), 0  # a lock cannot be copied

        def update(self, count: int) -> None:
            self.done += count

    bar = Bar()
    layer = RoutedExperts.from_checkpoint(_old_and_new(tmp_path)[0], layer=0, progress=bar.update)
    assert layer.report is not None and bar.done == layer.report.bytes
    copy.deepcopy(layer)


@pytest.mark.parametrize("mapped", [False, True])
def test_ids_and_weights_as_routers_give_them(mapped: bool) -> None:
    """Every dtype, strides, ids of no expert with NaN weights, an expert map. The first call makes the fast call."""
    layer, x = fresh(), torch.randn(7, 128).bfloat16()
    experts, routed = layer.problem.experts, routing(PROBLEM, 7, 0, "cpu")
    ids, weights = routed.ids.clone(), routed.weights.bfloat16()
    ids[1, 0], ids[2, 1], weights[1, 0], weights[2, 1] = -1, experts, torch.nan, torch.nan
    want = layer(x, topk_ids=ids, topk_weights=weights.float())
    assert want.isfinite().all()
    wild = ids.long()
    wild[1, 0], wild[2, 1] = (1 << 32) + 1, -(1 << 40)
    if mapped:
        layer.expert_map = torch.full((2 * experts,), -1, dtype=torch.int32)
        layer.expert_map[1::2] = torch.arange(experts)
        ids, wild = (torch.where((t >= 0) & (t < experts), 2 * t + 1, t) for t in (ids, wild))
        ids[2, 1] = 2 * experts
    for given in (ids, wild, torch.stack([wild, wild], 2)[..., 0], wild.t().contiguous().t()):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for routed_weights in (weights.to(dtype), torch.stack([weights, weights], 2).to(dtype)[..., 1]):
                for _ in range(2):
                    got = layer(x, topk_ids=given, topk_weights=routed_weights)
                    assert torch.equal(got, want), (given.dtype, given.stride(), dtype)
    assert bool(layer.executor.fast_calls) == (BACKEND == "cpu")


def test_comparing_all_addresses_costs_little_more_than_reading_them() -> None:
    table = fresh().executor.tensors
    held = [tensor for tensors in table.packed().values() for tensor in tensors.values()]
    calls = table.addresses, lambda: [tensor.data_ptr() for tensor in held]
    assert calls[0]() == calls[1]()
    ours, least = (min(times) for times in zip(*([_seconds(call, 500) for call in calls] for _ in range(20))))
    assert ours < 3 * least


def _seconds(call: Callable[[], object], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - start) / times


def test_dropped_layers_leave_nothing_behind() -> None:
    """50 layers, loaded, called and dropped: nothing of ours grows."""
    warm(fresh())
    gc.collect()
    before, executors = len(gc.get_objects()), []
    for _ in range(50):
        layer = fresh()
        warm(layer)
        executors.append(weakref.ref(layer.executor))
    del layer
    gc.collect()
    assert not [ref for ref in executors if ref() is not None]
    executors.clear()
    assert len(gc.get_objects()) - before < 50
