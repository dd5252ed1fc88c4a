"""Corrupt files for tests, and the check that opening them fails properly."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lancebill import errors as e
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.gguf import ARRAY
from lancebill.testing.gguf import string_bytes, value_bytes

Row = tuple[Any, type[e.LancebillError], str]
HUGE = 1 << 62
SLACK = 2 << 20


def assert_refused(path: Path, kind: type[e.LancebillError], fragment: str) -> None:
    """Opening raises exactly this error, with a location, quickly, and in no more memory than the size of the files."""
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size
    tracemalloc.start()
    started = time.process_time()  # CPU time, so that a busy machine does not fail the test
    try:
        with pytest.raises(e.LancebillError) as caught:
            Checkpoint.open(path)
        elapsed, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind, caught.value
    assert fragment in str(caught.value)
    assert caught.value.where is not None and len(str(caught.value)) < 2000
    str(caught.value).encode("utf-8")
    assert elapsed < 2
    assert peak <= size + SLACK


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def file_bytes(header: Any, data: int = 24, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry(),
    "b": entry("U8", [4], [24, 28]),
    "c": entry("F16", [0], [28, 28]),
}
SOUND = file_bytes(GOOD, 28)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"

PLACES = {"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors", "d": "y.safetensors"}


def index(**changes: Any) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": PLACES | changes}


def make_folder(root: Path) -> Path:
    folder = root / "a" / "b" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "x.safetensors").write_bytes(SOUND)
    (folder / "y.safetensors").write_bytes(file_bytes({"d": entry()}))
    (folder / "w.safetensors").write_bytes(file_bytes({"q": entry(), "a": entry(offsets=[24, 48])}, 48))
    (folder / "broken.safetensors").write_bytes(SOUND[:-1])
    (root / "outside").write_bytes(SOUND)
    (folder / "out.safetensors").symlink_to(root / "outside")
    (folder / "dangling.safetensors").symlink_to(root / "nowhere")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()
    return folder


U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
ARCH = string_bytes("general.architecture") + value_bytes("llama")
PAIR = string_bytes("llama.block_count") + value_bytes(3)


def info(
    name: bytes = b"t", dims: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    head = U64(len(name)) + name + U32(len(dims) if rank is None else rank)
    return head + b"".join(map(U64, dims)) + U32(kind) + U64(offset)


def gguf_bytes(
    pairs: tuple[bytes, ...] = (ARCH, PAIR),
    infos: tuple[bytes, ...] = (info(),),
    data: int = 32,
    *,
    magic: bytes = b"GGUF",
    version: bytes = U32(3),
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
) -> bytes:
    tensors, keys = (len(infos) if counts[0] is None else counts[0]), (len(pairs) if counts[1] is None else counts[1])
    header = magic + version + U64(tensors) + U64(keys) + b"".join(pairs) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + bytes(data)


def pair(key: str, value: bytes) -> tuple[bytes, ...]:
    return (ARCH, string_bytes(key) + value)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return U32(ARRAY) + U32(kind) + U64(count) + body


def nested(depth: int) -> bytes:
    return U32(ARRAY) + (U32(ARRAY) + U64(1)) * depth + U32(4) + U64(0)


ALIGNED = string_bytes("general.alignment")
