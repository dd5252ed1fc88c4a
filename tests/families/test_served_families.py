"""Every family in our server: answers that run together are those that transformers gives alone, however long they get.

Windows, chunks and other limits are a few tokens, so that prompts and answers are beyond all of them.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import tiny_models  # noqa: E402
import torch  # noqa: E402
from tiny_models import JUDGED, NEEDS, UNWRITABLE_NAMES  # noqa: E402

import lancebill  # noqa: E402
from lancebill.serving import engine as engines  # noqa: E402
from lancebill.serving.choose_runner import runner  # noqa: E402
from lancebill.serving.engine import Answer, BatchEngine, End, Limits  # noqa: E402
from lancebill.serving.ragged import RaggedModel, SeparateModel  # noqa: E402
from lancebill.serving.sampling import Sampling  # noqa: E402

CONTEXT, LIMIT = 96, 60.0
SMALL_LIMITS: dict[str, Any] = {
    "max_position_embeddings": 128, "sliding_window": 8, "sliding_window_size": 8, "sliding_window_pattern": 2,
    "global_attn_every_n_layers": 2, "attention_chunk_size": 16, "floor_scale": 16, "no_rope_layer_interval": 2,
    "index_topk": 16, "index_topk_blocks": 2, "index_block_size": 8, "rel_extent": 16, "log_scaling_n_floor": 16,
    "original_max_position_embeddings": 16, "eos_token_id": None,
}  # fmt: skip
_BOTH = {"layer_types": ["linear_attention", "full_attention"]}
_CHOSEN = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16}
_CHOSEN |= {"indexer_compress_ratio": 4, **_BOTH}
# transformers generates with no model whose layers are all recurrent.
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": _BOTH, "qwen3_5_moe": {"text_config": _BOTH}, "qwen3_5_moe_text": _BOTH,
    "qwen4_exp": {"text_config": _CHOSEN}, "qwen4_exp_text": _CHOSEN, "kimi_linear": _BOTH,
    "glm5_next": {"text_config": _BOTH},
    "bailing_hybrid": {"layer_group_size": 2}, "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "minimax_m3_vl": {"text_config": {"layer_types": ["minimax_m3_sparse", "full_attention"]}},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
}  # fmt: skip
TOGETHER = ("mixtral", "gpt_oss", "gemma4_text", "deepseek_v3", "mistral4", "afmoe", "granitemoe_swa")
ALONE = {"llama4": "its attention changes within 96 tokens", "llama4_text": "its attention changes within 96 tokens"}
# They generate in a way of their own, or only from images.
NO_SERVER = ("diffusion_gemma", "qwen3_omni_moe_thinker", "jetmoe", "aria", "aria_text")
PROMPTS, LENGTHS = [[5, 9, 1], list(range(2, 42)), [7]], [40, 20, 50]


@pytest.mark.parametrize("name", [name for name in JUDGED if name not in (*NO_SERVER, *UNWRITABLE_NAMES)])
@torch.no_grad()
def test_answers_beyond_every_limit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    monkeypatch.setattr(tiny_models, "SIZES", {**tiny_models.SIZES, **SMALL_LIMITS})
    monkeypatch.setitem(tiny_models.CHANGES, name, merged(tiny_models.CHANGES.get(name, {}), LAYERS.get(name, {})))
    tiny_models.tiny_model(name).save_pretrained(tmp_path)
    model = lancebill.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "pad_token_id": 0}
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=most, **options)[0, len(prompt) :].tolist()
        for prompt, most in zip(PROMPTS, LENGTHS)
    ]
    chosen = runner(model, context=CONTEXT)
    assert isinstance(chosen, RaggedModel) or name not in TOGETHER, chosen.why
    assert not isinstance(chosen, SeparateModel) or chosen.why == ALONE.get(name, chosen.why)
    assert isinstance(chosen, SeparateModel) or name not in ALONE
    for limit in ("LEAST_STEP_TOKENS", "MOST_STEP_TOKENS"):  # prompts take several steps
        monkeypatch.setattr(engines, limit, 24)
    assert in_a_server(chosen) == alone


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both, also of sections that both have."""
    sections = {key: {**first[key], **second[key]} for key in first.keys() & second.keys()}
    return {**first, **second, **sections}


def in_a_server(chosen: Any) -> list[list[int]]:
    engine = BatchEngine(chosen, Limits(CONTEXT))
    ended = [threading.Event() for _ in PROMPTS]
    answers = [
        Answer(prompt, most, Sampling(), lambda event, end=end: end.set() if isinstance(event, End) else None)
        for prompt, most, end in zip(PROMPTS, LENGTHS, ended)
    ]
    engine.submit(answers[:2])
    engine.start()
    ended[1].wait(LIMIT)
    engine.submit(answers[2:])
    assert all(end.wait(LIMIT) for end in ended) and engine.stop(LIMIT)
    return [answer.tokens for answer in answers]
