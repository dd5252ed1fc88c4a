"""Tiny random models of all families as saved by transformers, and quantised copies of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from initialised import initialised
from torch import Tensor

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.formats.base import Scheme
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.weight import LogicalWeight

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {"n_routed_experts": 16, "moe_intermediate_size": 32, "intermediate_size": 64, "n_shared_experts": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 32, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": GROUPED
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
    "deepseek_v4": {"n_routed_experts": 8, "moe_intermediate_size": 32},
    "glm4_moe": GROUPED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "minimax_m2": {"num_local_experts": 8, "intermediate_size": 32},
}


def save_model(transformers: Any, family: str, folder: Path) -> bool:
    """Save a tiny model; False if this version of transformers does not know the family."""
    try:
        config = transformers.AutoConfig.for_model(family, **(COMMON | FAMILIES[family]))
    except (ValueError, KeyError):
        return False
    torch.manual_seed(7)
    model = initialised(lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "experts" in name or "correction" in name or "router.bias" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(folder)
    return True


def save_model_with_tokenizer(transformers: Any, folder: Path) -> None:
    """A tiny Mixtral with a tokenizer."""
    assert save_model(transformers, "mixtral", folder)
    save_tokenizer(transformers, folder)


def save_tokenizer(transformers: Any, folder: Path) -> None:
    """A tokenizer of 127 words, with a chat template that only joins the messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", *(f"w{i}" for i in range(127))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def quantized_copy(
    source: Path, packed: Path, plain: Path, quant: dict[str, Any], scheme: Scheme, is_quantised: Callable[[str], bool],
    inputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write the checkpoint to `packed` with some modules quantised by `scheme`, and to `plain` with them dequantised.

    For schemes with act-order, each input gets a random order; modules with the same input share it. `inputs` are
    further tensors of every quantised module, by role.
    """
    with Checkpoint.open(source) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
        config = dict(checkpoint.config.model)
    stored_tensors, dequantised = {}, {}
    torch.manual_seed(3)
    orders: dict[tuple[str, bool], Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or tensor.ndim != 2 or not is_quantised(module):
            stored_tensors[name] = dequantised[name] = tensor
            continue
        block, _, last = module.rpartition(".")
        order = orders.setdefault((block, last in ("down_proj", "o_proj")), torch.randperm(tensor.shape[1]))
        weight = quantize(tensor[:, order] if scheme.act_order else tensor, scheme.spec)
        if scheme.act_order:
            weight = replace(weight, perm=order.to(torch.int32))
        dequantised[name] = dequantize(weight)
        for role, stored in encoded(scheme, replace(weight, inputs=inputs)).items():
            part = scheme.part(role)
            assert part is not None
            stored_tensors[module + part.suffix[0]] = stored
    _write(packed, stored_tensors, config | {"quantization_config": quant})
    _write(plain, dequantised, config)


def encoded(scheme: Scheme, weight: LogicalWeight) -> dict[str, Tensor]:
    """As the scheme stores it, with the matrix's size where it can be stored: many tools store it."""
    size = {} if scheme.part("shape") is None else {"shape": torch.tensor([weight.n, weight.k])}
    return size | scheme.encode(weight)


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    headers = {name: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    with CheckpointWriter(folder, headers) as out:
        out.write_json("config.json", config)
        for name, tensor in tensors.items():
            out.write(name, tensor)
