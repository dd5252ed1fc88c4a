"""The vLLM plugin without vLLM: settings, placement, hooks against recorded signatures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from takeovers import settings

from lancebill import Placement
from lancebill.errors import SpecError, UnsupportedProblem
from lancebill.integrations.vllm import hooks
from lancebill.integrations.vllm.placement import (
    dispatch_reason,
    dispatched_form,
    placement_of,
)
from lancebill.integrations.vllm.settings import Settings, parse_settings

SIGNATURES = json.loads(Path(__file__).with_name("vllm_signatures.json").read_text(encoding="utf-8"))


def test_settings() -> None:
    assert parse_settings({}) == parse_settings(None) == parse_settings({"other": 1}) == Settings()
    assert settings(mode="off").takes_any is False
    rules = settings(weights=[["0-3", "int4-g128"], ["7", None]], activations="fp8")
    assert [rules.names(layer) for layer in (0, 3, 4, 7)] == [True] * 4  # activations are about all layers
    rules = settings(weights=[["0-3", "int4-g128"], ["7", None]])
    assert [rules.names(layer) for layer in (0, 3, 4, 7)] == [True, True, False, True]
    assert parse_settings({}, batch_invariant=True).order == "batch-invariant"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mod": "offer"}, "'mod'"),
        ({"mode": "always"}, "lancebill.mode: .*offer or require or off.*'always'"),
        ({"mode": None}, "lancebill.mode"),
        ({"backend": "nope"}, "lancebill.backend: .*hopper"),
        ({"weights": "int5000"}, "lancebill.weights"),
        ({"weights": [["0-x", "mxfp4"]]}, "lancebill.weights.*0-x"),
        ({"weights": [["0", "mxfp4", 1]]}, "lancebill.weights"),
        ({"activations": 4}, "lancebill.activations"),
        ({"weights": []}, "lancebill.weights"),
        ({"weights": [["5-3", "mxfp4"]]}, "lancebill.weights.*'5-3' matches no layer.*3-5"),
        ({"gpu_memory": "much"}, "lancebill, gpu_memory.*20GiB"),
        ({"gpu_memory": True}, "lancebill, gpu_memory"),
        ({"gpu_memory": "24"}, "lancebill, gpu_memory.*needs a unit.*24GiB"),
        ({"gpu_experts": -1}, "lancebill, gpu_experts"),
        ({"gpu_experts": True}, "lancebill, gpu_experts"),
        ({"gpu_experts": 1, "cpu_threads": 0}, "lancebill, cpu_threads"),
        ({"cpu_threads": 1}, "lancebill, cpu_threads.*no layer is split"),
        ({"moves": "recency"}, "lancebill, moves.*only where layers are split"),
        ({"moves": "recency", "gpu_experts": 1, "order": "batch-invariant"}, "not batch-invariant"),
        ({"linear": "of"}, "lancebill.linear: .*auto or offer or off"),
        ({"moves": "always"}, "lancebill.moves.*off or recency"),
        ({"gpu_experts": 1, "gpu_memory": "1GiB"}, "gpu_experts and gpu_memory"),
        ([], "not an object"),
    ],
)
def test_wrong_settings_are_refused(section: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_settings({"lancebill": section})


def test_a_misspelled_section_is_a_warning_and_only_once(caplog: pytest.LogCaptureFixture) -> None:
    for key in ("lancebil", "Lancebill", "lance_bill"):
        for _ in range(2):
            assert parse_settings({key: {"mode": "require"}, "other": 1}) == Settings()
    said = [f"--additional-config: {key!r} is ignored; is 'lancebill' meant?" for key in ("lancebil", "Lancebill")]
    assert [record.getMessage() for record in caplog.records][:2] == said and len(caplog.records) == 3
    caplog.clear()
    parse_settings({"lancebil": {}, "lancebill": {}})
    parse_settings({"balance": 1, "billing": 2, "": 3})
    assert not caplog.records


def test_batch_invariance_must_agree() -> None:
    with pytest.raises(SpecError, match="batch-invariant"):
        parse_settings({"lancebill": {"order": "fast"}}, batch_invariant=True)


@dataclass(frozen=True)
class FakeParallel:
    tp_rank: int = 1
    tp_size: int = 2
    ep_rank: int = 3
    ep_size: int = 4
    use_ep: bool = False
    all2all_backend: str = "allgather_reducescatter"
    use_all2all_kernels: bool = False


def test_placement() -> None:
    tensor = placement_of(FakeParallel(), "linear", 0)
    assert (tensor.tp_rank, tensor.tp_size, tensor.ep_size) == (1, 2, 1)
    expert = placement_of(FakeParallel(0, 1, use_ep=True), "round_robin", 2)
    assert expert == Placement(0, 1, 3, 4, "round_robin", 2)


def test_forms_of_all_to_all_backends() -> None:
    def backend(name: str) -> FakeParallel:
        return FakeParallel(use_all2all_kernels=True, all2all_backend=name)

    for name, form in (("naive", None), ("deepep_low_latency", "batched"), ("deepep_high_throughput", "indexed")):
        assert dispatch_reason(backend(name)) is None and dispatched_form(backend(name)) == form
    assert dispatched_form(FakeParallel(all2all_backend="deepep_low_latency")) is None  # one data-parallel rank
    refused = dispatch_reason(backend("moonep"))
    assert refused is not None and "moonep" in refused.text


@pytest.mark.parametrize("version", SIGNATURES)
def test_hooks_exist_in_every_tested_version(version: str) -> None:
    for hook in (*hooks.HOOKS, *hooks.BALANCING_HOOKS):
        recorded = SIGNATURES[version][str(hook)]
        assert recorded is not None, hook
        assert set(hook.arguments) <= set(recorded), hook
    assert hooks.version_warning(version) is None


def test_optional_hooks_exist_in_the_first_and_last_tested_version() -> None:
    for version in (min(SIGNATURES), max(SIGNATURES)):
        for hook in (*hooks.NARROW_HOOKS, *hooks.STOCK_HOOKS, *hooks.RELOAD_HOOKS, *hooks.SAVE_HOOKS):
            assert set(hook.arguments) <= set(SIGNATURES[version][str(hook)] or ()), (version, hook)


def test_missing_hooks_and_untested_versions_are_named() -> None:
    with pytest.raises(UnsupportedProblem, match=r"json\.dumper"):
        hooks.check_hooks((hooks.Hook("json", "dumper"),))
    assert "json.dumper" in (hooks.missing_hook((hooks.Hook("json", "dumper"),)) or "")
    with pytest.raises(UnsupportedProblem, match="no colour"):
        hooks.check_hooks((hooks.Hook("json", "dumps", ("colour",)),))
    hooks.check_hooks((hooks.Hook("json", "JSONEncoder.default", ("o",)),))
    for version in ("0.25.1", "0.40.0rc1", "1.0", "dev"):
        assert "0.26 to 0.32" in (hooks.version_warning(version) or "")


def test_registration_without_vllm_is_one_warning() -> None:
    code = "from lancebill.integrations.vllm.plugin import register; import sys; sys.modules['vllm'] = None; register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "lancebill is not used" in done.stderr
    code = code.replace("; register()", "; import os; os.environ['LANCEBILL_VLLM'] = 'off'; register()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code.replace("'off'", "'require'")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr, "what requires it does not start without"
