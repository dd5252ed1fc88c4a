"""Llama-4 calls its experts with all rows for each of them: whole models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

import lancebill  # noqa: E402
from lancebill.errors import LaunchError  # noqa: E402
from lancebill.integrations.transformers.packed_experts import PackedSortedExperts  # noqa: E402

TEXT = {**tiny.COMMON, "num_local_experts": 8, "intermediate_size": 32, "intermediate_size_mlp": 64}
TEXT |= {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "num_hidden_layers": 4}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
IMAGES |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64}
IMAGES |= {"projector_output_dim": 64}
TOKENS = torch.arange(1, 19).view(2, 9)


@pytest.mark.parametrize(
    ("auto", "family", "more"),
    [
        ("AutoModelForCausalLM", "llama4_text", TEXT),
        ("AutoModelForImageTextToText", "llama4", {"text_config": TEXT, "vision_config": IMAGES}),
    ],
)
def test_whole_models(auto: str, family: str, more: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(family, **more)
    torch.manual_seed(3)
    reference = getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    ours = lancebill.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        got, want = ours(TOKENS).logits, reference(TOKENS).logits
    assert (got - want).norm() / want.norm() < 1e-5
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(TOKENS, **options), reference.generate(TOKENS, **options))
    assert len(ours.lancebill_reports()) == 2


def test_experts_that_are_not_loaded_raise() -> None:
    place = PackedSortedExperts(3)
    with pytest.raises(LaunchError, match="layer 3"):
        place(torch.zeros(4, 2))
