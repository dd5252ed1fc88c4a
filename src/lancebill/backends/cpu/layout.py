"""Weights as the CPU kernels read them: blocks of 16 rows, units of 64 bytes (see native/lancebill.h).

Of a gated w13, blocks of gates and of ups alternate. Codes of four bits are the nibbles of two blocks that follow each
other. What the kernels read: `codes`, `scales` and `zeros` (one for each group of a row), `row_scale`, `bias`, `perm`.
`kept0` ... hold levels that those do not give back, for `unpack` alone; they are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lancebill.backends.cpu.form import CpuForm, matrix_form, padded_columns
from lancebill.backends.cpu.native import abi, library
from lancebill.errors import BadValue
from lancebill.moe.layout import Layout, MatrixShape, Packed, as_integer
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import E4M3, ZERO16, DType
from lancebill.numbers.spec import ALL, DIV, Level, Scale
from lancebill.numbers.weight import LogicalWeight

BLOCK = 16
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SCALE_BYTES = {
    abi.ScaleKind.BF16: torch.int16, abi.ScaleKind.F16: torch.int16, abi.ScaleKind.F32: torch.int32, abi.ScaleKind.E8M0: torch.uint8,
    abi.ScaleKind.E4M3: torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class CpuLayout(Layout):
    """The layout of one problem's matrices."""

    problem: Problem

    def form(self, shape: MatrixShape) -> CpuForm:
        return matrix_form(shape, self.problem.inputs_of(shape.name))

    def padded(self, shape: MatrixShape) -> tuple[int, int]:
        """Rows in whole blocks, columns in whole groups."""
        form = self.form(shape)
        rows = 2 * _up(shape.n // 2) if self.problem.is_gated(shape.name) else _up(shape.n, BLOCK * _strip(form))
        return rows, padded_columns(shape.k, form.group)

    def storage(self, shape: MatrixShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        form, (n, k) = self.form(shape), self.padded(shape)
        strips = n // BLOCK // _strip(form)
        groups = (n // BLOCK, k // form.group, BLOCK)
        held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"codes": ((strips, BLOCK * k), torch.uint8)}
        if form.scale != abi.ScaleKind.NONE:
            held["scales"] = groups, _SCALE_BYTES[form.scale]
        if form.zero != abi.ZeroKind.NONE:
            held["zeros"] = groups, torch.uint8 if form.zero == abi.ZeroKind.U8 else torch.int32
        if form.row_scale:
            held["row_scale"] = (n,), torch.int32
        for place, index in enumerate(form.kept):
            level = shape.spec.levels[index]
            held[f"kept{place}"] = level.shape(shape.n, shape.k), _INTEGER[level.dtype.storage.itemsize]
        if shape.bias:
            held["bias"] = (n,), torch.int32
        if shape.act_order:
            held["perm"] = (shape.k,), torch.int32
        return held

    def allocate(self, shape: MatrixShape, experts: int, device: torch.device | str = "cpu") -> Packed:
        """On large pages where the system has them: a layer is read from end to end."""
        made = super().allocate(shape, experts, device)
        native = library()
        if native is not None and made["codes"].device.type == "cpu":
            for tensor in made.values():
                native.huge_pages(tensor)
        return made

    def pack(self, shape: MatrixShape, weight: LogicalWeight, out: Mapping[str, Tensor]) -> None:
        _require_numbers(weight)
        form, (_, k) = self.form(shape), self.padded(shape)
        codes = _stored_codes(shape.spec.dtype, weight.codes)
        out["codes"].copy_(_pack_codes(form.values.codes, self._place(shape, codes, k)))
        if form.scale != abi.ScaleKind.NONE:
            out["scales"].copy_(_by_group(self._place(shape, self._scales(shape, form, weight), k // form.group)))
        if form.zero != abi.ZeroKind.NONE:
            out["zeros"].copy_(_by_group(self._place(shape, self._zeros(shape, form, weight), k // form.group)))
        if form.row_scale:
            out["row_scale"].copy_(as_integer(self._place(shape, _row_scale(shape, weight))))
        for place, index in enumerate(form.kept):
            out[f"kept{place}"].copy_(as_integer(weight.levels()[index][1]))
        if shape.bias:
            bias = weight.bias if weight.bias is not None else torch.zeros(shape.n)
            out["bias"].copy_(as_integer(self._place(shape, bias.float())))
        if shape.act_order:
            natural = torch.arange(shape.k, dtype=torch.int32)
            out["perm"].copy_(natural if weight.perm is None else weight.perm)

    def unpack(self, shape: MatrixShape, packed: Mapping[str, Tensor]) -> LogicalWeight:
        form, (n, k) = self.form(shape), self.padded(shape)
        spec = shape.spec
        codes = self._take(shape, _unpack_codes(form.values.codes, packed["codes"], n, k))[:, : shape.k]
        levels: list[Tensor | None] = [None] * len(spec.levels)
        for place, index in enumerate(form.kept):
            levels[index] = packed[f"kept{place}"].view(spec.levels[index].dtype.storage)
        for index, level in enumerate(spec.levels):
            if levels[index] is None:
                name = "zeros" if level is spec.zero else "scales"
                values = self._take(shape, packed[name].transpose(1, 2).reshape(n, -1))
                levels[index] = self._of_blocks(shape, form, level, values)
        known = [level for level in levels if level is not None]
        scales, zero = len(spec.scales), int(spec.zero is not None)
        return LogicalWeight(
            spec,
            _logical_codes(spec.dtype, codes.contiguous()),
            tuple(known[:scales]),
            known[scales] if zero else None,
            tuple(known[scales + zero :]),
            bias=self._take(shape, packed["bias"].view(torch.float32)) if shape.bias else None,
            perm=packed["perm"] if shape.act_order else None,
        )

    # ------------------------------------------------------------ rows and columns

    def _place(self, shape: MatrixShape, rows: Tensor, columns: int = 0) -> Tensor:
        """Rows in packed order, both sides padded with zeros."""
        if columns > (rows.shape[1] if columns else 0):
            rows = torch.cat([rows, rows.new_zeros(rows.shape[0], columns - rows.shape[1])], dim=1)
        count, _ = self.padded(shape)
        if not self.problem.is_gated(shape.name):
            return _pad(rows, count)
        half = shape.n // 2
        blocks = [_pad(side, count // 2).unflatten(0, (-1, BLOCK)) for side in (rows[:half], rows[half:])]
        return torch.stack(blocks, dim=1).flatten(0, 2)

    def _take(self, shape: MatrixShape, rows: Tensor) -> Tensor:
        """The inverse of `_place` for rows; columns stay padded."""
        if not self.problem.is_gated(shape.name):
            return rows[: shape.n]
        half = shape.n // 2
        sides = rows.unflatten(0, (-1, 2, BLOCK)).unbind(1)
        return torch.cat([side.flatten(0, 1)[:half] for side in sides])

    # ------------------------------------------------------------ what groups have

    def _scales(self, shape: MatrixShape, form: CpuForm, weight: LogicalWeight) -> Tensor:
        """[N, groups]: one native level as it is, or all levels together in fp32."""
        inner = [(level, t) for level, t in zip(shape.spec.scales, weight.scales) if level.block[1] != ALL]
        if form.scale != abi.ScaleKind.F32 or (len(inner) == 1 and 0 not in form.kept):
            level, stored = inner[0]
            return as_integer(_groups(shape, form, level, stored))
        every = list(zip(shape.spec.scales, weight.scales)) if shape.spec.minimum else inner
        return as_integer(_product(shape, form, every))

    def _zeros(self, shape: MatrixShape, form: CpuForm, weight: LogicalWeight) -> Tensor:
        """[N, groups]: bytes in the table's units, or what is subtracted after scaling."""
        spec = shape.spec
        offset = torch.zeros(shape.n, 1)
        if spec.zero is not None and weight.zero is not None:
            zero = _groups(shape, form, spec.zero, weight.zero)
            if form.zero == abi.ZeroKind.U8:
                return (zero + form.values.center).to(torch.uint8)
            inner = [(level, t) for level, t in zip(spec.scales, weight.scales) if level.block[1] != ALL]
            offset = zero.float() * _product(shape, form, inner)
        if spec.minimum:
            offset = offset + _product(shape, form, list(zip(spec.minimum, weight.minimum)))
        return as_integer(offset.expand(shape.n, -(-shape.k // form.group)).contiguous())

    def _of_blocks(self, shape: MatrixShape, form: CpuForm, level: Level, values: Tensor) -> Tensor:
        """The stored numbers of a level from those of every packed group."""
        rows, columns = level.block
        wanted = level.shape(shape.n, shape.k)
        chosen = values[:: rows or shape.n, :: columns // form.group or values.shape[1]]
        chosen = chosen[: wanted[0], : wanted[1]].clone(memory_format=torch.contiguous_format)
        if level.dtype == ZERO16:
            return (chosen.int() - form.values.center).to(torch.int16)
        return chosen.view(level.dtype.storage)


def _groups(shape: MatrixShape, form: CpuForm, level: Level, stored: Tensor) -> Tensor:
    """A level's numbers for every row and every packed group."""
    stored, columns = _every_row(shape, level, stored), level.block[1]
    count = -(-shape.k // form.group)
    if columns == ALL:
        return stored.expand(-1, count).contiguous()
    return stored.repeat_interleave(columns // form.group, dim=1)[:, :count].contiguous()


def _every_row(shape: MatrixShape, level: Level, stored: Tensor) -> Tensor:
    rows = level.block[0]
    return stored.expand(shape.n, -1) if rows == ALL else stored.repeat_interleave(rows, dim=0)[: shape.n]


def _product(shape: MatrixShape, form: CpuForm, levels: list[tuple[Scale, Tensor]]) -> Tensor:
    """Levels of scaling together, fp32 [N, groups]; one where there are none."""
    product = torch.ones(shape.n, -(-shape.k // form.group))
    for level, stored in levels:
        numbers = _groups(shape, form, level, level.dtype.decode(stored))
        product = product / numbers if level.op == DIV else product * numbers
    return product


def _row_scale(shape: MatrixShape, weight: LogicalWeight) -> Tensor:
    """fp32 [N]: every scale that covers whole rows."""
    product = torch.ones(shape.n, 1)
    for level, stored in zip(shape.spec.scales, weight.scales):
        if level.block[1] == ALL:
            numbers = _every_row(shape, level, level.dtype.decode(stored))
            product = product / numbers if level.op == DIV else product * numbers
    return product.squeeze(1)


# ------------------------------------------------------------ codes


def _strip(form: CpuForm) -> int:
    """Row blocks whose codes lie together."""
    return 2 if form.values.codes == abi.Codes.TABLE4 else 1


def _pack_codes(kind: abi.Codes, codes: Tensor) -> Tensor:
    """[N, K] bytes to [strips, bytes]."""
    units: Tensor = codes.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, 4)).transpose(1, 2)  # [block, unit, row, column]
    if kind == abi.Codes.TABLE4:
        units = units[0::2] | (units[1::2] << 4)
    elif kind == abi.Codes.FLOAT8:
        units = units.transpose(2, 3)
    return units.flatten(1)


def _unpack_codes(kind: abi.Codes, packed: Tensor, n: int, k: int) -> Tensor:
    if kind == abi.Codes.FLOAT8:
        units = packed.view(-1, k // 4, 4, BLOCK).transpose(2, 3)
    else:
        units = packed.view(-1, k // 4, BLOCK, 4)
    if kind == abi.Codes.TABLE4:
        units = torch.stack([units & 15, units >> 4], dim=1).flatten(0, 1)
    return units.transpose(1, 2).reshape(n, k)


def _stored_codes(dtype: DType, codes: Tensor) -> Tensor:
    """Codes as the kernels number them."""
    numbers = _renumbered(dtype)
    return codes if numbers is None else numbers[0].index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _logical_codes(dtype: DType, codes: Tensor) -> Tensor:
    numbers = _renumbered(dtype)
    return codes if numbers is None else numbers[1].index_select(0, codes.reshape(-1).int()).view(codes.shape)


@lru_cache(maxsize=64)
def _renumbered(dtype: DType) -> tuple[Tensor, Tensor] | None:
    """Where the numbers differ, there and back: two's complement to offset binary, six-bit floats to e4m3."""
    own = torch.arange(1 << dtype.bits, dtype=torch.uint8)
    if dtype.bits <= 4:
        return None
    if dtype.table[0] == 0 and dtype.table[-1] < 0 and dtype.table[1] == 1:
        stored = own ^ (1 << (dtype.bits - 1))
    elif dtype.bits < 8 and dtype.ieee is not None:
        stored = E4M3.encode(dtype.decode(own))
    else:
        return None
    back = torch.zeros(256, dtype=torch.uint8)
    back[stored.int()] = own
    return stored, back


def _by_group(numbers: Tensor) -> Tensor:
    """[N, groups] to [blocks, groups, 16]."""
    blocks: Tensor = numbers.unflatten(0, (-1, BLOCK)).transpose(1, 2)
    return blocks


def _require_numbers(weight: LogicalWeight) -> None:
    """Codes and scales that are NaN or infinite mean nothing to integer kernels."""
    dtype = weight.spec.dtype
    if len(dtype.valid_codes) < 1 << dtype.bits:
        wrong = torch.ones(256, dtype=torch.bool)
        wrong[list(dtype.valid_codes)] = False
        if bool(wrong[weight.codes.int()].any()):
            raise BadValue(f"{dtype} codes that are not numbers", hint="the reference backend computes with them")
    for level, stored in weight.levels():
        if not bool(level.dtype.decode(stored).isfinite().all()):
            raise BadValue(f"{level.dtype} scales that are not finite", hint="the reference backend computes with them")


def _pad(rows: Tensor, count: int) -> Tensor:
    extra = count - rows.shape[0]
    return rows if extra == 0 else torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])])


def _up(size: int, multiple: int = BLOCK) -> int:
    return -(-size // multiple) * multiple
