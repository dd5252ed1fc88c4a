"""The models of the serving table: configs, and one checkpoint with random weights that every backend loads.

Configs are those of the published models, most with fewer layers. A folder with nothing but config.json is for vLLM's
dummy loader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MXFP4_EVERYWHERE = {"quant_method": "mxfp4", "modules_to_not_convert": []}
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 131072,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "quantization_config": MXFP4_EVERYWHERE,
}
# Qwen3's attention around the experts of DeepSeek-V4-Flash.
QWEN3_V4_EXPERTS = QWEN3_30B | {
    "num_hidden_layers": 6,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 6,
}
GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
GPT_OSS_20B = GPT_OSS_120B | {
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
DEEPSEEK_V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 128],
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "expert_dtype": "fp4",
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
# For a test of this script on any machine.
TINY = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-v4-experts": QWEN3_V4_EXPERTS,
    "gpt-oss-120b": GPT_OSS_120B,
    "qwen3-30b": QWEN3_30B,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-20b-4-layers": GPT_OSS_20B
    | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt-oss-1-layer": GPT_OSS_120B | {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "qwen3-30b-6-layers": QWEN3_30B | {"num_hidden_layers": 6},
    "qwen3-30b-1-layer": QWEN3_30B | {"num_hidden_layers": 1},
    "qwen3-v4-experts-1-layer": QWEN3_V4_EXPERTS | {"num_hidden_layers": 1},
    "tiny-qwen3": QWEN3_30B | TINY | {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4},
    "tiny-gpt-oss": GPT_OSS_120B
    | TINY
    | {"num_local_experts": 16, "layer_types": ["sliding_attention", "full_attention"]},
}
CHECKPOINTS = (
    "gpt-oss-120b",
    "gpt-oss-1-layer",
    "gpt-oss-20b",
    "gpt-oss-20b-4-layers",
    "tiny-gpt-oss",
)  # loaded from a file; the others have random weights by the loader


def experts_of(name: str) -> int:
    """The number of routed experts of each layer."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(MODELS[name][key] for key in keys if key in MODELS[name])


def stacked_experts(config: dict[str, Any], layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The expert tensors of a Qwen3 model in MXFP4: a checkpoint's name, vLLM's parameter, its shape in bytes."""
    if config["model_type"] != "qwen3_moe":
        return
    hidden, middle = config["hidden_size"], config["moe_intermediate_size"]
    for name, part, n, k in (("gate_up_proj", "w13", 2 * middle, hidden), ("down_proj", "w2", hidden, middle)):
        prefix, rows = f"model.layers.{layer}.mlp.experts.{name}", (config["num_experts"], n)
        yield f"{prefix}_blocks", f"{part}_weight", (*rows, k // 2)
        yield f"{prefix}_scales", f"{part}_weight_scale", (*rows, k // 32)


def has_equal_weights(name: str) -> bool:
    """Whether all backends have the same weights, so that their answers can be compared."""
    return name in CHECKPOINTS or any(stacked_experts(MODELS[name], 0))


def model_folder(name: str, root: Path, device: str) -> Path:
    """The model's folder with its config and, for `CHECKPOINTS`, its weights."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    config = MODELS[name]
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if name in CHECKPOINTS and not (folder / "model.safetensors.index.json").exists():
        _write_checkpoint(config, folder, device)
    return folder


def word_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer beside the config: one word for each id, so that text and ids are equally long.

    A word holds the space before it: vLLM refuses a text of more characters than its longest word times its tokens.
    """
    spaces = {
        "type": "Metaspace",
        "replacement": "\N{LOWER ONE EIGHTH BLOCK}",
        "prepend_scheme": "always",
        "split": True,
    }
    words = {f"{spaces['replacement']}t{number}": number for number in range(vocabulary)}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": spaces,
        "post_processor": None,
        "decoder": spaces,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": next(iter(words))},
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


def _write_checkpoint(config: dict[str, Any], folder: Path, device: str) -> None:
    """One file for each layer and one for the rest, written in parallel."""
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)
    parts = [dict(_ends(config, generator))]
    parts += [dict(_layer(config, layer, generator)) for layer in range(config["num_hidden_layers"])]
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part, name: save_file(part, folder / name), parts, names))
    weight_map = {tensor: name for part, name in zip(parts, names, strict=True) for tensor in part}
    index = {
        "metadata": {"total_size": sum(t.nbytes for part in parts for t in part.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _ends(config: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", _normal((vocabulary, hidden), 1.0, generator)
    yield "lm_head.weight", _normal((vocabulary, hidden), 1 / math.sqrt(hidden), generator)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def _attention(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """The matrices of an attention: names, rows, columns."""
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    yield "self_attn.q_proj", queries, hidden
    yield "self_attn.k_proj", keys, hidden
    yield "self_attn.v_proj", keys, hidden
    yield "self_attn.o_proj", hidden, queries


def _layer(config: dict[str, Any], layer: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, middle, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    prefix = f"model.layers.{layer}"
    for name, n, k in (*_attention(config), ("mlp.router", experts, hidden)):
        yield f"{prefix}.{name}.weight", _normal((n, k), 1 / math.sqrt(k), generator)
        yield f"{prefix}.{name}.bias", _normal((n,), 0.02, generator)
    yield f"{prefix}.self_attn.sinks", _normal((config["num_attention_heads"],), 1.0, generator)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for name, n, k in (("gate_up_proj", 2 * middle, hidden), ("down_proj", hidden, middle)):
        yield f"{prefix}.mlp.experts.{name}_blocks", _integers((experts, n, k // 32, 16), 0, 256, generator)
        # 2^-8 or 2^-7 times codes of about 3 in size: variance near 1 / k
        yield f"{prefix}.mlp.experts.{name}_scales", _integers((experts, n, k // 32), 119, 121, generator)
        yield f"{prefix}.mlp.experts.{name}_bias", _normal((experts, n), 0.02, generator)


def _normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    made = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return made.mul_(deviation).to(torch.bfloat16).cpu()


def _integers(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device, dtype=torch.uint8).cpu()


def fill_parameter(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Random values that behave, for one parameter of a model without a checkpoint.

    vLLM's dummy loader leaves integers as they are (zeros draw less power than real codes) and all else within 1e-3.
    """
    if values.device.type == "meta" or values.numel() == 0:
        return
    if values.dtype == torch.uint8:
        low, high = (118, 121) if "scale" in name else (0, 256)
        for row in values:
            row.copy_(torch.randint(low, high, row.shape, generator=generator, device=row.device, dtype=torch.uint8))
    elif values.dtype == torch.float8_e4m3fn:
        made = torch.randn(values.shape, generator=generator, device=values.device)
        values.copy_(made.mul_(64).clamp_(-448, 448).to(values.dtype))
    elif values.dtype == torch.float8_e8m0fnu:
        values.view(torch.uint8).fill_(115)
    elif not values.is_floating_point() or "cos_sin" in name or "inv_freq" in name:
        return
    elif "scale_inv" in name or name.endswith("weight_scale"):
        values.fill_(2.0**-12)
    elif "correction_bias" in name or "sink" in name:
        values.zero_()
    elif "norm" in name and values.dim() == 1:
        values.fill_(1.0)
    elif name.endswith("bias") or "hc_" in name:
        values.normal_(0, 0.02, generator=generator)
    elif values.dim() >= 2:
        values.normal_(0, 1 / math.sqrt(values.shape[-1]), generator=generator)
