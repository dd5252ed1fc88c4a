"""Weights that change under a running engine, or start at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

import engine
import models


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
