"""Options of the commands that run a model, without a model."""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lancebill.cli import bench_serve, chat, generate, models, serve
from lancebill.cli.answering import AnswerOptions
from lancebill.cli.engines import Engine
from lancebill.cli.main import app
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
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("/help\n/tmp is full, why?\n/etc/hosts is a file\nhello\n/quit\nlost\n")
    )
    chat._talk(object(), [], AnswerOptions(5))  # type: ignore[arg-type]  # nobody answers
    assert asked == ["/tmp is full, why?", "/etc/hosts is a file", "hello"]
    said = capsys.readouterr().err
    assert "no such command: /help" in said and "/clear" in said


def test_bytes_that_are_not_text_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(answering: Any, messages: Any, *_: Any) -> dict[str, Any]:
        return {"prompt": messages if isinstance(messages, str) else messages[-1]["content"]}

    def type_in() -> None:
        typed = io.TextIOWrapper(io.BytesIO(b"a\xff\xfe\nhello\n"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", typed)

    monkeypatch.setattr(chat, "_answer", answer)
    monkeypatch.setattr(generate, "_answer", answer)
    type_in()
    refused, answered = generate._answer_lines(object(), True, True, AnswerOptions(5))  # type: ignore[arg-type]
    assert json.dumps(refused, ensure_ascii=False).encode() and refused["prompt"] == r"a\udcff\udcfe"
    assert "bytes that are not text" in refused["error"]["what"] and answered == {"prompt": "hello"}
    type_in()
    chat._talk(object(), [], AnswerOptions(5))  # type: ignore[arg-type]
    assert "bytes that are not text" in capsys.readouterr().err
    for words in (["generate", ".", "--raw", "a\udcff"], ["chat", ".", "--system", "a\udcff"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and "bytes that are not text" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "owner/name", "x", "--weights", "int99"], "int99"),
        (["generate", "owner/name", "x", "--gpu-memory", "20GiB"], "--gpu-memory got device 'cpu' hint --device cuda"),
        (["chat", "owner/name", "--backend", "none"], "no backend is called"),
        (["serve", "owner/name", "--engine", "transformers", "--gpu-experts", "4"], "where --gpu-experts"),
        (["serve", "owner/name", "--engine", "transformers", "--gpu-memory", "off"], "where --gpu-memory"),
        (["serve", "owner/name", "--engine", "transformers", "--activations", "auto"], "auto"),
        (["serve", "owner/name", "--engine", "transformers", "--order", "auto"], "no such order"),
        (["eval", "owner/name", "--text", __file__, "--variant", "stored", "--variant", "int99"], "int99"),
        (["eval", "owner/name", "--text", __file__, "--variant", "stored", "--variant", "a/b/c/d/e"], "the variant"),
    ],
)
def test_wrong_options_are_found_before_a_download(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lancebill.checkpoint.read.hub.local_path", lambda *_: pytest.fail("downloads"))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output


def test_answer_options_are_numbers() -> None:
    for wrong, option in (({"temperature": math.nan}, "--temperature"), ({"top_p": math.nan}, "--top-p")):
        with pytest.raises(SpecError, match=f"{option}: not a number"):
            AnswerOptions(5, **wrong)  # type: ignore[arg-type]


def test_temperatures_that_are_almost_zero_are_greedy() -> None:
    assert AnswerOptions(5, 1e-40, top_p=0.5).for_transformers() == {"do_sample": False, "max_new_tokens": 5}
    assert AnswerOptions(5, 1e-3).for_transformers() == {"do_sample": True, "max_new_tokens": 5, "temperature": 1e-3}


def test_the_server_passes_on_all_but_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed: list[Any] = []
    monkeypatch.setattr(serve, "_serve_with_transformers", lambda *given: passed.append((given[5], given[-1])))
    words = ["serve", str(tmp_path), "--engine", "transformers"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--backend", "auto", "--moves", "off", "--order", "off"]).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--kept-tokens", "0", "--max-model-len", "9"]).exit_code == 0
    usual, none = {"device": "cpu", "dtype": "auto", "weights": None}, {"context": None, "kept_tokens": None}
    assert passed == [(none, usual), (none, {**usual, "order": "off"}), ({"context": 9, "kept_tokens": 0}, usual)]


@pytest.mark.parametrize("option", ["--rest", "--kept-tokens"])
def test_what_vllm_does_not_take(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "chosen_engine", lambda *_: (Engine.vllm, "engine: vLLM"))
    done = CliRunner().invoke(app, ["serve", str(tmp_path), option, "0"])
    shown = " ".join(done.output.split())
    assert done.exit_code == 2 and "only the transformers engine takes this" in shown and option in shown
