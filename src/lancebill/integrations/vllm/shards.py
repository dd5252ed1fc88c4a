"""The matrix of a dense layer on one rank, put together from the stored modules that vLLM merges into it.

Which rows and columns of a module belong where is vLLM's business (tensor parallelism, repeated key heads, merged
projections). So vLLM's own loader is asked: it loads a matrix that holds row numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.errors import UnsupportedProblem
from lancebill.numbers.codec import plain_matrix
from lancebill.numbers.weight import FACTORS, LogicalWeight, same_or_none, stack

Span = tuple[int, int]
Load = Callable[[Tensor, Tensor], None]  # vLLM's loader for one layer and module: (destination, whole matrix)
EMPTY = -1


@dataclass(frozen=True)
class RankPart:
    """Rows and columns of a stored module, and the row of the layer's matrix at which they begin."""

    at: int
    rows: Span
    columns: Span


def find_shard(load: Load, layer: tuple[int, int], module: tuple[int, int]) -> RankPart:
    """Where vLLM's loader puts a module of this size in a layer's matrix of this size."""
    if layer[1] == module[1]:
        target = torch.full((layer[0], 1), EMPTY, dtype=torch.int64, device="cpu")
        load(target, torch.arange(module[0], device="cpu").unsqueeze(1))
        at, rows = _run(target.squeeze(1))
        return RankPart(at, rows, (0, module[1]))
    target = torch.full((1, layer[1]), EMPTY, dtype=torch.int64, device="cpu")
    load(target, torch.arange(module[1], device="cpu").unsqueeze(0))
    _, columns = _run(target.squeeze(0))
    return RankPart(0, (0, module[0]), columns)


def _run(numbers: Tensor) -> tuple[int, Span]:
    """The place and the values of the only run of consecutive numbers."""
    places = (numbers != EMPTY).nonzero().flatten().tolist()
    found = [int(numbers[place]) for place in places]
    first = found[0] if found else 0
    if not found or found != list(range(first, first + len(found))) or places[-1] - places[0] + 1 != len(places):
        raise UnsupportedProblem("vLLM loads this module in several pieces")
    return places[0], (first, first + len(found))


def cut(weight: LogicalWeight, shard: RankPart) -> LogicalWeight:
    """A rank's part of a module. Blocks that the cut divides become smaller, with the same scales."""
    (top, bottom), (left, right) = shard.rows, shard.columns
    spec = weight.spec
    if (top, bottom) != (0, weight.n):
        spec = spec.map_blocks(0, math.gcd(top, bottom))
    if (left, right) != (0, weight.k):
        if weight.perm is not None:
            raise UnsupportedProblem("the columns of a matrix with act-order cannot be divided among ranks")
        spec = spec.map_blocks(1, math.gcd(left, right))
    return weight.reblock(spec).cut(shard.rows, shard.columns)


def joined(parts: Mapping[RankPart, LogicalWeight | Tensor], rows: int) -> LogicalWeight:
    """The whole matrix of a layer; raises where its parts are not alike."""
    ordered = [parts[shard] for shard in sorted(parts, key=lambda shard: shard.at)]
    weights = [part for part in ordered if isinstance(part, LogicalWeight)]
    if len(weights) != len(ordered) or sum(weight.n for weight in weights) != rows:
        raise UnsupportedProblem("not all of its rows are quantised")
    weights = _alike(weights)
    first = weights[0]
    if any(weight.spec != first.spec for weight in weights):
        kinds = ", ".join(dict.fromkeys(str(weight.spec) for weight in weights))
        raise UnsupportedProblem("its modules are quantised differently", got=kinds)
    factors = [weight.inputs.get(FACTORS) for weight in weights]
    if any(not same_or_none(factor, factors[0]) for factor in factors):
        raise UnsupportedProblem("its modules scale their common input differently")
    whole = first if len(weights) == 1 else stack(weights)
    return replace(whole, inputs={} if factors[0] is None else {FACTORS: factors[0]})


def _alike(weights: list[LogicalWeight]) -> list[LogicalWeight]:
    """With blocks of equal height, where ranks cut blocks of large modules less than those of small ones."""
    if all(weight.spec == weights[0].spec for weight in weights):
        return weights
    height = math.gcd(*(level.block[0] for weight in weights for level in weight.spec.levels))
    return [weight.reblock(weight.spec.map_blocks(0, height)) for weight in weights]


def dequantized(parts: Mapping[RankPart, LogicalWeight | Tensor], out: Tensor) -> None:
    """Write the parts into the plain matrix of a layer."""
    for shard, part in parts.items():
        values = part if isinstance(part, Tensor) else plain_matrix(part)
        out[shard.at : shard.at + values.shape[0]] = values
