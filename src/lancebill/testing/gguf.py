"""Writes small GGUF files for tests and examples; `lancebill.checkpoint.read.gguf` reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lancebill.checkpoint.read.file_bytes import bytes_of
from lancebill.checkpoint.read.ggml_types import TYPE_IDS, TYPES
from lancebill.checkpoint.read.gguf import ALIGNMENT_KEY, ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, STRING
from lancebill.formats.stored import DTYPE_NAMES

Scalar = bool | int | float | str
Value = Scalar | Sequence[Scalar]
U32, I32, F32, U64, I64 = 4, 5, 6, 10, 11
_FORMS = {BOOL: "?", U32: "I", I32: "i", F32: "f", U64: "Q", I64: "q"}


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, tuple[str, Tensor]]) -> None:
    """`tensors` are (ggml type name, tensor): uint8 [..., blocks, bytes per block], or plain numbers."""
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)
    header = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += string_bytes(key) + value_bytes(value)
    offset = 0
    for name, (kind, tensor) in tensors.items():
        header += info_bytes(name, kind, tensor, offset)
        offset += -(-tensor.nbytes // alignment) * alignment
    with path.open("wb") as file:
        file.write(_padded(bytes(header), alignment))
        for _, tensor in tensors.values():
            file.write(_padded(bytes_of(tensor), alignment))


def info_bytes(name: str, kind: str, tensor: Tensor, offset: int) -> bytes:
    """One tensor's entry in the header; the fastest dimension comes first."""
    number = TYPE_IDS[kind]
    block = TYPES[number]
    shape = tuple(tensor.shape)
    if block.dtype is None:
        assert tensor.dtype == torch.uint8 and shape[-1] == block.size, f"{kind} blocks have {block.size} bytes"
        shape = (*shape[:-2], shape[-2] * block.elements)
    else:
        assert DTYPE_NAMES[tensor.dtype] == block.dtype, f"{kind} tensors hold {block.dtype}"
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string_bytes(name) + dims + struct.pack("<IQ", number, offset)


def string_bytes(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Value) -> bytes:
    """Type and value; an array has the type of its first element."""
    if isinstance(value, str | bool | int | float):
        kind = _kind(value)
        return struct.pack("<I", kind) + _scalar(value, kind)
    kind = _kind(value[0]) if value else U32
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_scalar(v, kind) for v in value)


def _kind(value: Scalar) -> int:
    if isinstance(value, str):
        return STRING
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, float):
        return F32
    if value >= 0:
        return U32 if value < 1 << 32 else U64
    return I32 if value >= -(1 << 31) else I64


def _scalar(value: Scalar, kind: int) -> bytes:
    return string_bytes(value) if isinstance(value, str) else struct.pack("<" + _FORMS[kind], value)


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)
