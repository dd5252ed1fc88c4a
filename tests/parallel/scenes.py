"""Small layers and batches, identical on every worker, and the single-rank result to compare with."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.naming import TABLE
from lancebill.formats import registry
from lancebill.layer.parts import pull
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.placement import Placement
from lancebill.parallel import ExpertParallel, Mesh
from lancebill.testing.checkpoints import Generated, Geometry, generate

Batch = tuple[Tensor, Tensor, Tensor]
ROWS = {row.family: row for row in TABLE}
TOP_K = 3  # more than two, so that the order of a sum matters


@cache
def checkpoint(fmt: str, variant: str = "", family: str = "qwen3_moe", experts: int = 8, seed: int = 0) -> Generated:
    """A model of one layer; `variant` is a part of an example's name."""
    example = next(e for e in registry()[fmt].examples() if variant in e.name)
    top_k = 1 if family == "llama4" else TOP_K
    size = Geometry(experts=experts, hidden=128, intermediate=128, top_k=top_k)
    return generate(example, ROWS[family], ROWS[family].forms[0], size, seed=seed)


def load(made: Generated, placement: Placement | None = None, **options: Any) -> RoutedExperts:
    manifest = manifests.build(made.config, made.headers)
    manifest.check(where="scene")
    wanted = LoadOptions(placement=placement or Placement(), **options)
    recipe = Recipe.make(manifest, 0, wanted)
    return RoutedExperts(pull(recipe, made.read))


def load_by_pushing(made: Generated, placement: Placement, **options: Any) -> RoutedExperts:
    """The same layer, loaded by pushing this rank's own tensors without headers."""
    layer = RoutedExperts.from_config(made.config, 0, placement=placement, **options)
    experts = {expert for _, expert, _ in made.weights}
    mine = placement.experts(len(experts))
    layer.load_weights((name, t) for name, t in made.tensors.items() if int(name.split(".")[5]) in mine)
    return layer.finish()


def load_parallel(
    made: Generated, mesh: Mesh, *, redundant: int = 0, strategy: str = "linear", **options: Any
) -> ExpertParallel:
    """The layer on a mesh; `form`, `max_tokens` and `wire` are options of `ExpertParallel`, all others of the load."""
    ours = {name: options.pop(name) for name in ("form", "max_tokens", "wire") if name in options}
    placement = mesh.placement(redundant=redundant, strategy=strategy)
    make = options.pop("make", load)
    return ExpertParallel(make(made, placement, **options), mesh, placement, **ours)


def batch(layer: RoutedExperts, tokens: int, seed: int, experts: range) -> Batch:
    """Tokens routed to `experts`, with one padding slot."""
    g = torch.Generator().manual_seed(seed)
    top_k = layer.problem.top_k
    x = torch.randn(tokens, layer.problem.hidden, generator=g).to(torch.bfloat16)
    ids = torch.rand(tokens, len(experts), generator=g).argsort(dim=1)[:, :top_k] + experts.start
    if tokens > 2 and top_k > 1:
        ids[1, 0] = -1
    return x, ids, torch.rand(tokens, top_k, generator=g)


def batches(layer: RoutedExperts, counts: tuple[int, ...], experts: range, seed: int = 0) -> list[Batch]:
    """One batch per rank."""
    return [batch(layer, count, 100 * seed + rank, experts) for rank, count in enumerate(counts)]


def run_layer(layer: torch.nn.Module, given: Batch) -> Tensor:
    x, ids, weights = given
    out: Tensor = layer(x, topk_ids=ids, topk_weights=weights)
    return out


def single_rank_result(single: RoutedExperts, given: list[Batch], rank: int) -> Tensor:
    """The rows of `rank` in the result of a single rank for all batches together."""
    whole = (torch.cat(parts) for parts in zip(*given))
    lengths = [len(x) for x, _, _ in given]
    x, ids, weights = whole
    return run_layer(single, (x, ids, weights)).split(lengths)[rank]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-2) -> bool:
    """Equal up to bf16 rounding of the output."""
    return bool((a.float() - b.float()).norm() <= tolerance * b.float().norm())


def require(condition: bool, what: str = "") -> None:
    """An assert for workers, which pytest does not rewrite and `python -O` would strip."""
    if not condition:
        raise AssertionError(what)
