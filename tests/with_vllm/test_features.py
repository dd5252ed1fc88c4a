"""What an engine asks for besides answers: LoRA, batch invariance, whole graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import engine
import models

from lancebill.errors import UnsupportedProblem


def test_lora_is_refused(folder: Path) -> None:
    """vLLM's own LoRA kernels for experts need a GPU: with `offer` the engine starts with vLLM's experts."""
    model = models.plain_model("qwen3_moe", folder)
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with engine.engine(model, **lora) as llm:
        takeover = engine.takeover_of(llm)
        assert not takeover.layers and "LoRA adapters of experts" in takeover.summary()
    with (
        pytest.raises(UnsupportedProblem, match="LoRA adapters of experts"),
        engine.engine(model, {"mode": "require"}, **lora),
    ):
        pass


def test_unquantised_experts_stay_with_vllm(folder: Path) -> None:
    """Its own kernels for them are faster than torch-cpu. Quantised ones are taken by default."""
    plain, packed = models.plain_model("qwen3_moe", folder), models.converted("qwen3_moe", "ct-int4", folder)
    with engine.engine(plain) as llm:
        assert "torch-cpu is slower than vLLM" in engine.takeover_of(llm).summary()
        assert not engine.takeover_of(llm).layers
    with engine.engine(packed) as llm:
        assert engine.takeover_of(llm).layers.keys() == {0, 1}


@pytest.mark.parametrize("name", ["experts_int8", "int8_per_channel_weight_only"])
def test_experts_that_vllm_is_asked_to_quantise(name: str, folder: Path) -> None:
    """Its CPU build has no kernels for them: it says so, and we do not compute them as they are stored."""
    model, options = models.plain_model("qwen3_moe", folder), {"dtype": "bfloat16", "quantization": name}
    with pytest.raises(NotImplementedError, match="Int8"), engine.engine(model, {"backend": "torch-cpu"}, **options):
        pass
    with (
        pytest.raises(UnsupportedProblem, match="asked to quantise"),
        engine.engine(model, {"mode": "require"}, **options),
    ):
        pass
    with engine.engine(model, {"mode": "require", "weights": "int8-channel"}, **options) as llm:
        assert engine.takeover_of(llm).layers.keys() == {0, 1}


def test_batch_invariance(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM replaces its dense operations by Triton kernels then, which its CPU build lacks: those stay as they are."""
    from vllm.model_executor.determinism import batch_invariant

    model = models.converted("qwen3_moe", "ct-int4", folder)
    monkeypatch.setattr(batch_invariant, "init_batch_invariance", lambda: None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with engine.engine(model, {"mode": "require"}, dtype="float16") as llm:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT")
        assert all(len(tokens) == engine.TOKENS for tokens in engine.ask(llm).tokens)
        for layer in engine.takeover_of(llm).layers.values():
            assert layer.problem.order == "batch-invariant"
            check_rows_do_not_depend_on_the_batch(layer)


def check_rows_do_not_depend_on_the_batch(layer: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(33, layer.problem.hidden, generator=generator).half()
    ids = torch.rand(33, 8, generator=generator).topk(2).indices
    weights = torch.rand(33, 2, generator=generator)
    whole = layer(x, topk_ids=ids, topk_weights=weights)
    for first, last in ((0, 1), (5, 7), (16, 33)):
        part = layer(x[first:last], topk_ids=ids[first:last], topk_weights=weights[first:last])
        assert torch.equal(part, whole[first:last])


def test_compiled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build traces through the experts: the model is one graph, and our operator computes inside it."""
    from torch._dynamo.utils import counters

    from lancebill.integrations.vllm import experts

    found: list[str] = []

    def find(name: str) -> Any:
        found.append(name)
        return get_layer(name)

    get_layer = experts.get_layer_from_name
    monkeypatch.setattr(experts, "get_layer_from_name", find)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # a graph from the cache would not be traced
    counters.clear()
    model = models.converted("qwen3_moe", "ct-int4", folder)
    with engine.engine(model, {"mode": "require"}, enforce_eager=False) as llm:
        assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
        found.clear()
        got = engine.ask(llm)
    assert len(set(found)) == 2 and len(found) == 2 * engine.TOKENS  # both layers, once a step
    want = engine.reference(model)
    assert got.tokens == want.tokens and got.distance(want) <= 1e-5
