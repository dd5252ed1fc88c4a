"""Conversion: exact where possible, the error measured elsewhere, and no tensor lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversion import (
    SIZE,
    biases,
    dense_source,
    file_contents,
    find_example,
    find_row,
    matrices,
    read_config,
    run_conversion,
    same_matrices,
)
from covering import distinct_forms
from torch import Tensor

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import GATE, UP
from lancebill.checkpoint.write.convert import fit_to_scheme
from lancebill.checkpoint.write.target import choose_target
from lancebill.cli.verify import examine
from lancebill.errors import CannotEncode
from lancebill.formats.base import Example, Format
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.search import search_pays
from lancebill.numbers.spec import NVFP4, NVFP4_DIV, TENSOR, QuantSpec
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import same_bits
from lancebill.testing.checkpoints import Geometry, generate, save, small_size
from lancebill.testing.conformance import all_examples
from lancebill.testing.models import write_model

CONTAINERS = ("gguf",)  # formats with their own file type
ROUND_TRIPS = [
    ("mxfp4", None), ("mxfp8", None), ("nvfp4", None), ("int4-g128", None), ("int4-g32-zp", None), ("int3-g64", None),
    ("int8", None), ("fp8-tensor", None), ("fp8-channel", None), ("fp8-block", None), ("nvfp4", "modelopt"),
    ("mxfp8", "modelopt"), ("int4-g128", "gptq"), ("int8", "gptq"), ("int4-g32-zp", "gptq"), ("int4-g32-zp", "awq"),
    ("fp8-block", "fp8"), ("fp8-channel", "fp8"), ("nf4", "bitsandbytes"), ("int8", "bitsandbytes"),
    ("mxfp4", "gpt-oss"), ("fp16", None), ("fp32", None),
]  # fmt: skip


EXAMPLES = [
    pytest.param(fmt, example, id=f"{fmt.name}:{example.name}")
    for fmt, example in all_examples()
    if fmt.name not in CONTAINERS
]


@pytest.mark.parametrize(("fmt", "example"), EXAMPLES)
def test_every_format_dequantises_exactly(fmt: Format, example: Example, tmp_path: Path) -> None:
    row = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    made = generate(example, row, row.forms[0], small_size(example))
    source = save(made, tmp_path / "source")
    report = run_conversion(source, tmp_path / "dense", "fp32")
    assert same_matrices(matrices(tmp_path / "dense"), matrices(source))
    assert report.total.max_error == 0
    assert "quantization_config" not in read_config(tmp_path / "dense")


@pytest.mark.parametrize(("to", "fmt"), ROUND_TRIPS)
def test_the_output_is_the_quantised_source(to: str, fmt: str | None, tmp_path: Path) -> None:
    source = dense_source(tmp_path)
    report = run_conversion(source, tmp_path / "out", to, fmt)
    got, want = matrices(tmp_path / "out"), matrices(source)
    for key in want:
        assert same_bits(got[key], rounded(want, key, report.target.spec)), key
    assert report.total.count == sum(values.numel() for values in want.values())
    run_conversion(tmp_path / "out", tmp_path / "back", "fp32")
    assert same_matrices(matrices(tmp_path / "back"), got)


def rounded(values: dict[tuple[int, int, str], Tensor], key: tuple[int, int, str], spec: QuantSpec) -> Tensor:
    """A matrix as it is written; gate and up share the scales of whole matrices."""
    *at, name = key
    halves = (GATE, UP) if name in (GATE, UP) and any(level.block == TENSOR for level in spec.scales) else (name,)
    together = torch.cat([values[(*at, half)] for half in halves])
    together = dequantize(quantize(together, spec, search=search_pays(spec)))
    return together.chunk(len(halves))[halves.index(name)]


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("to", ["nvfp4", "fp8-tensor"])
def test_gate_and_up_get_one_scale(to: str, search: bool, tmp_path: Path) -> None:
    run_conversion(dense_source(tmp_path), tmp_path / "out", to, search=search)
    found = examine(tmp_path / "out", values=True)
    assert found.ok and not found.warnings, [warning.render() for warning in found.warnings]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("int4-g128", "gptq"), ("int4-g128", None)),
        (("int4-g128:fp16", None), ("int4-g128:fp16", "gptq")),
        (("int4-g32:fp16-zp", "gptq"), ("int4-g32:fp16-zp", "awq")),
        (("int4-g32:fp16-zp", "awq"), ("int4-g32:fp16-zp", None)),
        (("fp8-block", "fp8"), ("fp8-block", None)),
        (("mxfp4", None), ("mxfp4", "gpt-oss")),
        (("mxfp8", "modelopt"), ("mxfp8", None)),
        (("int4-g128", None), ("int4-g64", "gptq")),  # finer groups repeat their scale
    ],
)
def test_converting_between_formats_of_one_spec_is_exact(
    first: tuple[str, str | None], second: tuple[str, str | None], tmp_path: Path
) -> None:
    run_conversion(dense_source(tmp_path), tmp_path / "first", *first)
    report = run_conversion(tmp_path / "first", tmp_path / "second", *second)
    assert same_matrices(matrices(tmp_path / "first"), matrices(tmp_path / "second"))
    assert report.total.max_error == report.total.rms_error == 0


def test_nvfp4_keeps_its_codes_where_the_global_scale_is_inverted(tmp_path: Path) -> None:
    run_conversion(dense_source(tmp_path), tmp_path / "modelopt", "nvfp4", "modelopt")
    report = run_conversion(tmp_path / "modelopt", tmp_path / "ct", "nvfp4")
    assert report.target.spec == NVFP4_DIV
    assert 0 < report.total.rms_error < 2**-22
    weight = quantize(torch.randn(32, 64), NVFP4)
    scheme = choose_target(NVFP4).scheme()
    fitted, _ = fit_to_scheme(weight, scheme)
    assert torch.equal(fitted.codes, weight.codes) and torch.equal(fitted.scales[0], weight.scales[0])


FAMILIES = [(row.family, row.forms.index(form)) for row, forms in distinct_forms() for form in forms]


@pytest.mark.parametrize(("family", "form"), FAMILIES)
def test_every_naming_form_is_written_and_read_back(family: str, form: int, tmp_path: Path) -> None:
    source = dense_source(tmp_path, family, form, replace(SIZE, layers=2))
    run_conversion(source, tmp_path / "int8", "int8")
    got = matrices(tmp_path / "int8")
    for key, values in matrices(source).items():
        assert same_bits(got[key], dequantize(quantize(values, parse_spec("int8")))), key
    run_conversion(source, tmp_path / "fp32", "fp32")
    assert same_matrices(matrices(tmp_path / "fp32"), matrices(source))


def test_unquantised_output_keeps_the_names_of_the_source(tmp_path: Path) -> None:
    source = dense_source(tmp_path, "gpt_oss", 0)
    run_conversion(source, tmp_path / "out", "bf16")
    with Checkpoint.open(source) as before, Checkpoint.open(tmp_path / "out") as after:
        assert {n: i.shape for n, i in before.tensors.items()} == {n: i.shape for n, i in after.tensors.items()}
        assert all(same_bits(before.read(name), after.read(name)) for name in before.tensors)


def test_gpt_oss_round_trips(tmp_path: Path) -> None:
    """Stacked and interleaved with biases, to separate tensors per expert, and back."""
    row = find_row("gpt_oss")
    source = save(generate(find_example("mxfp4", "gpt-oss"), row, row.forms[0], SIZE), tmp_path / "source")
    run_conversion(source, tmp_path / "each", "mxfp4")
    run_conversion(tmp_path / "each", tmp_path / "back", "mxfp4", "gpt-oss")
    with Checkpoint.open(source) as before, Checkpoint.open(tmp_path / "back") as after:
        spelled = {name.replace(".bias", "_bias"): name for name in before.tensors}
        assert spelled.keys() == after.tensors.keys()
        assert all(same_bits(before.read(old), after.read(new)) for new, old in spelled.items())
    assert all(bias is not None for bias in biases(tmp_path / "each").values())


def test_gpt_oss_is_read_by_transformers(tmp_path: Path) -> None:
    """transformers dequantises our output to the same values."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    run_conversion(dense_source(tmp_path, "gpt_oss", 0), tmp_path / "out", "mxfp4", "gpt-oss")
    ours = matrices(tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        home = "model.layers.0.mlp.experts.gate_up_proj"
        theirs = mxfp4.convert_moe_packed_tensors(checkpoint.read(f"{home}_blocks"), checkpoint.read(f"{home}_scales"))
    for expert in range(SIZE.experts):
        fused = theirs[expert].float().t()
        assert torch.equal(fused[0::2], ours[0, expert, GATE])
        assert torch.equal(fused[1::2], ours[0, expert, UP])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("to", ["mxfp4", "nvfp4", "int4-g128", "int4-g32-zp", "int8", "fp8-block", "bf16"])
def test_a_gpu_writes_the_same_bytes(to: str, tmp_path: Path) -> None:
    source = dense_source(tmp_path)
    reports = [run_conversion(source, tmp_path / device, to, device=device) for device in ("cpu", "cuda")]
    assert file_contents(tmp_path / "cpu") == file_contents(tmp_path / "cuda")
    assert reports[0].total.saturated == reports[1].total.saturated


def has_negative_scales(path: Path) -> bool:
    """Scale search gives them to symmetric integers, and other readers must take them as they are."""
    with Checkpoint.open(path) as checkpoint:
        scales = (checkpoint.read(name) for name in checkpoint.tensors if name.endswith("weight_scale"))
        return any(bool((scale.float() < 0).any()) for scale in scales)


@pytest.mark.parametrize("to", ["int4-g128", "int8", "fp8-channel", "mxfp4"])
def test_transformers_loads_the_whole_model(to: str, tmp_path: Path) -> None:
    """transformers computes bitwise the same logits from the converted model and from its dequantised weights: expert
    tensors, copied tensors, names and config are all valid for it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    write_model(tmp_path / "model", Geometry(experts=4, hidden=256, intermediate=128, layers=2))
    run_conversion(tmp_path / "model", tmp_path / "small", to)
    run_conversion(tmp_path / "small", tmp_path / "dense", "bf16")
    assert has_negative_scales(tmp_path / "small") == (to == "int4-g128")
    logits = []
    for name in ("small", "dense", "model"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        with torch.no_grad():
            logits.append(model(torch.arange(16)[None]).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_a_family_with_a_format_of_its_own_is_not_written_in_one_that_looks_like_it(tmp_path: Path) -> None:
    source = dense_source(tmp_path, "deepseek_v4", 0)
    with pytest.raises(CannotEncode, match="is read as deepseek_v4"):
        run_conversion(source, tmp_path / "out", "fp8-block", "fp8")
    assert not (tmp_path / "out").exists()
