"""`check_values` finds invalid values and names the tensor that holds them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.load.check_values import Findings, check_stored_size, check_values
from lancebill.checkpoint.load.memory import plan_memory
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP
from lancebill.checkpoint.resolve.unquantized_experts import unquantized_experts
from lancebill.errors import ShardError
from lancebill.formats import registry
from lancebill.formats.base import Example, Format
from lancebill.moe.layout import PlainLayout
from lancebill.testing.checkpoints import Generated, Geometry, generate, small_size
from lancebill.testing.conformance import all_examples

SIZE = Geometry(experts=2, hidden=256, intermediate=256)
HOME = "model.layers.0.mlp.experts.1"
PROJECTIONS = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}


def find_example(fmt: str, name: str) -> Example:
    return next(e for e in registry()[fmt].examples() if e.name == name)


def generate_for(example: Example) -> Generated:
    row = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    return generate(example, row, row.forms[0], small_size(example))


def check_projection(made: Generated, projection: str = "up_proj", expert: int = 1) -> Findings:
    layer = manifests.build(made.config, made.headers).layers[0]
    return check_values(made.read, layer.projections[expert, PROJECTIONS[projection]])


@pytest.mark.parametrize(("fmt", "example"), [pytest.param(f, e, id=f"{f.name}:{e.name}") for f, e in all_examples()])
def test_valid_weights_have_no_problems(fmt: Format, example: Example) -> None:
    made = generate_for(example)
    manifest = manifests.build(made.config, made.headers)
    assert not list(unquantized_experts(manifest))
    for projection in manifest.layers[0].projections.values():
        found = check_values(made.read, projection)
        assert found.problems == found.warnings == (), fmt.name


@pytest.mark.parametrize(("fmt", "example"), [pytest.param(f, e, id=f"{f.name}:{e.name}") for f, e in all_examples()])
def test_a_nan_in_any_float_tensor_is_found(fmt: Format, example: Example) -> None:
    """For every format and role; the error names the expert. Packed codes of quantised weights are skipped."""
    made = generate_for(example)
    projection = manifests.build(made.config, made.headers).layers[0].projections[1, DOWN]
    for role, source in projection.sources.items():
        original = made.tensors[source.tensor]
        packed = role == "codes" and example.scheme.spec.quantized
        if not original.is_floating_point() or original.dtype.itemsize == 1 or packed:
            continue
        damaged = original.clone()
        (damaged if source.expert is None else damaged[source.expert]).view(-1)[0] = torch.nan
        made.tensors[source.tensor] = damaged
        problems = check_values(made.read, projection).problems
        assert problems, f"{fmt.name}: {role}"
        assert all("layer 0, expert 1, down" in str(problem.where) for problem in problems)
        made.tensors[source.tensor] = original


def set_nan(tensor: Tensor) -> None:
    tensor.view(-1)[5] = torch.nan


def set_inf(tensor: Tensor) -> None:
    tensor.view(-1)[5] = torch.inf


def set_zero(tensor: Tensor) -> None:
    tensor.view(-1)[5] = 0


def set_negative(tensor: Tensor) -> None:
    tensor.view(-1)[5] = -1


def set_byte(value: int) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor.view(torch.uint8).view(-1)[5] = value

    return change


PACKED = ("compressed-tensors", "pack-quantized-int4-g64:fp16")
INVALID = [
    (PACKED, ".weight_scale", set_nan, "scale 1: NaN or infinite"),
    (PACKED, ".weight_scale", set_inf, "scale 1: NaN or infinite"),
    (PACKED, ".weight_scale", set_zero, "scale 1: zero over non-zero codes"),
    (("dense", "bf16"), ".weight", set_nan, "codes: NaN or infinite"),
    (("dense", "fp32"), ".weight", set_inf, "codes: NaN or infinite"),
    (("fp8", "block-F32"), ".weight", set_byte(0x7F), "codes: NaN or infinite"),
    (("fp8", "block-F32"), ".weight_scale_inv", set_nan, "scale 1: NaN or infinite"),
    (("fp8", "block-F8_E8M0"), ".weight_scale_inv", set_byte(0xFF), "NaN"),
    (("fp8", "tensor-static"), ".input_scale", lambda t: t.fill_(0), "input_scale: not a positive number"),
    (("fp8", "tensor-static"), ".input_scale", lambda t: t.fill_(torch.nan), "input_scale: not a positive number"),
    (("fp8", "channel-dynamic"), ".bias", set_inf, "bias: not finite"),
    (("modelopt", "NVFP4"), ".weight_scale", set_byte(0x7F), "NaN"),
    (("modelopt", "NVFP4"), ".weight_scale_2", lambda t: t.fill_(torch.inf), "scale 2: NaN or infinite"),
    (("gptq", "int4-g32:fp16-zp-gptq-actorder"), ".g_idx", set_byte(3), "g_idx"),
    (("gptq", "int4-g64:fp16-gptq"), ".qzeros", set_zero, "zero points"),
    (("gptq", "int4-g64:fp16-zp-gptq"), ".qzeros", set_byte(0x7F), "the config names no tool"),
    (("auto-round", "auto_round:auto_gptq-int4-g64:fp16-zp"), ".qzeros", set_byte(0x7F), "the config names no tool"),
]


@pytest.mark.parametrize(("which", "suffix", "change", "text"), INVALID)
def test_each_invalid_value_is_reported_with_its_tensor(
    which: tuple[str, str], suffix: str, change: Callable[[Tensor], None], text: str
) -> None:
    made = generate_for(find_example(*which))
    change(made.tensors[f"{HOME}.up_proj{suffix}"])
    problems = check_projection(made).problems
    assert len(problems) == 1, problems
    assert text in problems[0].what + str(problems[0].where)
    assert "layer 0, expert 1, up" in str(problems[0].where)
    assert f"{HOME}.up_proj" in str(problems[0].where)
    assert check_projection(made, "down_proj").problems == () == check_projection(made, "up_proj", expert=0).problems


def test_a_zero_scale_over_zero_codes_is_fine() -> None:
    made = generate_for(find_example("fp8", "channel-dynamic"))
    made.tensors[f"{HOME}.up_proj.weight_scale"].view(-1)[5] = 0
    assert [problem.what for problem in check_projection(made).problems] == ["scale 1: zero over non-zero codes"]
    made.tensors[f"{HOME}.up_proj.weight"].view(torch.uint8)[5] = 0
    assert check_projection(made).problems == ()


def test_equal_scales_are_suspicious_unless_the_weights_are_zero() -> None:
    made = generate_for(find_example("fp8", "channel-dynamic"))
    made.tensors[f"{HOME}.up_proj.weight_scale"].fill_(0.5)
    assert ["all blocks have the same" in warning.what for warning in check_projection(made).warnings] == [True]
    made.tensors[f"{HOME}.up_proj.weight"].view(torch.uint8).zero_()
    assert check_projection(made).warnings == ()


def test_a_zero_point_of_inputs_may_be_zero() -> None:
    made = generate_for(find_example("quark", "int8-tensor"))
    made.tensors |= {f"{HOME}.up_proj.input_zero_point": torch.tensor(0, dtype=torch.int8)}
    assert check_projection(made).problems == ()


def test_a_negative_scale_is_a_note_and_only_for_float_codes() -> None:
    floats = generate_for(find_example("fp8", "channel-dynamic"))
    set_negative(floats.tensors[f"{HOME}.up_proj.weight_scale"])
    assert check_projection(floats).problems == ()
    assert ["negative" in note.what for note in check_projection(floats).notes] == [True]
    integers = generate_for(find_example(*PACKED))
    set_negative(integers.tensors[f"{HOME}.up_proj.weight_scale"])
    found = check_projection(integers)
    assert found.problems == found.warnings == found.notes == ()


def test_memory_is_planned_for_every_rank() -> None:
    made = generate_for(find_example(*PACKED))
    manifest = manifests.build(made.config, made.headers)
    alone = next(plan_memory(manifest, PlainLayout()))
    expert = 3 * 256 * 256  # one byte per code
    scales = 3 * 256 * 4 * 2
    assert alone.final == 2 * (expert // 2 + scales)
    assert alone.peak == alone.final + 2 * (expert + scales)
    ranks = list(plan_memory(manifest, PlainLayout(), tp=2, ep=2))
    assert [(r.tp_rank, r.ep_rank, r.experts, r.intermediate) for r in ranks] == [
        (0, 0, 1, 128), (1, 0, 1, 128), (0, 1, 1, 128), (1, 1, 1, 128),
    ]  # fmt: skip
    assert sum(rank.final for rank in ranks) == alone.final
    with pytest.raises(ShardError, match="over 3 ranks"):
        list(plan_memory(manifest, PlainLayout(), tp=3))


def _other_shape(state: Tensor) -> Tensor:
    return torch.tensor(list(bytes(state.tolist()).replace(b"[256, 256]", b"[512, 128]")), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("fmt", "example", "suffix", "wrong"),
    [
        ("bitsandbytes", "nf4", ".weight.quant_state.bitsandbytes__nf4", lambda t: torch.cat([t, t[:1]])),
        ("bitsandbytes", "nf4", ".weight.quant_state.bitsandbytes__nf4", lambda t: t.flip(0)),
        ("bitsandbytes", "nf4", ".weight.quant_state.bitsandbytes__nf4", _other_shape),
        ("compressed-tensors", "pack-quantized-int2", ".weight_shape", lambda t: t + 1),
    ],
)
def test_a_stored_size_is_checked_without_decoding(
    fmt: str, example: str, suffix: str, wrong: Callable[[Tensor], Tensor]
) -> None:
    made = generate_for(find_example(fmt, example))
    name = f"{HOME}.up_proj{suffix}"

    def errors() -> list[str]:
        layer = manifests.build(made.config, made.headers).layers[0]
        found = (check_stored_size(made.read, projection) for projection in layer.projections.values())
        return [str(error) for error in found if error is not None]

    assert not errors()
    made.tensors[name] = wrong(made.tensors[name])
    assert len(errors()) == 1 and name in errors()[0]
