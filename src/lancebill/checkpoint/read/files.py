"""A checkpoint on disk: its files, the tensors they hold, and reading slices of them.

Opening reads and checks headers and configs only. In an open `Checkpoint` every file exists, every tensor lies inside
its file, and every name is stored once.
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

from lancebill.checkpoint.read.config import CONFIG_FILES, MODEL_CONFIG, read_config
from lancebill.checkpoint.read.file_bytes import open_read, reason
from lancebill.checkpoint.read.gguf import read_gguf, split_files
from lancebill.checkpoint.read.hub import INDEX, parse_hub_name
from lancebill.checkpoint.read.links import TENSOR_SUFFIXES, check_link, check_links
from lancebill.checkpoint.read.safetensors import read_header
from lancebill.checkpoint.read.slices import Index, read_slice
from lancebill.checkpoint.read.strict_json import read_json
from lancebill.checkpoint.read.tensor_info import TensorInfo, quoted
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

MAX_NAME = 512  # characters of a tensor name: bounds the cost of pattern matching and of numbers in names
MISTRAL_CONFIG = "params.json"
INDEX_SUFFIX = ".index.json"


class Checkpoint:
    """Tensors by name. Reading is thread-safe; files are opened on first use."""

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
        self.problems = tuple(problems)  # defects that do not prevent reading; `verify` reports them

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a folder, a .safetensors file, or a .gguf file (with the other files of a split model)."""
        path = Path(path)
        if sys.byteorder != "little":  # files are little-endian, and bytes are never swapped here
            raise UnsupportedProblem("checkpoints can be read only on little-endian machines", got=sys.byteorder)
        try:
            return cls._open(path)
        except OSError as error:  # unreadable folders, file names the file system rejects
            raise CheckpointError(f"cannot open the checkpoint: {reason(error)}", where=str(path)) from None

    @classmethod
    def _open(cls, path: Path) -> Checkpoint:
        if not path.exists():
            name = parse_hub_name(path)
            hint = f"`hf download {name.repository}` prints the folder of a model on the hub" if name else None
            raise CheckpointError("no such file or folder", where=str(path), hint=hint)
        if path.is_dir():
            return _open_folder(path)
        if path.suffix == ".gguf":
            return _open_gguf(path)
        if path.suffix == ".safetensors":
            _refuse_shard(path)
            return cls(path, read_config(path.parent), read_header(path), files=[path])
        raise CheckpointError(
            "not a checkpoint", where=str(path), expected="a folder, a .safetensors file or a .gguf file"
        )

    def read(self, name: str, index: Index = ()) -> Tensor:
        """A new contiguous CPU tensor; with `index` (ints and slices) only those bytes are read."""
        info = self.tensors.get(name)
        if info is None:
            raise MissingTensor("no such tensor", where=str(self.path), got=quoted(name))
        return read_slice(self._descriptor(info.file), info, index)

    @cached_property
    def headers(self) -> dict[str, Stored]:
        """Dtype and shape of every tensor: the input of a manifest."""
        return {name: info.stored for name, info in self.tensors.items()}

    def other_files(self) -> tuple[Path, ...]:
        """Files of the folder that are neither tensors nor configs: tokenizer, templates ..."""
        if not self.path.is_dir():
            return ()
        check_links(self.path)  # again: the folder may have changed
        return tuple(
            file
            for file in sorted(self.path.iterdir())
            if file.is_file()
            and not file.name.startswith(".")
            and not file.name.endswith((*TENSOR_SUFFIXES, INDEX_SUFFIX))
            and file.name not in CONFIG_FILES
        )

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
    """Tensors by name; raises if a name occurs twice."""
    by_name: dict[str, TensorInfo] = {}
    problems = []
    for info in tensors:
        if len(info.name) > MAX_NAME:
            raise MalformedFile(
                f"the name {quoted(info.name)} is too long", where=str(info.file), expected=f"<= {MAX_NAME} characters"
            )
        first = by_name.setdefault(info.name, info)
        if first is not info:
            files = sorted({first.file.name, info.file.name})
            problems.append(
                DuplicateTensor(f"tensor {quoted(info.name)} is stored twice", where=str(path), got=" and ".join(files))
            )
    _raise_all(problems, path)
    return by_name


def _open_folder(folder: Path) -> Checkpoint:
    check_links(folder)
    if (folder / INDEX).exists():
        return _open_indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        _refuse_mistral(folder)
        for file in files:
            check_link(file, folder)
        return Checkpoint(folder, read_config(folder), [t for file in files for t in read_header(file)], files=files)
    return _open_gguf_folder(folder)


def _refuse_shard(file: Path) -> None:
    """Raise for one of several files: most of the checkpoint would be missing."""
    names = set(_weight_map(file.parent).values()) if (file.parent / INDEX).exists() else set()
    if file.name in names and len(names) > 1:
        raise CheckpointError(
            f"the file is one of {len(names)} of a checkpoint", where=str(file), hint=f"pass the folder: {file.parent}"
        )


def _refuse_mistral(folder: Path) -> None:
    if (folder / MISTRAL_CONFIG).exists() and not (folder / MODEL_CONFIG).exists():
        raise CheckpointError(
            "Mistral's own layout of files is not read",
            where=str(folder),
            expected=f"{MODEL_CONFIG}, and tensors with transformers' names",
            got=MISTRAL_CONFIG,
            hint="most models are published in both layouts: download the files of transformers' too",
        )


def _open_indexed(folder: Path) -> Checkpoint:
    """A folder with an index, which must agree with the headers of the files."""
    weight_map = _weight_map(folder)
    files = [folder / name for name in dict.fromkeys(weight_map.values())]
    problems: list[CheckpointError] = []
    for file in files:
        if file.exists():
            check_link(file, folder)
        else:
            what = "the index names a file that does not exist"
            hint = "download this file too, or wait until it is there"
            problems.append(MalformedFile(what, where=str(folder / INDEX), got=file.name, hint=hint))
    _raise_all(problems, folder)
    tensors = [t for file in files for t in read_header(file)]
    by_name = _by_name(tensors, folder)
    for name, file_name in weight_map.items():
        if name not in by_name or by_name[name].file.name != file_name:
            problems.append(
                MissingTensor(
                    f"the index places tensor {quoted(name)} in a file that does not hold it",
                    where=str(folder / INDEX),
                    expected=file_name,
                    got=by_name[name].file.name if name in by_name else "no file",
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
        # Only plain file names: a path could point outside the folder.
        plain = isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file and "\0" not in file
        if not plain or "\\" in file:
            raise MalformedFile(
                f"'weight_map' of tensor {quoted(name)} is not the plain name of a .safetensors file",
                where=where,
                got=quoted(file),
            )
    return weight_map


def _open_gguf_folder(folder: Path) -> Checkpoint:
    files = sorted(folder.glob("*.gguf"))
    models = sorted({split_files(file)[0] for file in files})
    if len(models) == 1:
        return _open_gguf(models[0], folder)
    if models:
        names = ", ".join(model.name for model in models)
        raise CheckpointError(
            "the folder holds several GGUF models: pass the path of one file", where=str(folder), got=names
        )
    pickles = any(file.suffix in (".bin", ".pt", ".pth") for file in folder.iterdir())
    hint = "pickle files can run code, so they are never read: convert them to safetensors" if pickles else None
    raise CheckpointError(
        "the folder holds no tensors", where=str(folder), expected="*.safetensors or *.gguf", hint=hint
    )


def model_path(path: Path) -> Path:
    """The file of a folder whose only tensors are one GGUF model, which has its config in itself; else `path`."""
    if not path.is_dir() or any(path.glob("*.safetensors")) or (path / INDEX).exists():
        return path
    files = sorted(path.glob("*.gguf"))
    return files[0] if files and split_files(files[0]) == tuple(files) else path


def _open_gguf(path: Path, folder: Path | None = None) -> Checkpoint:
    files = split_files(path)
    for file in files:
        if folder is not None or file != path:  # `path` itself is what the user named
            check_link(file, file.parent)
    config, tensors = read_gguf(files)
    return Checkpoint(folder or path, config, tensors, files=files)


def _raise_all(problems: Sequence[CheckpointError], path: Path) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise CheckpointProblems(problems, where=str(path))
