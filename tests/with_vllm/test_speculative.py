"""Models whose own block drafts tokens: it gets its own experts, whoever computes them, and the answers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import drafts
import engine

from lancebill import RoutedExperts

DRAFTING = {"method": "mtp", "num_speculative_tokens": 1}
OURS = {"backend": "torch-cpu"}


def draft_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_block_that_is_numbered_as_a_layer_is_taken(family: str, folder: Path) -> None:
    model = drafts.drafting_model(family, folder)
    with engine.engine(model, {"mode": "off"}, speculative_config=DRAFTING) as llm:
        want = engine.ask(llm)
    with engine.engine(model, OURS, speculative_config=DRAFTING) as llm:
        assert engine.takeover_of(llm).layers.keys() == {1}
        (layer,) = draft_of(llm).lancebill_takeover.layers.items()
        stored = RoutedExperts.from_checkpoint(model, 2, dtype=torch.float32, backend="torch-cpu")
        assert layer[0] == 2 and same(layer[1], stored)
        got = engine.ask(llm)
    assert got.tokens == want.tokens and got.distance(want) <= 1e-5


def test_a_block_with_numbers_of_its_own_is_left(folder: Path) -> None:
    """`mtp.layers.0` is not layer 0.

    Tokens are not compared: linear attention computes in bf16 only, and vLLM's own answers differ with and without
    drafts.
    """
    model = drafts.drafting_model("qwen3_next", folder)
    options = {"dtype": "bfloat16", "speculative_config": DRAFTING}
    with engine.engine(model, OURS, **options) as llm:
        assert engine.takeover_of(llm).layers.keys() == {0, 1}
        takeover = draft_of(llm).lancebill_takeover
        assert not takeover.layers and "mtp.layers.0.mlp.experts: vLLM (experts beside" in takeover.summary()
        assert same(engine.takeover_of(llm).layers[0], RoutedExperts.from_checkpoint(model, 0, backend="torch-cpu"))
        assert all(len(tokens) == engine.TOKENS for tokens in engine.ask(llm).tokens)
        (experts,) = (each for each in draft_of(llm).parameters() if each.ndim == 3 and each.shape[1] == 256)
        drafted = experts.float().norm()
    with engine.engine(model, {"mode": "off"}, **options) as llm:
        (experts,) = (each for each in draft_of(llm).parameters() if each.ndim == 3 and each.shape[1] == 256)
        assert experts.float().norm() == drafted


def same(layer: RoutedExperts, other: RoutedExperts) -> bool:
    return all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), other.state_dict().values(), strict=True))
