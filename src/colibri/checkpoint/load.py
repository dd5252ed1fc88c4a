"""From files to packed experts, one expert at a time.

Each projection is read as the smallest slice of its stored tensors that covers this rank's share,
decoded, cut exactly, and packed into buffers that were allocated first. Whatever the format, the
family and the parallel layout, this is the whole path; nothing here branches on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colibri import axes as ax
from colibri.checkpoint.manifest import Layer, Projection, Source
from colibri.checkpoint.naming import DOWN, GATE, UP
from colibri.checkpoint.placement import Cut, Placement
from colibri.errors import ColibriError, ShardError
from colibri.layout import Layout, MatrixShape, Packed
from colibri.quant import ALL, QuantSpec
from colibri.weight import INPUT_ROLES, LogicalWeight, stack

Reader = Callable[[str, tuple[int | slice, ...]], Tensor]
Span = tuple[int, int]


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's share on this rank: gate over up, and down. Act-order of down is folded away."""

    w13: LogicalWeight
    w2: LogicalWeight


@dataclass(frozen=True)
class LayerPlan:
    """What loading one layer under one placement gives, known from metadata alone."""

    layer: Layer
    placement: Placement
    cut: Cut
    experts: tuple[int, ...]  # logical experts in slot order
    w13: MatrixShape
    w2: MatrixShape

    def bytes(self, layout: Layout) -> int:
        return len(self.experts) * (layout.bytes(self.w13) + layout.bytes(self.w2))


def plan_layer(layer: Layer, placement: Placement, *, uneven: bool = False) -> LayerPlan:
    """Sizes and specs of a rank's share; raises `ShardError` where the cut is not possible."""
    gate, down = layer.projections[0, GATE], layer.projections[0, DOWN]
    block = max((level.block[1] for level in down.scheme.spec.levels), default=1) or 1
    cut = placement.cut(layer.intermediate, block=block, uneven=uneven)
    rows = _row_spec(gate, cut.granule, ordered=down.scheme.act_order)
    w13 = MatrixShape(
        cut.size * (2 if layer.gated else 1),
        layer.hidden,
        rows.stacked(cut.size) if layer.gated else rows,
        "bias" in gate.sources,
        gate.scheme.act_order,
    )
    columns = down.scheme.spec.map_blocks(1, cut.granule)
    w2 = MatrixShape(layer.hidden, cut.size, columns, "bias" in down.sources)
    return LayerPlan(layer, placement, cut, placement.experts(layer.experts), w13, w2)


def _row_spec(projection: Projection, granule: int, *, ordered: bool = False) -> QuantSpec:
    """The spec of this projection's rows once fused halves, cuts and reordering are undone."""
    spec = projection.scheme.spec
    if projection.step > 1 or ordered:
        return spec.map_blocks(0, 1)
    if projection.stored_n != projection.n:
        spec = spec.map_blocks(0, projection.n)  # the second half starts at row n
    return spec.map_blocks(0, granule)


def load_expert(read: Reader, plan: LayerPlan, expert: int) -> ExpertWeights:
    """Read, decode and cut one expert."""
    layer, cut = plan.layer, plan.cut
    down = layer.projections[expert, DOWN]
    order: Tensor | None = None
    if down.scheme.act_order:
        w2, order = _load_ordered_down(read, down, cut)
    else:
        w2 = _load(read, down, (0, down.n), (cut.start, cut.stop), plan.w2.spec)
    w2 = _pad(w2, plan.w2.n, plan.w2.k)
    if plan.placement.tp_rank > 0 and w2.bias is not None:
        w2 = replace(w2, bias=torch.zeros_like(w2.bias))  # the sum over ranks must count it once
    halves = [
        _pad(_load_rows(read, layer.projections[expert, name], cut, order), cut.size, layer.hidden)
        for name in ((GATE, UP) if layer.gated else (GATE,))
    ]
    return ExpertWeights(stack(halves) if layer.gated else halves[0], w2)


def load_layer(
    read: Reader,
    plan: LayerPlan,
    layout: Layout,
    *,
    out: Mapping[str, Packed] | None = None,
    transform: Callable[[ExpertWeights], ExpertWeights] | None = None,
    readers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Packed]:
    """Fill final buffers expert by expert; at most two experts are in flight.

    With `out` an earlier load's buffers are filled again, in place.
    """
    packed = (
        dict(out)
        if out is not None
        else {
            "w13": layout.allocate(plan.w13, len(plan.experts)),
            "w2": layout.allocate(plan.w2, len(plan.experts)),
        }
    )
    for slot, weights in enumerate(stream_experts(read, plan, readers=readers)):
        weights = transform(weights) if transform is not None else weights
        layout.pack(plan.w13, weights.w13, {name: t[slot] for name, t in packed["w13"].items()})
        layout.pack(plan.w2, weights.w2, {name: t[slot] for name, t in packed["w2"].items()})
        if progress is not None:
            progress(1)
    return packed


def stream_experts(read: Reader, plan: LayerPlan, *, readers: int = 2) -> Iterator[ExpertWeights]:
    """Experts in slot order, the next one read while the last is used."""
    if readers <= 1:
        for expert in plan.experts:
            yield load_expert(read, plan, expert)
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead: Future[ExpertWeights] | None = None
        for expert in plan.experts:
            current, ahead = ahead, pool.submit(load_expert, read, plan, expert)
            if current is not None:
                yield current.result()
        if ahead is not None:
            yield ahead.result()


def load_inputs(read: Reader, layer: Layer) -> dict[tuple[int, str], dict[str, Tensor]]:
    """Activation-side tensors of every expert, local or not: {(expert, projection): {role: value}}."""
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, projection in layer.projections.items():
        held = {role: _read(read, s, projection, None) for role, s in projection.sources.items() if role in INPUT_ROLES}
        if held:
            found[key] = held
    return found


def load_projection(read: Reader, projection: Projection) -> LogicalWeight:
    """One projection whole, in its own spec: what verify and convert look at."""
    return _load(read, projection, (0, projection.n), (0, projection.k), _row_spec(projection, 0))


def _load_rows(read: Reader, projection: Projection, cut: Cut, order: Tensor | None) -> LogicalWeight:
    """Gate or up: this rank's rows, in the order down's columns ended up in."""
    k = projection.k
    if order is None:
        return _load(read, projection, (cut.start, cut.stop), (0, k), _row_spec(projection, cut.granule))
    whole = load_projection(read, projection)
    return whole.rows(order[cut.start : cut.stop].long())


def _load_ordered_down(read: Reader, down: Projection, cut: Cut) -> tuple[LogicalWeight, Tensor | None]:
    """Down under act-order: cut along its sorted columns, so that groups stay whole.

    The permutation is returned to be folded into the rows of gate and up.
    """
    whole = load_projection(read, down)
    order = whole.perm
    sorted_down = replace(whole, perm=None)
    spec = down.scheme.spec.map_blocks(1, cut.granule)
    return sorted_down.reblock(spec).cut((0, down.n), (cut.start, cut.stop)), order


def _load(read: Reader, projection: Projection, rows: Span, columns: Span, spec: QuantSpec) -> LogicalWeight:
    """Rows and columns of a projection with the blocks of `spec`, from the smallest covering read."""
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
    except ColibriError as error:
        if error.where is not None and error.where.startswith("layer "):
            raise
        where = f"{projection.where} ({projection.module})"
        raise type(error)(error.what, where=where, expected=error.expected, got=error.got, hint=error.hint) from error


def _trim(
    weight: LogicalWeight, projection: Projection, rows: Span, columns: Span, origin: Span, spec: QuantSpec
) -> LogicalWeight:
    """Cut a decoded covering read to exactly [rows, columns), with the blocks of `spec`."""
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


def _read(read: Reader, source: Source, projection: Projection, around: tuple[Span, Span] | None) -> Tensor:
    """One part of a projection, cut to the covering read, the right way round."""
    ratio = source.part.ratio(source.dtype)
    full = ax.shape(source.axes, projection.stored_n, projection.k, ratio)
    if around is None or not source.part.cuttable:
        index: tuple[slice, ...] = tuple(slice(None) if s == ax.ANY else slice(0, s) for s in full)
    else:
        index = ax.slices(source.axes, *around, projection.stored_n, projection.k, ratio)
    if source.reversed:
        index = index[::-1]
    tensor = read(source.tensor, _expert_index(source, index))
    return tensor.t().contiguous() if source.reversed else tensor


def _expert_index(source: Source, index: tuple[slice, ...]) -> tuple[int | slice, ...]:
    if source.expert is None:
        return index
    if source.rows_per_expert:
        base = source.expert * source.rows_per_expert
        first = index[0]
        return (slice(base + first.start, base + first.stop), *index[1:])
    return (source.expert, *index)


def _pad(weight: LogicalWeight, n: int, k: int) -> LogicalWeight:
    """Zeros up to [n, k], with neutral scales: they add nothing to any product."""
    if (weight.n, weight.k) == (n, k):
        return weight
    spec = weight.spec
    for axis, (old, new) in enumerate(((weight.n, n), (weight.k, k))):
        inside = any(level.block[axis] != ALL and old % level.block[axis] for level in spec.levels)
        if old != new and inside and (spec.zero is not None or spec.minimum):
            raise ShardError(f"{spec} cannot be padded inside a block", expected="whole blocks", got=old)
    if weight.perm is not None and k != weight.k:
        raise ShardError("an act-ordered matrix cannot be padded along K")
    code = 0 if spec.zero is not None else int(spec.dtype.encode(torch.zeros(1)).view(torch.uint8)[0])
    codes = torch.full((n, k), code, dtype=weight.codes.dtype)
    codes[: weight.n, : weight.k] = weight.codes

    def grow(tensor: Tensor, shape: tuple[int, int], fill: Tensor) -> Tensor:
        out = fill.expand(shape).clone()
        out[: tensor.shape[0], : tensor.shape[1]] = tensor
        return out

    one = torch.ones(1)
    zero = weight.zero
    if spec.zero is not None and zero is not None:
        zero = grow(zero, spec.zero.shape(n, k), torch.zeros(1, dtype=zero.dtype))
    nothing = [s.dtype.encode(torch.zeros(1)) for s in spec.minimum]
    return replace(
        weight,
        codes=codes,
        scales=tuple(grow(t, s.shape(n, k), s.dtype.encode(one)) for s, t in zip(spec.scales, weight.scales)),
        zero=zero,
        minimum=tuple(grow(t, s.shape(n, k), z) for s, t, z in zip(spec.minimum, weight.minimum, nothing)),
        bias=None if weight.bias is None else torch.nn.functional.pad(weight.bias, (0, n - weight.n)),
    )
