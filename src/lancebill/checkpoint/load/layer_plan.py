"""The part of a layer that one rank loads: its experts, the cut of their matrices, and the specs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lancebill.checkpoint.load.projections import row_spec
from lancebill.checkpoint.resolve.naming import DOWN, GATE
from lancebill.checkpoint.resolve.stored_layer import Projection, StoredLayer
from lancebill.moe.layout import W2, W13, Layout, MatrixShape
from lancebill.moe.placement import Cut, Placement
from lancebill.numbers.codec import keeps_codes
from lancebill.numbers.spec import QuantSpec


@dataclass(frozen=True)
class LayerPlan:
    """Shapes and specs of one layer under one placement, known from metadata alone."""

    layer: StoredLayer
    placement: Placement
    cut: Cut
    experts: tuple[int, ...]  # logical experts in slot order
    w13: MatrixShape
    w2: MatrixShape
    requantize: Mapping[str, QuantSpec] = field(default_factory=dict)  # target specs, by w13 | w2

    @property
    def one_by_one(self) -> bool:
        """Whether loading rounds an expert's matrices or reorders their rows depending on their values."""
        return bool(self.requantize) or self.layer.sample(DOWN).scheme.act_order

    @property
    def views_codes(self) -> bool:
        """Whether codes that are on the device already are not copied before they are packed."""
        viewed = all(self.layer.sample(name).scheme.views_codes for name in (GATE, DOWN))
        return viewed and not self.one_by_one and self.placement.tp_size == 1

    @property
    def ordered(self) -> bool:
        """Whether w13's rows are permuted by w2's act-order."""
        return keeps_order(self.layer.sample(DOWN), self.requantize.get(W2))

    def shape(self, matrix: str) -> MatrixShape:
        return {W13: self.w13, W2: self.w2}[matrix]

    def bytes(self, layout: Layout) -> int:
        return len(self.experts) * (layout.bytes(self.w13) + layout.bytes(self.w2))


def plan_layer(
    layer: StoredLayer,
    placement: Placement,
    *,
    uneven: bool = False,
    requantize: Mapping[str, QuantSpec] | None = None,
) -> LayerPlan:
    """Shapes and specs of a rank's shard; raises `ShardError` where the matrices cannot be cut.

    `requantize` gives target specs for w13 and w2. Matrices are requantised whole and cut afterwards, so that
    every rank holds a slice of the same values.
    """
    targets = requantize or {}
    gate, down = layer.sample(GATE), layer.sample(DOWN)
    down_spec = targets.get(W2, down.scheme.spec)
    cut = placement.cut(layer.intermediate, block=down_spec.widest, uneven=uneven)
    ordered = keeps_order(down, targets.get(W2))
    rows = row_spec(gate, cut.granule, ordered=ordered, target=targets.get(W13))
    w13 = MatrixShape(
        W13,
        cut.size * (2 if layer.gated else 1),
        layer.hidden,
        rows.stacked(cut.size) if layer.gated else rows,
        "bias" in gate.sources,
        keeps_order(gate, targets.get(W13)),
    )
    w2 = MatrixShape(W2, layer.hidden, cut.size, down_spec.map_blocks(1, cut.granule), "bias" in down.sources)
    return LayerPlan(layer, placement, cut, placement.experts(layer.experts), w13, w2, targets)


def keeps_order(projection: Projection, target: QuantSpec | None) -> bool:
    """Whether columns stay in act-order: only where requantising to `target` keeps the codes as they are."""
    scheme = projection.scheme
    return scheme.act_order and (target is None or keeps_codes(scheme.spec, target))
