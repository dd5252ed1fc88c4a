"""Written checkpoints, read back with the safetensors library."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from samples import every_dtype, random_bytes, same, stored
from torch import Tensor

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.hub import INDEX
from lancebill.checkpoint.write import publish, save
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.errors import (
    CheckpointError,
    CheckpointProblems,
    DuplicateTensor,
    MissingTensor,
    WrongDtype,
    WrongShape,
)
from lancebill.formats.stored import TORCH_DTYPES, Stored


def write_all(destination: Path, tensors: Mapping[str, Tensor], **options: Any) -> None:
    with CheckpointWriter(destination, stored(tensors), **options) as out:
        for name in reversed(list(tensors)):
            out.write(name, tensors[name])


def file_names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    tensors = every_dtype() | {"turned": random_bytes(torch.bfloat16, (9, 4)).t()}
    write_all(tmp_path / "out", tensors)
    assert file_names(tmp_path / "out") == ["model.safetensors"] and file_names(tmp_path) == ["out"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(tensors)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    for info in Checkpoint.open(tmp_path / "out").tensors.values():
        assert info.start % TORCH_DTYPES[info.dtype].itemsize == 0


def test_shards_respect_the_size_limit(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_bytes(torch.float16, (i * 10, 8), i) for i in range(12)} | {"large": torch.ones(5000)}
    with CheckpointWriter(tmp_path / "out", stored(tensors), max_shard_bytes=4000) as out:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(out.write, tensors, tensors.values()))
        out.write_json("config.json", {"a": "é"})
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in files:
        loaded = load_file(tmp_path / "out" / file)
        assert sum(t.nbytes for t in loaded.values()) <= 4000 or list(loaded) == ["large"]
        assert all(index["weight_map"][name] == file and same(t, tensors[name]) for name, t in loaded.items())
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert set(checkpoint.tensors) == set(tensors) and checkpoint.config.model == {"a": "é"}


def test_an_incomplete_checkpoint_is_never_published(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    with pytest.raises(MissingTensor, match="'b'"), CheckpointWriter(tmp_path / "out", stored(tensors)) as out:
        out.write("a", tensors["a"])
        out.write("c", tensors["c"])
    with pytest.raises(CheckpointProblems, match="3 problems"), CheckpointWriter(tmp_path / "out", stored(tensors)):
        pass
    assert file_names(tmp_path) == []


def test_a_failure_keeps_the_existing_destination(tmp_path: Path) -> None:
    write_all(tmp_path / "out", {"a": torch.ones(2)})
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointWriter(tmp_path / "out", {"a": Stored("F32", (3,))}, overwrite=True) as out,
    ):
        out.write("a", torch.zeros(3))
        raise KeyboardInterrupt
    assert file_names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_failed_rename_restores_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path / "out", {"a": torch.ones(2)})
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="No space left"):
        write_all(tmp_path / "out", {"a": torch.zeros(2)}, overwrite=True)
    assert file_names(tmp_path) == ["out"] and Checkpoint.open(tmp_path / "out").read("a").sum() == 2


@pytest.mark.parametrize("call", ["ftruncate", "dup", "open"])
def test_a_failed_start_leaves_no_folder_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """`open` fails where the hidden folder is locked, the others where a shard is created."""

    real, failures = getattr(os, call), [OSError(errno.EIO, "Input/output error")]

    def failing_once(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **options)

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, call, failing_once)
    writer = CheckpointWriter(tmp_path / "out", {"a": Stored("F32", (3,))})
    with pytest.raises(CheckpointError, match="Input/output"), writer:
        pass
    assert file_names(tmp_path) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_overwriting_needs_the_option_and_a_checkpoint(tmp_path: Path) -> None:
    write_all(tmp_path / "out", {"a": torch.ones(2)})
    (tmp_path / "out" / "stale.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        write_all(tmp_path / "out", {"a": torch.zeros(2)})
    write_all(tmp_path / "out", {"a": torch.zeros(2)}, overwrite=True)
    assert file_names(tmp_path) == ["out"] and file_names(tmp_path / "out") == ["model.safetensors"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        write_all(tmp_path / "home", {"a": torch.zeros(2)}, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        write_all(tmp_path / "file", {"a": torch.zeros(2)}, overwrite=True)
    (tmp_path / "empty").mkdir()
    write_all(tmp_path / "empty", {"a": torch.zeros(2)})


@pytest.mark.parametrize("destination", ["source", "source/inside", ".", "link"])
def test_the_source_is_never_overwritten(tmp_path: Path, destination: str) -> None:
    write_all(tmp_path / "source", {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to("source")
    with pytest.raises(CheckpointError, match="overwrite the source"):
        write_all(tmp_path / destination, {"a": torch.zeros(2)}, source=tmp_path / "source", overwrite=True)
    assert Checkpoint.open(tmp_path / "source").read("a").sum() == 2


def test_only_declared_tensors_are_written(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", {"a": Stored("F32", (2,))}) as out:
        for name, tensor, error in (
            ("b", torch.ones(2), CheckpointError),
            ("a", torch.ones(2).half(), WrongDtype),
            ("a", torch.ones(3), WrongShape),
        ):
            with pytest.raises(error, match=name):
                out.write(name, tensor)
        out.write("a", torch.ones(2))
        with pytest.raises(DuplicateTensor, match="'a'"):
            out.write("a", torch.ones(2))
        with pytest.raises(CheckpointError, match="plain file name"):
            out.write_json("../x.json", {})
        with pytest.raises(CheckpointError, match="written twice"):
            out.write_json("model.safetensors", {})


def test_a_tensor_can_be_written_in_parts(tmp_path: Path) -> None:
    tensors = {
        "a": random_bytes(torch.float16, (6, 3, 2)),
        "b": random_bytes(torch.float16, (5, 2)),
        "none": torch.ones(0, 3),
    }
    with CheckpointWriter(tmp_path / "out", stored(tensors)) as out:
        for first, last in ((4, 6), (0, 1), (1, 4)):
            out.write("a", tensors["a"][first:last], first)
        out.write("none", tensors["none"], 0)
        out.write("b", tensors["b"][1:3], 1)
        for rows, first, error in (
            (tensors["b"][2:4], 2, DuplicateTensor),
            (tensors["b"], None, DuplicateTensor),
            (tensors["b"][3:], 4, WrongShape),
            (tensors["b"][:1], -1, WrongShape),
        ):
            with pytest.raises(error, match="b"):
                out.write("b", rows, first)
        out.write("b", tensors["b"][:1], 0)
        out.write("b", tensors["b"][3:], 3)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_missing_rows_are_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(MissingTensor, match="'a'"),
        CheckpointWriter(tmp_path / "out", {"a": Stored("F32", (4,))}) as out,
    ):
        out.write("a", torch.ones(3), 0)
        with pytest.raises(DuplicateTensor):
            out.write("a", torch.ones(1), 2)
    assert file_names(tmp_path) == []


def test_other_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with CheckpointWriter(tmp_path / "out", {}) as out:
        out.copy_file(tmp_path / "tokenizer.json")
        with pytest.raises(CheckpointError, match="No such file"):
            out.copy_file(tmp_path / "absent.json")
    assert file_names(tmp_path / "out") == ["tokenizer.json"]  # no tensors, no file for them


def test_too_little_disk_space_is_reported_before_writing(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="not enough space"),
        CheckpointWriter(tmp_path / "out", {"a": Stored("U8", (1 << 60,))}),
    ):
        pass
    assert file_names(tmp_path) == []


def test_a_header_that_no_reader_accepts_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "MAX_HEADER", 1000)
    with pytest.raises(CheckpointError, match="too many tensors"):
        save.plan_shards({f"{i}": Stored("U8", (1,)) for i in range(20)})
