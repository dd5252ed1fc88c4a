"""Options of the commands that run a model, without a model."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lancebill.cli import bench_serve, chat, models
from lancebill.cli.answering import AnswerOptions
from lancebill.errors import SpecError, UnsupportedProblem
from lancebill.evaluate.run import Variant
from lancebill.layer.recipe import UNQUANTISED


def test_dtypes_are_those_that_kernels_take() -> None:
    assert set(models.DTYPES) == {"auto", *(str(dtype).removeprefix("torch.") for dtype in UNQUANTISED)}


def test_rest_is_a_rule_beside_the_experts() -> None:
    assert models.with_rest("mxfp4", None) == "mxfp4"
    assert models.with_rest(None, "int8") == {"experts": None, "rest": "int8"}
    models.check_options(weights=models.with_rest(None, "int8"), activations="checkpoint", order="batch-invariant")
    for wrong in ({"weights": models.with_rest("mxfp4", "int99")}, {"activations": "foo"}, {"order": "slow"}):
        with pytest.raises(SpecError):
            models.check_options(**wrong)


def test_a_variant_may_have_a_spec_of_the_rest() -> None:
    assert Variant.parse("stored///int8") == Variant(rest="int8")
    assert str(Variant.parse("mxfp4/int8/cpu/int8")) == "mxfp4/int8/cpu/int8"
    assert str(Variant.parse("mxfp4")) == "mxfp4/16 bit/auto"


def test_a_gguf_file_needs_its_package_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedProblem, match="pip install gguf"):
        models.load(Path("model.gguf"))


def test_the_load_test_serves_models_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "running_server", nullcontext)
    with bench_serve._server("owner/model", ["--revision", "main"], "K") as started:
        assert list(started) == ["owner/model", "--api-key", "K", "--revision", "main"]
    with pytest.raises(SpecError, match="no such option"):
        bench_serve._server("http://localhost:1/v1", ["--odd"], None)


def test_unknown_commands_are_not_sent_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(answering: Any, messages: list[dict[str, str]], wanted: AnswerOptions) -> str:
        asked.append(messages[-1]["content"])
        return "yes"

    monkeypatch.setattr(chat, "_answer", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n/temp 2\n/etc/hosts is a file\nhello\n/quit\nlost\n"))
    chat._talk(object(), [], AnswerOptions(5))  # type: ignore[arg-type]  # nobody answers
    assert asked == ["/etc/hosts is a file", "hello"]
    said = capsys.readouterr().err
    assert "no such command: /help" in said and "/clear" in said
