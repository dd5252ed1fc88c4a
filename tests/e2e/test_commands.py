"""`lancebill generate` and `lancebill eval` on a tiny model with a tokenizer."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

from lancebill.backends.cpu.native import library  # noqa: E402
from lancebill.cli.main import app  # noqa: E402
from lancebill.errors import UnsupportedProblem  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands") / "model"
    tiny.save_model_with_tokenizer(transformers, folder)
    return folder


def commands() -> list[list[str]]:
    """The words of every command and command group."""
    found, pending = [], [([], typer.main.get_command(app))]
    for words, command in pending:
        found.append(words)
        inner = command.commands.items() if isinstance(command, typer.core.TyperGroup) else ()
        pending += [([*words, name], subcommand) for name, subcommand in inner]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage" in done.stdout and "--help" in done.stdout


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "lancebill", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("lancebill "), done.stderr


def call(*words: object) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_generate(model: Path) -> None:
    words = (
        "generate",
        model,
        "w1 w2 w3",
        "--max-tokens",
        5,
        "--weights",
        "int4-g32",
        "--backend",
        "torch-cpu",
        "--json",
    )
    found = call(*words)
    assert found["answers"][0]["tokens"] == 5
    assert len(found["answers"][0]["text"].split()) == 5
    assert list(found["layers"]) == ["int4-g32 x fp32 on torch-cpu"]
    repeated = call(*words)
    assert repeated["answers"][0]["text"] == found["answers"][0]["text"]


@pytest.mark.parametrize("backend", ["auto", "torch-cpu"])
def test_chat(model: Path, backend: str) -> None:
    """With native steps, and with transformers' own sampling."""
    words = ["chat", str(model), "--system", "w9", "--max-tokens", "3", "--backend", backend, "--weights", "int8"]
    typed = "w1 w2\n\n/clear\nw3\n/quit\nw4\n"
    done = CliRunner().invoke(app, words, input=typed)
    assert done.exit_code == 0, done.output
    answers = [line for line in done.stdout.splitlines() if line.startswith("w")]
    assert [len(answer.split()) for answer in answers] == [3, 3]


@pytest.mark.parametrize("backend", ["auto", "torch-cpu"])
def test_answers_end_with_the_context(model: Path, backend: str) -> None:
    """The model has 64 positions. A message that does not fit is refused, and the conversation goes on."""
    words = ["--max-tokens", "30", "--backend", backend, "--weights", "int8"]
    long, longer = "w1 " * 50, "w1 " * 64
    done = CliRunner().invoke(app, ["generate", str(model), long, "--raw", "--json", *words])
    assert done.exit_code == 0 and json.loads(done.stdout)["answers"][0]["tokens"] <= 14, done.output
    done = CliRunner().invoke(app, ["generate", str(model), longer, "--raw", *words])
    assert done.exit_code == 2 and "at most 63 tokens" in done.output
    done = CliRunner().invoke(app, ["chat", str(model), *words], input=f"{longer}\nw1\n")
    assert done.exit_code == 0 and "longer than the model's context" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("w")]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_refused_line_does_not_end_the_others(model: Path, as_json: bool) -> None:
    words = ["generate", str(model), "--raw", "--max-tokens", "2", "--weights", "int8", *["--json"] * as_json]
    done = CliRunner().invoke(app, words, input=f"w1\n{'w1 ' * 64}\nw2\n")
    assert done.exit_code == 1, done.output
    if as_json:
        answers = json.loads(done.stdout)["answers"]
        assert ["error" in answer for answer in answers] == [False, True, False]
        assert answers[1]["error"]["expected"] == "at most 63 tokens"
    else:
        assert len([line for line in done.stdout.splitlines() if line.startswith("w")]) == 2
        assert "longer than the model's context" in done.stderr


def test_yarn_gives_a_model_a_longer_context(model: Path, tmp_path: Path) -> None:
    """As the authors of Qwen3 describe it: `max_position_embeddings` stays as it is."""
    shutil.copytree(model, tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config["rope_parameters"] = {**config["rope_parameters"], **yarn}
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    for words, code in (("w1 " * 100, 0), ("w1 " * 128, 2)):
        done = CliRunner().invoke(app, ["generate", str(tmp_path / "long"), words, "--raw", "--max-tokens", "3"])
        assert done.exit_code == code, done.output
    assert "at most 127 tokens" in done.output


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Types text at a terminal, which is stdin; Ctrl-D ends it."""
    keyboard, screen = pty.openpty()
    with os.fdopen(screen) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield lambda text: os.write(keyboard, f"{text}\x04".encode())
    os.close(keyboard)


def test_prompts_from_a_terminal(model: Path, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    typed("w1 w2\n\nw3\n")
    app(["generate", str(model), "--max-tokens", "2", "--backend", "torch-cpu"], standalone_mode=False)
    out, err = capsys.readouterr()
    assert [len(line.split()) for line in out.splitlines()] == [2, 2]
    assert "Ctrl-D ends" in err and err.count("tokens/s") == 2


def test_a_conversation_in_a_terminal(
    model: Path, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("w1\n\nw2\n")
    app(["chat", str(model), "--max-tokens", "2", "--backend", "torch-cpu"], standalone_mode=False)
    out, err = capsys.readouterr()
    assert [len(line.split()) for line in out.replace("> ", "").splitlines()] == [2, 2, 0]
    assert "/quit or Ctrl-D" in err and err.count("tokens/s") == 2


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
def test_an_answer_ends_at_an_end_token(model: Path, tmp_path: Path) -> None:
    """Which is counted, and not shown."""
    words = ["w1 w2 w3", "--max-tokens", 5, "--weights", "int8", "--json"]
    whole = call("generate", model, *words)["answers"][0]["text"].split()
    ended = tmp_path / "model"
    shutil.copytree(model, ended)
    settings = json.loads((ended / "generation_config.json").read_text())
    last = next(word for i, word in enumerate(whole) if i and word not in whole[:i])
    settings["eos_token_id"] = 1 + int(last.removeprefix("w"))
    (ended / "generation_config.json").write_text(json.dumps(settings))
    found = call("generate", ended, *words)["answers"][0]
    assert found["text"].split() == whole[: whole.index(last)] and found["tokens"] == whole.index(last) + 1


def test_eval_as_a_table(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i}" for i in range(40)))
    words = ["eval", str(model), "--text", str(text), "--variant", "stored", "--variant", "int8", "--limit", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "perplexity" in done.stdout and "paired test" in done.stdout, done.output


def test_eval(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * 7 % 120}" for i in range(60)))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "w1", "answer": "#### 1"}\n{"question": "w2", "answer": "#### 2"}\n')
    found = call(
        "eval", model, "--text", text, "--window", 32, "--stride", 16, "--questions", questions, "--answer-tokens", 4,
        "--variant", "stored", "--variant", "stored//reference", "--variant", "int4-g32/int8/torch-cpu", "--json",
        "--batch", 2, "--answers", tmp_path / "answers.jsonl",
    )  # fmt: skip
    first, same, rounded = found["variants"]
    assert same["perplexity"]["value"] == pytest.approx(first["perplexity"]["value"], rel=1e-5)
    assert same["flexible"]["p"] == 1.0
    assert rounded["perplexity"]["value"] != first["perplexity"]["value"]
    assert list(rounded["layers"]) == ["int4-g32 x int8 on torch-cpu"]
    logged = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in logged] == [row["variant"] for row in found["variants"] for _ in range(2)]
    assert [row["right"] for row in logged] == ["1", "2"] * 3
    assert all(len(row["answer"].split()) == 4 for row in logged)


def test_eval_of_one_variant_on_questions_alone(model: Path, tmp_path: Path) -> None:
    """Answers of more tokens than lie between two looks for the next question."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "w1", "answer": "#### 1"}\n')
    words = ["eval", str(model), "--questions", str(questions), "--answer-tokens", "10", "--answers"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "answers.jsonl")])
    assert done.exit_code == 0 and "strict" in done.stdout, done.output
    assert "perplexity" not in done.stdout and "paired test" not in done.stdout
    assert len(json.loads((tmp_path / "answers.jsonl").read_text())["answer"].split()) == 10


def test_a_batch_of_questions_gives_the_same_answers(model: Path, tmp_path: Path) -> None:
    """Prompts of the same length need no padding, so the answers equal those of single prompts."""
    from lancebill.cli import models
    from lancebill.evaluate.run import answers

    loaded, tokenizer = models.load(model, dtype="auto")
    prompts = ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9"]
    together = answers(loaded, tokenizer, prompts, 6)
    assert together == [answers(loaded, tokenizer, [prompt], 6)[0] for prompt in prompts]
    assert len(set(together)) > 1
    (padded, _) = answers(loaded, tokenizer, ["w1 w2 w3", "w4 w5 w6 w7 w8"], 6)
    assert padded == together[0]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["eval", "model"], 2, "nothing to evaluate on"),
        (["eval", "model", "--text", "no"], 2, "no such file"),
        (["eval", "model", "--text", "model/model.safetensors"], 1, "not a UTF-8 text"),
        (["eval", "model", "--text", "empty"], 2, "two tokens"),
        (["eval", "model", "--text", "text", "--stride", "9", "--window", "8"], 2, "windows cannot cover"),
        (["eval", "model", "--text", "long"], 2, "longer than the model's context"),
        (["eval", "model", "--questions", "empty"], 1, "no questions"),
        (["eval", "model", "--questions", "text"], 1, "not a line of JSON"),
        (["eval", "model", "--text", "text", "--variant", "int4/bf16/cpu/int8/x"], 2, "cannot read the variant"),
        (["generate", "none", "x"], 2, "no such file"),
        (["generate", "model", ""], 2, "no tokens"),
        (["generate", "model", "x", "--dtype", "banana"], 2, "banana"),
        (["generate", "model", "x", "--device", "tpu"], 2, "unknown device"),
        (["generate", "model", "x", "--backend", "none"], 2, "no backend is called 'none'"),
        (["generate", "dense", "x"], 1, "has no experts"),
        (["generate", "empty", "x"], 1, "no config.json"),
        (["generate", "model", "x", "--gpu-memory", "1GiB"], 2, "split between a GPU and the CPU"),
        (["generate", "model", "x", "--gpu-experts", "4"], 2, "split between a GPU and the CPU"),
        (["generate", "model", "x", "--moves", "recency"], 2, "only where layers are split"),
        (
            ["generate", "model", "x", "--gpu-experts", "4", "--device", "sm_90", "--cpu-threads", "5000"],
            2,
            "than there are CPUs",
        ),
        (["generate", "model", "x", "--weights", "int9"], 2, "unknown number type"),
        (["generate", "model", "x", "--rest", "int9"], 2, "unknown number type"),
        (["generate", "model", "x", "--activations", "foo"], 2, "unknown number type"),
        (["chat", "model", "--temperature", "inf"], 2, "'--temperature'"),
        (["chat", "model", "--top-p", "nan"], 2, "'--top-p'"),
        (["serve", "model", "--api-key", ""], 2, "the key is empty"),
        (["bench-serve", "http://127.0.0.1:9/v1", "--odd"], 2, "no such option"),
        (["generate", "wordless", "x"], 1, "cannot load a tokenizer"),
        (["generate", "silent", "x"], 1, "the tokenizer has no words"),
        (["generate", "unknown", "x"], 1, "does not know the model"),
        (["bench-serve", "http://localhost:port/v1"], 2, "not the URL"),
        (["bench-serve", "nowhere"], 2, "no such checkpoint, and not the URL"),
        (["bench-serve", "http://127.0.0.1:9/v1"], 1, "no server answers"),
        (["bench-serve", "http://127.0.0.1:9/v1", "--engine", "transformers"], 2, "for a checkpoint"),
        (["serve", "model", "--engine", "vllm", "--device", "cpu"], 2, "selects the device itself"),
        (["serve", "model", "--engine", "transformers", "--odd"], 2, "no such option"),
        (["chat", "voiceless"], 2, "no chat template"),
    ],
)
def test_usage_errors_print_no_traceback(
    model: Path, words: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    Path("empty").touch()
    Path("text").write_text("w1 w2 w3 w4")
    Path("long").write_text("w1 " * 65)
    if not Path("dense").exists():
        config = transformers.LlamaConfig(**tiny.COMMON, intermediate_size=32)
        transformers.LlamaForCausalLM(config).save_pretrained("dense")
        for file in Path("model").glob("tokenizer*"):
            shutil.copy(file, "dense")
        shutil.copytree("model", "wordless", ignore=shutil.ignore_patterns("tokenizer*"))
        shutil.copytree("wordless", "silent")
        transformers.Qwen2Tokenizer().save_pretrained("silent")
        shutil.copytree("model", "voiceless")
        tokenizer = transformers.AutoTokenizer.from_pretrained("voiceless")
        tokenizer.chat_template = None
        Path("voiceless/chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained("voiceless")
        shutil.copytree("model", "unknown")
        config = json.loads(Path("unknown/config.json").read_text())
        Path("unknown/config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code and message in done.output and "Traceback" not in done.output, done.output


@pytest.mark.parametrize(
    ("file", "text", "code", "message"),
    [
        ("config.json", "<html>", 1, "not valid JSON"),
        ("tokenizer.json", "{}", 1, "cannot load a tokenizer"),
        ("chat_template.jinja", "{{ raise_exception('no [system] here') }}", 2, "refuses this\n  got      no [system]"),
    ],
)
def test_files_that_transformers_reads_too(
    model: Path, tmp_path: Path, file: str, text: str, code: int, message: str
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / file).write_text(text)
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "model"), "w1"])
    assert done.exit_code == code and message in done.output and "Traceback" not in done.output, done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": None}, "transformers cannot read the config"),
        ({"hidden_act": "sillu"}, "unknown value of 'hidden_act'"),
        ({"num_attention_heads": -1}, "transformers cannot build the model"),
        ({"num_hidden_layers": 10**9}, "layers 2 to 999999999"),
        ({"model_type": None}, "transformers cannot read the config"),
    ],
)
def test_a_wrong_value_in_the_config_is_named(
    model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | change))
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "model"), "w1"])
    assert done.exit_code == 1 and message in done.output and "Traceback" not in done.output, done.output


def test_every_integer_is_a_seed(model: Path) -> None:
    for seed in (-1, 2**64, 2**63 - 1):
        words = ("generate", model, "w1", "--max-tokens", 2, "--temperature", 1, "--seed", seed, "--json")
        assert call(*words)["answers"][0]["tokens"] == 2


def test_a_server_gets_the_options_of_the_load_test(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["bench-serve", str(model), "--engine", "transformers", "--api-key", "x", "--odd"]
    assert app(words, standalone_mode=False) == 2
    written = capfd.readouterr().err
    assert "as requested" in written and "--odd" in written and "refuses its options" in written


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_must_be_installed_to_be_requested(model: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(model), "--engine", "vllm"])
    assert done.exit_code == 1 and "vLLM is not installed" in done.output


def test_transformers_must_be_installed_for_whole_models(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lancebill
    from lancebill.cli import models

    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(UnsupportedProblem, match="transformers is not installed"):
        models.load(model)
    monkeypatch.delitem(sys.modules, "lancebill.integrations.transformers.pretrained", raising=False)
    with pytest.raises(UnsupportedProblem, match="transformers is not installed"):
        lancebill.from_pretrained(model)


def test_the_reports_say_how_the_rest_is_computed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU that converts bf16, for a checkpoint in bf16."""
    import lancebill
    from lancebill.integrations.transformers import pretrained

    shutil.copytree(model, tmp_path / "bf16")
    config = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(pretrained, "_computes", lambda dtype: False)
    loaded = lancebill.from_pretrained(tmp_path / "bf16", weights={"experts": "mxfp4"})
    said = "what is not quantised: fp32 (bf16 is slower on this CPU)"
    assert said in str(loaded.lancebill_reports()) and said in str(loaded.lancebill_rest)
    assert "declares" not in str(loaded.lancebill_reports()[0])
    plain = lancebill.from_pretrained(tmp_path / "bf16", dtype="float32")
    assert plain.lancebill_rest.not_quantised == "fp32"
