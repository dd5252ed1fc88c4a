"""How much memory loading takes on each rank, from metadata alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lancebill.checkpoint.load.layer_plan import LayerPlan, plan_layer
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.moe.layout import Layout, MatrixShape
from lancebill.moe.placement import Placement

LOADED_AT_ONCE = 2  # experts, at least: one is read while the other is packed


@dataclass(frozen=True)
class RankMemory:
    """One rank's shard of all layers: bytes after loading, and the peak while loading."""

    tp_rank: int
    ep_rank: int
    experts: int  # per layer
    intermediate: int  # local, padding included
    final: int
    peak: int


def plan_memory(manifest: Manifest, layout: Layout, *, tp: int = 1, ep: int = 1) -> Iterator[RankMemory]:
    """The memory of every rank; raises `ShardError` where the matrices cannot be cut."""
    for ep_rank in range(ep):
        for tp_rank in range(tp):
            placement = Placement(tp_rank, tp, ep_rank, ep)
            plans = [plan_layer(layer, placement, uneven=manifest.naming.uneven) for layer in manifest.stored_layers]
            final = sum(plan.bytes(layout) for plan in plans)
            working = max((expert_bytes(plan) for plan in plans), default=0)
            yield RankMemory(
                tp_rank,
                ep_rank,
                max((len(plan.experts) for plan in plans), default=0),
                max((plan.cut.size for plan in plans), default=0),
                final,
                final + LOADED_AT_ONCE * working,
            )


def expert_bytes(plan: LayerPlan) -> int:
    """One decoded expert: one byte per code, scales in their stored dtypes."""
    return _canonical_bytes(plan.w13) + _canonical_bytes(plan.w2)


def level_bytes(plan: LayerPlan) -> int:
    """The scales, zero points and minima of one decoded expert."""
    return _level_bytes(plan.w13) + _level_bytes(plan.w2)


def _canonical_bytes(shape: MatrixShape) -> int:
    return shape.n * shape.k * shape.spec.dtype.storage.itemsize + _level_bytes(shape)


def _level_bytes(shape: MatrixShape) -> int:
    levels = shape.spec.levels
    return sum(math.prod(level.shape(shape.n, shape.k)) * level.dtype.storage.itemsize for level in levels)
