"""Runs the scripts in `examples`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "one_layer.py": ([], "torch.Size([5, 64])"),
    "compare_formats.py": ([], "output differs by"),
    "whole_model.py": (["w5 w9"], "fp32 -> mxfp4"),
}


def test_every_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save_model_with_tokenizer(transformers, tmp_path)
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
    for name, (words, expected) in EXPECTED.items():
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path), *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert expected in capsys.readouterr().out, name
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(SystemExit, match=f"python examples/{name} PATH"):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
