"""`lancebill serve` with vLLM's server: the command that is started, and which engine is chosen. Needs no vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from lancebill.cli import engines
from lancebill.cli import serve as serve_command
from lancebill.cli.engines import Engine, chosen_engine
from lancebill.cli.main import app
from lancebill.errors import SpecError, UnsupportedProblem
from lancebill.integrations.vllm import plugin, server
from lancebill.integrations.vllm.server import server_start


def additional(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command[command.index("--additional-config") + 1])
    return found


def test_the_command_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--max-model-len", "48", "--additional_config", '{"other": 1, "lancebill": {"weights": "mxfp4"}}']
    section = {"mode": "require", "activations": "fp8", "weights": None}
    command = server_start("model", section, [*words, "--api-key=x"]).command
    assert additional(command) == {
        "other": 1,
        "lancebill": {"mode": "require", "activations": "fp8", "weights": "mxfp4"},
    }
    assert command[-3:] == ["--max-model-len", "48", "--api-key=x"]
    for distribution, entry in (("vllm", "vllm.entrypoints.cli.main"), ("x", "vllm.entrypoints.openai.api_server")):
        monkeypatch.setattr(server, "_version", lambda name, distribution=distribution: name == distribution or None)
        assert server_start("model", {}, []).command[2] == entry


@pytest.mark.parametrize(
    ("section", "words", "message"),
    [
        ({"weights": "int5000"}, [], "weights"),
        ({"order": "fast"}, ['--additional-config={"lancebill": {"order": "fast"}}'], "order is given twice"),
        ({"gpu_memory": "1GiB"}, ["--additional-config", '{"lancebill": {"gpu_memory": 1}}'], "and --gpu-memory"),
        ({"moves": "recency"}, [], "moves: .*only where layers are split"),
        ({"moves": "nonsense"}, [], "lancebill.moves"),
        ({"gpu_memory": "20GiB"}, [], "--gpu-memory: .*vLLM on a CPU.*without this option"),
        ({"gpu_experts": 4}, [], "--gpu-experts: .*vLLM on a CPU"),
        ({}, ["--additional-config", "{"], "not JSON"),
        ({}, ["--additional-config"], "not JSON"),
        ({}, ["--additional-config", "[]"], "not an object"),
        ({}, ["--additional-config", '{"lancebill": 3}'], "not an object"),
    ],
)
def test_wrong_options_are_found_before_vllm_starts(
    section: Any, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_on_cpu", lambda: True)
    with pytest.raises(SpecError, match=message):
        server_start("model", section, words)


def test_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert chosen_engine(None, None) == (Engine.transformers, "engine: transformers (vLLM is not installed)")
    with pytest.raises(UnsupportedProblem, match="not installed"):
        chosen_engine(Engine.vllm, None)
    for module in (engines, server):
        monkeypatch.setattr(module, "find_spec", lambda name: name)
    assert chosen_engine(None, None)[0] is Engine.vllm
    assert chosen_engine(None, "cuda:1")[0] is Engine.transformers
    assert chosen_engine(Engine.transformers, None)[0] is Engine.transformers
    with pytest.raises(SpecError, match="device"):
        chosen_engine(Engine.vllm, "cpu")


def test_serve_becomes_the_server_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    monkeypatch.setattr(server, "_on_cpu", lambda: False)
    started: list[list[str]] = []
    variables: list[dict[str, str]] = []
    monkeypatch.setattr(
        serve_command.os, "execve", lambda program, words, given: (started.append(words), variables.append(given))
    )
    words = ["serve", str(tmp_path), "--port", "1234", "--weights", "mxfp4", "--order", "batch-invariant"]
    done = CliRunner().invoke(app, [*words, "--tensor-parallel-size", "2", "--name", "me"])
    assert done.exit_code == 0, done.output
    expected = {"mode": "require", "weights": "mxfp4", "order": "batch-invariant"}
    assert additional(started[0]) == {"lancebill": expected}
    text = " ".join(started[0])
    assert "--port 1234" in text and "--served-model-name me" in text and text.endswith("--tensor-parallel-size 2")
    assert variables[0]["LANCEBILL_VLLM"] == "require"
    split = ["serve", str(tmp_path), "--gpu-memory", "20GiB", "--moves", "recency", "--cpu-threads", "1"]
    assert CliRunner().invoke(app, split).exit_code == 0
    expected = {"mode": "require", "gpu_memory": "20GiB", "moves": "recency", "cpu_threads": 1}  # type: ignore[dict-item]
    assert additional(started[1])["lancebill"] == expected
    assert CliRunner().invoke(app, ["serve", str(tmp_path), "--gpu-experts", "4"]).exit_code == 0
    assert additional(started[2])["lancebill"]["gpu_experts"] == 4
    with monkeypatch.context() as offline:
        offline.setattr("lancebill.checkpoint.read.hub.local_path", lambda *_: pytest.fail("downloads"))
        assert CliRunner().invoke(app, ["serve", "owner/name", "--weights", "off"]).exit_code == 2
    refused = CliRunner().invoke(app, [*words, "--engine", "transformers", "--tensor-parallel-size", "2"])
    assert refused.exit_code == 2


def test_the_mode_may_be_another_and_require_needs_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = server_start("model", {}, ['--additional-config={"lancebill": {"mode": "offer", "backend": "cpu"}}'])
    assert additional(offered.command)["lancebill"] == {"mode": "offer", "backend": "cpu"}
    offering = ["--additional-config", '{"lancebill": {"mode": "offer"}}']
    for given in ({}, {"VLLM_PLUGINS": "other,lancebill"}, {"LANCEBILL_VLLM": "on"}):
        monkeypatch.setattr(plugin.os, "environ", given)
        assert server_start("model", {}, []).environment == {**given, "LANCEBILL_VLLM": "require"}
    for name, value in (("LANCEBILL_VLLM", "off"), ("VLLM_PLUGINS", ""), ("VLLM_PLUGINS", "other")):
        monkeypatch.setattr(plugin.os, "environ", {name: value})
        with pytest.raises(SpecError, match=f"{name}: this keeps lancebill out of vLLM"):
            server_start("model", {}, [])
        assert server_start("model", {}, offering).environment == {name: value}
