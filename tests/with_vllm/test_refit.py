"""Weights that change under a running engine, start at random, or belong to dense layers that vLLM cannot read."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import engine
import models
import tiny

from lancebill.formats import registry


def test_reload_there_and_back(folder: Path) -> None:
    first, other = (models.converted("qwen3_moe", "ct-int4", folder, seed) for seed in (7, 8))
    with engine.engine(first, {"mode": "require"}) as llm:
        layers = engine.takeover_of(llm).layers
        before = {index: {k: v.clone() for k, v in layer.state_dict().items()} for index, layer in layers.items()}
        answers = [engine.ask(llm)]
        for path in (other, first):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            answers.append(engine.ask(llm))
        for index, layer in layers.items():
            assert all(torch.equal(tensor, before[index][name]) for name, tensor in layer.state_dict().items())
    assert answers[0] == answers[2] and answers[0].tokens != answers[1].tokens
    assert answers[1].tokens == engine.reference(other).tokens


def test_dummy_weights_need_only_a_config(folder: Path) -> None:
    source = models.converted("qwen3_moe", "ct-int4", folder)
    bare = folder / "bare"
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    with engine.engine(bare, {"mode": "require"}, load_format="dummy") as llm:
        assert engine.takeover_of(llm).layers.keys() == {0, 1}
        assert all(len(tokens) == engine.TOKENS for tokens in engine.ask(llm).tokens)


def test_layers_without_a_rule_stay_with_vllm(folder: Path) -> None:
    model = models.plain_model("qwen3_moe", folder)
    with engine.engine(model, {"weights": [["1", None]]}) as llm:
        takeover = engine.takeover_of(llm)
        assert {index: decision.taken for index, decision in takeover.decisions.items()} == {0: False, 1: True}
        got = engine.ask(llm)
    want = engine.reference(model)
    assert got.tokens == want.tokens and got.distance(want) <= 1e-5


def test_require_refuses_with_the_reasons(folder: Path) -> None:
    model = models.converted("qwen3_moe", "ct-int4", folder)
    assert json.loads((model / "config.json").read_text())["quantization_config"]
    with pytest.raises(Exception, match="hopper"), engine.engine(model, {"mode": "require", "backend": "hopper"}):
        pass


def test_quantised_attention_is_dequantised_while_loading(folder: Path) -> None:
    """vLLM's CPU build has no kernels for it, and refuses it without the plugin."""
    example = next(iter(registry()["fp8"].examples()))
    packed, plain = folder / "fp8-everything", folder / "fp8-everything-plain"
    quant = {**example.config.quant, "modules_to_not_convert": ["lm_head", "gate"]}
    source = models.plain_model("mixtral", folder)

    def is_quantised(module: str) -> bool:
        return ".experts." in module or ".self_attn." in module

    tiny.quantized_copy(source, packed, plain, quant, example.scheme, is_quantised)
    with engine.engine(packed, {"mode": "require"}) as llm:
        assert engine.takeover_of(llm).others.modules
        got = engine.ask(llm)
    want = engine.reference(packed)
    assert got.tokens == want.tokens and got.distance(want) <= 1e-5
