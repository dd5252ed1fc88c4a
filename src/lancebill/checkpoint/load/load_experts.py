"""Load experts from files into packed buffers, one expert at a time.

For each projection: read the smallest slice of the stored tensors that covers this rank's shard, decode it, cut it
to the exact shard, and pack it into preallocated buffers. Every format, family and parallel layout takes this
path; nothing here branches on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lancebill.checkpoint.load.input_scales import FACTORS, InputScales, combine_input_scales
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.manifest import Projection, StoredLayer, StoredPart
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP
from lancebill.errors import LancebillError, ShardError
from lancebill.formats import axes as ax
from lancebill.moe.layout import W2, W13, Layout, MatrixShape, Packed
from lancebill.moe.placement import Cut, Placement
from lancebill.numbers.codec import Loss, keeps_codes, requantize
from lancebill.numbers.spec import ALL, QuantSpec
from lancebill.numbers.weight import LogicalWeight, stack

Span = tuple[int, int]

EXPERTS_IN_FLIGHT = 2  # one is read while the other is packed


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's shard on this rank: w13 (gate stacked on up) and w2 (down).

    w2 has no act-order: its permutation is applied to the rows of w13 instead.
    """

    w13: LogicalWeight
    w2: LogicalWeight
    inputs13: InputScales
    inputs2: InputScales

    def pack(self, plan: LayerPlan, layout: Layout, rows: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Pack this expert into its rows of a layer's buffers."""
        for matrix, shape, weight in (("w13", plan.w13, self.w13), ("w2", plan.w2, self.w2)):
            assert weight.spec == shape.spec and (weight.perm is None or shape.act_order), "not as planned"
            layout.pack(shape, weight, rows[matrix])
        self.inputs13.write(rows["w13"])
        self.inputs2.write(rows["w2"])


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
    def ordered(self) -> bool:
        """Whether w13's rows are permuted by w2's act-order."""
        return keeps_order(self.layer.sample(DOWN), self.requantize.get("w2"))

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
    down_spec = targets.get("w2", down.scheme.spec)
    cut = placement.cut(layer.intermediate, block=down_spec.widest, uneven=uneven)
    ordered = keeps_order(down, targets.get("w2"))
    rows = _row_spec(gate, cut.granule, ordered=ordered, target=targets.get("w13"))
    w13 = MatrixShape(
        W13,
        cut.size * (2 if layer.gated else 1),
        layer.hidden,
        rows.stacked(cut.size) if layer.gated else rows,
        "bias" in gate.sources,
        keeps_order(gate, targets.get("w13")),
    )
    w2 = MatrixShape(W2, layer.hidden, cut.size, down_spec.map_blocks(1, cut.granule), "bias" in down.sources)
    return LayerPlan(layer, placement, cut, placement.experts(layer.experts), w13, w2, targets)


def keeps_order(projection: Projection, target: QuantSpec | None) -> bool:
    """Whether columns stay in act-order: only where requantising to `target` keeps the codes as they are."""
    scheme = projection.scheme
    return scheme.act_order and (target is None or keeps_codes(scheme.spec, target))


def _row_spec(
    projection: Projection, granule: int, *, ordered: bool = False, target: QuantSpec | None = None
) -> QuantSpec:
    """The spec of this projection's rows after fused halves are split, rows are reordered and the shard is cut."""
    spec = target or projection.scheme.spec
    if ordered or (projection.step > 1 and target is None):
        return spec.map_blocks(0, 1)
    if projection.stored_n != projection.n and target is None:
        spec = spec.map_blocks(0, projection.n)  # the second half starts at row n
    return spec.map_blocks(0, granule)


def load_expert(
    read: Reader, plan: LayerPlan, expert: int, losses: Callable[[str, Loss], None] | None = None
) -> ExpertWeights:
    """Read, decode, requantise where planned, and cut one expert."""
    layer, cut = plan.layer, plan.cut
    load = partial(_load_target, read, plan, losses)
    down = layer.projections[expert, DOWN]
    w2, order = load("w2", down, (0, down.n), (cut.start, cut.stop))
    w2 = _pad(w2, plan.w2.n, plan.w2.k)
    if plan.placement.tp_rank > 0 and w2.bias is not None:
        w2 = replace(w2, bias=torch.zeros_like(w2.bias))  # the sum over ranks must add it once
    halves = []
    for name in (GATE, UP) if layer.gated else (GATE,):
        half = layer.projections[expert, name]
        rows = (cut.start, cut.stop) if order is None else order[cut.start : cut.stop].long()
        halves.append(_pad(load("w13", half, rows, (0, half.k))[0], cut.size, layer.hidden))
    try:
        inputs = combine_input_scales([half.inputs for half in halves]), combine_input_scales([w2.inputs])
        return ExpertWeights(stack(halves) if layer.gated else halves[0], w2, *inputs)
    except LancebillError as error:
        raise error.within(f"layer {layer.index}, expert {expert}") from error


def _load_target(
    read: Reader,
    plan: LayerPlan,
    losses: Callable[[str, Loss], None] | None,
    matrix: str,
    projection: Projection,
    rows: Span | Tensor,
    columns: Span,
) -> tuple[LogicalWeight, Tensor | None]:
    """One projection's shard in the plan's spec, and for w2 the act-order of its columns.

    Columns are cut in sorted order, so that groups stay whole.
    """
    target = plan.requantize.get(matrix)
    granule = plan.cut.granule
    cut_columns = matrix == "w2"
    spec = plan.w2.spec if cut_columns else _row_spec(projection, granule, ordered=plan.ordered, target=target)
    if target is None and isinstance(rows, tuple) and not (cut_columns and projection.scheme.act_order):
        return _load(read, projection, rows, columns, spec), None
    whole = load_projection(read, projection)
    if target is not None:
        whole, loss = requantize(whole, target, keep_order=keeps_order(projection, target))
        if losses is not None:
            losses(matrix, loss)
    order = whole.perm if cut_columns else None
    whole = replace(whole, perm=None) if cut_columns else whole
    if isinstance(rows, Tensor):
        return whole.rows(rows), order
    return whole.reblock(spec).cut(rows, columns), order


def load_layer(
    read: Reader,
    plan: LayerPlan,
    layout: Layout,
    *,
    out: Mapping[str, Packed] | None = None,
    losses: Callable[[str, Loss], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Packed]:
    """Load all local experts, two at a time.

    One thread reads, decodes and packs an expert: allocators tend not to reuse memory that one thread allocates and
    another frees. With `out`, the buffers of an earlier load are refilled in place.
    """
    packed = (
        dict(out)
        if out is not None
        else {
            "w13": layout.allocate(plan.w13, len(plan.experts)),
            "w2": layout.allocate(plan.w2, len(plan.experts)),
        }
    )

    def fill(slot: int) -> list[tuple[str, Loss]]:
        cost: list[tuple[str, Loss]] = []
        weights = load_expert(read, plan, plan.experts[slot], lambda matrix, loss: cost.append((matrix, loss)))
        weights.pack(plan, layout, expert_rows(packed, slot))
        return cost

    with ThreadPoolExecutor(max_workers=EXPERTS_IN_FLIGHT) as pool:
        for cost in pool.map(fill, range(len(plan.experts))):
            if losses is not None:
                for matrix, loss in cost:  # in expert order, so that floating-point sums are reproducible
                    losses(matrix, loss)
            if progress is not None:
                progress(1)
    return packed


def expert_rows(packed: Mapping[str, Packed], slot: int) -> dict[str, Packed]:
    """Views of one slot of a layer's buffers."""
    return {matrix: {name: t[slot] for name, t in tensors.items()} for matrix, tensors in packed.items()}


def load_projection(read: Reader, projection: Projection) -> LogicalWeight:
    """One whole projection in its stored spec, for `verify` and `convert`."""
    return _load(read, projection, (0, projection.n), (0, projection.k), _row_spec(projection, 0))


def _load(read: Reader, projection: Projection, rows: Span, columns: Span, spec: QuantSpec) -> LogicalWeight:
    """These rows and columns of a projection with the blocks of `spec`, from the smallest slice that covers them."""
    try:
        scheme = projection.scheme
        units = scheme.units()
        stored_rows = _stored_rows(projection, rows)
        if units is None or scheme.act_order:
            around_rows, around_columns = (0, projection.stored_n), (0, projection.k)
        else:
            around_rows = _widen(stored_rows, units["n"], projection.stored_n)
            around_columns = _widen(columns, units["k"], projection.k)
        stored = {
            role: _read(read, source, projection, (around_rows, around_columns))
            for role, source in projection.sources.items()
        }
        size = around_rows[1] - around_rows[0], around_columns[1] - around_columns[0]
        weight = scheme.decode(stored, *size)
        return _trim(weight, projection, rows, columns, (around_rows[0], around_columns[0]), spec)
    except LancebillError as error:
        raise error.within(f"{projection.where} ({projection.module})") from error


def _trim(
    weight: LogicalWeight, projection: Projection, rows: Span, columns: Span, origin: Span, spec: QuantSpec
) -> LogicalWeight:
    """Cut a decoded covering slice, which starts at `origin`, to exactly these rows and columns."""
    if projection.step > 1:
        weight = weight.rows(torch.arange(rows[0], rows[1]) * projection.step + projection.first - origin[0])
        local_rows: Span = (0, weight.n)
    else:
        offset = projection.first - origin[0]
        local_rows = rows[0] + offset, rows[1] + offset
    local_columns = columns[0] - origin[1], columns[1] - origin[1]
    if local_rows == (0, weight.n) and local_columns == (0, weight.k):
        return weight.reblock(spec)
    return weight.reblock(spec).cut(local_rows, local_columns)


def _stored_rows(projection: Projection, rows: Span) -> Span:
    """The stored rows that cover logical `rows` of a (possibly fused) projection."""
    if projection.step > 1:
        return rows[0] * projection.step, rows[1] * projection.step
    return rows[0] + projection.first, rows[1] + projection.first


def _widen(span: Span, unit: int, size: int) -> Span:
    return span[0] // unit * unit, min(size, -(-span[1] // unit) * unit)


def _read(read: Reader, source: StoredPart, projection: Projection, around: tuple[Span, Span]) -> Tensor:
    """One part of a projection, sliced to the covering rows and columns; undoes a stored transposition."""
    ratio = source.part.ratio(source.dtype)
    full = ax.shape(source.axes, projection.stored_n, projection.k, ratio)
    if not source.part.cuttable:
        index: tuple[slice, ...] = tuple(slice(None) if s == ax.ANY else slice(0, s) for s in full)
    else:
        index = ax.slices(source.axes, *around, projection.stored_n, projection.k, ratio)
    if source.reversed:
        index = index[::-1]
    tensor = read(source.tensor, _expert_index(source, index))
    return tensor.t().contiguous() if source.reversed else tensor


def _expert_index(source: StoredPart, index: tuple[slice, ...]) -> tuple[int | slice, ...]:
    if source.expert is None:
        return index
    if source.rows_per_expert:
        base = source.expert * source.rows_per_expert
        first = index[0]
        return (slice(base + first.start, base + first.stop), *index[1:])
    return (source.expert, *index)


def _pad(weight: LogicalWeight, n: int, k: int) -> LogicalWeight:
    """Pad with zeros to [n, k]. Padding blocks get scale 1, so that they add nothing to a GEMM."""
    if (weight.n, weight.k) == (n, k):
        return weight
    spec = weight.spec
    for axis, (old, new) in enumerate(((weight.n, n), (weight.k, k))):
        inside = any(level.block[axis] == ALL or old % level.block[axis] for level in spec.minimum)
        if old != new and inside:
            raise ShardError(f"{spec} cannot be padded inside a block", expected="whole blocks", got=old)
    if weight.perm is not None and k != weight.k:
        raise ShardError("an act-ordered matrix cannot be padded along K")

    def grow(tensor: Tensor, shape: tuple[int, int], fill: Tensor) -> Tensor:
        out = fill.expand(shape).clone()
        out[: tensor.shape[0], : tensor.shape[1]] = tensor
        return out

    one = torch.ones(1)
    zero = weight.zero
    if spec.zero is not None and zero is not None:
        zero = grow(zero, spec.zero.shape(n, k), torch.zeros(1, dtype=zero.dtype))
    codes = _zero_codes(weight, zero, n, k)
    codes[: weight.n, : weight.k] = weight.codes
    zero_minimum = [s.dtype.encode(torch.zeros(1)) for s in spec.minimum]
    return replace(
        weight,
        stored=codes,
        scales=tuple(grow(t, s.shape(n, k), s.dtype.encode(one)) for s, t in zip(spec.scales, weight.scales)),
        zero=zero,
        minimum=tuple(grow(t, s.shape(n, k), z) for s, t, z in zip(spec.minimum, weight.minimum, zero_minimum)),
        bias=None if weight.bias is None else torch.nn.functional.pad(weight.bias, (0, n - weight.n)),
        inputs={role: _pad_input(role, t, k - weight.k) for role, t in weight.inputs.items()},
    )


def _zero_codes(weight: LogicalWeight, zero: Tensor | None, n: int, k: int) -> Tensor:
    """[n, k] codes that decode to 0: the zero points, since padding may share a block with real weights."""
    spec = weight.spec
    if spec.zero is None or zero is None:
        return spec.dtype.encode(torch.zeros(n, k))
    rows, columns = (
        torch.zeros(size, dtype=torch.int64) if side == ALL else torch.arange(size) // side
        for size, side in zip((n, k), spec.zero.block)
    )
    codes = spec.zero.dtype.decode(zero)[rows][:, columns]
    valid = codes.round().clamp(0, spec.dtype.max)
    if not torch.equal(codes[weight.n :], valid[weight.n :]):  # padding columns are multiplied by zero inputs
        raise ShardError("padding needs a zero point that is a valid code", expected=f"0 to {spec.dtype.max:g}")
    return valid.to(weight.codes.dtype)


def _pad_input(role: str, tensor: Tensor, columns: int) -> Tensor:
    """Only the pre-scale has an entry per column; padding columns get 1."""
    return torch.nn.functional.pad(tensor, (0, columns), value=1.0) if role == FACTORS else tensor
