"""Decoded experts, and how they are packed into the buffers of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lancebill.checkpoint.load.input_scales import InputScales, stack_inputs
from lancebill.checkpoint.load.layer_plan import LayerPlan
from lancebill.errors import LancebillError
from lancebill.moe.layout import W2, W13, Layout, Packed
from lancebill.numbers.weight import LogicalWeight, expert_of, stack_experts


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
        return self.matrices[W13].weight

    @property
    def w2(self) -> LogicalWeight:
        return self.matrices[W2].weight

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


def slot_rows(packed: Mapping[str, Packed], slots: int | slice) -> dict[str, Packed]:
    """Views of one slot, or of neighbouring ones, of a layer's buffers."""
    return {matrix: {name: t[slots] for name, t in tensors.items()} for matrix, tensors in packed.items()}
