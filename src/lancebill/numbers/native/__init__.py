"""C++ paths of this package for tensors on a CPU: one pass over memory where torch needs many operators.

The torch code that calls these functions is the definition, and runs where the library is not built. A function returns
None where it does not apply: no library, another device, strides that it cannot read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int32, c_int64, c_uint8, c_uint32, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from lancebill.native.address import host_address
from lancebill.native.build import NUMBERS
from lancebill.native.load import open_library

MOST_SCALES = 3


class PlaneStruct(Structure):
    """A bit field of a GGUF block. The fields of `lancebill_plane`."""

    _fields_ = [(name, c_int32) for name in ("start", "size", "width", "run", "bit", "lanes", "first", "shift")]


class FieldStruct(Structure):
    """The numbers of one kind in a GGUF block. The fields of `lancebill_field`."""

    _fields_ = [
        ("planes", POINTER(PlaneStruct)),
        ("plane_count", c_int32),
        ("flip", c_int32),
        ("bytes", c_int32),
        ("nibbles", c_int32),
        ("out", c_void_p),
    ]


class LevelStruct(Structure):
    """One number for each row and each `side` columns. The fields of `lancebill_level`."""

    _fields_ = [("numbers", c_void_p), ("stride", c_int32), ("side", c_int32), ("divide", c_int32)]


class CodeTypeStruct(Structure):
    """A type of codes. The fields of `lancebill_code_type`."""

    _fields_ = [
        ("encoding", c_int32),
        ("low", c_float),
        ("high", c_float),
        ("offset", c_int32),
        ("mask", c_int32),
        ("mantissa", c_int32),
        ("bias", c_int32),
        ("bits", c_int32),
    ]


class RoundingStruct(Structure):
    """Values, levels, codes and the error of rounding. The fields of `lancebill_rounding`."""

    _fields_ = [
        ("values", c_void_p),
        ("codes", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("minimum", LevelStruct),
        ("step", LevelStruct),
        ("zero", LevelStruct),
        ("scales", LevelStruct * MOST_SCALES),
        ("scale_count", c_int32),
        ("type", CodeTypeStruct),
        ("beyond_low", c_float),
        ("beyond_high", c_float),
        ("squares", c_double),
        ("energy", c_double),
        ("worst", c_float),
        ("peak", c_float),
        ("saturated", c_int64),
        ("flushed", c_int64),
    ]


class SurveyStruct(Structure):
    """What all bytes have in common. The fields of `lancebill_survey`."""

    _fields_ = [("sum", c_int64), ("any", c_uint8), ("low", c_uint8), ("high", c_uint8)]


class TrialsStruct(Structure):
    """Values, scales to try and the error of each. The fields of `lancebill_trials`."""

    _fields_ = [
        ("values", c_void_p),
        ("steps", c_void_p),
        ("errors", c_void_p),
        ("best", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("candidates", c_int32),
        ("side", c_int32),
        ("zero", LevelStruct),
        ("type", CodeTypeStruct),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The library, loaded once; None if it is not built, stale or switched off."""
    calls = open_library(NUMBERS, "the C++ paths of numbers").calls
    if calls is not None:
        calls.lancebill_transpose.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32]
        calls.lancebill_turn_nibbles.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(c_int32)]
        calls.lancebill_read_fields.argtypes = [c_void_p, c_int64, c_int64, POINTER(FieldStruct), c_int32]
        calls.lancebill_unpack_bits.argtypes = [c_void_p, c_int64, c_int32, c_void_p]
        calls.lancebill_contains.argtypes = [c_void_p, c_int64, POINTER(c_uint8), c_int32]
        calls.lancebill_survey_bytes.argtypes = [c_void_p, c_int64, POINTER(SurveyStruct)]
        calls.lancebill_not_finite.argtypes = [c_void_p, c_int64, c_int32, c_uint32]
    return calls


def library_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The library, if it can read and write these tensors: dense, real, on the CPU."""
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    return library() if plain else None


def transpose(matrices: Tensor) -> Tensor | None:
    """`matrices.mT.contiguous()` for elements of up to 4 bytes."""
    calls = library_for(matrices)
    if calls is None or matrices.element_size() > 4:
        return None
    *lead, rows, columns = matrices.shape
    out = matrices.new_empty(*lead, columns, rows)
    batch = matrices.shape[:-2].numel()
    calls.lancebill_transpose(
        host_address(matrices), host_address(out), batch, rows, columns, matrices.element_size()
    )  # fmt: skip
    return out


def turn_nibbles(words: Tensor, order: Sequence[int]) -> Tensor | None:
    """Words [..., K, N / 8] of 4-bit codes as bytes [..., N, K / 2]; nibble j of a word is row order[j]. K is even."""
    calls = library_for(words)
    if calls is None:
        return None
    *lead, rows, columns = words.shape
    out = torch.empty(*lead, 8 * columns, rows // 2, dtype=torch.uint8, device=words.device)
    batch = words.shape[:-2].numel()
    calls.lancebill_turn_nibbles(
        host_address(words), host_address(out), batch, rows, 8 * columns, (c_int32 * len(order))(*order)
    )
    return out


def field_struct(planes: Sequence[PlaneStruct], flip: int, size: int, *, nibbles: bool) -> FieldStruct:
    """A field without its output: `size` bytes for each block."""
    return FieldStruct((PlaneStruct * len(planes))(*planes), len(planes), flip, size, nibbles)


def read_fields(blocks: Tensor, fields: Sequence[FieldStruct]) -> list[Tensor] | None:
    """The bytes [..., bytes] of each field of the blocks [..., size], all of them in one pass."""
    calls = library_for(blocks)
    if calls is None:
        return None
    *lead, size = blocks.shape
    outs = [torch.empty(*lead, field.bytes, dtype=torch.uint8, device=blocks.device) for field in fields]
    filled = (FieldStruct * len(fields))(*fields)
    for field, out in zip(filled, outs):
        field.out = host_address(out)
    calls.lancebill_read_fields(host_address(blocks), blocks.shape[:-1].numel(), size, filled, len(filled))
    return outs


def unpack_bits(data: Tensor, bits: int) -> Tensor | None:
    """All codes of the bit streams [..., bytes], if they are whole groups of eight."""
    calls = library_for(data)
    if calls is None or data.shape[-1] % bits:
        return None
    *lead, size = data.shape
    out = torch.empty(*lead, size // bits * 8, dtype=torch.uint8, device=data.device)
    calls.lancebill_unpack_bits(host_address(data), data.numel() // bits, bits, host_address(out))
    return out


def contains(codes: Tensor, wanted: bytes) -> bool | None:
    """Whether any of the `wanted` bytes is in a tensor of bytes."""
    calls = library_for(codes)
    if calls is None:
        return None
    return bool(
        calls.lancebill_contains(host_address(codes), codes.numel(), (c_uint8 * len(wanted))(*wanted), len(wanted))
    )


def all_finite(numbers: Tensor, exponent: int) -> bool | None:
    """Whether no number of 2 or 4 bytes has all bits of `exponent` set."""
    calls = library_for(numbers)
    if calls is None:
        return None
    return not calls.lancebill_not_finite(host_address(numbers), numbers.numel(), numbers.element_size(), exponent)


def survey(data: Tensor) -> SurveyStruct | None:
    """What all bytes of a tensor have in common."""
    calls = library_for(data)
    if calls is None:
        return None
    found = SurveyStruct()
    calls.lancebill_survey_bytes(host_address(data), data.numel(), byref(found))
    return found
