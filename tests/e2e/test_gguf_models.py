"""Whole models from GGUF files, compared with transformers on the values that the gguf library reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

import lancebill  # noqa: E402
from lancebill.errors import CannotEncode, UnexpectedTensor, UnsupportedProblem  # noqa: E402

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "qwen2moe": ("qwen2_moe", {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}),
}
EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def dense(family: str, more: dict[str, Any]) -> Any:
    common = {**tiny.COMMON, "intermediate_size": 64, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family, **common, **more)
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write(model: Any, architecture: str, path: Path, extra: str | None = None) -> None:
    config = model.config
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.hidden_size // config.num_attention_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(config.vocab_size)
    out.add_expert_count(config.num_experts)
    out.add_expert_used_count(config.num_experts_per_tok)
    out.add_expert_feed_forward_length(config.moe_intermediate_size)
    out.add_tokenizer_model("gpt2")
    letters = [chr(code) for code in range(ord("!"), ord("!") + 90)]
    out.add_token_list([*letters, "ab", "cd", *(f"<{i}>" for i in range(config.vocab_size - 92))])
    out.add_token_types([1] * config.vocab_size)
    out.add_token_merges(["a b", "c d"])
    out.add_eos_token_id(config.vocab_size - 1)
    out.add_bos_token_id(config.vocab_size - 2)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            layer = name.split(".")[2]
            parts = zip(("gate", "up"), tensor.chunk(2, 1)) if "gate_up" in name else [("down", tensor)]
            for part, matrix in parts:
                add(out, f"blk.{layer}.{EXPERTS[part]}.weight", matrix)
            continue
        stem, _, suffix = name.rpartition(".")
        add(out, f"{names.get_name(stem)}.{suffix}", tensor.squeeze(0) if "shared_expert_gate" in name else tensor)
    if extra is not None:
        add(out, extra, torch.ones(4))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def add(out: Any, name: str, tensor: torch.Tensor) -> None:
    """Write matrices as Q8_0, vectors and the router unquantised. `tensor` is set to the values written."""
    values = tensor.contiguous().numpy()
    if tensor.ndim < 2 or "ffn_gate_inp" in name:
        out.add_tensor(name, values)
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        codes = gguf.quants.quantize(values, kind)
        out.add_tensor(name, codes, raw_dtype=kind)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(codes, kind)))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_whole_models(architecture: str, tmp_path: Path) -> None:
    reference = dense(*FAMILIES[architecture])
    write(reference, architecture, tmp_path / "model.gguf")
    ours = lancebill.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    tokens = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = ours(tokens).logits, reference(tokens).logits
    assert (got - want).norm() / want.norm() < 1e-5
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    last = reference.config.vocab_size - 1  # our model reads the EOS token from the file
    assert torch.equal(ours.generate(tokens, **options), reference.generate(tokens, **options, eos_token_id=last))
    assert "int8" in str(ours.lancebill_reports()[0].kept["w13"])
    with pytest.raises(CannotEncode, match="GGUF"):
        ours.save_pretrained(tmp_path / "saved")


def test_the_generate_command_takes_a_gguf_file(tmp_path: Path) -> None:
    from lancebill.cli.main import app

    write(dense(*FAMILIES["qwen3moe"]), "qwen3moe", tmp_path / "model.gguf")
    words = ["generate", str(tmp_path / "model.gguf"), "abc", "--max-tokens", "4", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["answers"][0]["tokens"] == 4
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "abc"])
    assert done.exit_code == 1 and "model.gguf" in done.output


def test_unknown_tensors_and_architectures_are_refused(tmp_path: Path) -> None:
    model = dense(*FAMILIES["qwen3moe"])
    write(model, "qwen3moe", tmp_path / "extra.gguf", extra="rope_freqs.weight")
    with pytest.raises(UnexpectedTensor, match="rope_freqs"):
        lancebill.from_pretrained(tmp_path / "extra.gguf")
    other = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    other.add_tensor("token_embd.weight", torch.ones(4, 4).numpy())
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    with pytest.raises(UnsupportedProblem, match="qwen3moe"):
        lancebill.from_pretrained(tmp_path / "other.gguf")
