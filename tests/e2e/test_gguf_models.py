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
from tiny_gguf_models import DELTA, GROUPED, LOCAL, MODELS, MOE, SCALES, dense, reference_of  # noqa: E402

import lancebill  # noqa: E402
from lancebill.errors import (  # noqa: E402
    BadValue,
    CannotEncode,
    MalformedFile,
    UnexpectedTensor,
    UnsupportedFormat,
    UnsupportedProblem,
    WrongShape,
)
from lancebill.integrations.transformers.gguf_changes import log_of_negated  # noqa: E402
from lancebill.integrations.transformers.gguf_rows import ROWS  # noqa: E402
from lancebill.testing.gguf import write_gguf  # noqa: E402


@pytest.mark.parametrize(("architecture", "family", "more"), MODELS, ids=[family for _, family, _ in MODELS])
def test_whole_models(architecture: str, family: str, more: dict[str, Any], tmp_path: Path) -> None:
    reference = reference_of(architecture, family, more)
    write(reference, architecture, tmp_path / "model.gguf")
    ours = lancebill.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    assert ours.config.model_type == family
    length = 140 if architecture == "deepseek4" else 9  # a layer reads sums of 128 tokens
    tokens = torch.randint(1, 128, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = ours(tokens).logits, reference(tokens).logits
    assert (got - want).norm() / want.norm() < 1e-4
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    last = reference.config.vocab_size - 1  # our model reads the EOS token from the file
    assert torch.equal(ours.generate(tokens, **options), reference.generate(tokens, **options, eos_token_id=last))
    assert "int8" in str(ours.lancebill_reports()[0].kept["w13"])
    linears = {name for name, module in reference.named_modules() if isinstance(module, torch.nn.Linear)}
    linears = {name for name in linears if "router" not in name and not name.endswith((".gate", ".wg"))}
    unpacked = (".kv_b_proj", ".dt_proj", ".o_a_proj", "shared_expert_gate")
    dequantised = {name for name in linears if name.endswith(unpacked)}
    embeddings = {name for name, module in reference.named_modules() if isinstance(module, torch.nn.Embedding)}
    assert set(ours.lancebill_rest.packed) == linears - dequantised | embeddings
    assert linears & set(ours.lancebill_rest.dequantized) == {name for name in dequantised if "gate" not in name}
    ours.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize(("architecture", "family", "more"), MODELS, ids=[family for _, family, _ in MODELS])
def test_models_of_16_bits(architecture: str, family: str, more: dict[str, Any], tmp_path: Path) -> None:
    """transformers keeps some modules in fp32, others in other releases: none hands fp32 on to a plain matrix."""
    reference = reference_of(architecture, family, more)
    write(reference, architecture, tmp_path / "model.gguf")
    tokens = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = reference(tokens).logits
        for dtype in (torch.bfloat16, torch.float16):
            got = lancebill.from_pretrained(tmp_path / "model.gguf", dtype=dtype)(tokens).logits
            assert (got.float() - want).norm() < 0.2 * want.norm()


@pytest.mark.parametrize("architecture", ["glm4moe", "deepseek4"])
def test_what_a_model_keeps_in_fp32_is_not_rounded(architecture: str, tmp_path: Path) -> None:
    family, more = next((family, more) for name, family, more in MODELS if name == architecture)
    reference = dense(family, more)
    write(reference, architecture, tmp_path / "model.gguf")
    ours = lancebill.from_pretrained(tmp_path / "model.gguf", dtype=torch.bfloat16).state_dict()
    wide = {name: tensor for name, tensor in reference.state_dict().items() if name in ours}
    wide = {name: tensor for name, tensor in wide.items() if ours[name].dtype == torch.float32}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in wide
    assert all(torch.equal(ours[name], tensor) for name, tensor in wide.items())
    assert ours["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "family", "more", "stem", "module"),
    [
        ("qwen3next", "qwen3_next", DELTA, "attn_gate", "linear_attn.in_proj_qkvz"),
        ("granitemoe", "granitemoeshared", {**LOCAL, **SCALES}, "ffn_up_shexp", "shared_mlp.input_linear"),
    ],
)
def test_matrices_of_different_types_that_are_one_in_the_model_keep_their_blocks(
    architecture: str, family: str, more: dict[str, Any], stem: str, module: str, tmp_path: Path
) -> None:
    shared = {"shared_expert_intermediate_size": 96, "shared_intermediate_size": 96}
    reference = dense(family, {**MOE, **more, **shared})
    write(reference, architecture, tmp_path / "model.gguf", kinds={stem: "Q4_0"})
    ours = lancebill.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    tokens = torch.arange(1, 10)[None]
    with torch.no_grad():
        got, want = ours(tokens).logits, reference(tokens).logits
    assert (got - want).norm() / want.norm() < 1e-4
    assert ours.lancebill_rest.packed[f"model.layers.0.{module}"] == "int8-g32:fp16 and int4-g32:fp16"
    requantised = lancebill.from_pretrained(tmp_path / "model.gguf", weights={"rest": "int8"}, dtype=torch.float32)
    with torch.no_grad():
        assert (requantised(tokens).logits - want).norm() / want.norm() < 0.05
    assert "and" not in requantised.lancebill_rest.packed[f"model.layers.0.{module}"]


def test_the_language_model_of_one_with_images_is_qwen3(tmp_path: Path) -> None:
    """A file of qwen3vlmoe has only the language model, for which transformers has no class of its own."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    text = {**tiny.COMMON, **MOE, "num_key_value_heads": 2, "norm_topk_prob": True, "rope_parameters": rotary}
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    images |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=images)
    torch.manual_seed(3)
    reference = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    language = dense("qwen3_moe", {**MOE, "norm_topk_prob": True})
    write(language, "qwen3vlmoe", tmp_path / "model.gguf")
    names = [name for name in reference.state_dict() if "visual" not in name]
    state = {name: language.state_dict()[name.replace("language_model.", "")] for name in names}
    assert not reference.load_state_dict(state, strict=False).unexpected_keys
    tokens = torch.arange(1, 10)[None]
    with torch.no_grad():
        got = lancebill.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)(tokens).logits
        want = reference(tokens).logits
    assert (got - want).norm() / want.norm() < 1e-4


def test_every_architecture_has_a_test() -> None:
    assert {architecture for architecture, _, _ in MODELS} == set(ROWS)


def test_saved_as_one_file_and_only_if_not_requantised(tmp_path: Path) -> None:
    write(dense("qwen3_moe", MOE), "qwen3moe", tmp_path / "model.gguf")
    ours = lancebill.from_pretrained(tmp_path / "model.gguf")
    ours.save_pretrained(tmp_path / "saved")
    assert [file.name for file in (tmp_path / "saved").iterdir()] == ["model.gguf"]
    requantised = lancebill.from_pretrained(tmp_path / "model.gguf", weights="mxfp4")
    with pytest.raises(CannotEncode, match="convert --experts-only"):
        requantised.save_pretrained(tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen3moe.block_count", 1 << 30),
        ("qwen3moe.attention.key_length", 1 << 30),
        ("qwen3moe.embedding_length", 0.5),
        ("qwen3moe.attention.head_count_kv", 0),
        ("qwen3moe.rope.scaling.type", "new"),
    ],
)
def test_sizes_that_no_tensor_has_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    names = ("token_embd.weight", *(f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")))
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.block_count": 1, "qwen3moe.embedding_length": 32}
    metadata |= {"qwen3moe.attention.head_count": 2, "qwen3moe.expert_count": 2, "qwen3moe.expert_used_count": 1}
    metadata["qwen3moe.attention.layer_norm_rms_epsilon"] = 1e-6
    tensors = {name: ("F32", torch.ones(2, 32, 32)) for name in names}
    write_gguf(tmp_path / "model.gguf", {**metadata, key: value}, tensors)
    with pytest.raises((MalformedFile, UnsupportedProblem)) as caught:
        lancebill.from_pretrained(tmp_path / "model.gguf")
    assert any(word in str(caught.value) for word in (key, "layers", "rotary", "hidden_size"))


def test_linear_attention_that_cannot_be_is_refused(tmp_path: Path) -> None:
    model = dense("qwen3_next", {**MOE, **DELTA, "shared_expert_intermediate_size": 96})
    write(model, "qwen3next", tmp_path / "both.gguf", extra="blk.0.attn_q.weight")
    with pytest.raises(MalformedFile, match=r"blk\.0\.ssm_a, blk\.0\.attn_q"):
        lancebill.from_pretrained(tmp_path / "both.gguf")
    write(model, "qwen3next", tmp_path / "heads.gguf", stated={"linear_num_key_heads": 4})
    with pytest.raises(WrongShape, match=r"blk\.0\.attn_qkv"):
        lancebill.from_pretrained(tmp_path / "heads.gguf")
    with pytest.raises(BadValue, match="ssm_a"):
        log_of_negated(torch.tensor([-1.0, 0.5]), "blk.0.ssm_a")


def test_scores_that_the_model_does_not_compute_are_refused(tmp_path: Path) -> None:
    model = dense("glm4_moe", {**GROUPED, "use_qk_norm": True})
    write(model, "bailingmoe2", tmp_path / "model.gguf", stated={"score_function": "softmax"})
    with pytest.raises(UnsupportedProblem, match="expert_gating_func"):
        lancebill.from_pretrained(tmp_path / "model.gguf")


@pytest.mark.parametrize("architecture", ["mistral3", "deepseek2"])
def test_queries_that_the_model_does_not_scale_are_refused(architecture: str, tmp_path: Path) -> None:
    family, more = next((family, more) for name, family, more in MODELS if name == architecture)
    write(dense(family, more), architecture, tmp_path / "model.gguf", stated={"llama_4_scaling_beta": 0.1})
    with pytest.raises(UnsupportedProblem, match=r"temperature_scale.*expected 0.*layer by layer"):
        lancebill.from_pretrained(tmp_path / "model.gguf")


def test_the_generate_command_takes_a_gguf_file(tmp_path: Path) -> None:
    from lancebill.cli.main import app

    write(dense("qwen3_moe", MOE), "qwen3moe", tmp_path / "model.gguf")
    words = ["generate", str(tmp_path / "model.gguf"), "abc", "--max-tokens", "4", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["answers"][0]["tokens"] == 4
    words[1] = str(tmp_path)  # its folder
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_the_tokenizer_of_an_architecture_that_transformers_does_not_read_is_beside_the_file(tmp_path: Path) -> None:
    from lancebill.cli.main import app

    write(dense("dots1", GROUPED), "dots1", tmp_path / "model.gguf")
    words = ["generate", str(tmp_path / "model.gguf"), "w1 w2", "--max-tokens", "4", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "tokenizer_config.json" in done.output
    tiny.save_tokenizer(transformers, tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_unknown_tensors_and_architectures_are_refused(tmp_path: Path) -> None:
    model = dense("qwen3_moe", MOE)
    write(model, "qwen3moe", tmp_path / "extra.gguf", extra="rope_freqs.weight")
    with pytest.raises(UnexpectedTensor, match="rope_freqs"):
        lancebill.from_pretrained(tmp_path / "extra.gguf")
    other = gguf.GGUFWriter(tmp_path / "other.gguf", "arctic")
    other.add_tensor("token_embd.weight", torch.ones(4, 4).numpy())
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    with pytest.raises(UnsupportedProblem, match="qwen3moe"):
        lancebill.from_pretrained(tmp_path / "other.gguf")


def test_the_folder_of_one_gguf_file(tmp_path: Path) -> None:
    """Beside a config.json too: the file has its own. Two models are named."""
    write(dense("qwen3_moe", MOE), "qwen3moe", tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert lancebill.from_pretrained(tmp_path, dtype=torch.float32).config.model_type == "qwen3_moe"
    (tmp_path / "config.json").unlink()
    (tmp_path / "other.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    with pytest.raises(UnsupportedFormat, match=r"one file: model\.gguf, other\.gguf"):
        lancebill.from_pretrained(tmp_path)
