"""`lancebill convert` that is stopped leaves nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.cli.main import app
from lancebill.testing.checkpoints import Geometry
from lancebill.testing.models import write_model


@pytest.mark.parametrize("earlier", [False, True])
def test_sigterm_removes_the_partial_folder(earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier checkpoint at the destination stays."""
    size = Geometry(experts=4, hidden=128, intermediate=64, layers=2)
    write_model(tmp_path / "model", size)
    out, found, write = tmp_path / "out", list[list[str]](), CheckpointWriter.write
    out.mkdir()
    command = ["convert", str(tmp_path / "model"), str(out / "new"), "--to", "mxfp4"]
    if earlier:
        write_model(out / "new", size, seed=1)
        command.append("--overwrite")
    before = contents(out)

    def stopped(self: CheckpointWriter, *tensor: Any, **more: Any) -> None:
        write(self, *tensor, **more)
        if not found:
            found.append([folder.name for folder in out.iterdir() if folder.name != "new"])
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(CheckpointWriter, "write", stopped)
    done = CliRunner().invoke(app, command)
    assert found and found[0], done.output  # the partial folder was there
    assert done.exit_code == 128 + signal.SIGTERM
    assert contents(out) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() if file.is_file() else b"" for file in folder.rglob("*")}
