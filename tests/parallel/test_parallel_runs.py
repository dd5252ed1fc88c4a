"""Experts over processes give what one process gives: real worlds of two and four, over gloo."""

from __future__ import annotations

import pytest
import torch
from scenes import TOP_K, alone, batches, checkpoint, close, load, must, pushed, run, spread
from torch import Tensor, nn
from worlds import run_world

from lancebill.errors import LaunchError, RanksDisagree
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.placement import Placement
from lancebill.moe.problem import BATCH_INVARIANT
from lancebill.moe.routing import Routing
from lancebill.parallel import GATHER, ExpertParallel, Mesh

UNEQUAL = ((5, 3, 0, 7), (1, 0, 0, 0), (4, 4, 4, 4), (0, 0, 0, 0))


def test_four_ranks_of_experts() -> None:
    run_world(4, _four_ranks)


def _four_ranks(rank: int) -> None:
    mesh = Mesh.make(ep=4)
    for fmt, variant, family in (("gptq", "int4-g64:fp16-zp", "qwen3_moe"), ("mxfp4", "", "gpt_oss")):
        made = checkpoint(fmt, variant, family)
        single = load(made)
        for strategy in ("linear", "round_robin"):
            experts = spread(made, mesh, strategy=strategy)
            for counts in UNEQUAL:
                _check_bitwise(experts, single, counts, rank, range(8))
            _check_bitwise(experts, single, (6, 2, 0, 1), rank, range(1, 1 + TOP_K))  # five experts get nothing
        gathered = spread(made, mesh, strategy="round_robin", form=GATHER, max_tokens=7)
        for counts in UNEQUAL:
            given = batches(single, counts, range(8))
            must(close(run(gathered, given[rank]), alone(single, given, rank)))
    _uneven_and_redundant(rank, mesh)
    _disagreement(rank, mesh)


def _check_bitwise(
    experts: nn.Module, single: RoutedExperts, counts: tuple[int, ...], rank: int, routed: range
) -> None:
    given = batches(single, counts, routed)
    must(torch.equal(run(experts, given[rank]), alone(single, given, rank)), f"{counts}, rank {rank}")


def _uneven_and_redundant(rank: int, mesh: Mesh) -> None:
    made = checkpoint("gptq", "int4-g64:fp16-zp", experts=6)
    _check_bitwise(spread(made, mesh), load(made), (5, 3, 0, 7), rank, range(6))
    copied = spread(made, mesh, redundant=2, order=BATCH_INVARIANT)
    must(copied.assignment.experts_by_rank == ((0, 1), (2, 3), (4, 5), (0, 1)))
    single = load(made, order=BATCH_INVARIANT)
    _check_bitwise(copied, single, (5, 3, 0, 7), rank, range(6))
    real = sum(int((ids >= 0).sum()) for _, ids, _ in batches(single, (5, 3, 0, 7), range(6)))
    must(sum(copied.logical_load()) == real, "padding is not counted, everything else is, once")


def _disagreement(rank: int, mesh: Mesh) -> None:
    made = checkpoint("gptq", "int8" if rank == 2 else "int4")
    with pytest.raises(RanksDisagree, match="rank 2: "):
        spread(made, mesh)


def test_two_ranks() -> None:
    run_world(2, _two_ranks)


def _two_ranks(rank: int) -> None:
    experts, tensors = Mesh.make(ep=2), Mesh.make(tp=2)
    _check_bitwise(spread(checkpoint("dense"), experts), load(checkpoint("dense")), (4, 9), rank, range(8))
    weighted = checkpoint("dense", family="llama4")
    for form in ({}, {"form": GATHER, "max_tokens": 9}):  # one slot a token: both forms are exact
        _check_bitwise(spread(weighted, experts, **form), load(weighted), (4, 9), rank, range(8))
    static = checkpoint("modelopt", "FP8")
    options = {"activations": "checkpoint"}
    _check_bitwise(spread(static, experts, **options), load(static, **options), (4, 9), rank, range(8))
    for made in (
        checkpoint("gptq", "int4-g64:fp16-zp"),
        checkpoint("mxfp4", family="gpt_oss"),
    ):  # the second has biases
        single = load(made, activations="fp32")
        given = batches(single, (7,), range(8))
        must(close(run(spread(made, tensors, activations="fp32"), given[0]), run(single, given[0]), 4e-3))
    _routed(rank, experts, tensors)


def _routed(rank: int, experts: Mesh, tensors: Mesh) -> None:
    """Routing inside; zero experts and shared experts count once, whatever is summed."""
    made, routing = checkpoint("gptq", "int4-g64:fp16-zp"), Routing(TOP_K, zero_experts=2, renormalize=True)
    for mesh, tokens in ((experts, 3 + 4 * rank), (tensors, 5)):
        single, parallel = load(made, routing=routing), spread(made, mesh, routing=routing)
        single.shared_experts = parallel.layer.shared_experts = _Double()
        x, _, _ = batches(single, (tokens,), range(8))[0]
        logits = torch.randn(tokens, 10, generator=torch.Generator().manual_seed(rank if mesh is experts else 0))
        want = single.forward_routed(x, logits)
        must(close(parallel.forward_routed(x, logits), want))


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_both_kinds_at_once() -> None:
    run_world(4, _both_kinds)


def _both_kinds(rank: int) -> None:
    mesh = Mesh.make(tp=2, ep=2)
    must((mesh.tp.rank, mesh.ep.rank, mesh.tp.ranks[0]) == (rank % 2, rank // 2, rank // 2 * 2))
    for fmt, family in (("gptq", "qwen3_moe"), ("mxfp4", "gpt_oss")):
        made = checkpoint(fmt, family=family)
        single = load(made, activations="fp32")
        for form in ({}, {"form": GATHER, "max_tokens": 8}):
            experts = spread(made, mesh, activations="fp32", **form)
            for counts in ((6, 8), (0, 3)):
                given = batches(single, counts, range(8))
                must(close(run(experts, given[mesh.ep.rank]), alone(single, given, mesh.ep.rank), 4e-3))

    _fewer_expert_ranks(rank, mesh, Mesh.make(tp=2, ep=1, ranks=(0, 1)))


def _fewer_expert_ranks(rank: int, mesh: Mesh, half: Mesh) -> None:
    """Each slice of an expert moves between ranks that hold the same slice."""
    made = checkpoint("gptq", "int4-g64:fp16-zp")
    experts = spread(made, mesh, order=BATCH_INVARIANT)
    given = batches(experts.layer, (6, 6), range(8))[0]
    before = run(experts, given)
    experts.resize(half)
    if rank < 2:
        must(torch.equal(run(experts, given), before))


def test_moves() -> None:
    run_world(4, _moves)


def _moves(rank: int) -> None:
    mesh, half = Mesh.make(ep=4), Mesh.make(ep=2, ranks=(0, 1))
    _rebalance(rank, mesh)
    _refit(rank, mesh)
    _moved_inputs(rank, mesh)
    _elastic(rank, mesh, half)


def _rebalance(rank: int, mesh: Mesh) -> None:
    made = checkpoint("gptq", "int4-g64:fp16-zp", experts=6)
    single = load(made, order=BATCH_INVARIANT)
    experts = spread(made, mesh, redundant=2, order=BATCH_INVARIANT)
    given = batches(single, (9, 5, 0, 7), range(6))
    before = run(experts, given[rank])
    run(experts, batches(single, (20, 20, 20, 20), range(TOP_K), seed=1)[rank])  # three experts do most
    old = experts.assignment
    experts.rebalance()
    must(experts.assignment.logical != old.logical)
    must(sum(experts.logical_load()) == 0)
    must(torch.equal(run(experts, given[rank]), before))
    must(torch.equal(before, alone(single, given, rank)))
    _check_rows(experts, single)
    saved = experts.state_dict()
    fresh = spread(made, mesh, redundant=2, order=BATCH_INVARIANT)
    fresh.load_state_dict(saved)
    must(fresh.assignment == experts.assignment)
    must(torch.equal(run(fresh, given[rank]), before))


def _check_rows(experts: ExpertParallel, single: RoutedExperts) -> None:
    """Every slot holds, bit for bit, the expert the assignment says."""
    held = experts.assignment.experts_by_rank[experts.mesh.ep.rank]
    for mine, whole in zip(experts.layer.expert_weights(), single.expert_weights()):
        must(torch.equal(mine, whole[list(held)]))


def _refit(rank: int, mesh: Mesh) -> None:
    """Weights pushed after a move land where their experts now are, also those of newcomers whose
    headers this rank never saw."""
    made, other = checkpoint("gptq", "int4-g64:fp16-zp"), checkpoint("gptq", "int4-g64:fp16-zp", seed=1)
    single = load(other)
    given = batches(single, (5, 3, 0, 7), range(8))
    for make in (load, pushed):
        experts = spread(made, mesh, make=make)
        experts.arrange(
            experts.assignment.arranged([[(e + 3) % 8 for e in slots] for slots in experts.assignment.experts_by_rank])
        )
        must(experts.layer.load_weights(other.tensors.items()) == set(other.tensors))
        experts.layer.finish()
        must(torch.equal(run(experts, given[rank]), alone(single, given, rank)))


def _moved_inputs(rank: int, mesh: Mesh) -> None:
    """An expert's static input scales go with it."""
    made = checkpoint("modelopt", "FP8", experts=8)
    options = {"activations": "checkpoint", "order": BATCH_INVARIANT}
    single, experts = load(made, **options), spread(made, mesh, **options)
    given = batches(single, (5, 3, 0, 7), range(8))
    before = run(experts, given[rank])
    turned = [[(e + 3) % 8 for e in slots] for slots in experts.assignment.experts_by_rank]
    experts.arrange(experts.assignment.arranged(turned))
    must(torch.equal(run(experts, given[rank]), before))
    must(torch.equal(before, alone(single, given, rank)))


def _elastic(rank: int, mesh: Mesh, half: Mesh) -> None:
    made = checkpoint("gptq", "int4-g64:fp16-zp", experts=6)
    single, experts = load(made), spread(made, mesh)
    all_given = batches(single, (5, 3, 0, 7), range(6))
    before = run(experts, all_given[rank])
    must(torch.equal(before, alone(single, all_given, rank)))
    experts.resize(half)
    if rank < 2:
        given = batches(single, (8, 6), range(6), seed=2)
        must(torch.equal(run(experts, given[rank]), alone(single, given, rank)))
        must(experts.layer.problem.experts == 3)
        _check_rows(experts, single)
    else:
        must(all(t.shape[0] == 0 for t in experts.layer.expert_weights()))
        with pytest.raises(LaunchError, match="outside"):
            run(experts, all_given[rank])
        if rank == 3:  # the place is taken by a process that starts empty
            experts = ExpertParallel(load(made, Placement(ep_size=6)), half)
    experts.resize(mesh)
    must(torch.equal(run(experts, all_given[rank]), before))
