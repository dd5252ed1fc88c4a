"""A writer that is killed at any step leaves the old or the new checkpoint, and the next writer cleans up."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import stored

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.write import publish
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.errors import CheckpointError


def _write(destination: Path, value: float) -> None:
    tensors = {"a": torch.full((2,), value)}
    with CheckpointWriter(destination, stored(tensors), overwrite=True) as out:
        out.write("a", tensors["a"])


def _dies_at(step: int, call: Callable[..., Any], counter: list[int]) -> Callable[..., Any]:
    """`call`, but the process ends before the given step and nothing is cleaned up."""

    def counted(*args: Any, **options: Any) -> Any:
        if counter[0] == step:
            os._exit(1)
        counter[0] += 1
        return call(*args, **options)

    return counted


def _write_and_die(destination: Path, step: int, exchanges: bool) -> bool:
    """Overwrite the destination in a child that is killed at a step; False if there are fewer steps."""
    child = os.fork()
    if child == 0:
        counter = [0]
        if not exchanges:
            publish._exchange = lambda one, other: False
        publish._exchange = _dies_at(step, publish._exchange, counter)
        for owner, name in ((Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (publish, "sync")):
            setattr(owner, name, _dies_at(step, getattr(owner, name), counter))
        _write(destination, 2.0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("exchanges", [True, False])
def test_killed_at_every_step(tmp_path: Path, exchanges: bool) -> None:
    absent, step = 0, 0
    while True:
        folder = tmp_path / str(step)
        _write(folder / "out", 1.0)
        if not _write_and_die(folder / "out", step, exchanges):
            break
        absent += not (folder / "out").exists()
        publish.recover(folder / "out")
        assert Checkpoint.open(folder / "out").read("a").tolist() in ([1.0, 1.0], [2.0, 2.0])
        assert [file.name for file in folder.iterdir()] == ["out"]
        _write(folder / "out", 3.0)
        assert Checkpoint.open(folder / "out").read("a").tolist() == [3.0, 3.0]
        step += 1
    assert step >= 4 and absent == (0 if exchanges else 1), "only two renames leave a moment without a destination"


def test_the_next_writer_restores_and_cleans(tmp_path: Path) -> None:
    _write(tmp_path / "out", 1.0)
    (tmp_path / "out").rename(tmp_path / ".out.0123456789ab.old")
    (tmp_path / ".out.0123456789ab.partial").mkdir()
    (tmp_path / ".out.not-ours.partial").mkdir()
    with pytest.raises(CheckpointError, match="not empty"):
        CheckpointWriter(tmp_path / "out", {})
    assert sorted(file.name for file in tmp_path.iterdir()) == [".out.not-ours.partial", "out"]
    assert Checkpoint.open(tmp_path / "out").read("a").sum() == 2


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    with CheckpointWriter(tmp_path / "out", stored(tensors)) as first:
        _write(tmp_path / "out", 5.0)
        assert first.folder.exists()
        shutil.rmtree(tmp_path / "out")
        first.write("a", tensors["a"])
    assert Checkpoint.open(tmp_path / "out").read("a").sum() == 2
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_gone_is_not_published(tmp_path: Path) -> None:
    _write(tmp_path / "out", 1.0)
    hidden = publish.HiddenFolder(tmp_path / "out")
    shutil.rmtree(hidden.path)
    with pytest.raises(FileNotFoundError):
        hidden.publish(tmp_path / "out")
    hidden.remove()
    assert Checkpoint.open(tmp_path / "out").read("a").sum() == 2


def test_a_folder_that_another_writer_cleans_up_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its creation and its lock, or just after."""
    lock, seen = publish._lock, list[Path]()

    def late(folder: Path) -> int | None:
        seen.append(folder)
        if len(seen) == 1:
            folder.rmdir()
        descriptor = lock(folder)
        if len(seen) == 2:
            folder.rmdir()
        return descriptor

    monkeypatch.setattr(publish, "_lock", late)
    _write(tmp_path / "out", 4.0)
    assert len(set(seen)) == 3 and [file.name for file in tmp_path.iterdir()] == ["out"]
    assert Checkpoint.open(tmp_path / "out").read("a").sum() == 8


def test_without_locks_nothing_of_others_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    left = tmp_path / ".out.0123456789ab.partial"
    left.mkdir()
    _write(tmp_path / "out", 1.0)
    _write(tmp_path / "out", 2.0)
    assert left.exists() and Checkpoint.open(tmp_path / "out").read("a").sum() == 4


def test_folders_that_cannot_be_exchanged(tmp_path: Path) -> None:
    """The kernel refuses a folder and one inside it."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert not publish._exchange(tmp_path / "outer", inner) and inner.exists()
