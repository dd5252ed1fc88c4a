"""Experts that are loaded together: the same buffers as one by one, and errors that name the expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lancebill.backends.cpu.native import library
from lancebill.checkpoint.load import projections, slice_sizes
from lancebill.checkpoint.load.expert_weights import pack_experts
from lancebill.checkpoint.load.layer_plan import plan_layer
from lancebill.checkpoint.load.load_experts import load_expert, load_experts
from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.load.staging import DeviceReader, TensorSource
from lancebill.checkpoint.read.slices import Index
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import BadValue
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.moe.layout import MatrixShape, Packed, PlainLayout
from lancebill.moe.placement import Placement
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.codec import dequantize
from lancebill.numbers.weight import LogicalWeight, expert_of, same_bits
from lancebill.testing.checkpoints import Generated, Geometry, generate

EXPERTS = 5


def layer_of(fmt: str, example_name: str) -> tuple[Generated, Recipe]:
    example = next(e for e in registry()[fmt].examples() if e.name == example_name)
    family = names.find_family({"model_type": "qwen3_moe"})
    generated = generate(example, family, family.forms[0], Geometry(EXPERTS, 256, 128))
    manifest = manifests.build(generated.config, generated.headers)
    return generated, Recipe.make(manifest, 0, LoadOptions())


@pytest.mark.parametrize(
    ("fmt", "example"), [("gptq", "int4-g64:fp16-zp-gptq"), ("fp8", "channel-dynamic"), ("awq", "int4-g64:fp16-zp")]
)
def test_slices_fill_what_single_experts_fill(fmt: str, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generated, recipe = layer_of(fmt, example)
    want = recipe.allocate()
    # Not in order, so that slots are packed one run at a time.
    order = (3, 0, 1, 4, 2)
    experts = [load_expert(generated.read, recipe.plan, recipe.plan.experts[slot]) for slot in order]
    pack_experts(recipe.plan, recipe.layout, experts, want, order)
    counts: list[int] = []
    for size in (1, 1 << 30):  # one expert at a time, and all at once
        monkeypatch.setattr(slice_sizes, "SLICE_BYTES", {"cpu": size})
        got = load_layer(generated.read, recipe.plan, recipe.layout, out=recipe.allocate(), progress=counts.append)
        assert all(same_bits(got[m][name], want[m][name]) for m in want for name in want[m])
    assert counts == [1] * EXPERTS + [EXPERTS]


@pytest.mark.skipif(library() is None, reason="the CPU kernels, which refuse NaN, are not built")
def test_an_error_in_a_slice_names_its_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    generated, recipe = layer_of("fp8", "channel-dynamic")
    monkeypatch.setattr(slice_sizes, "SLICE_BYTES", {"cpu": 1 << 30})
    name = next(name for name in generated.tensors if "experts.3.up_proj.weight_scale" in name)
    generated.tensors[name][4] = torch.nan
    with pytest.raises(BadValue, match=r"expert 3"):
        load_layer(generated.read, recipe.plan, recipe.layout, out=recipe.allocate())


def test_questions_are_answered_when_everything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: no answer is awaited before the end, and what was not as usual is loaded again."""
    generated, recipe = layer_of("gptq", "int4-g64:fp16-gptq")
    want = load_layer(generated.read, recipe.plan, recipe.layout, out=recipe.allocate())
    monkeypatch.setattr(DeviceReader, "asynchronous", True)
    monkeypatch.setattr(slice_sizes, "HELD_BYTES", 1)  # one expert at a time
    counts: list[int] = []
    for source in (TensorSource.FILES, TensorSource.PINNED, TensorSource.DEVICE):
        got = load_layer(
            generated.read, recipe.plan, recipe.layout, out=recipe.allocate(), progress=counts.append, source=source
        )
        assert all(same_bits(got[m][name], want[m][name]) for m in want for name in want[m])
    assert counts == [EXPERTS] + [1] * 2 * EXPERTS
    name = next(name for name in generated.tensors if "experts.3.up_proj.qzeros" in name)
    generated.tensors[name][0, 1] += 1
    with pytest.raises(BadValue, match=r"expert 3, up .*the middle code"):
        load_layer(generated.read, recipe.plan, recipe.layout, out=recipe.allocate(), source=TensorSource.DEVICE)


@pytest.mark.parametrize("together", [1, 1 << 30])
def test_tensors_may_have_any_strides(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generated, recipe = layer_of("compressed-tensors", "pack-quantized-int4-g64:fp16")

    def turned(name: str, index: Index) -> Tensor:
        tensor = generated.read(name, index)
        return tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor.repeat_interleave(2)[::2]

    monkeypatch.setattr(slice_sizes, "SLICE_BYTES", {"cpu": together})
    want, got = (load_layer(read, recipe.plan, PlainLayout()) for read in (generated.read, turned))
    assert all(same_bits(got[m][name], want[m][name]) for m in want for name in want[m])


def test_w13_is_packed_before_w2_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU packs the one while the host reads the other."""
    generated, recipe = layer_of("gptq", "int4-g64:fp16-gptq")
    seen: list[str] = []
    pack = PlainLayout.pack

    def recorded(layout: PlainLayout, shape: MatrixShape, weight: LogicalWeight, out: Packed) -> None:
        seen.append(f"pack {shape.name}")
        pack(layout, shape, weight, out)

    def read(name: str, index: Index) -> Tensor:
        seen.append("read w2" if ".down_proj." in name else "read w13")
        return generated.read(name, index)

    monkeypatch.setattr(PlainLayout, "pack", recorded)
    monkeypatch.setattr(DeviceReader, "asynchronous", True)
    load_layer(read, recipe.plan, PlainLayout(), source=TensorSource.DEVICE)
    assert list(dict.fromkeys(seen)) == ["read w13", "pack w13", "read w2", "pack w2"]


VIEWED = [(fmt, e) for fmt, found in registry().items() for e in found.examples() if e.scheme.views_codes]


@pytest.mark.parametrize(("fmt", "example"), VIEWED, ids=[f"{fmt}-{e.name}" for fmt, e in VIEWED])
def test_codes_that_stay_where_they_are_are_those_that_are_stacked(
    fmt: str, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    generated = generate(example, family, family.forms[0], Geometry(3, 256, 128))
    layer = manifests.build(generated.config, generated.headers).layers[0]
    assert layer is not None
    for tp in (1, 2):
        plan = plan_layer(layer, Placement(tp_rank=tp - 1, tp_size=tp))
        got = load_experts(generated.read, plan, range(3))
        with monkeypatch.context() as patch:
            patch.setattr(projections, "_may_stay_apart", lambda codes: False)
            want = load_experts(generated.read, plan, range(3))
        for a, b in ((want.w13, got.w13), (want.w2, got.w2)):
            if tp == 1 and plan.views_codes and not family.forms[0].stacked:
                assert isinstance(b.stored, Nibbles) and len(b.stored.apart) >= 3
            assert b.equals(a)
            for some in (2, slice(1, 3)):
                assert expert_of(b, some).equals(expert_of(a, some))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_gate_and_up_of_one_tensor_are_those_of_two(family: str, tp: int) -> None:
    """Rows that alternate, halves of a tensor, tensors of their own: all give gate over up."""
    example = next(e for e in registry()["mxfp4"].examples())
    row = names.find_family({"model_type": family})
    for form in row.forms:
        generated = generate(example, row, form, Geometry(2, 256, 128))
        layer = manifests.build(generated.config, generated.headers).layers[0]
        for rank in range(tp):
            plan = plan_layer(layer, Placement(tp_rank=rank, tp_size=tp))
            got = load_experts(generated.read, plan, (0, 1)).w13
            for expert in range(2):
                rows = slice(rank * 128 // tp, (rank + 1) * 128 // tp)
                want = torch.cat([half[rows] for half in halves_of(generated, form, expert)])
                assert same_bits(dequantize(expert_of(got, expert)), want), (form, expert)


def halves_of(generated: Generated, form: names.NameForm, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    held = {stored: dequantize(generated.weights[0, expert, stored]) for stored in form.names}
    if not form.fused:
        return held[names.GATE], held[names.UP]
    fused = held[names.GATE_UP]
    return (fused[0::2], fused[1::2]) if form.interleaved else (fused[:128], fused[128:])
