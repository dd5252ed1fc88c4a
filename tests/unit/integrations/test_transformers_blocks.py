"""MoE blocks of transformers compared with our layers loaded from the same saved weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from initialised import initialised
from torch import Tensor, nn

from lancebill.layer.routed_experts import RoutedExperts

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
    "head_dim": 16,
}
GROUPED = {"n_routed_experts": 16, "moe_intermediate_size": 32, "intermediate_size": 64, "n_shared_experts": 1}
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 32, "layer_types": ["full_attention"] * 3},
    "deepseek_v3": GROUPED
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
    "deepseek_v4": {"n_routed_experts": 8, "moe_intermediate_size": 32},
    "glm4_moe": GROUPED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "minimax_m2": {"num_local_experts": 8, "intermediate_size": 32},
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A tiny random model of the family, and the checkpoint transformers writes for it."""
    family = request.param
    try:
        config = transformers.AutoConfig.for_model(family, **(COMMON | FAMILIES[family]))
    except (ValueError, KeyError):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(7)
    model = initialised(lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "experts" in name or "correction" in name or "router.bias" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    return model, folder


def _blocks(model: nn.Module) -> dict[int, nn.Module]:
    blocks_by_layer = {}
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        blocks = [m for m in layer.children() if hasattr(m, "experts")]
        if blocks:
            blocks_by_layer[index] = blocks[0]
    return blocks_by_layer


def test_our_layers_equal_transformers_blocks(saved: tuple[nn.Module, Path]) -> None:
    model, folder = saved
    recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def recorder(index: int):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            recorded[index] = x, output[0] if isinstance(output, tuple) else output

        return hook

    blocks = _blocks(model)
    assert len(blocks) >= 2
    for index, block in blocks.items():
        block.register_forward_hook(recorder(index), with_kwargs=True)
    tokens = torch.randint(0, 128, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(input_ids=tokens)
        for index, block in blocks.items():
            theirs_in, theirs_out = recorded[index]
            x = theirs_in.reshape(-1, theirs_in.shape[-1])
            layer = RoutedExperts.from_checkpoint(folder, layer=index, dtype=torch.float32)
            gate = block.gate if hasattr(block, "gate") else block.router
            ours = layer.forward_routed(x, x @ gate.weight.t(), input_ids=tokens.reshape(-1))
            shared = getattr(block, "shared_experts", None)
            ours = ours if shared is None else ours + shared(x)
            want = theirs_out.reshape(-1, x.shape[1])
            error = (ours - want).norm(dim=1) / want.norm(dim=1)
            assert error.max() < 1e-5, f"layer {index}, row {int(error.argmax())}"
