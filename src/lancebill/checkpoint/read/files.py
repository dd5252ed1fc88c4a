"""A checkpoint on disk: which files it has, which tensors they hold, and reading parts of them.

Opening reads headers and configs only and checks them whole: a `Checkpoint` that exists has files
that are there, tensors that lie inside them, and one place for every name.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType

from torch import Tensor

from lancebill.checkpoint.read.config import CONFIG_FILES, read_config, read_json
from lancebill.checkpoint.read.file_bytes import open_read, reason
from lancebill.checkpoint.read.gguf import read_gguf, split_files
from lancebill.checkpoint.read.safetensors import read_header
from lancebill.checkpoint.read.slices import Index, read_slice
from lancebill.checkpoint.read.tensor_info import TensorInfo as TensorInfo
from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.errors import (
    CheckpointError,
    CheckpointProblems,
    DuplicateTensor,
    MalformedFile,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedProblem,
)
from lancebill.formats.stored import Config, Stored

MAX_NAME = 512  # of a tensor: patterns are matched against it, numbers read in it
INDEX = "model.safetensors.index.json"
TENSOR_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
INDEX_SUFFIX = ".index.json"


class Checkpoint:
    """Tensors by name. Reading is thread-safe; files are opened when first read."""

    def __init__(
        self,
        path: Path,
        config: Config,
        tensors: Iterable[TensorInfo],
        problems: Sequence[CheckpointError] = (),
        files: Sequence[Path] | None = None,
    ) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.path = path
        self.config = config
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_by_name(tensors, path))
        self.files = tuple(dict.fromkeys(t.file for t in self.tensors.values()) if files is None else files)
        self.problems = tuple(problems)  # what does not stop reading, for `verify` to report

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """A folder, one .safetensors file, or one .gguf file (with its split siblings)."""
        path = Path(path)
        if sys.byteorder != "little":  # numbers in files are, and are never swapped here
            raise UnsupportedProblem("checkpoints are read on little-endian machines only", got=sys.byteorder)
        try:
            return cls._open(path)
        except OSError as error:  # folders that cannot be listed, names no file system takes
            raise CheckpointError(f"cannot open the checkpoint: {reason(error)}", where=str(path)) from None

    @classmethod
    def _open(cls, path: Path) -> Checkpoint:
        if not path.exists():
            raise CheckpointError("no such file or folder", where=str(path))
        if path.is_dir():
            return _open_folder(path)
        if path.suffix == ".gguf":
            return _open_gguf(path)
        if path.suffix == ".safetensors":
            return cls(path, read_config(path.parent), read_header(path), files=[path])
        raise CheckpointError(
            "not a checkpoint", where=str(path), expected="a folder, a .safetensors file or a .gguf file"
        )

    def read(self, name: str, index: Index = ()) -> Tensor:
        """A fresh contiguous CPU tensor; with `index` (ints and slices) only those bytes are read."""
        info = self.tensors.get(name)
        if info is None:
            raise MissingTensor("no such tensor", where=str(self.path), got=quoted(name))
        return read_slice(self._descriptor(info.file), info, index)

    @cached_property
    def headers(self) -> dict[str, Stored]:
        """What the files say of every tensor: all that a manifest is made from."""
        return {name: info.stored for name, info in self.tensors.items()}

    def other_files(self) -> tuple[Path, ...]:
        """What belongs to the folder and is neither tensors nor a config: tokenizer, templates ..."""
        if not self.path.is_dir():
            return ()
        others = [
            file
            for file in sorted(self.path.iterdir())
            if file.is_file()
            and not file.name.startswith(".")
            and not file.name.endswith((*TENSOR_SUFFIXES, INDEX_SUFFIX))
            and file.name not in CONFIG_FILES
        ]
        for file in others:
            _check_inside(file, self.path)
        return tuple(others)

    def close(self) -> None:
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = open_read(file)
            return self._descriptors[file]


def _by_name(tensors: Iterable[TensorInfo], path: Path) -> dict[str, TensorInfo]:
    """One place for every name."""
    found: dict[str, TensorInfo] = {}
    problems = []
    for info in tensors:
        if len(info.name) > MAX_NAME:
            raise MalformedFile(
                f"the name {quoted(info.name)} is too long", where=str(info.file), expected=f"<= {MAX_NAME} characters"
            )
        first = found.setdefault(info.name, info)
        if first is not info:
            files = sorted({first.file.name, info.file.name})
            problems.append(
                DuplicateTensor(f"tensor {quoted(info.name)} is stored twice", where=str(path), got=" and ".join(files))
            )
    _raise_all(problems, path)
    return found


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / INDEX).exists():
        return _open_indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        for file in files:
            _check_inside(file, folder)
        return Checkpoint(folder, read_config(folder), [t for file in files for t in read_header(file)], files=files)
    return _open_gguf_folder(folder)


def _open_indexed(folder: Path) -> Checkpoint:
    """A folder with an index: the index and the headers must tell the same story."""
    weight_map = _weight_map(folder)
    files = [folder / name for name in dict.fromkeys(weight_map.values())]
    problems: list[CheckpointError] = []
    for file in files:
        if file.exists():
            _check_inside(file, folder)
        else:
            problems.append(
                MalformedFile("the index names a file that is not there", where=str(folder / INDEX), got=file.name)
            )
    _raise_all(problems, folder)
    tensors = [t for file in files for t in read_header(file)]
    found = _by_name(tensors, folder)
    for name, file_name in weight_map.items():
        if name not in found or found[name].file.name != file_name:
            problems.append(
                MissingTensor(
                    f"the index places tensor {quoted(name)} in a file that does not hold it",
                    where=str(folder / INDEX),
                    expected=file_name,
                    got=found[name].file.name if name in found else "no file",
                )
            )
    _raise_all(problems, folder)
    extra = [
        UnexpectedTensor(f"tensor {quoted(t.name)} is not in the index", where=str(t.file))
        for t in tensors
        if t.name not in weight_map
    ]
    return Checkpoint(folder, read_config(folder), tensors, extra, files)


def _weight_map(folder: Path) -> dict[str, str]:
    where = str(folder / INDEX)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MalformedFile("'weight_map' is not a map of tensors to files", where=where, got=quoted(weight_map))
    for name, file in weight_map.items():
        # Only plain names: a path could leave the folder.
        plain = isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file and "\0" not in file
        if not plain or "\\" in file:
            raise MalformedFile(
                f"'weight_map' of tensor {quoted(name)} is not the plain name of a .safetensors file",
                where=where,
                got=quoted(file),
            )
    return weight_map


def _check_inside(file: Path, folder: Path) -> None:
    """Links may not lead out of the folder, but for a hub cache: snapshots/<revision>/x -> blobs/y."""
    root = folder.resolve()
    try:
        target = file.resolve()
    except RuntimeError:
        raise MalformedFile("a link that leads in a circle", where=str(file)) from None
    if not target.is_relative_to(root) and not target.is_relative_to(root.parent.parent / "blobs"):
        raise MalformedFile("a link that leads out of the checkpoint folder", where=str(file), got=str(target))


def _open_gguf_folder(folder: Path) -> Checkpoint:
    files = sorted(folder.glob("*.gguf"))
    models = sorted({split_files(file)[0] for file in files})
    if len(models) == 1:
        return _open_gguf(models[0], folder)
    if models:
        names = ", ".join(model.name for model in models)
        raise CheckpointError("the folder holds several GGUF models: name one", where=str(folder), got=names)
    pickles = any(file.suffix in (".bin", ".pt", ".pth") for file in folder.iterdir())
    hint = "pickled weights can run code and are never read: convert them to safetensors" if pickles else None
    raise CheckpointError("no tensors here", where=str(folder), expected="*.safetensors or *.gguf", hint=hint)


def _open_gguf(path: Path, folder: Path | None = None) -> Checkpoint:
    files = split_files(path)
    if folder is not None:
        for file in files:
            _check_inside(file, folder)
    config, tensors = read_gguf(files)
    return Checkpoint(folder or path, config, tensors, files=files)


def _raise_all(problems: Sequence[CheckpointError], path: Path) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise CheckpointProblems(problems, where=str(path))
