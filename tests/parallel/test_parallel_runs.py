"""Results of two and four processes with gloo equal those of one process."""

from __future__ import annotations

import pytest
import torch
from scenes import (
    TOP_K,
    batches,
    checkpoint,
    close,
    load,
    load_by_pushing,
    load_parallel,
    require,
    run_layer,
    single_rank_result,
)
from torch import Tensor, nn
from worlds import run_world

from lancebill.errors import LaunchError, RanksDisagree
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.placement import Placement
from lancebill.moe.problem import BATCH_INVARIANT
from lancebill.moe.routing import Routing
from lancebill.parallel import GATHER, ExpertParallel, Mesh

UNEQUAL = ((5, 3, 0, 7), (1, 0, 0, 0), (4, 4, 4, 4), (0, 0, 0, 0))


def test_expert_parallel_on_four_ranks() -> None:
    run_world(4, _four_ranks)


def _four_ranks(rank: int) -> None:
    mesh = Mesh.make(ep=4)
    for fmt, variant, family in (("gptq", "int4-g64:fp16-zp", "qwen3_moe"), ("mxfp4", "", "gpt_oss")):
        made = checkpoint(fmt, variant, family)
        single = load(made)
        for strategy in ("linear", "round_robin"):
            experts = load_parallel(made, mesh, strategy=strategy)
            for counts in UNEQUAL:
                _check_bitwise(experts, single, counts, rank, range(8))
            _check_bitwise(experts, single, (6, 2, 0, 1), rank, range(1, 1 + TOP_K))  # five experts get no tokens
        gathered = load_parallel(made, mesh, strategy="round_robin", form=GATHER, max_tokens=7)
        for counts in UNEQUAL:
            given = batches(single, counts, range(8))
            require(close(run_layer(gathered, given[rank]), single_rank_result(single, given, rank)))
    _uneven_and_redundant(rank, mesh)
    _disagreement(rank, mesh)


def _check_bitwise(
    experts: nn.Module, single: RoutedExperts, counts: tuple[int, ...], rank: int, routed: range
) -> None:
    given = batches(single, counts, routed)
    require(
        torch.equal(run_layer(experts, given[rank]), single_rank_result(single, given, rank)), f"{counts}, rank {rank}"
    )


def _uneven_and_redundant(rank: int, mesh: Mesh) -> None:
    made = checkpoint("gptq", "int4-g64:fp16-zp", experts=6)
    _check_bitwise(load_parallel(made, mesh), load(made), (5, 3, 0, 7), rank, range(6))
    copied = load_parallel(made, mesh, redundant=2, order=BATCH_INVARIANT)
    require(copied.assignment.experts_by_rank == ((0, 1), (2, 3), (4, 5), (0, 1)))
    single = load(made, order=BATCH_INVARIANT)
    _check_bitwise(copied, single, (5, 3, 0, 7), rank, range(6))
    real = sum(int((ids >= 0).sum()) for _, ids, _ in batches(single, (5, 3, 0, 7), range(6)))
    require(sum(copied.logical_load()) == real, "every slot but padding is counted once")


def _disagreement(rank: int, mesh: Mesh) -> None:
    made = checkpoint("gptq", "int8" if rank == 2 else "int4")
    with pytest.raises(RanksDisagree, match="rank 2: "):
        load_parallel(made, mesh)


def test_expert_or_tensor_parallel_on_two_ranks() -> None:
    run_world(2, _two_ranks)


def _two_ranks(rank: int) -> None:
    experts, tensors = Mesh.make(ep=2), Mesh.make(tp=2)
    _check_bitwise(load_parallel(checkpoint("dense"), experts), load(checkpoint("dense")), (4, 9), rank, range(8))
    weighted = checkpoint("dense", family="llama4")
    for form in ({}, {"form": GATHER, "max_tokens": 9}):  # one slot per token: both forms are exact
        _check_bitwise(load_parallel(weighted, experts, **form), load(weighted), (4, 9), rank, range(8))
    static = checkpoint("modelopt", "FP8")
    options = {"activations": "checkpoint"}
    _check_bitwise(load_parallel(static, experts, **options), load(static, **options), (4, 9), rank, range(8))
    for made in (
        checkpoint("gptq", "int4-g64:fp16-zp"),
        checkpoint("mxfp4", family="gpt_oss"),
    ):  # the second has biases
        single = load(made, activations="fp32")
        given = batches(single, (7,), range(8))
        require(
            close(
                run_layer(load_parallel(made, tensors, activations="fp32"), given[0]), run_layer(single, given[0]), 4e-3
            )
        )
    _routed(rank, experts, tensors)


def _routed(rank: int, experts: Mesh, tensors: Mesh) -> None:
    """`forward_routed`: zero experts and shared experts are added once, not once per rank."""
    made, routing = checkpoint("gptq", "int4-g64:fp16-zp"), Routing(TOP_K, zero_experts=2, renormalize=True)
    for mesh, tokens in ((experts, 3 + 4 * rank), (tensors, 5)):
        single, parallel = load(made, routing=routing), load_parallel(made, mesh, routing=routing)
        single.shared_experts = parallel.layer.shared_experts = _Double()
        x, _, _ = batches(single, (tokens,), range(8))[0]
        logits = torch.randn(tokens, 10, generator=torch.Generator().manual_seed(rank if mesh is experts else 0))
        want = single.forward_routed(x, logits)
        require(close(parallel.forward_routed(x, logits), want))


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_expert_and_tensor_parallel_together() -> None:
    run_world(4, _both_kinds)


def _both_kinds(rank: int) -> None:
    mesh = Mesh.make(tp=2, ep=2)
    require((mesh.tp.rank, mesh.ep.rank, mesh.tp.ranks[0]) == (rank % 2, rank // 2, rank // 2 * 2))
    for fmt, family in (("gptq", "qwen3_moe"), ("mxfp4", "gpt_oss")):
        made = checkpoint(fmt, family=family)
        single = load(made, activations="fp32")
        for form in ({}, {"form": GATHER, "max_tokens": 8}):
            experts = load_parallel(made, mesh, activations="fp32", **form)
            for counts in ((6, 8), (0, 3)):
                given = batches(single, counts, range(8))
                require(
                    close(
                        run_layer(experts, given[mesh.ep.rank]), single_rank_result(single, given, mesh.ep.rank), 4e-3
                    )
                )

    _fewer_expert_ranks(rank, mesh, Mesh.make(tp=2, ep=1, ranks=(0, 1)))


def _fewer_expert_ranks(rank: int, mesh: Mesh, half: Mesh) -> None:
    """Each slice of an expert moves between ranks that hold the same slice index."""
    made = checkpoint("gptq", "int4-g64:fp16-zp")
    experts = load_parallel(made, mesh, order=BATCH_INVARIANT)
    given = batches(experts.layer, (6, 6), range(8))[0]
    before = run_layer(experts, given)
    experts.resize(half)
    if rank < 2:
        require(torch.equal(run_layer(experts, given), before))


def test_moving_experts_between_ranks() -> None:
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
    experts = load_parallel(made, mesh, redundant=2, order=BATCH_INVARIANT)
    given = batches(single, (9, 5, 0, 7), range(6))
    before = run_layer(experts, given[rank])
    run_layer(
        experts, batches(single, (20, 20, 20, 20), range(TOP_K), seed=1)[rank]
    )  # three experts get most of the load
    old = experts.assignment
    experts.rebalance()
    require(experts.assignment.logical != old.logical)
    require(sum(experts.logical_load()) == 0)
    require(torch.equal(run_layer(experts, given[rank]), before))
    require(torch.equal(before, single_rank_result(single, given, rank)))
    _check_rows(experts, single)
    saved = experts.state_dict()
    fresh = load_parallel(made, mesh, redundant=2, order=BATCH_INVARIANT)
    fresh.load_state_dict(saved)
    require(fresh.assignment == experts.assignment)
    require(torch.equal(run_layer(fresh, given[rank]), before))


def _check_rows(experts: ExpertParallel, single: RoutedExperts) -> None:
    """Every slot holds bitwise the weights of its assigned expert."""
    held = experts.assignment.experts_by_rank[experts.mesh.ep.rank]
    for mine, whole in zip(experts.layer.expert_weights(), single.expert_weights()):
        require(torch.equal(mine, whole[list(held)]))


def _refit(rank: int, mesh: Mesh) -> None:
    """Weights pushed after a move go to the new slots of their experts, also on a rank that never saw the headers of an
    expert that moved to it."""
    made, other = checkpoint("gptq", "int4-g64:fp16-zp"), checkpoint("gptq", "int4-g64:fp16-zp", seed=1)
    single = load(other)
    given = batches(single, (5, 3, 0, 7), range(8))
    for make in (load, load_by_pushing):
        experts = load_parallel(made, mesh, make=make)
        experts.arrange(
            experts.assignment.arranged([[(e + 3) % 8 for e in slots] for slots in experts.assignment.experts_by_rank])
        )
        require(experts.layer.load_weights(other.tensors.items()) == set(other.tensors))
        experts.layer.finish()
        require(torch.equal(run_layer(experts, given[rank]), single_rank_result(single, given, rank)))


def _moved_inputs(rank: int, mesh: Mesh) -> None:
    """An expert's static input scales move with it."""
    made = checkpoint("modelopt", "FP8", experts=8)
    options = {"activations": "checkpoint", "order": BATCH_INVARIANT}
    single, experts = load(made, **options), load_parallel(made, mesh, **options)
    given = batches(single, (5, 3, 0, 7), range(8))
    before = run_layer(experts, given[rank])
    turned = [[(e + 3) % 8 for e in slots] for slots in experts.assignment.experts_by_rank]
    experts.arrange(experts.assignment.arranged(turned))
    require(torch.equal(run_layer(experts, given[rank]), before))
    require(torch.equal(before, single_rank_result(single, given, rank)))


def _elastic(rank: int, mesh: Mesh, half: Mesh) -> None:
    made = checkpoint("gptq", "int4-g64:fp16-zp", experts=6)
    single, experts = load(made), load_parallel(made, mesh)
    all_given = batches(single, (5, 3, 0, 7), range(6))
    before = run_layer(experts, all_given[rank])
    require(torch.equal(before, single_rank_result(single, all_given, rank)))
    experts.resize(half)
    if rank < 2:
        given = batches(single, (8, 6), range(6), seed=2)
        require(torch.equal(run_layer(experts, given[rank]), single_rank_result(single, given, rank)))
        require(experts.layer.problem.experts == 3)
        _check_rows(experts, single)
    else:
        require(all(t.shape[0] == 0 for t in experts.layer.expert_weights()))
        with pytest.raises(LaunchError, match="outside"):
            run_layer(experts, all_given[rank])
        if rank == 3:  # simulate a new process, which starts without experts
            experts = ExpertParallel(load(made, Placement(ep_size=6)), half)
    experts.resize(mesh)
    require(torch.equal(run_layer(experts, all_given[rank]), before))
