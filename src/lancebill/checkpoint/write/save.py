"""Write a checkpoint: declare all tensors, write them in any order, publish the folder atomically.

All tensors are declared before the first is written, so headers and offsets are final from the start and any thread can
write any tensor. Everything goes to a hidden folder next to the destination, which takes the destination's place once
it is complete and synced to disk (`publish.py`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from lancebill.checkpoint.read.file_bytes import reason, write_exactly
from lancebill.checkpoint.read.hub import INDEX
from lancebill.checkpoint.read.safetensors import MAX_HEADER, METADATA, PREFIX
from lancebill.checkpoint.write.publish import HiddenFolder, recover, sync
from lancebill.errors import CheckpointError, CheckpointProblems, DuplicateTensor, MissingTensor, WrongDtype, WrongShape
from lancebill.formats.stored import DTYPE_NAMES, TORCH_DTYPES, Stored

SHARD_BYTES = 5_000_000_000
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Shard:
    """One output file: its header, and the offset of each tensor."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def plan_shards(tensors: Mapping[str, Stored], limit: int = SHARD_BYTES) -> list[Shard]:
    """Distribute tensors over files in order, at most `limit` bytes per file; a larger tensor gets its own file."""
    if not tensors:
        return []
    groups: list[dict[str, Stored]] = [{}]
    filled = 0
    for name, stored in tensors.items():
        size = _nbytes(stored)
        if groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = stored
        filled += size
    if len(groups) == 1:
        return [_shard(SINGLE, groups[0])]
    total = len(groups)
    return [_shard(f"model-{i:05d}-of-{total:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def _shard(name: str, tensors: Mapping[str, Stored]) -> Shard:
    """Sort tensors by element size, largest first, so that every tensor is aligned to its element size."""
    order = sorted(tensors.items(), key=lambda item: -TORCH_DTYPES[item[1].dtype].itemsize)
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    starts, at = {}, 0
    for tensor, stored in order:
        starts[tensor], end = at, at + _nbytes(stored)
        entries[tensor] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError("too many tensors for one file", where=name, hint="choose a smaller shard size")
    header = len(text).to_bytes(PREFIX, "little") + text
    return Shard(name, header, {n: len(header) + start for n, start in starts.items()}, len(header) + at)


def _nbytes(stored: Stored) -> int:
    return math.prod(stored.shape) * TORCH_DTYPES[stored.dtype].itemsize


class CheckpointWriter:
    """Use as `with CheckpointWriter(path, tensors) as out:` and `write` each tensor; leaving the block publishes.

    An exception inside the block removes what was written; the destination stays unchanged.
    """

    def __init__(
        self,
        destination: str | Path,
        tensors: Mapping[str, Stored],
        *,
        source: str | Path | None = None,
        max_shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        self.destination = Path(destination).resolve()
        self.tensors = dict(tensors)
        self.shards = plan_shards(self.tensors, max_shard_bytes)
        self._shard_of = {name: shard for shard in self.shards for name in shard.offsets}
        self._overwrite = overwrite
        self._started: dict[str, list[tuple[int, int]]] = {}
        self._rows: dict[str, int] = {}
        self._written: set[str] = set()
        self._names = {shard.name for shard in self.shards} | ({INDEX} if len(self.shards) > 1 else set())
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}
        self._hidden: HiddenFolder | None = None
        with _os_errors_reported(self.destination):
            recover(self.destination)
        _check_destination(self.destination, overwrite)
        if source is not None:
            _check_apart(self.destination, Path(source).resolve())

    def __enter__(self) -> CheckpointWriter:
        with _os_errors_reported(self.destination):
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._hidden = HiddenFolder(self.destination)
            try:
                self._check_space()
                for shard in self.shards:
                    self._create(shard)
            except BaseException:
                self.abort()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self.abort()  # after _finish there is nothing left to remove

    @property
    def folder(self) -> Path:
        """The hidden folder that is written."""
        assert self._hidden is not None, "used outside its with block"
        return self._hidden.path

    def write(self, name: str, tensor: Tensor, first_row: int | None = None) -> None:
        """Write a declared tensor, or some of its rows from `first_row` on. Any thread, any order, each row once."""
        shard, stored = self._shard_of.get(name), self.tensors.get(name)
        if shard is None or stored is None:
            raise CheckpointError(f"tensor '{name}' was not declared", where=str(self.destination))
        got = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        if got != stored.dtype:
            raise WrongDtype("the dtype is not the declared one", where=name, expected=stored.dtype, got=got)
        whole = stored.shape[0] if stored.shape else 1
        first, rows = (0, whole) if first_row is None else (first_row, len(tensor))
        shape = (rows, *stored.shape[1:]) if stored.shape else ()
        if tuple(tensor.shape) != shape or first < 0 or first + rows > whole:
            got = f"{tuple(tensor.shape)}" + ("" if first_row is None else f" from row {first}")
            raise WrongShape("the shape is not the declared one", where=name, expected=stored.shape, got=got)
        self._reserve(name, first, first + rows)
        data = tensor.detach().cpu().contiguous()
        offset = shard.offsets[name] + first * (_nbytes(stored) // max(whole, 1))
        write_exactly(self._descriptors[shard.name], data, offset, self.destination / shard.name)
        with self._lock:
            self._rows[name] = self._rows.get(name, 0) + rows
            if self._rows[name] == whole:  # row ranges never overlap, so the tensor is complete
                self._written.add(name)

    def _reserve(self, name: str, first: int, stop: int) -> None:
        """Reserve rows for one writer; raises if any of them is already written."""
        with self._lock:
            spans = self._started.setdefault(name, [])
            if name in self._written or any(first < high and low < stop for low, high in spans):
                raise DuplicateTensor(f"tensor '{name}' is written twice", where=str(self.destination))
            spans.append((first, stop))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        path = self._new_file(name)
        with _os_errors_reported(path):
            path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

    def copy_file(self, source: Path) -> None:
        """Copy a file unchanged, under the same name."""
        path = self._new_file(source.name)
        with _os_errors_reported(source):
            shutil.copyfile(source, path)

    def abort(self) -> None:
        """Remove everything written so far; the destination stays unchanged."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        if self._hidden is not None:
            self._hidden.remove()

    def _new_file(self, name: str) -> Path:
        with self._lock:
            if Path(name).name != name or name in self._names:
                what = "is written twice" if name in self._names else "is not a plain file name"
                raise CheckpointError(f"file '{name}' {what}", where=str(self.destination))
            self._names.add(name)
        return self.folder / name

    def _check_space(self) -> None:
        needed, free = sum(shard.size for shard in self.shards), shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                "not enough space on the disk",
                where=str(self.destination.parent),
                expected=f"{needed} bytes",
                got=f"{free} bytes free",
            )

    def _create(self, shard: Shard) -> None:
        descriptor = os.open(self.folder / shard.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._descriptors[shard.name] = descriptor  # before anything can fail: `abort` closes it
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(shard.header)
        os.ftruncate(descriptor, shard.size)

    def _finish(self) -> None:
        problems = [
            MissingTensor(f"tensor '{name}' was declared but never written", where=str(self.destination))
            for name in self.tensors
            if name not in self._written
        ]
        if problems:
            raise problems[0] if len(problems) == 1 else CheckpointProblems(problems, where=str(self.destination))
        with _os_errors_reported(self.destination):
            if len(self.shards) > 1:
                self._write_index()
            for file in self.folder.iterdir():
                sync(file)
            sync(self.folder)
            _check_destination(self.destination, self._overwrite)  # it may have changed since the first check
            assert self._hidden is not None
            self._hidden.publish(self.destination)

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": sum(_nbytes(stored) for stored in self.tensors.values())},
            "weight_map": {name: self._shard_of[name].name for name in sorted(self.tensors)},
        }
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _check_destination(destination: Path, overwrite: bool) -> None:
    """The destination must be absent, an empty folder, or with `overwrite` a checkpoint."""
    if not destination.exists():
        return
    if not destination.is_dir():
        raise CheckpointError("the destination is a file", where=str(destination), expected="a folder")
    names = [file.name for file in destination.iterdir()]
    if not names:
        return
    if not overwrite:
        raise CheckpointError(
            "the destination exists and is not empty",
            where=str(destination),
            hint="--overwrite, or overwrite=True, replaces an existing checkpoint",
        )
    if not any(name == "config.json" or name.endswith((".safetensors", ".gguf")) for name in names):
        raise CheckpointError(
            "the destination is not a checkpoint and is not overwritten",
            where=str(destination),
            hint="remove the folder first",
        )


def _check_apart(destination: Path, source: Path) -> None:
    if source.is_relative_to(destination) or (source.is_dir() and destination.is_relative_to(source)):
        raise CheckpointError("the destination would overwrite the source", where=str(destination), got=str(source))


@contextmanager
def _os_errors_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write: {reason(error)}", where=str(path)) from None
