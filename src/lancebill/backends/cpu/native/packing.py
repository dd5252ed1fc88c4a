"""Calls of the library's packing functions (pack.h)."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from lancebill.backends.cpu.native import Library, library
from lancebill.backends.cpu.native.abi import Codes
from lancebill.backends.cpu.native.row_source import source_of
from lancebill.native.address import host_address
from lancebill.numbers.bit_packing import Nibbles

_INVALID = 1  # the status of invalid codes


class RowsStruct(Structure):
    """Rows of one matrix of several experts, and where they go. The fields of `lancebill_rows`."""

    _fields_ = [
        ("parts", c_void_p),
        ("stride", c_int64),
        ("order", c_int32),
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
    codes: Tensor | Nibbles,
    out: Tensor,
    padded: tuple[int, int],
    kind: Codes,
    *,
    gated: bool,
    codes_of: Tensor | None = None,
    invalid: bytes = b"",
) -> bool | None:
    """Codes [..., n, k] in bytes or nibbles into `out`; whether all of them are valid. None if there is no library, or
    it cannot read or write these tensors.

    `codes_of` translates codes; `invalid` are codes that the kernels do not support.
    """
    call = _call(codes, out, padded, gated)
    if call is None:
        return None
    native, struct, _ = call
    table, size = (None, 0) if codes_of is None else (c_void_p(host_address(codes_of)), len(codes_of))
    bits = 4 if isinstance(codes, Nibbles) else 8
    status = native.calls.lancebill_pack_codes(
        ctypes.byref(struct), bits, int(kind), table, size, invalid, len(invalid)
    )
    if status not in (0, _INVALID):
        native.raise_status(status)
    return not status


def pack_groups(
    rows: Tensor,
    out: Tensor,
    padded: tuple[int, int],
    *,
    gated: bool,
    start: int = 0,
    record: int = 1,
    gap: int = 0,
) -> bool:
    """One number per row and group, [..., n, groups], into `out` from `start` on, with a gap after each record. Whether
    there is a library that can."""
    call = _call(rows, out, padded, gated)
    if call is None:
        return False
    native, struct, _ = call
    struct.out += start
    status = native.calls.lancebill_pack_groups(ctypes.byref(struct), rows.element_size(), record, gap)
    if status:
        native.raise_status(status)
    return True


def _call(
    rows: Tensor | Nibbles, out: Tensor, padded: tuple[int, int], gated: bool
) -> tuple[Library, RowsStruct, object] | None:
    """The library, its argument, and what that points to."""
    native = library()
    if native is None or out.device.type != "cpu" or not out.is_contiguous():
        return None
    source = source_of(rows, gated=gated)
    if source is None:
        return None
    parts = (c_void_p * len(source.addresses))(*source.addresses)
    struct = RowsStruct(
        ctypes.addressof(parts),
        source.stride,
        int(source.order),
        source.experts,
        source.rows,
        source.columns,
        *padded,
        int(gated),
        host_address(out),
        torch.get_num_threads(),
    )
    return native, struct, parts
