"""Tiny random models of the families that vLLM runs on a CPU, and copies of them in all formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kinds
import torch

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
GROUPED = {"n_routed_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128, "n_shared_experts": 1}
QWEN = {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128, "norm_topk_prob": True}
# vLLM computes latent attention only in the sizes of the real models.
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 128},
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 128,
        "intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3_moe": QWEN,
    "olmoe": {"num_experts": 8, "intermediate_size": 128},
    "gpt_oss": {
        "num_local_experts": 8,
        "intermediate_size": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    },
    "glm4_moe": GROUPED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 2},
    "granitemoe": {"num_local_experts": 8, "intermediate_size": 128},
    "granitemoeshared": {"num_local_experts": 8, "intermediate_size": 128, "shared_intermediate_size": 128},
    "granitemoehybrid": {
        "num_local_experts": 8,
        "intermediate_size": 128,
        "shared_intermediate_size": 128,
        "layer_types": ["attention", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "logits_scaling": 8.0,  # as published; without it one rounding of a logit is more than the bound
    },
    "granitemoe_swa": {"num_local_experts": 8, "intermediate_size": 128, "shared_intermediate_size": 128},
    "mellum": QWEN,
    "flex_olmo": {"num_experts": 8, "intermediate_size": 128},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "moe_intermediate_size": 128, "intermediate_size": 128},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 128,
        "intermediate_size": 128,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32,
    },
    "dbrx": {
        "d_model": 128,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "intermediate_size": 128,
    },
    "exaone_moe": {
        "num_experts": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "intermediate_size": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "full_attention"],
    },
    "llama4_text": {
        "num_local_experts": 8,
        "intermediate_size": 128,
        "intermediate_size_mlp": 128,
        "num_experts_per_tok": 1,
        "use_qk_norm": False,
    },
    "deepseek_v2": GROUPED
    | LATENT
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": GROUPED
    | LATENT
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 32}
    | {"topk_method": "noaux_tc"},
}
# (format, spec, act-order) of examples that can be applied to every matrix.
EVERYWHERE: dict[str, tuple[str, str, bool]] = {
    "ct-int4": ("compressed-tensors", "int4-g64:fp16", False),
    "gptq": ("gptq", "int4-g64:fp16-zp", False),
    "gptq-act-order": ("gptq", "int4-g32:fp16-zp", True),
    "fp8-block": ("fp8", "fp8-block", False),
    "fp8-tensor": ("modelopt", "fp8-tensor", False),
    "nvfp4": ("modelopt", "nvfp4", False),
    "bitsandbytes": ("bitsandbytes", "nf4", False),
}


def dense_model(folder: Path) -> Path:
    """A tiny bf16 model without experts."""
    import transformers

    made = folder / "llama"
    if not made.exists():
        torch.manual_seed(7)
        config = transformers.LlamaConfig(**COMMON, intermediate_size=128)
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    return made


def tied_model(family: str, folder: Path) -> Path:
    """A tiny bf16 model with one matrix for embeddings and logits."""
    return plain_model(family, folder / "tied", tie_word_embeddings=True)


def plain_model(family: str, folder: Path, seed: int = 7, **changes: Any) -> Path:
    """A tiny bf16 model as transformers saves it."""
    import transformers

    folder = folder / f"{family}-{seed}-plain"
    if not folder.exists():
        config = transformers.AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | changes))
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "experts" in name or "correction" in name or "router.bias" in name:
                    tensor.copy_(torch.randn(tensor.shape) * 0.1)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def converted(family: str, kind: str, folder: Path, seed: int = 7) -> Path:
    """The model with its experts in one of `kinds.KINDS`."""
    source = plain_model(family, folder, seed)
    made = folder / f"{family}-{seed}-{kind}"
    if kind == "bf16":
        return source
    if not made.exists():
        kinds.write_copy(source, made, kind)
    return made


def dequantised(family: str, kind: str, folder: Path, seed: int = 7) -> Path:
    """The model with the numbers of one of `kinds.KINDS`, unquantised."""
    source = converted(family, kind, folder, seed)
    made = folder / f"{family}-{seed}-{kind}-dequantised"
    if not made.exists():
        kinds.write_dequantised(source, made)
    return made


def quantised_everywhere(family: str, kind: str, folder: Path, seed: int = 7) -> Path:
    """The model with the matrices of experts, attention and dense layers in one of `EVERYWHERE`."""
    import tiny

    from lancebill.formats import registry

    made = folder / f"{family}-{seed}-{kind}-everywhere"
    if made.exists():
        return made
    name, spec, act_order = EVERYWHERE[kind]
    example = next(
        e for e in registry()[name].examples() if (str(e.scheme.spec), e.scheme.act_order) == (spec, act_order)
    )
    kept = {"ignore": ["lm_head", "re:.*gate$"], "modules_to_not_convert": ["lm_head", "gate"]}
    kept |= {"exclude_modules": ["lm_head", "*.gate"], "llm_int8_skip_modules": ["lm_head", "gate"]}
    quant = dict(example.config.quant)
    quant |= {key: kept[key] for key in kept if key in quant or key == "modules_to_not_convert"}
    words = (".experts.", ".self_attn.", ".mlp.")

    def is_quantised(module: str) -> bool:
        return any(word in module for word in words) and not module.endswith("gate")

    source = plain_model(family, folder, seed)
    tiny.quantized_copy(source, made, folder / f"{made.name}-plain", quant, example.scheme, is_quantised)
    return made
