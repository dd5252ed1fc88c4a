"""`ExpertParallel` on one process without torch.distributed, and the errors it raises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lancebill.backends.base import Reason
from lancebill.backends.reference import Reference
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.naming import TABLE
from lancebill.errors import LaunchError, RanksDisagree, ShardError, SpecError, UnsupportedProblem
from lancebill.formats import registry
from lancebill.layer.parts import pull
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.placement import Placement
from lancebill.moe.problem import BATCH_INVARIANT, CONTIGUOUS, Problem
from lancebill.parallel import GATHER, ExpertParallel, Mesh, gather
from lancebill.parallel.groups import OUTSIDE, RankGroup
from lancebill.testing.checkpoints import Geometry, generate

ROW = next(row for row in TABLE if row.family == "qwen3_moe")


def _load(placement: Placement | None = None, **options: Any) -> RoutedExperts:
    example = next(iter(registry()["gptq"].examples()))
    made = generate(example, ROW, ROW.forms[0], Geometry(experts=6, hidden=128, intermediate=128, top_k=2))
    manifest = manifests.build(made.config, made.headers)
    recipe = Recipe.make(manifest, 0, LoadOptions(placement=placement or Placement(), **options))
    return RoutedExperts(pull(recipe, made.read))


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 128, generator=g).to(torch.bfloat16)
    return x, torch.rand(9, 6, generator=g).argsort(1)[:, :2], torch.rand(9, 2, generator=g)


@pytest.mark.parametrize("form", [{}, {"form": GATHER, "max_tokens": 9}])
def test_one_process_gives_the_result_of_the_layer(form: dict[str, Any]) -> None:
    x, ids, weights = _inputs()
    experts = ExpertParallel(_load(), Mesh.make(), **form)
    want = _load()(x, topk_ids=ids, topk_weights=weights)
    assert torch.equal(experts(x, topk_ids=ids, topk_weights=weights), want)
    assert experts.logical_load() == torch.bincount(ids.flatten(), minlength=6).tolist()


def test_copies_and_moves_on_one_process_do_not_change_results() -> None:
    placement = Placement(redundant=2)
    layer = _load(placement, order=BATCH_INVARIANT)
    experts = ExpertParallel(layer, Mesh(), placement)
    x, ids, weights = _inputs()
    want = _load(order=BATCH_INVARIANT)(x, topk_ids=ids, topk_weights=weights)
    assert torch.equal(experts(x, topk_ids=ids, topk_weights=weights), want)
    experts.arrange(experts.assignment.arranged([[5, 1, 2, 3, 4, 0, 3, 3]]))
    assert torch.equal(experts(x, topk_ids=ids, topk_weights=weights), want)
    experts.resize(Mesh(), redundant=0)
    assert layer.problem.experts == layer.problem.global_experts == 6
    assert torch.equal(experts(x, topk_ids=ids, topk_weights=weights), want)


def test_replica_tables_move_with_the_module() -> None:
    experts = ExpertParallel(_load(), Mesh()).to("meta")
    assert {buffer.device.type for buffer in experts.buffers()} == {"meta"}
    assert not any("replicas" in name or "load" in name for name in experts.state_dict())


def test_a_placement_other_than_the_layers_is_refused() -> None:
    with pytest.raises(ShardError, match="another placement"):
        ExpertParallel(_load(Placement(ep_size=2)), Mesh())
    with pytest.raises(ShardError, match="not this rank's"):
        ExpertParallel(_load(Placement(ep_size=2)), Mesh(), Placement(ep_size=2))


@pytest.mark.parametrize("logical", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, -1]])
def test_a_saved_placement_must_contain_every_expert(logical: list[int]) -> None:
    with pytest.raises(ShardError, match="another placement"):
        ExpertParallel(_load(), Mesh()).set_extra_state(torch.tensor(logical))


@pytest.mark.parametrize("form", [{"form": "broadcast"}, {"form": GATHER}])
def test_unknown_forms_are_refused(form: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="form"):
        ExpertParallel(_load(), Mesh(), **form)


def test_more_ranks_than_processes_are_refused() -> None:
    with pytest.raises(ShardError, match="init_process_group"):
        Mesh.make(tp=2)


def test_invalid_inputs_are_refused_before_anything_is_sent() -> None:
    x, ids, weights = _inputs()
    experts = ExpertParallel(_load(), Mesh())
    with pytest.raises(LaunchError, match="topk_ids"):
        experts(x, topk_ids=ids[:, :1], topk_weights=weights)
    outside = RankGroup(OUTSIDE, 2, ())
    not_a_member = ExpertParallel(_load(), Mesh(outside, outside, outside))
    with pytest.raises(LaunchError, match="outside"):
        not_a_member(x, topk_ids=ids, topk_weights=weights)
    with pytest.raises(LaunchError, match="outside"):
        outside.all_reduce(x)
    with pytest.raises(LaunchError, match="outside the mesh"):
        _ = not_a_member.assignment
    with pytest.raises(LaunchError, match="more tokens than max_tokens"):
        gather.forward(_load(), RankGroup(), 8, x, Indexed(ids, weights), x.dtype)


def test_meshes_that_do_not_fit_are_refused() -> None:
    experts = ExpertParallel(_load(), Mesh())
    with pytest.raises(ShardError, match="tensor-parallel size"):
        experts.resize(Mesh(tp=RankGroup(0, 2, (0, 1))))
    with pytest.raises(ShardError, match="must come first"):
        experts.resize(Mesh(ep=RankGroup(1, 2, (1, 0))))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ShardError, match="not the number of ranks"):
            Mesh.make(tp=2)
    finally:
        dist.destroy_process_group()


class _ByTokenOnly(Reference):
    """A backend that cannot compute rows that are grouped by expert."""

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        if problem.dispatch == CONTIGUOUS:
            yield Reason("dispatch", "only computes experts by token ids")


def test_a_backend_without_grouped_rows_cannot_exchange_them() -> None:
    layer = _load(Placement(ep_size=2))
    assert layer.choice.chosen is not None
    layer.choice = replace(layer.choice, chosen=replace(layer.choice.chosen, backend=_ByTokenOnly()))
    with pytest.raises(UnsupportedProblem, match="grouped by expert"):
        ExpertParallel(layer, Mesh(ep=RankGroup(0, 2, (0, 1))))


def test_arrange_cannot_add_slots() -> None:
    experts = ExpertParallel(_load(), Mesh())
    other = ExpertParallel(_load(Placement(redundant=2)), Mesh(), Placement(redundant=2)).assignment
    with pytest.raises(ShardError, match="resize"):
        experts.arrange(other)


def test_a_disagreement_names_the_rank_and_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RankGroup(0, 3, (4, 5, 6))
    monkeypatch.setattr(RankGroup, "gather_text", lambda *_: ["a: 1\nb: 2", "a: 1\nb: 3", "a: 1\nb: 2"])
    with pytest.raises(RanksDisagree, match=r"rank 5: no; expected b: 2; got b: 3"):
        group.require_agreement({}, torch.device("cpu"), "no")
