"""Attention that changes with the position of a token, far beyond the tokens that a server tries whole models with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lancebill.serving.choose_runner import own_attention, runner  # noqa: E402
from lancebill.serving.far_probes import same_at_end  # noqa: E402
from lancebill.serving.probes import probe_tokens  # noqa: E402
from lancebill.serving.ragged import ATTENTION, RaggedModel, SeparateModel  # noqa: E402
from lancebill.serving.start import start  # noqa: E402
from lancebill.serving.whole_prompts import pieces_differ  # noqa: E402

SIZES = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 4096,
}  # fmt: skip
# As published, Llama 4 sees chunks of 8,192 tokens, and scales queries of every fourth layer from there on.
LLAMA_4 = {"intermediate_size_mlp": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "use_qk_norm": False}
NEVER = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama_4(chunk: int, floor: int) -> Any:
    torch.manual_seed(0)
    values = {**SIZES, **LLAMA_4, "attention_chunk_size": chunk, "floor_scale": floor}
    config = transformers.Llama4TextConfig(**values, pad_token_id=0)
    return transformers.Llama4ForCausalLM(config).eval()


def mistral(window: int | None) -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=window)
    return transformers.MistralForCausalLM(config).eval()


def is_same(model: Any, end: int) -> bool:
    return same_at_end(model, model.config.num_hidden_layers, end, probe_tokens(model))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_at_the_end_of_a_context(dtype: torch.dtype) -> None:
    for chunk, floor, end, same in (
        (NEVER, NEVER, 4096, True), (1024, NEVER, 1024, True), (NEVER, 1024, 1023, True),
        (1024, NEVER, 1030, False), (1024, NEVER, 2048, False), (1024, NEVER, 4096, False),
        (NEVER, 1024, 1030, False), (NEVER, 4000, 4096, False),
    ):  # fmt: skip
        assert is_same(llama_4(chunk, floor).to(dtype), end) is same, (chunk, floor, end)
    for window, end in ((None, 4096), (5, 64), (512, 4096), (512, 100)):
        assert is_same(mistral(window).to(dtype), end), (window, end)
    assert is_same(mistral(None), 3), "no token is before those of the probe"


class NoWindow:
    """The config of an attention that does not pass its window on, which only the masks know then."""

    sliding_window = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def test_a_window_that_only_the_masks_know_is_noticed() -> None:
    model = mistral(64)
    for layer in model.model.layers:
        layer.self_attn.config = NoWindow(model.config)
    assert is_same(model, 64) and not is_same(model, 65)


def test_the_server_says_why_and_batches_shorter_contexts() -> None:
    model = llama_4(1024, 1024)
    before = model.config._attn_implementation
    app, line = start("tiny", model, SimpleNamespace(eos_token_id=4))
    assert app.engine.stop(10)
    assert line.startswith("context 4096 tokens; requests run in turns (its attention changes within 4096 tokens)")
    assert model.config._attn_implementation == before
    app, line = start("tiny", model, SimpleNamespace(eos_token_id=4), context=1023)
    assert app.engine.stop(10)
    assert line.startswith("context 1023 tokens; requests run batched")
    assert model.config._attn_implementation == ATTENTION
    with own_attention(model, before):
        assert model(torch.tensor([[1, 2]])).logits.isfinite().all()
    assert model.config._attn_implementation == ATTENTION


def test_how_long_sequences_get_may_be_unknown() -> None:
    assert type(runner(llama_4(1024, NEVER))) is SeparateModel, "as long as the model allows"
    assert type(runner(mistral(64))) is RaggedModel


def test_caches_that_keep_the_prompt_read_it_whole() -> None:
    kept = ["sliding_attention", "full_attention"]
    assert not pieces_differ(transformers.Gemma3TextConfig(layer_types=kept, num_hidden_layers=2), 4096)
    pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")  # which knows its cache
    config = transformers.UnlimitedOcrTextConfig(num_hidden_layers=2, sliding_window=128)
    assert pieces_differ(config, 4096) and not pieces_differ(config, 128)
