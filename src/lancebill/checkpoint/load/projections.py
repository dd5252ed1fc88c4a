"""Reads projections of one or several experts: the smallest covering slice of each stored tensor, decoded and cut.

Several experts are read and decoded as one value with a leading expert dimension where their scheme allows it, on the
device of the tensors that the reader returns; otherwise one by one. Codes stay where they are, if the scheme only views
them (`Nibbles.apart`): the kernels that pack them find them by their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lancebill.checkpoint.load.staging import DeviceReader, Read
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.stored_layer import Projection, StoredPart
from lancebill.errors import LancebillError
from lancebill.formats import axes as ax
from lancebill.formats.base import Scheme
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight, expert_of, stack_experts

Span = tuple[int, int]
Area = tuple[Span, Span]  # rows and columns
Found = Tensor | list[Tensor]  # one part of several experts: [experts, ...], or a tensor for each
CODES = "codes"


def load_projection(read: Reader, projection: Projection) -> LogicalWeight:
    """One whole projection in its stored spec, for `verify` and `convert`."""
    whole = (0, projection.n), (0, projection.k)
    return read_projection(read, projection, whole, row_spec(projection, 0))


def row_spec(
    projection: Projection, granule: int, *, ordered: bool = False, target: QuantSpec | None = None
) -> QuantSpec:
    """The spec of this projection's rows after fused halves are split, rows are reordered and the shard is cut."""
    spec = target or projection.scheme.spec
    if ordered or (projection.step > 1 and target is None):
        return spec.map_blocks(0, 1)
    if projection.stored_n != projection.n and target is None:
        spec = spec.map_blocks(0, projection.n)  # the second half starts at row n
    return spec.map_blocks(0, granule)


def read_projection(read: Reader, projection: Projection, area: Area, spec: QuantSpec) -> LogicalWeight:
    """These rows and columns of one projection, with the blocks of `spec`."""
    return expert_of(read_projections(read, (projection,), area, spec), 0)


def read_projections(read: Reader, experts: Sequence[Projection], area: Area, spec: QuantSpec) -> LogicalWeight:
    """The same projection of several experts, with a leading expert dimension. An error names its expert."""
    if not _alike(experts):
        return stack_experts([read_projection(read, projection, area, spec) for projection in experts])
    try:
        return _read_alike(read, experts, area, spec)
    except LancebillError as error:
        if len(experts) == 1:
            raise error.within(f"{experts[0].where} ({experts[0].module})") from error
        for projection in experts:  # which one is it?
            read_projection(read, projection, area, spec)
        raise


def _alike(experts: Sequence[Projection]) -> bool:
    """Whether these projections can be decoded together."""
    first = experts[0]
    if len(experts) == 1:
        return True
    return first.scheme.batched and not first.scheme.act_order and all(map(first.stored_like, experts))


def reads_of(experts: Sequence[Projection], area: Area) -> Iterator[Read]:
    """What `read_projections` reads, in its order."""
    for alike in [experts] if _alike(experts) else [[projection] for projection in experts]:
        around = _around(alike[0], area)
        for role in alike[0].sources:
            yield from _part_reads(alike, role, around)


def _around(projection: Projection, area: Area) -> Area:
    """The stored rows and columns that must be read to get these."""
    units = projection.scheme.units
    if units is None or projection.scheme.act_order:
        return (0, projection.stored_n), (0, projection.k)
    rows, columns = area
    around_rows = _widen(_stored_rows(projection, rows), units["n"], projection.stored_n)
    return around_rows, _widen(columns, units["k"], projection.k)


def _read_alike(read: Reader, experts: Sequence[Projection], area: Area, spec: QuantSpec) -> LogicalWeight:
    first, (rows, columns) = experts[0], area
    scheme, (around_rows, around_columns) = first.scheme, _around(first, area)
    found = {role: _read_part(read, experts, role, (around_rows, around_columns)) for role in first.sources}
    size = around_rows[1] - around_rows[0], around_columns[1] - around_columns[0]
    weight = _decode_apart(scheme, found, size) if scheme.views_codes and _may_stay_apart(found[CODES]) else None
    if weight is None:
        stored = {role: _stacked(tensors) for role, tensors in found.items()}
        if scheme.batched and not scheme.act_order:
            weight = scheme.decode(stored, *size)
        else:
            weight = stack_experts([scheme.decode({role: tensor[0] for role, tensor in stored.items()}, *size)])
    return _trim(weight, first, rows, columns, (around_rows[0], around_columns[0]), spec)


def _may_stay_apart(codes: Found) -> bool:
    """Whether these are tensors of several experts, as kernels can read them."""
    if not isinstance(codes, list) or len(codes) == 1:
        return False
    return all(map(Tensor.is_contiguous, codes)) and len({tensor.nbytes for tensor in codes}) == 1


def _decode_apart(scheme: Scheme, found: Mapping[str, Found], size: Span) -> LogicalWeight | None:
    """Decode experts whose codes are not stacked; None if the codes were copied nevertheless."""
    codes = found[CODES]
    stored = {role: _stacked(tensors) for role, tensors in found.items() if role != CODES}
    first = codes[0].unsqueeze(0)
    weight = scheme.decode({**stored, CODES: first.expand(len(codes), *codes[0].shape)}, *size)
    view = weight.stored
    if not isinstance(view, Nibbles) or view.source.stride(0) or view.source.data_ptr() != first.data_ptr():
        return None
    return replace(weight, stored=replace(view, apart=tuple(codes)))


def _stacked(tensors: Found) -> Tensor:
    """[experts, ...], contiguous, however the reader's tensors are."""
    if isinstance(tensors, Tensor):
        return tensors.contiguous()
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].contiguous().unsqueeze(0)


def _trim(
    weight: LogicalWeight, projection: Projection, rows: Span, columns: Span, origin: Span, spec: QuantSpec
) -> LogicalWeight:
    """Cut a decoded covering slice, which starts at `origin`, to exactly these rows and columns."""
    if projection.step > 1:
        numbers = torch.arange(rows[0], rows[1], device=weight.device)
        weight = weight.rows(numbers * projection.step + projection.first - origin[0])
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


def _read_part(read: Reader, experts: Sequence[Projection], role: str, around: Area) -> Found:
    """One part of all experts, sliced to the covering rows and columns; undoes a stored transposition."""
    source, reads = experts[0].sources[role], _part_reads(experts, role, around)
    found = read.all(reads) if isinstance(read, DeviceReader) else [read(name, index) for name, index in reads]
    stacked = found[0] if len(found) < len(experts) else found  # one tensor has several experts
    matrix = len(ax.shape(source.axes, experts[0].stored_n, experts[0].k, source.part.ratio(source.dtype))) == 2
    return _stacked(stacked).mT.contiguous() if source.reversed and matrix else stacked


def _part_reads(experts: Sequence[Projection], role: str, around: Area) -> list[Read]:
    """The reads of one part: one for each expert, or a single one if they are neighbours in one tensor."""
    projection, source = experts[0], experts[0].sources[role]
    ratio = source.part.ratio(source.dtype)
    full = ax.shape(source.axes, projection.stored_n, projection.k, ratio)
    if not source.part.cuttable:
        index: tuple[slice, ...] = tuple(slice(None) if s == ax.ANY else slice(0, s) for s in full)
    else:
        index = ax.slices(source.axes, *around, projection.stored_n, projection.k, ratio)
    if not source.rows_per_expert and all(part == slice(0, size) for part, size in zip(index, full)):
        index = ()  # the whole tensor: indexing takes longer than everything else about reading from memory
    if source.reversed:
        index = index[::-1]
    if source.expert is None:  # then each has a tensor of its own
        return [(each.sources[role].tensor, index) for each in experts]
    sources = [each.sources[role] for each in experts]
    if len(sources) > 1 and not source.rows_per_expert:
        last = source.expert + len(sources)
        if len({s.tensor for s in sources}) == 1 and [s.expert for s in sources] == list(range(source.expert, last)):
            return [(source.tensor, (slice(source.expert, last), *index))]
    return [(s.tensor, _expert_index(s, index)) for s in sources]


def _expert_index(source: StoredPart, index: tuple[slice, ...]) -> tuple[int | slice, ...]:
    assert source.expert is not None
    if source.rows_per_expert:
        base = source.expert * source.rows_per_expert
        first = index[0]
        return (slice(base + first.start, base + first.stop), *index[1:])
    return (source.expert, *index)
