"""Conversion of everything but the experts' weights, and conversions that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion import (
    SIZE,
    dense_source,
    file_contents,
    find_example,
    find_row,
    matrices,
    read_config,
    run_conversion,
    same_matrices,
)
from torch import Tensor

import lancebill.formats as formats
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.write.convert import fit_to_scheme
from lancebill.checkpoint.write.plan_output import plan_output
from lancebill.checkpoint.write.target import choose_target
from lancebill.errors import BadValue, CannotEncode, CheckpointError, UnsupportedFormat
from lancebill.formats import registry
from lancebill.formats._gptq_zeros import Zeros
from lancebill.formats.base import Example, Module
from lancebill.formats.gptq import gptq_scheme
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import F16
from lancebill.numbers.spec import DENSE_BF16, DENSE_F32, FP8_BLOCK, group, int_spec
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight, same_bits
from lancebill.testing.checkpoints import Generated, generate, save

# Other tensors and files ------------------------------------------------------------------------------


def checkpoint_with(
    folder: Path, example: Example, extra: dict[str, Tensor], model: dict[str, Any] | None = None
) -> Path:
    """A checkpoint of `example` with extra tensors and files."""
    row = find_row("qwen3_moe")
    made = generate(example, row, row.forms[0], replace(SIZE, hidden=256, intermediate=256))
    config = replace(made.config, model={**made.config.model, **(model or {})})
    made = Generated(config, {**made.tensors, **extra}, made.weights)
    save(made, folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "hf_quant_config.json").write_text("{}")
    return folder


def encoded(example: Example, module: str, values: Tensor) -> dict[str, Tensor]:
    weight = quantize(values, example.scheme.spec)
    tensors = {}
    for role, tensor in example.scheme.encode(weight).items():
        part = example.scheme.part(role)
        assert part is not None
        tensors[module + part.suffix[0]] = tensor
    return tensors


@pytest.fixture
def fp8_model(tmp_path: Path) -> Path:
    """Block-wise FP8 except for the embedding, the router and a norm."""
    example = find_example("fp8", "block-F32")
    torch.manual_seed(0)
    extra = {
        "model.embed_tokens.weight": torch.randn(64, 256).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.randn(2, 256),
        "model.norm.weight": torch.randn(256).bfloat16(),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(192).bfloat16(),
        **encoded(example, "model.layers.0.self_attn.q_proj", torch.randn(192, 256)),
        **encoded(example, "model.layers.0.mlp.shared_expert.down_proj", torch.randn(256, 320)),
    }
    return checkpoint_with(tmp_path / "fp8", example, extra)


def test_plain_tensors_and_files_are_copied(fp8_model: Path, tmp_path: Path) -> None:
    run_conversion(fp8_model, tmp_path / "out", "mxfp4")
    with Checkpoint.open(fp8_model) as before, Checkpoint.open(tmp_path / "out") as after:
        for name in ("model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
            assert same_bits(before.read(name), after.read(name))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert read_config(tmp_path / "out")["hidden_size"] == 256


def test_other_modules_stay_quantised_if_that_is_exact(fp8_model: Path, tmp_path: Path) -> None:
    report = run_conversion(fp8_model, tmp_path / "out", "fp8-block")
    assert set(report.recast) == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.shared_expert.down_proj"}
    name = "model.layers.0.self_attn.q_proj"
    with Checkpoint.open(fp8_model) as before, Checkpoint.open(tmp_path / "out") as after:
        assert same_bits(before.read(f"{name}.weight"), after.read(f"{name}.weight"))
        assert same_bits(before.read(f"{name}.weight_scale_inv"), after.read(f"{name}.weight_scale"))
        assert same_bits(before.read(f"{name}.bias"), after.read(f"{name}.bias"))
        held = {n.removeprefix(name): i.stored for n, i in after.tensors.items() if n.startswith(name)}
        scheme = registry()["compressed-tensors"].scheme(after.config, Module(name, held))
    assert scheme.spec == FP8_BLOCK
    ignored = read_config(tmp_path / "out")["quantization_config"]["ignore"]
    assert name not in ignored and "model.embed_tokens" in ignored and "model.layers.0.mlp.gate" in ignored


def test_other_modules_are_otherwise_dequantised_and_listed_as_ignored(fp8_model: Path, tmp_path: Path) -> None:
    report = run_conversion(fp8_model, tmp_path / "out", "int4-g64", "gptq")
    assert len(report.dequantized) == 2 and not report.recast
    name = "model.layers.0.self_attn.q_proj"
    with Checkpoint.open(fp8_model) as before, Checkpoint.open(tmp_path / "out") as after:
        example = find_example("fp8", "block-F32")
        stored = {"codes": before.read(f"{name}.weight"), "scale": before.read(f"{name}.weight_scale_inv")}
        want = dequantize(example.scheme.decode(stored, 192, 256)).bfloat16()
        assert same_bits(after.read(f"{name}.weight"), want)
        assert f"{name}.weight_scale_inv" not in after.tensors
        held = {n.removeprefix(name): i.stored for n, i in after.tensors.items() if n.startswith(name)}
        scheme = registry()["gptq"].scheme(after.config, Module(name, held))
    assert scheme.spec == DENSE_BF16


@pytest.mark.parametrize("fmt", ["compressed-tensors", "gptq"])
def test_other_modules_are_left_out_however_engines_call_them(fmt: str, fp8_model: Path, tmp_path: Path) -> None:
    """vLLM fuses q, k and v, transformers moves layers, and no file stores a tied output matrix."""
    run_conversion(fp8_model, tmp_path / "out", "int4-g64", fmt)
    with Checkpoint.open(tmp_path / "out") as after:
        specs = {
            name: registry()[fmt].scheme(after.config, Module(name)).spec
            for name in (
                "model.layers.0.self_attn.qkv_proj", "model.language_model.layers.0.self_attn.q_proj", "lm_head",
                "model.layers.0.mlp.shared_experts.gate_proj", "model.layers.0.mlp.experts.7.gate_proj",
                "model.layers.0.mlp.experts",
            )
        }  # fmt: skip
    assert [spec.quantized for spec in specs.values()] == [False] * 4 + [True] * 2, specs


def test_a_module_without_its_scale_is_an_error(tmp_path: Path) -> None:
    example = find_example("fp8", "block-F32")
    tensors = encoded(example, "model.layers.0.self_attn.q_proj", torch.randn(128, 256))
    tensors.pop("model.layers.0.self_attn.q_proj.weight_scale_inv")
    source = checkpoint_with(tmp_path / "source", example, tensors)
    with pytest.raises(CheckpointError, match="q_proj"):
        run_conversion(source, tmp_path / "out", "mxfp4")


def test_pre_quantisation_scales_are_folded_in_and_other_input_scales_dropped(tmp_path: Path) -> None:
    example = next(e for e in registry()["modelopt"].examples() if e.scheme.part("pre_quant_scale") and e.inputs)
    row = find_row("qwen3_moe")
    made = generate(example, row, row.forms[0], replace(SIZE, intermediate=256))
    for expert in range(SIZE.experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            made.tensors[f"model.layers.0.mlp.experts.{expert}.{name}.pre_quant_scale"] = torch.rand(256) + 0.5
    source = save(made, tmp_path / "source")
    report = run_conversion(source, tmp_path / "out", "fp32")
    assert same_matrices(matrices(tmp_path / "out"), matrices(source))
    assert report.dropped == {"pre_quant_scale": 6, **dict.fromkeys(example.inputs, 6)}


def test_act_order_is_undone(tmp_path: Path) -> None:
    row = find_row("qwen3_moe")
    example = next(e for e in registry()["gptq"].examples() if e.scheme.act_order)
    source = save(generate(example, row, row.forms[0], SIZE), tmp_path / "source")
    report = run_conversion(source, tmp_path / "out", "int8-g32")
    got = matrices(tmp_path / "out")
    for key, values in matrices(source).items():
        assert same_bits(got[key], dequantize(quantize(values, report.target.spec)))


def test_a_zero_point_the_target_cannot_store_is_requantised() -> None:
    spec = int_spec(4, group(64), zero_point=True, scale=F16)
    codes = torch.randint(0, 16, (32, 128), dtype=torch.uint8)
    zero = torch.full((32, 2), 16, dtype=torch.int16)
    weight = LogicalWeight(spec, codes, (torch.ones(32, 2, dtype=torch.float16),), zero)
    second = gptq_scheme(spec, zeros=Zeros.PLAIN, desc_act=False)
    fitted, cost = fit_to_scheme(weight, second)
    second.encode(fitted)
    assert int(fitted.zero.max()) <= 15 and cost.count == codes.numel()  # type: ignore[union-attr]
    within = replace(weight, zero=zero - 1)
    exact, cost = fit_to_scheme(within, second)
    assert exact.equals(within) and cost.max_error == 0


def test_the_group_size_must_divide_the_rows(tmp_path: Path) -> None:
    source = dense_source(tmp_path, size=replace(SIZE, intermediate=96))
    with pytest.raises(CannotEncode, match=r"down.*divides 96: 16, 32"):
        run_conversion(source, tmp_path / "out", "int4-g128")
    assert not (tmp_path / "out").exists()


def test_an_error_names_formats_that_can_store_the_spec() -> None:
    with pytest.raises(CannotEncode, match="bitsandbytes"):
        choose_target(parse_spec("nf4"))
    with pytest.raises(UnsupportedFormat, match="compressed-tensors"):
        choose_target(parse_spec("mxfp4"), "nonsense")


# Failure --------------------------------------------------------------------------------------------


def damaged(folder: Path) -> Path:
    source = dense_source(folder)
    with Checkpoint.open(source) as checkpoint:
        info = checkpoint.tensors["model.layers.0.mlp.experts.1.down_proj.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.start + 20)
        file.write(b"\xc0\x7f")
    return source


FAULTY = """
from dataclasses import replace
from lancebill.formats.compressed_tensors import CompressedTensors

class Faulty(CompressedTensors):
    name = "faulty"

    def matches(self, config):
        return config.method == self.name

    def export(self, spec, dense_modules):
        config, scheme = super().export(spec, dense_modules)
        return {{**config, "quant_method": self.name}}, {written}

    def scheme(self, config, module):
        scheme, experts = super().scheme(config, module), "experts" in module.name
        return {read}

FORMAT = Faulty()
"""
NO_BIAS = "replace(scheme, parts=tuple(part for part in scheme.parts if part.role != 'bias'))"


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        (NO_BIAS, "scheme", "cannot store 'bias'"),
        ("scheme", "scheme.rotated(32) if experts else scheme", "cannot read back its own output"),
        ("scheme", "scheme if experts or not scheme.spec.quantized else scheme.rotated(32)", "read this module back"),
    ],
    ids=["bias", "experts", "others"],
)
def test_a_format_that_cannot_read_what_it_writes_is_caught_before_writing(
    written: str, read: str, message: str, fp8_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"faulty_{len(written + read)}.py").write_text(FAULTY.format(written=written, read=read))
    with monkeypatch.context() as patch:
        patch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
        registry.cache_clear()
        with pytest.raises(CannotEncode, match=message):
            run_conversion(fp8_model, tmp_path / "out", "fp8-block", "faulty")
    registry.cache_clear()


def test_experts_that_a_family_cannot_name_stacked(tmp_path: Path) -> None:
    with pytest.raises(CannotEncode, match="cannot name stacked tensors"):
        run_conversion(dense_source(tmp_path, "grok1"), tmp_path / "out", "mxfp4", "mxfp4")


def test_a_gguf_file_of_an_unknown_architecture_is_not_converted() -> None:
    row = find_row("gguf")
    made = generate(find_example("gguf", "Q8_0"), row, row.forms[0], SIZE)
    config = replace(made.config, model={**made.config.model, "architecture": "unheard-of"})
    with pytest.raises(UnsupportedFormat, match="unheard-of"):
        plan_output(manifests.build(config, made.headers), choose_target(parse_spec("mxfp4"), None), made.headers)


def test_a_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    source = damaged(tmp_path)
    with pytest.raises(BadValue, match="NaN"):
        run_conversion(source, tmp_path / "out", "mxfp4")
    assert sorted(file.name for file in tmp_path.iterdir()) == [source.name]


def test_a_failed_conversion_keeps_the_existing_destination(tmp_path: Path) -> None:
    run_conversion(dense_source(tmp_path / "good"), tmp_path / "out", "int8")
    before = file_contents(tmp_path / "out")
    with pytest.raises(BadValue):
        run_conversion(damaged(tmp_path / "bad"), tmp_path / "out", "mxfp4", overwrite=True)
    assert file_contents(tmp_path / "out") == before
    with pytest.raises(CheckpointError, match="not empty"):
        run_conversion(dense_source(tmp_path / "again"), tmp_path / "out", "mxfp4")
    assert file_contents(tmp_path / "out") == before


def test_the_destination_must_not_be_the_source(tmp_path: Path) -> None:
    source = dense_source(tmp_path)
    before = file_contents(source)
    with pytest.raises(CheckpointError, match="overwrite the source"):
        run_conversion(source, source, "mxfp4", overwrite=True)
    assert file_contents(source) == before


def test_a_large_tensor_is_copied_in_chunks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lancebill.checkpoint.write.convert.COPY_BYTES", 1000)
    example = find_example("dense", "bf16")
    extra = {"model.embed_tokens.weight": torch.randn(77, 256), "model.empty.weight": torch.randn(0, 256)}
    source = checkpoint_with(tmp_path / "source", example, extra)
    run_conversion(source, tmp_path / "out", "int8")
    with Checkpoint.open(tmp_path / "out") as after:
        assert all(same_bits(after.read(name), tensor) for name, tensor in extra.items())


def test_a_weight_of_the_target_spec_is_unchanged() -> None:
    weight = LogicalWeight(DENSE_F32, torch.randn(4, 8))
    fitted, cost = fit_to_scheme(weight, choose_target(DENSE_F32).scheme())
    assert fitted.equals(weight)
    assert (cost.count, cost.max_error) == (32, 0)
