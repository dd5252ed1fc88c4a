"""GGUF."""

from __future__ import annotations
from pathlib import Path
from collections.abc import Sequence
from colibri.stored import Config
from colibri.checkpoint.tensors import TensorInfo


def split_files(path: Path) -> tuple[Path, ...]:
    return (path,)


def read_gguf(files: Sequence[Path]) -> tuple[Config, list[TensorInfo]]:
    raise NotImplementedError
