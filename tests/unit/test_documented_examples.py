"""Runs the Python examples in the documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from project import ROOT

import lancebill.formats as formats
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.write.convert import ConvertOptions, convert, plan_conversion
from lancebill.checkpoint.write.target import choose_target
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing import conformance
from lancebill.testing.checkpoints import Geometry
from lancebill.testing.models import write_model

SMALL = Geometry(experts=2, hidden=128, intermediate=64)


def blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


def test_the_readme_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", SMALL)
    (example,) = blocks("README.md")
    exec(compile(example.replace("path/to/model", str(tmp_path / "model")), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "bf16 -> mxfp4" in printed
    assert printed.endswith("torch.Size([5, 128])\n")


def test_the_engine_guide_runs(tmp_path: Path) -> None:
    """Its examples are one program; the model has two experts, so every token goes to both."""
    write_model(tmp_path / "model", SMALL)
    program = "\n".join(blocks("docs/guides/engines.md")).replace("path/to/model", str(tmp_path / "model"))
    exec(compile(program, "engines.md", "exec"), {})


def test_the_guides_format_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes the conformance tests, and `convert` writes and reads it."""
    (source,) = blocks("docs/guides/add-a-format.md")
    (tmp_path / "guide_row_float.py").write_text(source)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    formats.registry.cache_clear()
    try:
        conformance.check_format(formats.registry()["row-float"])
        write_model(tmp_path / "model", SMALL)
        target = choose_target(parse_spec("e5m2-channel"), "row-float")
        with Checkpoint.open(tmp_path / "model") as checkpoint:
            convert(
                checkpoint, tmp_path / "out", plan_conversion(checkpoint, target, ConvertOptions()), ConvertOptions()
            )
        with Checkpoint.open(tmp_path / "out") as checkpoint:
            assert "model.layers.0.mlp.experts.1.up_proj.row_float" in checkpoint.tensors
            assert "model.layers.0.mlp.gate" in checkpoint.config.quant["skip"]
    finally:
        formats.registry.cache_clear()
