"""Read and check the header of a .safetensors file.

The file is 8 bytes of header length, a JSON header, and one buffer that the tensors cover exactly: no gaps, no
overlaps, nothing after the last tensor. Sizes are Python integers, so they cannot overflow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lancebill.checkpoint.read.file_bytes import opened
from lancebill.checkpoint.read.strict_json import parse_object
from lancebill.checkpoint.read.tensor_info import TensorInfo, quoted
from lancebill.errors import MalformedFile, WrongDtype
from lancebill.formats.stored import TORCH_DTYPES

MAX_HEADER = 100_000_000
PREFIX = 8
METADATA = "__metadata__"
FIELDS = {"dtype", "shape", "data_offsets"}
MAX_DIMS = 64  # torch's limit
MAX_EMPTY = 1 << 60  # product of the non-zero axes of an empty tensor
PAIRS = "F4"  # two codes in a byte; the shape counts codes
_ITEM_BITS = {name: 8 * dtype.itemsize for name, dtype in TORCH_DTYPES.items()} | {PAIRS: 4}
_LFS = b"version https://git-lfs"
CUT_OFF = "the file is not complete: download it again"


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """All tensors of the file, by offset."""
    where = str(path)
    with opened(path) as (file, size):
        length = _header_length(file.read(len(_LFS)), size, where)
        file.seek(PREFIX)
        data = file.read(length)
    if not data.startswith(b"{"):
        raise MalformedFile("the header is not a JSON object", where=where, expected="'{' at byte 8")
    entries = parse_object(data, f"{where} (header)")
    _check_metadata(entries.pop(METADATA, {}), where)
    begin = PREFIX + length
    tensors = [_tensor(name, entry, path, begin, size) for name, entry in entries.items()]
    tensors.sort(key=lambda t: (t.start, t.end))
    _check_covered(tensors, begin, size, where)
    return tuple(tensors)


def _header_length(start: bytes, size: int, where: str) -> int:
    if len(start) < PREFIX:
        what = "the file is too short for a header"
        raise MalformedFile(what, where=where, expected=">= 8 bytes", got=size, hint=CUT_OFF)
    length = int.from_bytes(start[:PREFIX], "little")
    hint = "this is a Git LFS pointer: fetch the real file with `git lfs pull`" if start == _LFS else None
    if length > MAX_HEADER:
        raise MalformedFile(
            "the header is too large", where=where, expected=f"<= {MAX_HEADER} bytes", got=length, hint=hint
        )
    if PREFIX + length > size:
        raise MalformedFile(
            "the header does not fit the file",
            where=where,
            expected=f"<= {size - PREFIX} bytes",
            got=length,
            hint=CUT_OFF,
        )
    return length


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedFile(f"{METADATA} is not a map of strings", where=where)


def _tensor(name: str, entry: Any, path: Path, begin: int, size: int) -> TensorInfo:
    if not name or not name.isprintable():
        raise MalformedFile("a tensor's name is empty or not printable", where=_at(path, name))
    if not isinstance(entry, dict) or set(entry) != FIELDS:
        got = quoted(sorted(entry) if isinstance(entry, dict) else entry)
        raise MalformedFile(
            "a header entry must have exactly dtype, shape and data_offsets", where=_at(path, name), got=got
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise WrongDtype("unknown dtype", where=_at(path, name), expected=", ".join(_ITEM_BITS), got=quoted(dtype))
    if not _is_sizes(shape) or len(shape) > MAX_DIMS:
        expected = f"at most {MAX_DIMS} sizes >= 0"
        raise MalformedFile(
            "the shape is not a list of sizes", where=_at(path, name), expected=expected, got=quoted(shape)
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedFile("data_offsets is not [start, end]", where=_at(path, name), got=quoted(offsets))
    if dtype == PAIRS and (not shape or shape[-1] % 2):
        raise MalformedFile(f"the last axis of {dtype} is not even", where=_at(path, name), got=quoted(shape))
    nbytes = math.prod(shape) * _ITEM_BITS[dtype] // 8
    start, end = begin + offsets[0], begin + offsets[1]
    # An empty tensor has no bytes that its axes could be checked against.
    if not nbytes and math.prod(max(s, 1) for s in shape) >= MAX_EMPTY:
        raise MalformedFile("the shape is too large", where=_at(path, name), got=quoted(shape))
    if end - start != nbytes:
        what = f"shape {quoted(shape)} of {dtype} and data_offsets disagree"
        raise MalformedFile(what, where=_at(path, name), expected=f"{nbytes} bytes", got=f"{end - start} bytes")
    if end > size:
        raise MalformedFile(
            "the tensor reaches past the end of the file",
            where=_at(path, name),
            expected=f"<= {size - begin}",
            got=offsets[1],
            hint=CUT_OFF,
        )
    if dtype == PAIRS:  # as most writers store them
        dtype, shape = "U8", [*shape[:-1], shape[-1] // 2]
    return TensorInfo(name, dtype, tuple(shape), path, start, end)


def _at(path: Path, name: str) -> str:
    return f"{path}: tensor {quoted(name)}"


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_covered(tensors: list[TensorInfo], begin: int, size: int, where: str) -> None:
    """Each tensor must start where the previous one ends, and the last must end with the file."""
    at = begin
    for tensor in tensors:
        if tensor.start != at:
            kind = "overlaps the previous one" if tensor.start < at else "leaves a gap before it"
            raise MalformedFile(
                f"the tensor {kind}",
                where=_at(tensor.file, tensor.name),
                expected=f"start {at - begin}",
                got=tensor.start - begin,
            )
        at = tensor.end
    if at != size:
        raise MalformedFile(
            "the file has bytes after the last tensor",
            where=where,
            expected=f"{at} bytes in total",
            got=f"{size} bytes",
        )
