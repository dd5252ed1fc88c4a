"""Quantised dense layers (attention, shared experts): dequantised while they load, or computed by our kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import engine
import models

BOUND = 1e-5
SAMPLE = [("off", "fp8-block"), ("offer", "ct-int4")]
CELLS = sorted({*SAMPLE, *((mode, kind) for kind in models.EVERYWHERE for mode in ("off", "offer"))})


def linear_methods(llm: Any) -> dict[str, Any]:
    """The methods of ours by layer, in an engine of this process."""
    from lancebill.integrations.vllm.linear import LinearMethod

    named = engine.model_of(llm).named_modules()
    methods = {name: module.quant_method for name, module in named if hasattr(module, "quant_method")}
    return {name: method for name, method in methods.items() if isinstance(method, LinearMethod)}


@pytest.mark.parametrize(("mode", "kind"), CELLS)
def test_dense_layers(
    mode: str, kind: str, folder: Path, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    if (mode, kind) not in SAMPLE and not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.quantised_everywhere("glm4_moe", kind, folder)
    with engine.engine(model, {"mode": "require", "linear": mode}) as llm:
        assert engine.takeover_of(llm).others.modules
        ours = linear_methods(llm)
        got = engine.ask(llm)
    want = engine.reference(model)
    record_property("distance", got.distance(want))
    assert got.tokens == want.tokens and got.distance(want) <= BOUND
    taken = {name.rpartition(".")[2] for name in ours}
    assert taken == (set() if mode == "off" else {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})


def test_compiled_dense_layers(folder: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.quantised_everywhere("glm4_moe", "ct-int4", folder)
    with engine.engine(model, {"mode": "require", "linear": "offer"}, enforce_eager=False) as llm:
        got = engine.ask(llm)
    want = engine.reference(model)
    assert got.tokens == want.tokens and got.distance(want) <= BOUND


def test_dense_layers_are_reloaded(folder: Path) -> None:
    first, other = (models.quantised_everywhere("glm4_moe", "ct-int4", folder, seed) for seed in (7, 8))
    with engine.engine(first, {"mode": "require", "linear": "offer"}) as llm:
        places = {name: method.linear.packed["w13"] for name, method in linear_methods(llm).items()}
        answers = [engine.ask(llm)]
        for path in (other, first):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            answers.append(engine.ask(llm))
        for name, method in linear_methods(llm).items():
            now = method.linear.packed["w13"]
            assert all(now[part].data_ptr() == tensor.data_ptr() for part, tensor in places[name].items())
    assert answers[0] == answers[2] and answers[0].tokens != answers[1].tokens
    assert answers[1].tokens == engine.reference(other).tokens
