"""The sum over ranks equals the result of one rank: every format with its families, in one process."""

from __future__ import annotations

import pytest
import torch
from covering import GATE_SCALE, LAYOUTS, SIZES, Case, cases, families_and_forms, is_tame, tame
from torch import Tensor

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.naming import DOWN
from lancebill.formats import registry
from lancebill.layer.parts import pull
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.placement import Placement
from lancebill.moe.problem import BATCH_INVARIANT
from lancebill.parallel.replicas import Assignment, ReplicaTables
from lancebill.testing import checkpoints
from lancebill.testing.checkpoints import Generated, Geometry, generate

CASES = cases()
TOKENS = 5
EXACT = (Activation("silu"), Activation("relu2_no_mul"))  # on tame weights; activations with limits are not


def _load(made: Generated, manifest: Manifest, placement: Placement) -> RoutedExperts:
    options = LoadOptions(placement=placement, dtype=torch.float32, order=BATCH_INVARIANT)
    return RoutedExperts(pull(Recipe.make(manifest, 0, options), made.read))


def _checkpoint(case: Case) -> Generated:
    """Few experts: five do not divide evenly over ranks; two with two copies fill four slots."""
    size = Geometry(
        experts=2 if case.redundant else 5,
        hidden=128 if case.example.k == 256 else 256,
        intermediate=case.example.k,
        top_k=1 if case.row.family == "llama4" else 2,
    )
    return generate(case.example, case.row, case.form, size)


def _inputs(layer: RoutedExperts, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse +-1 tokens and power-of-two weights: nothing is rounded."""
    g = torch.Generator().manual_seed(1)
    x = torch.zeros(TOKENS, layer.problem.hidden)
    for row in x:
        row[torch.randperm(row.numel(), generator=g)[:6]] = torch.randint(0, 2, (6,), generator=g) * 2.0 - 1
    ids = torch.stack([torch.randperm(experts, generator=g)[: layer.problem.top_k] for _ in range(TOKENS)])
    ids[2] = -1
    return x, ids, torch.tensor([[0.5, 2.0]])[:, : layer.problem.top_k].repeat(TOKENS, 1)


def _part(layer: RoutedExperts, placement: Placement, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """One rank's part of the output, in fp32."""
    experts = layer.problem.global_experts - placement.redundant
    tables = ReplicaTables(Assignment.of(placement, experts), torch.device("cpu"))
    return layer(x, topk_ids=tables.choose(ids), topk_weights=weights, out=torch.empty(x.shape))


def _close(got: Tensor, want: Tensor) -> None:
    assert (got - want).norm() / want.norm() < 1e-5


def _tame_checkpoint(made: Generated) -> bool:
    return all(is_tame(w, 1.0 if name == DOWN else GATE_SCALE) for (_, _, name), w in made.weights.items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sum_over_ranks_equals_the_single_rank(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.tp > 1:
        monkeypatch.setattr(checkpoints, "random_example", tame)
    made = _checkpoint(case)
    manifest = manifests.build(made.config, made.headers, case.row)
    manifest.check(where=str(case))
    plain = _load(made, manifest, Placement())
    # Without tensor parallelism results are compared bitwise. The single rank is then padded in the same way, because
    # torch may sum a longer row in another order.
    single = _load(made, manifest, Placement(pad_to=case.pad_to)) if case.tp == 1 else plain
    x, ids, weights = _inputs(single, single.problem.experts)
    want = single(x, topk_ids=ids, topk_weights=weights)
    _close(want, plain(x, topk_ids=ids, topk_weights=weights))
    parts = [_part(_load(made, manifest, p), p, x, ids, weights) for p in case.placements()]
    got = torch.stack(parts).sum(0)
    assert want.abs().max() > 0
    if case.tp == 1 or (_tame_checkpoint(made) and single.problem.activation in EXACT):
        assert torch.equal(got, want)
    else:
        _close(got, want)


def test_every_pair_is_covered() -> None:
    formats = registry().values()
    forms = {
        (row.family, row.forms.index(form))
        for fmt in formats
        for row, row_forms in families_and_forms(fmt)
        for form in row_forms
    }
    required: set[tuple[object, ...]] = {(f.name, row.family) for f in formats for row, _ in families_and_forms(f)}
    required |= {("example", f.name, e.name) for f in formats for e in f.examples()}
    required |= {(f.name, *layout) for f in formats for layout in LAYOUTS}
    required |= {(form, kind, size) for form in forms for kind, sizes in SIZES.items() for size in sizes}
    covered: set[tuple[object, ...]] = set()
    for case in CASES:
        covered |= {(case.format.name, case.row.family), ("example", case.format.name, case.example.name)}
        covered |= {(case.format.name, case.tp, case.ep, case.redundant)}
        covered |= {((case.row.family, case.number), kind, getattr(case, kind)) for kind in SIZES}
    assert not required - covered
