"""The packed weights of the CPU kernels: blocks of 16 rows, units of 64 bytes (see native/lancebill.h).

In a gated w13, gate and up blocks alternate. Two consecutive blocks share bytes of 4-bit codes, and three units hold
four of 6-bit codes. The kernels read
`codes`, `scales` and `zeros` (one per row and group), `row_scale`, `bias` and `perm`. The small `kept0` ... hold
the levels that cannot be recovered from these; only `unpack` reads them.

The torch code here is the definition. The library packs codes and groups in one pass where it is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from lancebill.backends.cpu.form import CpuForm, Record, matrix_form, padded_columns
from lancebill.backends.cpu.group_numbers import repeat_to_groups, row_scale, scale_product
from lancebill.backends.cpu.native import abi, library
from lancebill.backends.cpu.native.packing import pack_codes, pack_groups
from lancebill.backends.cpu.records import FACTOR_BYTES, from_bytes, join_records, record_bytes, split_records, to_bytes
from lancebill.backends.cpu.unpack_on_gpu import unpack_nibbles
from lancebill.errors import BadValue
from lancebill.moe.layout import Layout, MatrixShape, Packed, as_column, as_integer, bias_of, order_of
from lancebill.moe.problem import Problem
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.dtypes import E4M3, ZERO16, DType
from lancebill.numbers.scan import all_finite, contains_any
from lancebill.numbers.spec import ALL, Level
from lancebill.numbers.weight import LogicalWeight

BLOCK = 16
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SCALE_BYTES = {
    abi.ScaleKind.BF16: torch.int16, abi.ScaleKind.F16: torch.int16, abi.ScaleKind.F32: torch.int32,
    abi.ScaleKind.E8M0: torch.uint8, abi.ScaleKind.E4M3: torch.uint8,
}  # fmt: skip
_ZERO_BYTES = {abi.ZeroKind.U8: torch.uint8, abi.ZeroKind.OFFSET_F32: torch.int32}


@dataclass(frozen=True)
class CpuLayout(Layout):
    """The layout of one problem's matrices."""

    problem: Problem

    def form(self, shape: MatrixShape) -> CpuForm:
        return matrix_form(shape, self.problem.inputs_of(shape.name))

    def padded(self, shape: MatrixShape) -> tuple[int, int]:
        """Rows and columns with padding to whole blocks and groups."""
        form = self.form(shape)
        rows = (
            2 * _round_up(shape.n // 2)
            if self.problem.is_gated(shape.name)
            else _round_up(shape.n, BLOCK * _strip(form))
        )
        return rows, padded_columns(shape.k, form.group)

    def storage(self, shape: MatrixShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        form, (n, k) = self.form(shape), self.padded(shape)
        strips = n // BLOCK // _strip(form)
        groups = (n // BLOCK, k // form.group, BLOCK)
        code_bytes = BLOCK * k * 6 // 8 if form.values.codes == abi.Codes.BITS6 else BLOCK * k
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"codes": ((strips, code_bytes), torch.uint8)}
        if form.scale in _SCALE_BYTES:
            tensors["scales"] = groups, _SCALE_BYTES[form.scale]
        if form.zero in _ZERO_BYTES:
            tensors["zeros"] = groups, _ZERO_BYTES[form.zero]
        for record in form.records:
            size = record_bytes(form.factor // form.group)
            tensors[record.name] = (n // BLOCK, self._records(shape, form), size), torch.uint8
        if form.row_scale:
            tensors["row_scale"] = (n,), torch.int32
        for place, index in enumerate(form.kept):
            level = shape.spec.levels[index]
            tensors[f"kept{place}"] = level.shape(shape.n, shape.k), _INTEGER_OF_SIZE[level.dtype.storage.itemsize]
        if shape.bias:
            tensors["bias"] = (n,), torch.int32
        if shape.act_order:
            tensors["perm"] = (shape.k,), torch.int32
        return tensors

    def allocate(self, shape: MatrixShape, experts: int, device: torch.device | str = "cpu") -> Packed:
        """Requests huge pages, since the kernels read a layer from end to end."""
        packed = super().allocate(shape, experts, device)
        native = library()
        if native is not None and packed["codes"].device.type == "cpu":
            for tensor in packed.values():
                native.huge_pages(tensor)
        return packed

    def _write(self, shape: MatrixShape, weight: LogicalWeight, out: Mapping[str, Tensor]) -> None:
        form = self.form(shape)
        _require_finite_levels(weight)
        self._write_codes(shape, form, weight, out["codes"])
        for record in form.records:
            self._write_records(shape, form, record, weight, out[record.name])
        if form.scale in _SCALE_BYTES:
            self._write_groups(shape, form, self._scales(shape, form, weight), out["scales"])
        if form.zero in _ZERO_BYTES:
            self._write_groups(shape, form, self._zeros(shape, form, weight), out["zeros"])
        if form.row_scale:
            out["row_scale"].copy_(as_integer(self._place(shape, row_scale(shape, weight)).squeeze(-1)))
        for place, index in enumerate(form.kept):
            out[f"kept{place}"].copy_(as_integer(weight.levels()[index][1]))
        if shape.bias:
            out["bias"].copy_(as_integer(self._place(shape, bias_of(shape, weight))).squeeze(-1))
        if shape.act_order:
            out["perm"].copy_(order_of(shape, weight))

    def unpack(self, shape: MatrixShape, packed: Mapping[str, Tensor]) -> LogicalWeight:
        form, spec = self.form(shape), shape.spec
        levels: list[Tensor | None] = [None] * len(spec.levels)
        for place, index in enumerate(form.kept):
            levels[index] = packed[f"kept{place}"].view(spec.levels[index].dtype.storage)
        for record in form.records:
            numbers, factors = (self._take(shape, rows) for rows in split_records(packed[record.name]))
            number, factor = spec.levels[record.number], spec.levels[record.factor]
            levels[record.number] = from_bytes(number.dtype, self._blocks(shape, form.group, number, numbers))
            levels[record.factor] = self._blocks(shape, form.factor, factor, factors).to(factor.dtype.storage)
        for index, level in enumerate(spec.levels):
            if levels[index] is None:
                name = "zeros" if level is spec.zero else "scales"
                values = self._take(shape, packed[name].transpose(-1, -2).flatten(-3, -2))
                levels[index] = _stored_numbers(form, level, self._blocks(shape, form.group, level, values))
        complete = [level for level in levels if level is not None]
        scales, zero = len(spec.scales), int(spec.zero is not None)
        return LogicalWeight(
            spec,
            self._unpack_codes(shape, form, packed["codes"]),
            tuple(complete[:scales]),
            complete[scales] if zero else None,
            tuple(complete[scales + zero :]),
            bias=self._take(shape, as_column(packed["bias"])).squeeze(-1) if shape.bias else None,
            perm=packed["perm"] if shape.act_order else None,
        )

    def _unpack_codes(self, shape: MatrixShape, form: CpuForm, packed: Tensor) -> Tensor | Nibbles:
        """The codes in their own numbering; 4-bit ones stay two per byte, which is several times faster."""
        kind, (n, k), dtype = form.values.codes, self.padded(shape), shape.spec.dtype
        if kind == abi.Codes.TABLE4 and dtype.bits == 4 and shape.k % 2 == 0:
            if on_gpu(packed):
                found = unpack_nibbles(packed, shape.n, shape.k, gated=self._gated(shape))
                if found is not None:
                    return Nibbles(found)
            rows = self._take(shape, _unpack_nibbles(packed, n, k))[..., : shape.k // 2]
            return Nibbles(rows.contiguous())
        codes = self._take(shape, _unpack_codes(kind, packed, n, k))[..., : shape.k]
        return _logical_codes(dtype, codes.contiguous())

    def _write_codes(self, shape: MatrixShape, form: CpuForm, weight: LogicalWeight, out: Tensor) -> None:
        """Codes in the kernels' numbering and order; rejects NaN and infinite ones."""
        kind, dtype = form.values.codes, shape.spec.dtype
        maps = _code_maps(dtype)
        valid = pack_codes(
            weight.stored, out, self.padded(shape), kind, gated=self._gated(shape),
            codes_of=None if maps is None else maps[0], invalid=_invalid_codes(dtype),
        )  # fmt: skip
        if valid is False:
            raise _not_finite(f"{dtype} codes")
        if valid is None:
            _require_finite_codes(weight)
            codes = _stored_codes(dtype, weight.codes)
            out.copy_(_pack_codes(kind, self._place(shape, codes, self.padded(shape)[1])))

    def _write_groups(self, shape: MatrixShape, form: CpuForm, numbers: Tensor, out: Tensor) -> None:
        """One number per row and group, in the kernels' order."""
        n, k = self.padded(shape)
        if not pack_groups(numbers, out, (n, k // form.group), gated=self._gated(shape)):
            out.copy_(_by_group(self._place(shape, numbers, k // form.group)))

    def _write_records(
        self, shape: MatrixShape, form: CpuForm, record: Record, weight: LogicalWeight, out: Tensor
    ) -> None:
        """Small integers of groups under the factors of rows."""
        level, codes = weight.levels()[record.number]
        numbers = repeat_to_groups(shape, form.group, level, to_bytes(level.dtype, codes))
        level, stored = weight.levels()[record.factor]
        factors = repeat_to_groups(shape, form.factor, level, stored.float())
        (n, _), records, groups = self.padded(shape), self._records(shape, form), form.factor // form.group
        write = partial(pack_groups, out=out, gated=self._gated(shape))
        written = write(factors, padded=(n, records), gap=groups * BLOCK) and write(
            numbers, padded=(n, records * groups), start=FACTOR_BYTES, record=groups, gap=FACTOR_BYTES
        )
        if not written:
            placed = self._place(shape, numbers, records * groups), self._place(shape, factors, records)
            out.copy_(join_records(*placed))

    # ------------------------------------------------------------ rows and columns

    def _records(self, shape: MatrixShape, form: CpuForm) -> int:
        """Records of a row block: enough for all columns."""
        return -(-self.padded(shape)[1] // form.factor)

    def _gated(self, shape: MatrixShape) -> bool:
        return self.problem.is_gated(shape.name)

    def _place(self, shape: MatrixShape, rows: Tensor, columns: int = 0) -> Tensor:
        """Rows [..., n, columns] in packed order, with rows and columns padded with zeros."""
        rows = _pad(rows, -1, columns) if columns else rows
        count, _ = self.padded(shape)
        if not self.problem.is_gated(shape.name):
            return _pad(rows, -2, count)
        sides = (_pad(side, -2, count // 2).unflatten(-2, (-1, BLOCK)) for side in rows.chunk(2, -2))
        return torch.stack(list(sides), dim=-3).flatten(-4, -2)

    def _take(self, shape: MatrixShape, rows: Tensor) -> Tensor:
        """The inverse of `_place` for rows. Columns stay padded."""
        if not self.problem.is_gated(shape.name):
            return rows[..., : shape.n, :]
        sides = rows.unflatten(-2, (-1, 2, BLOCK)).unbind(-3)
        return torch.cat([side.flatten(-3, -2)[..., : shape.n // 2, :] for side in sides], -2)

    # ------------------------------------------------------------ scales and zeros of groups

    def _scales(self, shape: MatrixShape, form: CpuForm, weight: LogicalWeight) -> Tensor:
        """[N, groups]: the stored scales of a single level, or the product of all levels in fp32."""
        inner = [(level, t) for level, t in zip(shape.spec.scales, weight.scales) if level.block[1] != ALL]
        if form.scale != abi.ScaleKind.F32 or (len(inner) == 1 and 0 not in form.kept):
            level, stored = inner[0]
            return as_integer(repeat_to_groups(shape, form.group, level, stored))
        levels = list(zip(shape.spec.scales, weight.scales)) if shape.spec.minimum else inner
        return as_integer(scale_product(shape, form.group, levels))

    def _zeros(self, shape: MatrixShape, form: CpuForm, weight: LogicalWeight) -> Tensor:
        """[N, groups]: bytes in units of the table, or fp32 offsets that are subtracted after scaling."""
        spec = shape.spec
        offset = torch.zeros(shape.n, 1, dtype=torch.float32, device=weight.device)
        if spec.zero is not None and weight.zero is not None:
            zero = repeat_to_groups(shape, form.group, spec.zero, weight.zero)
            if form.zero == abi.ZeroKind.U8:
                return (zero + form.values.center).to(torch.uint8)
            inner = [(level, t) for level, t in zip(spec.scales, weight.scales) if level.block[1] != ALL]
            offset = zero.float() * scale_product(shape, form.group, inner)
        if spec.minimum:
            offset = offset + scale_product(shape, form.group, list(zip(spec.minimum, weight.minimum)))
        return as_integer(offset.expand(*weight.lead, shape.n, -(-shape.k // form.group)).contiguous())

    def _blocks(self, shape: MatrixShape, group: int, level: Level, values: Tensor) -> Tensor:
        """The numbers of a level, given one for every row and `group` columns."""
        rows, columns = level.block
        blocks = level.shape(shape.n, shape.k)
        chosen = values[..., :: rows or shape.n, :: columns // group or values.shape[-1]]
        return chosen[..., : blocks[0], : blocks[1]].clone(memory_format=torch.contiguous_format)


def _stored_numbers(form: CpuForm, level: Level, numbers: Tensor) -> Tensor:
    if level.dtype == ZERO16:
        return (numbers.int() - form.values.center).to(torch.int16)
    return numbers.view(level.dtype.storage)


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


# ------------------------------------------------------------ codes


def _strip(form: CpuForm) -> int:
    """Row blocks that share code bytes."""
    return 2 if form.values.codes == abi.Codes.TABLE4 else 1


def _pack_codes(kind: abi.Codes, codes: Tensor) -> Tensor:
    """[..., N, K] bytes to [..., strips, bytes], by way of [..., block, unit, row, column]."""
    units: Tensor = codes.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, 4)).transpose(-3, -2)
    if kind == abi.Codes.TABLE4:
        units = units[..., 0::2, :, :, :] | (units[..., 1::2, :, :, :] << 4)
    elif kind == abi.Codes.FLOAT8:
        units = units.transpose(-1, -2)
    elif kind == abi.Codes.BITS6:
        first, fourth = units.unflatten(-3, (-1, 4)).split((3, 1), dim=-3)
        units = first | (_pair_of_each_line(fourth) << 6)
        return units.flatten(-4)
    return units.flatten(-3)


def _pair_of_each_line(unit: Tensor) -> Tensor:
    """Two bits of 6-bit codes [..., 1, row, column] for each of three lines, the lowest first."""
    return torch.cat([(unit >> shift) & 3 for shift in (0, 2, 4)], dim=-3)


def _unpack_codes(kind: abi.Codes, packed: Tensor, n: int, k: int) -> Tensor:
    if kind == abi.Codes.FLOAT8:
        units: Tensor = packed.unflatten(-1, (k // 4, 4, BLOCK)).transpose(-1, -2)
    elif kind == abi.Codes.BITS6:
        lines = packed.unflatten(-1, (k // 16, 3, BLOCK, 4))
        low, middle, high = (lines >> 6).split(1, dim=-3)
        units = torch.cat([lines & 63, low | (middle << 2) | (high << 4)], dim=-3).flatten(-4, -3)
    else:
        units = packed.unflatten(-1, (k // 4, BLOCK, 4))
    if kind == abi.Codes.TABLE4:
        units = torch.stack([units & 15, units >> 4], dim=-4).flatten(-5, -4)
    return units.transpose(-3, -2).reshape(*packed.shape[:-2], n, k)


def _unpack_nibbles(packed: Tensor, n: int, k: int) -> Tensor:
    """4-bit codes as rows of bytes [..., n, k / 2]. A word has four columns of a row of one block in its low nibbles,
    and of the other block in its high ones."""
    words = packed.contiguous().view(torch.int32).unflatten(-1, (k // 4, BLOCK))
    rows = torch.empty(*packed.shape[:-1], 2, BLOCK, k // 4, dtype=torch.int16, device=packed.device)
    for block, nibbles in enumerate((words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F)):
        pairs = (nibbles | (nibbles >> 4)) & 0x00FF00FF  # two columns in the bytes 0 and 2
        joined = (pairs | (pairs >> 8)).view(torch.int16)[..., ::2]
        rows[..., block, :, :] = joined.transpose(-1, -2)
    return rows.view(torch.uint8).view(*packed.shape[:-2], n, k // 2)


def _stored_codes(dtype: DType, codes: Tensor) -> Tensor:
    """Codes in the kernels' numbering."""
    return _look_up(dtype, 0, codes)


def _logical_codes(dtype: DType, codes: Tensor) -> Tensor:
    return _look_up(dtype, 1, codes)


def _look_up(dtype: DType, way: int, codes: Tensor) -> Tensor:
    table = _code_map_on(dtype, way, codes.device)
    return codes if table is None else table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@cache  # not `lru_cache`: recorded graphs read these tables for ever (split/recorded.py)
def _code_map_on(dtype: DType, way: int, device: torch.device) -> Tensor | None:
    maps = _code_maps(dtype)
    return None if maps is None else maps[way].to(device)


@lru_cache(maxsize=64)
def _code_maps(dtype: DType) -> tuple[Tensor, Tensor] | None:
    """Maps to and from the kernels' codes if they differ: two's complement to offset binary, 6-bit floats to e4m3."""
    codes = torch.arange(1 << dtype.bits, dtype=torch.uint8, device="cpu")
    if dtype.bits <= 4:
        return None
    if dtype.table[0] == 0 and dtype.table[-1] < 0 and dtype.table[1] == 1:
        stored = codes ^ (1 << (dtype.bits - 1))
    elif dtype.bits < 8 and dtype.ieee is not None:
        stored = E4M3.encode(dtype.decode(codes))
    else:
        return None
    back = torch.zeros(256, dtype=torch.uint8, device="cpu")
    back[stored.int()] = codes
    return stored, back


def _by_group(numbers: Tensor) -> Tensor:
    """[..., N, groups] to [..., blocks, groups, 16]."""
    blocks: Tensor = numbers.unflatten(-2, (-1, BLOCK)).transpose(-1, -2)
    return blocks


def _require_finite_codes(weight: LogicalWeight) -> None:
    """Rejects NaN and infinite codes, which integer kernels cannot represent."""
    if contains_any(weight.codes, _invalid_codes(weight.spec.dtype)):
        raise _not_finite(f"{weight.spec.dtype} codes")


def _require_finite_levels(weight: LogicalWeight) -> None:
    """Rejects NaN and infinite scales, zero points and minima."""
    for level, stored in weight.levels():
        if not all_finite(stored) or contains_any(stored, _invalid_codes(level.dtype)):
            raise _not_finite(f"{level.dtype} scales")


def _not_finite(what: str) -> BadValue:
    return BadValue(f"{what} that are NaN or infinite", hint="the reference backend supports them")


@lru_cache(maxsize=64)
def _invalid_codes(dtype: DType) -> bytes:
    """The codes without a finite value."""
    return bytes(set(range(len(dtype.table))) - set(dtype.valid_codes))


def _pad(rows: Tensor, axis: int, count: int) -> Tensor:
    """Zeros appended along one of the last two axes."""
    extra = count - rows.shape[axis]
    return rows if extra == 0 else torch.nn.functional.pad(rows, (0, extra) if axis == -1 else (0, 0, 0, extra))


def _round_up(size: int, multiple: int = BLOCK) -> int:
    return -(-size // multiple) * multiple
