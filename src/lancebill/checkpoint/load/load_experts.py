"""Read and decode experts, a few at a time.

For each projection: read the smallest slice of the stored tensors that covers this rank's shard, decode it, and cut it
to the exact shard. Every format, family and parallel layout takes this path; nothing here branches on any of them.
Everything happens on the device that the reader reads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lancebill.checkpoint.load.expert_weights import ExpertWeights, MatrixWeights, stack_weights
from lancebill.checkpoint.load.gate_and_up import Inputs, read_gate_and_up, read_together
from lancebill.checkpoint.load.input_scales import combine_input_scales
from lancebill.checkpoint.load.layer_plan import LayerPlan, keeps_order
from lancebill.checkpoint.load.padding import pad
from lancebill.checkpoint.load.projections import Span, load_projection, read_projections, reads_of, row_spec
from lancebill.checkpoint.load.staging import Read
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP
from lancebill.checkpoint.resolve.stored_layer import Projection
from lancebill.errors import LancebillError
from lancebill.moe.layout import W2, W13
from lancebill.numbers.codec import requantize
from lancebill.numbers.loss import Loss
from lancebill.numbers.weight import LogicalWeight, stack, stack_experts

TakeLoss = Callable[[str, Loss], None]  # is given what requantising a matrix cost


def load_expert(read: Reader, plan: LayerPlan, expert: int, losses: TakeLoss | None = None) -> ExpertWeights:
    """Read, decode, requantise where planned, and cut one expert."""
    return load_experts(read, plan, (expert,), losses).at(0)


def load_experts(
    read: Reader, plan: LayerPlan, experts: Sequence[int], losses: TakeLoss | None = None
) -> ExpertWeights:
    """Several experts, with a leading expert dimension on every tensor, on the device that `read` reads to."""
    found = [weights.matrices for weights in load_matrices(read, plan, experts, losses)]
    return ExpertWeights({name: matrix for matrices in found for name, matrix in matrices.items()})


def load_matrices(
    read: Reader, plan: LayerPlan, experts: Sequence[int], losses: TakeLoss | None = None
) -> Iterator[ExpertWeights]:
    """As `load_experts`, one matrix before the other is read: a device can pack it meanwhile.

    w13 is the larger one, so it comes first, unless its rows are in the act-order of w2.
    """
    if plan.one_by_one and len(experts) > 1:
        yield stack_weights([load_expert(read, plan, expert, losses) for expert in experts])
        return
    load = _Load(read, plan, experts, losses)
    if plan.one_by_one:
        w2, order = load.w2()
        yield load.matrix(W2, [w2], [w2.inputs])
        yield load.matrix(W13, *load.w13(order))
    else:
        yield load.matrix(W13, *load.w13(None))
        w2, _ = load.w2()
        yield load.matrix(W2, [w2], [w2.inputs])


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


class _Load:
    """One load of some experts."""

    def __init__(self, read: Reader, plan: LayerPlan, experts: Sequence[int], losses: TakeLoss | None) -> None:
        self.read, self.plan, self.experts, self.losses = read, plan, experts, losses

    def matrix(self, name: str, parts: Sequence[LogicalWeight], inputs: Sequence[Inputs]) -> ExpertWeights:
        """One matrix, of one part or of gate and up. If they, or what they say about their input, do not fit, finds
        out whose."""
        try:
            weight = stack(parts) if len(parts) > 1 else parts[0]
            return ExpertWeights({name: MatrixWeights(weight, combine_input_scales(inputs, weight.lead))})
        except LancebillError as error:
            if len(self.experts) == 1:
                raise error.within(f"{self.plan.layer.where}, expert {self.experts[0]}") from error
            for expert in self.experts:
                load_expert(self.read, self.plan, expert)
            raise

    def w2(self) -> tuple[LogicalWeight, Tensor | None]:
        """w2, and the act-order of its columns if it has one."""
        plan, cut = self.plan, self.plan.cut
        w2, order = self._target(W2, self._projections(DOWN), (0, plan.layer.hidden), (cut.start, cut.stop))
        w2 = pad(w2, plan.w2.n, plan.w2.k)
        if plan.placement.tp_rank > 0 and w2.bias is not None:
            w2 = replace(w2, bias=torch.zeros_like(w2.bias))  # the sum over ranks must add it once
        return w2, order

    def w13(self, order: Tensor | None) -> tuple[list[LogicalWeight], list[Inputs]]:
        """w13 as one part or, if gate and up cannot be read together, as two; and what both say about their input.

        `order` is the act-order of w2, in which their rows are.
        """
        layer, cut = self.plan.layer, self.plan.cut
        projections = [self._projections(name) for name in ((GATE, UP) if layer.gated else (GATE,))]
        rows = (cut.start, cut.stop) if order is None else order[cut.start : cut.stop].long()
        if layer.gated and isinstance(rows, tuple) and not self.plan.one_by_one:
            spec = row_spec(projections[0][0], cut.granule)
            joined = read_gate_and_up(self.read, projections[0], projections[1], rows, cut.size, spec)
            if joined is not None:
                return [joined[0]], joined[1]
        halves = (self._target(W13, each, rows, (0, layer.hidden))[0] for each in projections)
        parts = [pad(half, cut.size, layer.hidden) for half in halves]
        return parts, [part.inputs for part in parts]

    def _projections(self, name: str) -> list[Projection]:
        return [self.plan.layer.projections[expert, name] for expert in self.experts]

    def _target(
        self, matrix: str, experts: Sequence[Projection], rows: Span | Tensor, columns: Span
    ) -> tuple[LogicalWeight, Tensor | None]:
        """One projection's shard in the plan's spec, and for w2 the act-order of its columns.

        Columns are cut in sorted order, so that groups stay whole.
        """
        plan, projection, cut_columns = self.plan, experts[0], matrix == W2
        target = plan.requantize.get(matrix)
        spec = plan.w2.spec
        if not cut_columns:
            spec = row_spec(projection, plan.cut.granule, ordered=plan.ordered, target=target)
        if target is None and isinstance(rows, tuple) and not (cut_columns and projection.scheme.act_order):
            return read_projections(self.read, experts, (rows, columns), spec), None
        assert len(experts) == 1, "requantised and reordered matrices are loaded one by one"
        whole = load_projection(self.read, projection)
        if target is not None:
            whole, loss = requantize(whole, target, keep_order=keeps_order(projection, target))
            if self.losses is not None:
                self.losses(matrix, loss)
        order = whole.perm if cut_columns else None
        whole = replace(whole, perm=None) if cut_columns else whole
        whole = whole.rows(rows) if isinstance(rows, Tensor) else whole.reblock(spec).cut(rows, columns)
        return stack_experts([whole]), order
