"""Models whose modules outside the experts were quantised while loading: saved, read back, read by others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

import lancebill  # noqa: E402
from lancebill.checkpoint.read.files import Checkpoint  # noqa: E402
from lancebill.cli.convert import run_conversion, target_of  # noqa: E402
from lancebill.errors import CannotEncode, SpecError  # noqa: E402
from lancebill.formats import registry  # noqa: E402
from lancebill.layer.quantized_linear import QuantizedLinear  # noqa: E402

TOKENS = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))
MIXED = {"*.self_attn.*": "int8", "lm_head": "fp8-channel"}
# Rules, and the specs that the checkpoint then has outside its experts.
RULES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "experts and rest": ({"experts": "mxfp4", "rest": "int8"}, {"int8"}),
    "one spec": ({"experts": "int4-g32", "rest": "int4-g32"}, {"int4-g32"}),
    "rest of two specs": ({"experts": "int4-g32", "rest": MIXED}, {"int8", "fp8-channel"}),
    "experts as stored": ({"rest": "int4-g32-zp"}, {"int4-g32-zp"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("rest") / "model"
    assert tiny.save_model(transformers, "qwen3_moe", made)
    return made


def check_same(one: Any, other: Any) -> None:
    """Every parameter has the same bits, packed ones included, and so have the logits."""
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with torch.no_grad():
        assert torch.equal(one(TOKENS).logits, other(TOKENS).logits)


@pytest.mark.parametrize("case", RULES)
def test_read_back_with_the_same_bits(folder: Path, case: str, tmp_path: Path) -> None:
    rules, specs = RULES[case]
    ours = lancebill.from_pretrained(folder, weights=rules)
    assert len(ours.lancebill_rest.requantized) == 9
    ours.save_pretrained(tmp_path / "saved")
    again = lancebill.from_pretrained(tmp_path / "saved")
    assert {str(spec) for spec in again.lancebill_rest.specs.values()} == specs
    assert not again.lancebill_rest.requantized
    check_same(again, ours)


def test_the_library_decodes_every_module(folder: Path, tmp_path: Path) -> None:
    """compressed-tensors chooses the group of each module and decompresses it."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    rules = {"experts": "mxfp4", "rest": MIXED}
    ours = lancebill.from_pretrained(folder, weights=rules, attn_implementation="eager")
    ours.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    quantization.apply_quantization_config(theirs, quantization.QuantizationConfig.model_validate(config))
    judged = 0
    with Checkpoint.open(tmp_path / "saved") as saved:
        for name, module in theirs.named_modules():
            scheme = module.__dict__.get("quantization_scheme")
            if not isinstance(module, nn.Linear) or scheme is None:
                continue
            compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
            stored = [tensor for tensor in saved.tensors if tensor.startswith(f"{name}.")]
            state = {tensor.removeprefix(f"{name}."): saved.read(tensor) for tensor in stored}
            got, packed = compressor.decompress(state, scheme)["weight"], ours.get_submodule(name)
            assert isinstance(packed, QuantizedLinear)
            assert torch.equal(got, packed.weight.to(got.dtype))  # it multiplies in the type of the scales
            judged += 1
    assert judged == 9
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        want = ours(TOKENS).logits.float()
        assert (theirs(TOKENS).logits.float() - want).norm() / want.norm() < 0.05  # fp8 modules declare fp8 inputs


def test_an_output_matrix_that_was_tied_to_the_embedding(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", **(tiny.COMMON | tiny.FAMILIES["qwen3_moe"]), tie_word_embeddings=True
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "tied")
    ours = lancebill.from_pretrained(tmp_path / "tied", weights={"experts": "mxfp4", "rest": {"lm_head": "int8"}})
    ours.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    check_same(lancebill.from_pretrained(tmp_path / "saved"), ours)


def test_what_is_stored_quantised_stays_so(folder: Path, tmp_path: Path) -> None:
    """Experts in a new spec, attention as it is stored."""
    example = next(e for e in registry()["compressed-tensors"].examples() if e.name == "pack-quantized-int5-g64")
    quant = {**example.config.quant, "ignore": ["re:.*experts.*", "re:.*mlp.gate$", "lm_head"]}
    tiny.quantized_copy(
        folder, tmp_path / "packed", tmp_path / "plain", quant, example.scheme, lambda m: ".self_attn." in m
    )
    ours = lancebill.from_pretrained(tmp_path / "packed", weights="mxfp4")
    kept = set(ours.lancebill_rest.specs)
    ours.save_pretrained(tmp_path / "saved")
    again = lancebill.from_pretrained(tmp_path / "saved")
    assert kept == set(again.lancebill_rest.specs) and len(kept) == 8
    check_same(again, ours)


def test_a_format_with_one_spec(folder: Path, tmp_path: Path) -> None:
    rules = {"experts": "int4-g32:fp16", "rest": "int4-g32:fp16"}
    ours = lancebill.from_pretrained(folder, weights=rules)
    ours.save_pretrained(tmp_path / "saved", format="gptq")
    check_same(lancebill.from_pretrained(tmp_path / "saved"), ours)
    ours = lancebill.from_pretrained(folder, weights={**rules, "rest": "int8"})
    with pytest.raises(CannotEncode, match="gptq stores all matrices with one spec") as caught:
        ours.save_pretrained(tmp_path / "never", format="gptq")
    assert "compressed-tensors" in str(caught.value) and not (tmp_path / "never").exists()


def test_another_format_for_what_is_stored(folder: Path, tmp_path: Path) -> None:
    """`format=` is obeyed or refused also where nothing was requantised."""
    run_conversion(folder, tmp_path / "packed", target_of("int4-g32:fp16", "compressed-tensors"), {})
    ours = lancebill.from_pretrained(tmp_path / "packed")
    ours.save_pretrained(tmp_path / "saved", format="gptq")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["quantization_config"]["quant_method"] == "gptq"
    check_same(lancebill.from_pretrained(tmp_path / "saved"), ours)
    ours.save_pretrained(tmp_path / "same", format="compressed-tensors")
    with pytest.raises(CannotEncode, match="cannot write gguf"):
        ours.save_pretrained(tmp_path / "never", format="gguf")


def test_what_a_format_cannot_hold_is_said(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lancebill.from_pretrained(folder, weights={"experts": "int4-g32", "rest": "int8"}).save_pretrained(tmp_path / "two")
    assert not caplog.messages
    ours = lancebill.from_pretrained(tmp_path / "two")
    ours.save_pretrained(tmp_path / "one", format="gptq")
    lost, unread = caplog.messages
    assert lost.startswith("gptq cannot hold 9 modules outside the experts; they are written unquantised")
    assert "transformers alone cannot load" in unread and "int4-g32 in gptq" in unread
    assert not lancebill.from_pretrained(tmp_path / "one").lancebill_rest.specs


@pytest.mark.parametrize("argument", ["weights", "activations"])
def test_a_rule_that_matches_no_module(folder: Path, argument: str) -> None:
    with pytest.raises(SpecError, match=r"no module matches this rule; expected .* model.layers.0.self_attn.q_proj"):
        lancebill.from_pretrained(folder, **{argument: {"rest": {"self_attn.*": "int8"}}})


def test_modules_that_a_rule_leaves_as_they_are(folder: Path) -> None:
    """Routers may be named, although they are never quantised."""
    rules = {"lm_head": None, "*.mlp.gate": None, "*": "int8"}
    model = lancebill.from_pretrained(folder, weights={"rest": rules})
    assert len(model.lancebill_rest.requantized) == 8 and "lm_head" not in model.lancebill_rest.requantized


def test_experts_that_would_be_rounded_again(folder: Path, tmp_path: Path) -> None:
    run_conversion(folder, tmp_path / "nf4", target_of("nf4", "bitsandbytes"), {})
    ours = lancebill.from_pretrained(tmp_path / "nf4", weights={"rest": "int8"})
    with pytest.raises(CannotEncode, match="nf4"):
        ours.save_pretrained(tmp_path / "saved")
