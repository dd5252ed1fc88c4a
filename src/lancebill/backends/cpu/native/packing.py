"""Calls of the library's packing functions (pack.h)."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from lancebill.backends.cpu.native import Library
from lancebill.backends.cpu.native.abi import Codes

_INVALID = 1  # the status of invalid codes


class RowsStruct(Structure):
    """Rows of one matrix of several experts, and where they go. The fields of `lancebill_rows`."""

    _fields_ = [
        ("data", c_void_p),
        ("expert_stride", c_int64),
        ("row_stride", c_int64),
        ("experts", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("padded_rows", c_int32),
        ("padded_columns", c_int32),
        ("gated", c_int32),
        ("out", c_void_p),
        ("threads", c_int32),
    ]


def pack_codes(
    library: Library,
    rows: Tensor,
    out: Tensor,
    padded: tuple[int, int],
    kind: Codes,
    *,
    bits: int,
    gated: bool,
    codes_of: Tensor | None = None,
    invalid: bytes = b"",
) -> bool:
    """Codes [..., n, k] of 8 bits, or [..., n, k / 2] of 4, into `out`; whether all of them are valid.

    `codes_of` translates codes; `invalid` are codes that the kernels do not support.
    """
    struct = _struct(rows, out, rows.shape[-1] * 8 // bits, padded, gated)
    table = c_void_p(None if codes_of is None else codes_of.data_ptr())
    status = library.calls.lancebill_pack_codes(ctypes.byref(struct), bits, int(kind), table, invalid, len(invalid))
    if status not in (0, _INVALID):
        library.raise_status(status)
    return not status


def pack_groups(
    library: Library,
    rows: Tensor,
    out: Tensor,
    padded: tuple[int, int],
    *,
    gated: bool,
    start: int = 0,
    record: int = 1,
    gap: int = 0,
) -> None:
    """One number per row and group, [..., n, groups], into `out` from `start` on, with a gap after each record."""
    struct = _struct(rows, out, rows.shape[-1], padded, gated)
    struct.out += start
    status = library.calls.lancebill_pack_groups(ctypes.byref(struct), rows.element_size(), record, gap)
    if status:
        library.raise_status(status)


def can_pack(rows: Tensor, out: Tensor) -> bool:
    """Whether the functions can read and write these tensors: elements of a row are neighbours, packed experts too."""
    return rows.device.type == out.device.type == "cpu" and rows.stride(-1) == 1 and out.is_contiguous()


def _struct(rows: Tensor, out: Tensor, columns: int, padded: tuple[int, int], gated: bool) -> RowsStruct:
    experts = rows.shape[0] if rows.dim() == 3 else 1
    size = rows.element_size()
    return RowsStruct(
        rows.data_ptr(),
        rows.stride(0) * size if rows.dim() == 3 else 0,
        rows.stride(-2) * size,
        experts,
        rows.shape[-2],
        columns,
        *padded,
        int(gated),
        out.data_ptr(),
        torch.get_num_threads(),
    )
