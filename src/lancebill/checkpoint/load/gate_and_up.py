"""Gate and up of several experts, read and decoded together: neither is copied below the other.

Tensors of their own are read in turn, gate, up, gate, up: two matrices of one expert are neighbours, which is one
matrix of twice the rows. Where one tensor has both, it is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor

from lancebill.checkpoint.load.padding import pad
from lancebill.checkpoint.load.projections import Area, Span, read_projections
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.stored_layer import Projection
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight, join_rows, split_rows

Inputs = Mapping[str, Tensor]  # activation-side tensors by role


def read_gate_and_up(
    read: Reader, gates: Sequence[Projection], ups: Sequence[Projection], rows: Span, size: int, spec: QuantSpec
) -> tuple[LogicalWeight, list[Inputs]] | None:
    """w13 of several experts from these rows of gate and up, padded to `size` rows each, and what gate and up say about
    their input. `spec` is that of gate. None if they cannot be read together."""
    together = read_together(gates, ups, rows, size)
    if together is None:
        return None
    gate, (projections, area) = gates[0], together
    both = read_projections(read, projections, area, spec)
    if gate.stored_n == gate.n:
        both = pad(both, size, gate.k)
        return join_rows(both, 2), [{role: t[i::2] for role, t in both.inputs.items()} for i in range(2)]
    stacked = (split_rows(both, 2) if gate.step == 2 else both).reblock(spec.stacked(size))
    return replace(stacked, inputs={}), [both.inputs]


def read_together(
    gates: Sequence[Projection], ups: Sequence[Projection], rows: Span, size: int
) -> tuple[list[Projection], Area] | None:
    """What to read as one, and which rows and columns of it; None if gate and up cannot be read together."""
    gate, up = gates[0], ups[0]
    if gate.scheme.act_order:
        return None
    columns = 0, gate.k
    if gate.stored_n == gate.n:
        return (list(chain(*zip(gates, ups))), (rows, columns)) if up.stored_like(gate) else None
    if not _one_tensor(gate, up) or rows[1] - rows[0] != size or (gate.step == 1 and rows != (0, gate.n)):
        return None
    return [projection.fused for projection in gates], ((rows[0] * 2, rows[1] * 2), columns)


def _one_tensor(gate: Projection, up: Projection) -> bool:
    """Whether the halves, or alternating rows, of one tensor are gate and up."""
    places = ((gate.first, gate.step), (up.first, up.step))
    fused = gate.stored_n == 2 * gate.n and places in (((0, 1), (gate.n, 1)), ((0, 2), (1, 2)))
    return fused and gate.sources == up.sources
