"""`lancebill explain`: verdicts of every backend, for checkpoints and shapes, also on devices this machine lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from project import ROOT
from typer.testing import CliRunner, Result

import lancebill.backends as backends
from lancebill.backends import oracle
from lancebill.backends import registry as registry_module
from lancebill.backends.base import Reason
from lancebill.backends.oracle import explain as lancebill_explain
from lancebill.backends.reference import Reference
from lancebill.backends.registry import registry
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.stored_layer import StoredLayer
from lancebill.cli.main import app
from lancebill.errors import ShardError, SpecError
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device
from lancebill.moe.model_shapes import NAMED, parse_shape
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.testing import judge
from lancebill.testing.checkpoints import Geometry
from lancebill.testing.models import write_model

FINE, PROBLEM, USAGE = 0, 1, 2
SMALL = Geometry(experts=4, hidden=128, intermediate=64, layers=2)
GUIDE = ROOT / "docs" / "guides" / "add-a-backend.md"


class Picky(Reference):
    name = "picky"

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        yield Reason("device", "needs a [quantum] computer", "wait a few years")
        yield Reason("weights", f"{problem.w13.spec} is not to its taste")


class Shy(Reference):
    name = "shy"
    on_request = True


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    backends_by_name = {backend.name: backend for backend in (Picky(), Reference(), Shy())}
    for module in (registry_module, oracle):
        monkeypatch.setattr(module, "registry", lambda: backends_by_name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", SMALL)
    return tmp_path / "model"


def call(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def parsed(*words: object, code: int = FINE) -> dict[str, Any]:
    result = call("explain", *words, "--json")
    assert result.exit_code == code, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


# shapes ----------------------------------------------------------------------------------------------


def test_named_shapes_match_the_models() -> None:
    sizes = {
        name: (s.experts, s.hidden, s.intermediate, s.top_k, str(s.activation), s.bias) for name, s in NAMED.items()
    }
    assert sizes == {
        "deepseek-v4-flash": (256, 4096, 2048, 6, "silu (limit 10)", False),
        "gpt-oss-120b": (128, 2880, 2880, 4, "swigluoai (limit 7)", True),
        "qwen3-30b-a3b": (128, 2048, 768, 8, "silu", False),
        "mixtral-8x7b": (8, 4096, 14336, 2, "silu", False),
        "deepseek-v3": (256, 7168, 2048, 8, "silu", False),
        "kimi-k2": (384, 7168, 2048, 8, "silu", False),
        "glm-4.5-air": (128, 4096, 1408, 8, "silu", False),
        "llama-4-scout": (16, 5120, 8192, 1, "silu", False),
        "qwen3-235b-a22b": (128, 4096, 1536, 8, "silu", False),
    }


@pytest.mark.parametrize(
    "text", ["", "mixtral", "1,2,3", "8,64,64,0", "8,64,-64,2", "8,64,64,9", "8,64,64,²", "9" * 5000 + ",1,1,1"]
)
def test_invalid_shapes_are_rejected(text: str) -> None:
    with pytest.raises(SpecError):
        parse_shape(text)


def test_shape_and_checkpoint_give_the_same_problem(model: Path) -> None:
    """The sizes and the shards are the same, whether they come from files or from a shape."""
    for spec in ("mxfp4", "int4-g32", "fp8-block"):
        for tp in (1, 2):
            from_files = parsed(model, "--weights", spec, "--tp", tp)["problem"]
            by_name = parsed("--shape", "4,128,64,2", "--weights", spec, "--tp", tp)["problem"]
            assert from_files == by_name


@pytest.mark.parametrize(("tp", "share"), [(1, 2880), (2, 1440), (4, 736), (8, 384)])
def test_named_shape_shards_at_block_boundaries(tp: int, share: int) -> None:
    down = NAMED["gpt-oss-120b"].problem(parse_spec("mxfp4"), ACTIVATIONS["bf16"], tp=tp).w2
    assert down is not None and (down.k, str(down.spec)) == (share, "mxfp4")


def test_named_shape_of_one_expert_parallel_rank() -> None:
    problem = NAMED["kimi-k2"].problem(parse_spec("int4-g32"), ACTIVATIONS["bf16"], ep=8)
    assert (problem.experts, problem.global_experts, problem.intermediate) == (48, 384, 2048)


def test_impossible_shards_are_rejected() -> None:
    with pytest.raises(ShardError, match="768"):
        NAMED["qwen3-30b-a3b"].problem(parse_spec("mxfp4"), ACTIVATIONS["bf16"], tp=5)
    assert call("explain", "--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--tp", 5).exit_code == PROBLEM


# verdicts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "cpu"])
@pytest.mark.parametrize("shape", ["gpt-oss-120b", "kimi-k2", "mixtral-8x7b"])
def test_explain_works_for_absent_devices(shape: str, device: str) -> None:
    answer = parsed("--shape", shape, "--weights", "mxfp4", "--device", device)
    assert answer["device"] == device
    assert answer["problem"]["experts"] == NAMED[shape].experts
    assert [backend["name"] for backend in answer["backends"]] == list(registry())
    by_name = {backend["name"]: backend for backend in answer["backends"]}
    assert by_name[answer["choice"]]["supported"]
    problem = NAMED[shape].problem(parse_spec("mxfp4"), ACTIVATIONS["bf16"])
    assert lancebill_explain(problem, device).describe()["backends"] == answer["backends"]
    for backend in answer["backends"]:
        assert backend["supported"] == (not backend["reasons"])
        assert (backend["estimate_us"] is not None) == backend["supported"]
        assert all(reason["code"] and reason["text"] for reason in backend["reasons"])


@pytest.mark.usefixtures("three")
def test_every_reason_is_listed() -> None:
    words = ("--shape", "8,64,64,2", "--weights", "int4-g32", "--device", "sm_90")
    answer = parsed(*words)
    assert answer["choice"] == "reference"
    picky = next(backend for backend in answer["backends"] if backend["name"] == "picky")
    assert picky == {
        "name": "picky",
        "supported": False,
        "reasons": [
            {"code": "device", "text": "needs a [quantum] computer", "hint": "wait a few years"},
            {"code": "weights", "text": "int4-g32 is not to its taste", "hint": None},
        ],
        "estimate_us": None,
    }
    text = call("explain", *words).stdout
    for expected in ("needs a [quantum] computer", "wait a few years", "int4-g32 is not to its taste", "on request"):
        assert expected in text
    assert "reference: the only candidate" in text


@pytest.mark.usefixtures("three")
def test_a_requested_backend_is_chosen_or_refused() -> None:
    words = ("--shape", "8,64,64,2", "--weights", "mxfp4", "--device", "cpu")
    assert parsed(*words, "--backend", "shy")["choice"] == "shy"
    assert "shy, as requested" in call("explain", *words, "--backend", "shy").stdout
    refused = parsed(*words, "--backend", "picky", code=PROBLEM)
    assert refused["choice"] is None
    assert len(refused["backends"]) == 3
    result = call("explain", *words, "--backend", "picky")
    assert result.exit_code == PROBLEM
    assert "refused" in result.stdout
    assert "wait a few years" in result.stdout


def test_tokens_and_activations_change_the_answer() -> None:
    words = ("--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--device", "cpu", "--backend", "reference")
    few, many = (parsed(*words, "--tokens", tokens)["backends"] for tokens in (1, 4096))
    assert [b["estimate_us"] for b in few if b["supported"]] < [b["estimate_us"] for b in many if b["supported"]]
    assert parsed(*words, "--activations", "fp8")["problem"]["activations"] == "fp8"
    assert parsed(*words, "--activations", "fp16")["problem"]["input"] == "fp16"


# checkpoints -----------------------------------------------------------------------------------------


def test_explaining_a_checkpoint_matches_loading_it(model: Path) -> None:
    answer = parsed(model, "--layer", 1, "--device", "cpu")
    assert (answer["source"], answer["layer"]) == (str(model), 1)
    with Checkpoint.open(model) as checkpoint:
        layer = RoutedExperts.from_checkpoint(checkpoint, 1)
    assert layer.choice.describe() == {key: answer[key] for key in layer.choice.describe()}
    assert "layer 0" in call("explain", model).stdout


def test_options_override_the_checkpoint(model: Path) -> None:
    problem = parsed(model, "--weights", "mxfp4", "--activations", "fp8", "--device", "sm_90")["problem"]
    assert (problem["w13"], problem["activations"], problem["input"]) == ("mxfp4", "fp8", "bf16")
    assert parsed(model, "--activations", "checkpoint")["problem"]["activations"] == "bf16"
    assert parsed(model, "--activations", "fp16")["problem"]["input"] == "fp16"


def test_a_layer_without_experts_is_an_error(model: Path) -> None:
    assert "layer 7" in parsed(model, "--layer", 7, code=PROBLEM)["error"]["what"]


def test_static_activations_need_input_scales(model: Path) -> None:
    error = parsed(model, "--activations", "fp8-static", code=PROBLEM)["error"]
    assert "input scale" in error["what"] and error["where"] == "layer 0, w13"


def test_differently_quantised_layers_are_named(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    plain, mxfp4 = (parse_spec(name) for name in ("bf16", "mxfp4"))
    monkeypatch.setattr(StoredLayer, "spec", lambda layer, name: mxfp4 if layer.index == 1 else plain)
    assert "quantised differently, see --layer: 1" in call("explain", model).stdout
    assert "quantised differently, see --layer: 0" in call("explain", model, "--layer", 1).stdout


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--shape", "8,64,64,2"),
        ("--shape", "gpt-5", "--weights", "mxfp4"),
        ("--shape", "8,64,64,2", "--weights", "int40"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--device", "abacus"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--backend", "none"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--layer", "1"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--mixture", "text"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--revision", "main"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--moves", "recency"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--backend", "none"),
        ("--shape", "8,64,64,2", "--weights", "mxfp4", "--activations", "checkpoint"),
        ("no/such/path",),
        ("no/such/path", "--shape", "8,64,64,2"),
    ],
)
def test_usage_errors(words: tuple[str, ...]) -> None:
    error = parsed(*words, code=USAGE)["error"]
    assert error["what"]


# the guide -------------------------------------------------------------------------------------------


def test_the_guides_backend_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry finds it, it passes the judge, and `explain` lists it."""
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    (tmp_path / "guide_unquantised.py").write_text(source)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    registry.cache_clear()
    try:
        backend = registry()["unquantised"]
        assert judge.check_backend(backend, Device("cpu")) >= 2
        words = ("--shape", "8,64,64,2", "--device", "cpu", "--backend", "unquantised")
        assert parsed(*words, "--weights", "bf16")["choice"] == "unquantised"
        refused = parsed(*words, "--weights", "mxfp4", "--activations", "fp8", code=PROBLEM)
        reasons = next(b["reasons"] for b in refused["backends"] if b["name"] == "unquantised")
        assert [reason["code"] for reason in reasons] == ["weights", "weights", "activations"]
    finally:
        registry.cache_clear()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--device", "cpu", "--gpu-experts", "64"],
            "split between a GPU and the CPU where --gpu-experts got device 'cpu' hint --device sm_90",
        ),
        (["--gpu-experts", "999"], "expected 0 to 128 got 999"),
        (["--gpu-experts", "64", "--weights", "bf16"], "need the CPU kernels"),
        (["--gpu-experts", "0", "--moves", "recency"], "expected 1 to 127 got 0"),
        (["--gpu-experts", "128", "--moves", "recency"], "expected 1 to 127 got 128"),
        (["--moves", "recency"], "only where layers are split"),
    ],
)
def test_splits_that_cannot_run_are_refused(words: list[str], message: str) -> None:
    first = ["explain", "--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--device", "sm_90"]
    done = CliRunner().invoke(app, [*first, *words])
    assert done.exit_code in (1, 2) and message in " ".join(done.output.split()), done.output


def test_small_batches_copy_nothing() -> None:
    words = ["explain", "--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--device", "sm_90", "--gpu-experts", "64"]
    for tokens, copied in (("48", False), ("2048", True)):
        made = json.loads(CliRunner().invoke(app, [*words, "--tokens", tokens, "--json"]).output)["missing_experts"]
        assert bool(made["streamed"]) == copied and made["cpu"]
        assert copied or made["cpu_us"] == made["cpu_alone_us"]
