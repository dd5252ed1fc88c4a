"""Plain dense layers keep 16 bits where the CPU computes in fp32: the same answers, with every load and reload."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import engine
import models
from safetensors.torch import load_file, save_file

BOUND = 1e-5
NARROW = {"model.embed_tokens", "lm_head"} | {f"model.layers.{i}.self_attn.qkv_proj" for i in range(2)}


def stored_in(llm: Any) -> dict[str, torch.dtype]:
    """The dtypes of the matrices that lancebill multiplies."""
    from lancebill.integrations.vllm.narrow import NarrowEmbeddingMethod, NarrowLinearMethod

    ours = (NarrowLinearMethod, NarrowEmbeddingMethod)
    named = engine.model_of(llm).named_modules()
    methods = [(name, module) for name, module in named if isinstance(module.__dict__.get("quant_method"), ours)]
    return {name: module.weight.dtype for name, module in methods if module.quant_method.narrow.weight is not None}


def fine_copy(source: Path, made: Path) -> Path:
    """The model with dense matrices that need fp32."""
    shutil.copytree(source, made)
    tensors = load_file(source / "model.safetensors")
    fine = {name: t.float() * 1.001 if "experts" not in name else t for name, t in tensors.items()}
    save_file(fine, made / "model.safetensors", metadata={"format": "pt"})
    return made


def check(got: engine.Answers, model: Path) -> None:
    want = engine.reference(model)
    assert got.tokens == want.tokens and got.distance(want) <= BOUND


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_reloads_of_narrow_and_fine_matrices(
    eager: bool, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """16 bits where they hold the numbers, fp32 where not; a compiled graph sees either."""
    if not eager and not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    first = models.converted("qwen3_moe", "ct-int4", folder)
    fine = fine_copy(first, tmp_path / "fine")
    with engine.engine(first, {"mode": "require"}, enforce_eager=eager) as llm:
        assert stored_in(llm) == dict.fromkeys(NARROW, torch.bfloat16)
        check(engine.ask(llm), first)
        for path, dtype in ((fine, torch.float32), (first, torch.bfloat16)):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            assert stored_in(llm) == dict.fromkeys(NARROW, dtype)
            check(engine.ask(llm), path)


def test_what_is_left_to_vllm(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Everything with `linear: off`; matrices that need fp32; and models of whose experts we take none."""
    if not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.converted("qwen3_moe", "ct-int4", folder)
    fine = fine_copy(model, tmp_path / "fine")
    plain, none = models.plain_model("qwen3_moe", folder), {"weights": [["9", None]]}
    for path, settings in ((model, {"linear": "off"}), (fine, {}), (plain, none)):
        with engine.engine(path, settings) as llm:
            assert not stored_in(llm)
            check(engine.ask(llm), path)


def test_one_matrix_for_embeddings_and_logits(folder: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.tied_model("qwen3_moe", folder)
    with engine.engine(model, {"mode": "require"}) as llm:
        made = engine.model_of(llm)
        assert made.lm_head.weight is made.model.embed_tokens.weight
        assert made.lm_head.weight.dtype == torch.bfloat16
        check(engine.ask(llm), model)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        assert made.lm_head.weight is made.model.embed_tokens.weight
        check(engine.ask(llm), model)


def test_a_model_without_experts(
    folder: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Left alone, unless dense layers are offered; and `require` says that there is nothing to require."""
    if not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.dense_model(folder)
    with engine.engine(model, {"mode": "require"}) as llm:
        assert engine.takeover_of(llm) is None and not stored_in(llm)
        left = engine.ask(llm)
    assert "this model has none" in "".join(capfd.readouterr())
    with engine.engine(model, {"linear": "offer"}) as llm:
        assert "lm_head" in stored_in(llm)
        got = engine.ask(llm)
    assert got.tokens == left.tokens and got.distance(left) <= BOUND
