"""Weights that change under a running engine, or start at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import engine
import models
from safetensors.torch import load_file, save_file

from lancebill.errors import UnsupportedProblem


def test_refits_there_and_back(folder: Path, request: pytest.FixtureRequest) -> None:
    """A to B to A, many times: every refit gives the same bits, and the answers of its weights."""
    refits = 1000 if request.config.getoption("--vllm-all") else 20
    first, other = (models.converted("qwen3_moe", "ct-int4", folder, seed) for seed in (7, 8))
    with engine.engine(first, {"mode": "require"}) as llm:
        layers = engine.takeover_of(llm).layers
        bits, answers = [snapshot(layers)], [engine.ask(llm)]
        for count in range(1, refits + 1):
            reload(llm, (first, other)[count % 2])
            if count == 1:
                bits.append(snapshot(layers))
                answers.append(engine.ask(llm))
            assert same(layers, bits[count % 2]), f"refit {count}"
            assert not any(layer.refit.pending for layer in layers.values())
        assert engine.ask(llm) == answers[0] and answers[0].tokens != answers[1].tokens
        for layer in layers.values():  # what is left of it after vLLM's sleep mode, which its CPU build does not have
            for tensor in layer.parameters():
                tensor.data.zero_()
        reload(llm, first)
        assert same(layers, bits[0]) and engine.ask(llm) == answers[0]
    assert answers[1].tokens == engine.reference(other).tokens


def reload(llm: Any, model: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def snapshot(layers: dict[int, Any]) -> dict[str, torch.Tensor]:
    return {f"{index}.{name}": t.clone() for index, layer in layers.items() for name, t in layer.state_dict().items()}


def same(layers: dict[int, Any], bits: dict[str, torch.Tensor]) -> bool:
    now = snapshot(layers)
    return now.keys() == bits.keys() and all(torch.equal(tensor, bits[name]) for name, tensor in now.items())


def test_a_wrong_reload_is_named_and_the_next_works(folder: Path) -> None:
    """A checkpoint without one expert tensor, one of another format, a part of a tensor."""
    from vllm.model_executor.model_loader import checkpoint_weight_patch as patches

    model, other = (models.plain_model("qwen3_moe", folder, seed) for seed in (7, 8))
    another = models.converted("qwen3_moe", "ct-int4", folder, 8)
    lacking = folder / "lacking"
    shutil.copytree(other, lacking)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in reversed(tensors) if ".layers.1.mlp.experts." in name)
    whole = tensors.pop(name)
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    with engine.engine(model, {"mode": "require"}) as llm:
        want = engine.ask(llm)
        for wrong, words in ((lacking, name), (another, "weight_packed")):
            with pytest.raises(Exception, match=f"(?s)the reload is not complete.*{words}"):
                reload(llm, wrong)
            assert engine.ask(llm).tokens != want.tokens  # no more than the words of the error
            reload(llm, model)
            assert engine.ask(llm) == want
        values, places = whole.flatten()[:4].clone(), torch.arange(4)
        patch = patches.CheckpointWeightPatch(name, tuple(whole.shape), whole.dtype, values, places)
        with pytest.raises(UnsupportedProblem, match=f"{name}: sparse patches"):
            patches.load_checkpoint_weight_patches(engine.model_of(llm), [patch])
        with pytest.raises(Exception, match="lancebill holds weights of this model"):
            llm.llm_engine.engine_core.save_sharded_state(str(folder))
        assert engine.ask(llm) == want


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
    with engine.engine(model, {"weights": [["1", None]], "backend": "torch-cpu"}) as llm:
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
