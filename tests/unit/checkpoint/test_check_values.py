"""Numbers that cannot be right are found by `check_values`, and the tensor they are in is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.load.check_values import Findings, check_values
from lancebill.checkpoint.load.memory import plan_memory
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP
from lancebill.errors import ShardError
from lancebill.formats import registry
from lancebill.formats.base import Example, Format
from lancebill.moe.layout import PlainLayout
from lancebill.testing.checkpoints import Generated, Geometry, generate
from lancebill.testing.conformance import all_examples

SIZE = Geometry(experts=2, hidden=256, intermediate=256)
HOME = "model.layers.0.mlp.experts.1"
PROJECTIONS = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}


def example_of(fmt: str, name: str) -> Example:
    return next(e for e in registry()[fmt].examples() if e.name == name)


def made_of(example: Example) -> Generated:
    row = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    return generate(example, row, row.forms[0], replace(SIZE, hidden=example.k, intermediate=example.k))


def look(made: Generated, projection: str = "up_proj", expert: int = 1) -> Findings:
    layer = manifests.build(made.config, made.headers).layers[0]
    return check_values(made.read, layer.projections[expert, PROJECTIONS[projection]])


@pytest.mark.parametrize(("fmt", "example"), [pytest.param(f, e, id=f"{f.name}:{e.name}") for f, e in all_examples()])
def test_good_values_have_no_problems(fmt: Format, example: Example) -> None:
    made = made_of(example)
    layer = manifests.build(made.config, made.headers).layers[0]
    for projection in layer.projections.values():
        assert check_values(made.read, projection).problems == (), fmt.name


@pytest.mark.parametrize(("fmt", "example"), [pytest.param(f, e, id=f"{f.name}:{e.name}") for f, e in all_examples()])
def test_a_nan_in_any_float_tensor_is_found(fmt: Format, example: Example) -> None:
    """Whatever the format and the role; the expert is named. Codes packed into words of any dtype are exempt."""
    made = made_of(example)
    projection = manifests.build(made.config, made.headers).layers[0].projections[1, DOWN]
    for role, source in projection.sources.items():
        good = made.tensors[source.tensor]
        packed = role == "codes" and example.scheme.spec.quantized
        if not good.is_floating_point() or good.dtype.itemsize == 1 or packed:
            continue
        bad = good.clone()
        (bad if source.expert is None else bad[source.expert]).view(-1)[0] = torch.nan
        made.tensors[source.tensor] = bad
        found = check_values(made.read, projection).problems
        assert found, f"{fmt.name}: {role}"
        assert all("layer 0, expert 1, down" in str(problem.where) for problem in found)
        made.tensors[source.tensor] = good


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
KINDS = [
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
]


@pytest.mark.parametrize(("which", "suffix", "change", "text"), KINDS)
def test_each_kind_is_found_and_named(
    which: tuple[str, str], suffix: str, change: Callable[[Tensor], None], text: str
) -> None:
    made = made_of(example_of(*which))
    change(made.tensors[f"{HOME}.up_proj{suffix}"])
    found = look(made).problems
    assert len(found) == 1, found
    assert text in found[0].what + str(found[0].where)
    assert "layer 0, expert 1, up" in str(found[0].where)
    assert f"{HOME}.up_proj" in str(found[0].where)
    assert look(made, "down_proj").problems == () == look(made, "up_proj", expert=0).problems


def test_a_zero_scale_over_zero_codes_is_fine() -> None:
    made = made_of(example_of("fp8", "channel-dynamic"))
    made.tensors[f"{HOME}.up_proj.weight_scale"].view(-1)[5] = 0
    assert [problem.what for problem in look(made).problems] == ["scale 1: zero over non-zero codes"]
    made.tensors[f"{HOME}.up_proj.weight"].view(torch.uint8)[5] = 0
    assert look(made).problems == ()


def test_a_negative_scale_is_only_noted_and_only_for_floats() -> None:
    floats = made_of(example_of("fp8", "channel-dynamic"))
    set_negative(floats.tensors[f"{HOME}.up_proj.weight_scale"])
    assert look(floats).problems == ()
    assert ["negative" in note.what for note in look(floats).notes] == [True]
    integers = made_of(example_of(*PACKED))
    set_negative(integers.tensors[f"{HOME}.up_proj.weight_scale"])
    assert look(integers) == Findings()


def test_memory_is_planned_for_every_rank() -> None:
    made = made_of(example_of(*PACKED))
    manifest = manifests.build(made.config, made.headers)
    alone = next(plan_memory(manifest, PlainLayout()))
    expert = 3 * 256 * 256  # a byte a code
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
