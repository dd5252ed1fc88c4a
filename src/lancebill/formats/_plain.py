"""Weights as engines hold them in memory: one tensor for the codes and one for each level of the spec.

No checkpoint uses this scheme, so it is no format of the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import BadValue, SpecError
from lancebill.formats._floats import scale_axes
from lancebill.formats.base import BIAS, FLOAT_NAMES, FLOATS, SCALAR, Part, Scheme, codes_of, part
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.numbers.bit_packing import pack_bits, unpack_bits
from lancebill.numbers.dtypes import E8M0, INTEGER, ZERO16, DType
from lancebill.numbers.spec import TENSOR, Level, QuantSpec
from lancebill.numbers.unusual import unusual
from lancebill.numbers.weight import LogicalWeight

WORDS = ("U8", "I8", "I32")  # of packed codes


@dataclass(frozen=True)
class PlainScheme(Scheme):
    """Codes [n, k], or packed along k with the first code in the lowest bits, and the levels in their own dtypes."""

    batched = True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        spec, codes = self.spec, stored["codes"]
        if codes.shape[-1] != k:
            codes = unpack_bits(codes, spec.dtype.bits, k)
        elif spec.quantized:
            codes = _from_zero(codes, spec.dtype)
            _check_range("codes", codes, (1 << spec.dtype.bits) - 1)
        lead = codes.shape[:-2]
        if spec.zero is not None and spec.zero.dtype == ZERO16:
            hint = "zero points are numbers of unsigned codes, from 0; 2**bits only where they were stored less 1"
            _check_range("zero points", stored["zero"], 1 << spec.dtype.bits, hint)
        return LogicalWeight(
            spec,
            codes,
            tuple(_level(stored[r], level, n, k, lead) for r, level in zip(level_roles("scale"), spec.scales)),
            None if spec.zero is None else _level(stored["zero"], spec.zero, n, k, lead),
            tuple(_level(stored[r], level, n, k, lead) for r, level in zip(level_roles("minimum"), spec.minimum)),
        )

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        spec, codes = self.spec, weight.codes
        described = self.part("codes")
        if spec.quantized and described is not None and described.axes[0].endswith("^"):
            codes = pack_bits(codes, spec.dtype.bits, torch.uint8)
        stored = dict(zip(level_roles("scale"), weight.scales)) | dict(zip(level_roles("minimum"), weight.minimum))
        return {"codes": codes, **stored} | ({} if weight.zero is None else {"zero": weight.zero})


def plain_scheme(spec: QuantSpec, *, packed: bool) -> PlainScheme:
    """The scheme of `spec` with one tensor for each level; `packed`: several codes in a word."""
    if packed and not (spec.quantized and spec.dtype.bits < 8):
        raise SpecError("only codes of fewer than 8 bits can be packed", got=spec)
    dtypes = WORDS if packed else _code_dtypes(spec.dtype)
    parts = [part("codes", ".codes", dtypes, "n k^" if packed else "n k", bits=spec.dtype.bits if packed else 1)]
    levels = [*zip(level_roles("scale"), spec.scales), *zip(level_roles("minimum"), spec.minimum)]
    parts += [_level_part(role, level) for role, level in levels]
    parts += [] if spec.zero is None else [_level_part("zero", spec.zero)]
    parts += [BIAS, part("input_scale", ".input_scale", FLOATS, SCALAR, optional=True)]
    parts += [part("pre_quant_scale", ".pre_quant_scale", FLOATS, "k", optional=True)]
    return PlainScheme(spec, tuple(parts))


def level_roles(kind: str) -> tuple[str, ...]:
    """The roles of a spec's levels, innermost first."""
    return kind, f"{kind}_2", f"{kind}_3"


def _level_part(role: str, level: Level) -> Part:
    axes = scale_axes(level.block)
    return part(role, f".{role}", _byte_dtypes(level.dtype), (*axes, "1 1") if level.block == TENSOR else axes)


def _code_dtypes(dtype: DType) -> tuple[str, ...]:
    """The dtypes in which unpacked codes may come."""
    return (*_byte_dtypes(dtype), "I8") if _is_biased(dtype) else _byte_dtypes(dtype)


def _is_biased(dtype: DType) -> bool:
    """Whether the codes of a byte are signed integers shifted by 128: engines hold these as torch.int8."""
    return dtype.bits == 8 and dtype.kind == INTEGER and dtype.table[0] == dtype.min == -128


def _from_zero(codes: Tensor, dtype: DType) -> Tensor:
    """Bytes of codes that start at 0. The sign bit is what two's complement and the shift by 128 differ in."""
    return codes_of(codes) ^ 0x80 if codes.dtype == torch.int8 and _is_biased(dtype) else codes_of(codes)


def _check_range(what: str, codes: Tensor, highest: int, hint: str | None = None) -> None:
    """Raise unless all are from 0 to `highest`: kernels have no bits for others, and would change other codes."""
    limits = torch.iinfo(codes.dtype)
    if not codes.numel() or (limits.min == 0 and limits.max <= highest):
        return
    low, high = torch.aminmax(codes)
    if unusual((low < 0) | (high > highest)):
        got = f"{int(low)} to {int(high)}"
        raise BadValue(f"{what} out of range", expected=f"0 to {highest}", got=got, hint=hint)


def _byte_dtypes(dtype: DType) -> tuple[str, ...]:
    """The dtypes in which single numbers of a type may come: their bytes, or torch's own type."""
    if dtype == ZERO16:
        return "I16", "U8", "I8", "I32"
    if dtype.wide is not None:
        return (FLOAT_NAMES[dtype],)
    native = (DTYPE_NAMES[dtype.native],) if dtype.native is not None else ("F8_E8M0",) if dtype == E8M0 else ()
    signed = ("I8",) if dtype.bits == 8 and dtype.min < 0 and dtype.table[0] == 0 else ()  # two's complement
    return "U8", *native, *signed


def _level(tensor: Tensor, level: Level, n: int, k: int, lead: tuple[int, ...]) -> Tensor:
    shaped = tensor.reshape(*lead, *level.shape(n, k))
    if level.dtype == ZERO16:
        return shaped.to(torch.int16)
    if level.dtype.wide is not None:
        return shaped
    _check_range("codes of a level", codes_of(shaped), (1 << level.dtype.bits) - 1)
    return codes_of(shaped)
