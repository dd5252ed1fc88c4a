"""Load experts from files into packed buffers, a few at a time.

For each projection: read the smallest slice of the stored tensors that covers this rank's shard, decode it, cut it
to the exact shard, and pack it into preallocated buffers. Every format, family and parallel layout takes this
path; nothing here branches on any of them. Everything happens on the device that the reader reads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lancebill.checkpoint.load.gate_and_up import Inputs, read_gate_and_up, read_together
from lancebill.checkpoint.load.input_scales import InputScales, combine_input_scales, stack_inputs
from lancebill.checkpoint.load.padding import pad
from lancebill.checkpoint.load.projections import Span, read_projection, read_projections, reads_of
from lancebill.checkpoint.load.staging import Read
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.manifest import Projection, StoredLayer
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP
from lancebill.errors import LancebillError
from lancebill.moe.layout import W2, W13, Layout, MatrixShape, Packed
from lancebill.moe.placement import Cut, Placement
from lancebill.numbers.codec import keeps_codes, requantize
from lancebill.numbers.loss import Loss
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight, expert_of, stack, stack_experts


@dataclass(frozen=True)
class MatrixWeights:
    """One matrix of an expert, or of several, and the scales of its input."""

    weight: LogicalWeight
    inputs: InputScales

    def at(self, index: int | slice) -> MatrixWeights:
        return MatrixWeights(expert_of(self.weight, index), self.inputs.at(index))


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's shard on this rank, w13 (gate stacked on up) and w2 (down), or those of several experts; or only one
    of the two matrices.

    w2 has no act-order: its permutation is applied to the rows of w13 instead.
    """

    matrices: Mapping[str, MatrixWeights]

    @property
    def w13(self) -> LogicalWeight:
        return self.matrices["w13"].weight

    @property
    def w2(self) -> LogicalWeight:
        return self.matrices["w2"].weight

    @property
    def count(self) -> int:
        """Of several experts, how many."""
        return next(iter(self.matrices.values())).weight.lead[0]

    def at(self, index: int | slice) -> ExpertWeights:
        """One, or some, of several experts: views."""
        return ExpertWeights({name: matrix.at(index) for name, matrix in self.matrices.items()})

    def pack(self, plan: LayerPlan, layout: Layout, rows: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Pack into the rows of a layer's buffers: of one expert, or of as many as this holds."""
        for name, matrix in self.matrices.items():
            shape, weight = plan.shape(name), matrix.weight
            assert weight.spec == shape.spec and (weight.perm is None or shape.act_order), "not as planned"
            layout.pack(shape, weight, rows[name])
            matrix.inputs.write(rows[name])


def stack_weights(experts: Sequence[ExpertWeights]) -> ExpertWeights:
    """Several single experts as one value."""
    by_name = {name: [expert.matrices[name] for expert in experts] for name in experts[0].matrices}
    return ExpertWeights(
        {
            name: MatrixWeights(stack_experts([m.weight for m in held]), stack_inputs([m.inputs for m in held]))
            for name, held in by_name.items()
        }
    )


def pack_experts(
    plan: LayerPlan,
    layout: Layout,
    weights: ExpertWeights | Sequence[ExpertWeights],
    packed: Mapping[str, Packed],
    slots: Sequence[int],
) -> None:
    """Pack experts into these slots of a layer's buffers: expert i into slots[i], neighbouring slots together.

    `weights` is a stack of experts, or a sequence of single ones. They are packed on the device that holds them. An
    error names the expert.
    """
    stacked = weights if isinstance(weights, ExpertWeights) else stack_weights(weights)
    first = 0
    for last in range(1, len(slots) + 1):
        if last < len(slots) and slots[last] == slots[last - 1] + 1:
            continue
        run = stacked if last - first == len(slots) else stacked.at(slice(first, last))
        _pack_run(plan, layout, run, packed, slots[first])
        first = last


def _pack_run(plan: LayerPlan, layout: Layout, weights: ExpertWeights, packed: Mapping[str, Packed], slot: int) -> None:
    """Experts into neighbouring slots, the first into `slot`. If they cannot be packed together, finds out which."""
    count = weights.count
    try:
        weights.pack(plan, layout, slot_rows(packed, slice(slot, slot + count)))
    except LancebillError as error:
        if count == 1:
            raise error.within(f"{plan.layer.where}, expert {plan.experts[slot]}") from error
        for i in range(count):
            _pack_run(plan, layout, weights.at(slice(i, i + 1)), packed, slot + i)
        raise


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
        """Whether an expert's matrices are rounded, or their rows reordered, by what they hold."""
        return bool(self.requantize) or self.layer.sample(DOWN).scheme.act_order

    @property
    def views_codes(self) -> bool:
        """Whether codes that are on the device already are not copied before they are packed."""
        viewed = all(self.layer.sample(name).scheme.views_codes for name in (GATE, DOWN))
        return viewed and not self.one_by_one and self.placement.tp_size == 1

    @property
    def ordered(self) -> bool:
        """Whether w13's rows are permuted by w2's act-order."""
        return keeps_order(self.layer.sample(DOWN), self.requantize.get("w2"))

    def shape(self, matrix: str) -> MatrixShape:
        return {"w13": self.w13, "w2": self.w2}[matrix]

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
    return load_experts(read, plan, (expert,), losses).at(0)


def load_experts(
    read: Reader, plan: LayerPlan, experts: Sequence[int], losses: Callable[[str, Loss], None] | None = None
) -> ExpertWeights:
    """Several experts, with a leading expert dimension on every tensor, on the device that `read` reads to."""
    found = [weights.matrices for weights in load_matrices(read, plan, experts, losses)]
    return ExpertWeights({name: matrix for matrices in found for name, matrix in matrices.items()})


def load_matrices(
    read: Reader, plan: LayerPlan, experts: Sequence[int], losses: Callable[[str, Loss], None] | None = None
) -> Iterator[ExpertWeights]:
    """As `load_experts`, one matrix before the other is read: a device can pack it meanwhile.

    w13 is the larger one, so it comes first, unless its rows are in the act-order of w2.
    """
    if plan.one_by_one and len(experts) > 1:
        yield stack_weights([load_expert(read, plan, expert, losses) for expert in experts])
        return
    load, order = partial(_load_target, read, plan, losses), None
    if not plan.one_by_one:
        yield _matrix(read, plan, experts, "w13", _load_w13(read, plan, load, experts, order))
    w2, order = _load_w2(plan, load, experts)
    yield _matrix(read, plan, experts, "w2", (w2, [w2.inputs]))
    if plan.one_by_one:
        yield _matrix(read, plan, experts, "w13", _load_w13(read, plan, load, experts, order))


def _matrix(
    read: Reader, plan: LayerPlan, experts: Sequence[int], name: str, loaded: Joined | list[LogicalWeight]
) -> ExpertWeights:
    """One matrix of these experts. If gate and up, or what they say about their input, do not fit, finds out whose."""
    try:
        weight, inputs = loaded if isinstance(loaded, tuple) else (_stacked(loaded), [half.inputs for half in loaded])
        return ExpertWeights({name: MatrixWeights(weight, combine_input_scales(inputs, weight.lead))})
    except LancebillError as error:
        if len(experts) == 1:
            raise error.within(f"{plan.layer.where}, expert {experts[0]}") from error
        for expert in experts:
            load_expert(read, plan, expert)
        raise


def reads_of_experts(plan: LayerPlan, experts: Sequence[int]) -> Iterator[Read]:
    """What `load_experts` reads, so that it can be read ahead."""
    layer, cut = plan.layer, plan.cut
    down, *sides = (
        [layer.projections[expert, name] for expert in experts] for name in (DOWN, GATE, UP)[: 2 + layer.gated]
    )
    if plan.one_by_one:
        for projections in (down, *sides):
            yield from reads_of(projections, ((0, projections[0].n), (0, projections[0].k)))
        return
    rows = cut.start, cut.stop
    together = read_together(sides[0], sides[1], rows, cut.size) if layer.gated else None
    for projections, area in [(side, (rows, (0, layer.hidden))) for side in sides] if together is None else [together]:
        yield from reads_of(projections, area)
    yield from reads_of(down, ((0, layer.hidden), (cut.start, cut.stop)))


Joined = tuple[LogicalWeight, list[Inputs]]  # a matrix, and what its projections say about its input
Load = Callable[..., tuple[LogicalWeight, Tensor | None]]  # `_load_target` with its first arguments


def _load_w2(plan: LayerPlan, load: Load, experts: Sequence[int]) -> tuple[LogicalWeight, Tensor | None]:
    """w2, and the act-order of its columns if it has one."""
    layer, cut = plan.layer, plan.cut
    down = [layer.projections[expert, DOWN] for expert in experts]
    w2, order = load("w2", down, (0, layer.hidden), (cut.start, cut.stop))
    w2 = pad(w2, plan.w2.n, plan.w2.k)
    if plan.placement.tp_rank > 0 and w2.bias is not None:
        w2 = replace(w2, bias=torch.zeros_like(w2.bias))  # the sum over ranks must add it once
    return w2, order


def _load_w13(
    read: Reader, plan: LayerPlan, load: Load, experts: Sequence[int], order: Tensor | None
) -> Joined | list[LogicalWeight]:
    """w13 and what gate and up say about their input; or gate and up, if they cannot be read together.

    Their rows are in w2's act-order if there is one.
    """
    layer, cut = plan.layer, plan.cut
    names = (GATE, UP) if layer.gated else (GATE,)
    projections = [[layer.projections[expert, name] for expert in experts] for name in names]
    rows = (cut.start, cut.stop) if order is None else order[cut.start : cut.stop].long()
    if layer.gated and isinstance(rows, tuple) and not plan.one_by_one:
        spec = _row_spec(projections[0][0], cut.granule)
        joined = read_gate_and_up(read, projections[0], projections[1], rows, cut.size, spec)
        if joined is not None:
            return joined
    halves = (load("w13", each, rows, (0, layer.hidden))[0] for each in projections)
    return [pad(half, cut.size, layer.hidden) for half in halves]


def _stacked(halves: Sequence[LogicalWeight]) -> LogicalWeight:
    return stack(halves) if len(halves) > 1 else halves[0]


def _load_target(
    read: Reader,
    plan: LayerPlan,
    losses: Callable[[str, Loss], None] | None,
    matrix: str,
    experts: Sequence[Projection],
    rows: Span | Tensor,
    columns: Span,
) -> tuple[LogicalWeight, Tensor | None]:
    """One projection's shard in the plan's spec, and for w2 the act-order of its columns.

    Columns are cut in sorted order, so that groups stay whole.
    """
    target, projection = plan.requantize.get(matrix), experts[0]
    granule = plan.cut.granule
    cut_columns = matrix == "w2"
    spec = plan.w2.spec if cut_columns else _row_spec(projection, granule, ordered=plan.ordered, target=target)
    if target is None and isinstance(rows, tuple) and not (cut_columns and projection.scheme.act_order):
        return read_projections(read, experts, (rows, columns), spec), None
    assert len(experts) == 1, "requantised and reordered matrices are loaded one by one"
    whole = load_projection(read, projection)
    if target is not None:
        whole, loss = requantize(whole, target, keep_order=keeps_order(projection, target))
        if losses is not None:
            losses(matrix, loss)
    order = whole.perm if cut_columns else None
    whole = replace(whole, perm=None) if cut_columns else whole
    whole = whole.rows(rows) if isinstance(rows, Tensor) else whole.reblock(spec).cut(rows, columns)
    return stack_experts([whole]), order


def expert_rows(packed: Mapping[str, Packed], slot: int) -> dict[str, Packed]:
    """Views of one slot of a layer's buffers."""
    return slot_rows(packed, slot)


def slot_rows(packed: Mapping[str, Packed], slots: int | slice) -> dict[str, Packed]:
    """Views of one slot, or of neighbouring ones, of a layer's buffers."""
    return {matrix: {name: t[slots] for name, t in tensors.items()} for matrix, tensors in packed.items()}


def load_projection(read: Reader, projection: Projection) -> LogicalWeight:
    """One whole projection in its stored spec, for `verify` and `convert`."""
    whole = (0, projection.n), (0, projection.k)
    return read_projection(read, projection, whole, _row_spec(projection, 0))
