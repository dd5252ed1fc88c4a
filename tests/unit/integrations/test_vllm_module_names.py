"""Which layer of a checkpoint a module of vLLM is."""

from __future__ import annotations

import pytest

from lancebill.integrations.vllm.module_names import DRAFT, UNNUMBERED, layer_index, why_no_layer


def config(model_type: str) -> dict[str, object]:
    return {"model_type": model_type, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("module", "number"),
    [("model.layers.7.mlp.experts", 7), ("model.blocks.mlp.experts", None), ("a.1.b.2.experts", None), ("0", 0)],
)
def test_the_number_of_a_layer(module: str, number: int | None) -> None:
    assert layer_index(module) == number


@pytest.mark.parametrize(
    ("model_type", "module", "names", "why"),
    [
        # vLLM's names are the checkpoint's.
        ("qwen3_next", "model.layers.0.mlp.experts", ["model.layers.0.mlp.experts.0.up_proj.weight"], None),
        ("qwen3_next", "mtp.layers.0.mlp.experts", ["mtp.layers.0.mlp.experts.0.up_proj.weight"], DRAFT),
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts", ["mtp.layers.0.mlp.experts.gate_up_proj"], DRAFT),
        ("nemotron_h", "mtp.layers.0.mixer.experts", ["mtp.layers.0.mixer.experts.0.up_proj.weight"], DRAFT),
        ("glm4_moe", "model.layers.2.mlp.experts", ["model.layers.2.mlp.experts.0.up_proj.weight"], None),
        ("deepseek_v3", "model.layers.2.mlp.experts", ["model.layers.2.mlp.experts.0.up_proj.weight"], None),
        # They are not, or there are no files.
        ("qwen3_next", "mtp.layers.0.mlp.experts", [], DRAFT),
        ("nemotron_h", "mtp.layers.0.mixer.experts", ["language_model.mtp.layers.0.mixer.experts.0.up_proj"], DRAFT),
        ("inkling_text", "model.layers.0.transformer_block.mlp.experts", ["model.layers.0.mlp.experts.w13"], DRAFT),
        ("step3p5", "model.layers.2.mtp_block.moe.experts", ["model.layers.2.moe.gate_proj.weight"], None),
        ("gemma4", "model.layers.0.moe.experts", ["model.layers.0.experts.gate_up_proj"], None),
        ("qwen3_vl_moe", "language_model.model.layers.0.mlp.experts", ["model.language_model.layers.0.mlp"], None),
        ("laguna", "model.layers.0.mlp.experts", ["model.layers.0.mlp.experts.e_score_correction_bias"], None),
        ("laguna", "model.layers.0.mlp.experts", ["model.layers.0.mlp.experts_too.weight"], None),
        # Reported elsewhere, and not found at all.
        ("llama", "mtp.layers.0.mlp.experts", [], None),
        ("qwen3_next", "mtp.mlp.experts", [], UNNUMBERED),
    ],
)  # fmt: skip
def test_experts_that_are_no_layer(model_type: str, module: str, names: list[str], why: str | None) -> None:
    assert why_no_layer(module, config(model_type), sorted(names)) == why
