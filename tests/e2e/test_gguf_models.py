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
from tiny_gguf import write  # noqa: E402

import lancebill  # noqa: E402
from lancebill.errors import CannotEncode, UnexpectedTensor, UnsupportedProblem  # noqa: E402

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "qwen2moe": ("qwen2_moe", {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}),
    # Half of a head's columns are rotated, a bias corrects the routing.
    "minimax-m2": ("minimax_m2", {"num_local_experts": 8, "intermediate_size": 32, "head_dim": 16, "rotary_dim": 8}),
}


def dense(family: str, more: dict[str, Any]) -> Any:
    common = {**tiny.COMMON, "intermediate_size": 64, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family, **{**common, **more})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        if name.endswith("correction_bias"):
            tensor.normal_()  # else zero
    return model


@pytest.mark.parametrize("architecture", FAMILIES)
def test_whole_models(architecture: str, tmp_path: Path) -> None:
    reference = dense(*FAMILIES[architecture])
    write(reference, architecture, tmp_path / "model.gguf")
    ours = lancebill.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    tokens = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = ours(tokens).logits, reference(tokens).logits
    assert (got - want).norm() / want.norm() < 1e-4
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    last = reference.config.vocab_size - 1  # our model reads the EOS token from the file
    assert torch.equal(ours.generate(tokens, **options), reference.generate(tokens, **options, eos_token_id=last))
    assert "int8" in str(ours.lancebill_reports()[0].kept["w13"])
    assert {"lm_head", "model.embed_tokens", "model.layers.1.self_attn.k_proj"} <= set(ours.lancebill_rest.packed)
    assert not ours.lancebill_rest.dequantized
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
