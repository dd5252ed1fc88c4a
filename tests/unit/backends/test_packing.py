"""Packing several experts at once gives what packing one by one gives, in every layout; errors name the expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancebill.backends.base import NoForm
from lancebill.backends.cpu.layout import CpuLayout
from lancebill.backends.cpu.native import library, packing
from lancebill.backends.gpu.choose_form import kernel_form
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.humming.layout import HummingLayout
from lancebill.moe.layout import Layout, MatrixShape, Packed, PlainLayout
from lancebill.numbers.bit_packing import Nibbles, pack_bits
from lancebill.numbers.weight import LogicalWeight, expert_of, same_bits, stack_experts
from lancebill.testing.layers import layer_problem, plausible_weight

EXPERTS = 3
SPECS = (
    "mxfp4", "nvfp4", "int4-g32", "int4-g128:fp16", "int4-g32-zp", "int4", "int8-g32", "int8",
    "fp8-channel", "fp8-tensor", "fp8-block", "mxfp8", "int2-g64-zp", "int3-g64", "nf4", "iq4-g32:fp16",
)  # fmt: skip
SIZES = ((128, 256), (192, 320))  # hidden, intermediate: whole and padded units


def layouts(spec: str, activations: str, hidden: int, intermediate: int) -> list[tuple[Layout, MatrixShape]]:
    """Every layout that can store this spec, with gated w13 and plain w2."""
    problem = layer_problem(spec, activations, hidden=hidden, intermediate=intermediate, experts=EXPERTS, top_k=1)
    candidates: list[tuple[Layout, MatrixShape]] = []
    for shape in problem.matrices.values():
        candidates += [(PlainLayout(), shape), (CpuLayout(problem), shape), (FragmentLayout(problem), shape)]
        if spec == "mxfp4" and not shape.bias:
            candidates.append((HummingLayout(), shape))
    return [(layout, shape) for layout, shape in candidates if can_store(layout, shape)]


def can_store(layout: Layout, shape: MatrixShape) -> bool:
    try:
        if isinstance(layout, FragmentLayout):
            kernel_form(shape, layout.problem.inputs_of(shape.name))
        layout.storage(shape)
    except NoForm:
        return False
    return True


def packed(layout: Layout, shape: MatrixShape, weights: LogicalWeight) -> Packed:
    out = layout.allocate(shape, weights.lead[0])
    for tensor in out.values():
        tensor.fill_(85)  # pack must write every byte
    layout.pack(shape, weights, out)
    return out


def dense_codes(weight: LogicalWeight) -> LogicalWeight:
    """The same weight with two codes per byte."""
    return replace(weight, stored=Nibbles(pack_bits(weight.codes, 4, torch.uint8)))


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("spec", SPECS)
def test_together_is_one_by_one_and_unpack_undoes_it(spec: str, activations: str) -> None:
    seen = 0
    for size in SIZES:
        for layout, shape in layouts(spec, activations, *size):
            singles = [plausible_weight(shape, seed) for seed in range(EXPERTS)]
            together = stack_experts(singles)
            got = packed(layout, shape, together)
            for i, single in enumerate(singles):
                want = packed(layout, shape, stack_experts([single]))
                assert all(same_bits(got[name][i], want[name][0]) for name in got), (layout, shape)
            assert layout.unpack(shape, got).equals(together)
            assert expert_of(layout.unpack(shape, got), 1).equals(singles[1])
            if shape.spec.dtype.bits == 4:
                dense = packed(layout, shape, dense_codes(together))
                assert all(same_bits(got[name], dense[name]) for name in got), (layout, shape)
            seen += 1
    assert seen


@pytest.mark.parametrize("spec", (*SPECS, "int8-zp", "mxfp6-e2m3", "mxfp8-e5m2", "int2-g64", "ternary-tensor"))
def test_the_library_packs_what_torch_packs(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("the CPU kernels are not built")
    for hidden, intermediate in (*SIZES, (96, 24)):
        problem = layer_problem(spec, "bf16", hidden=hidden, intermediate=intermediate, experts=EXPERTS, top_k=1)
        for shape in problem.matrices.values():
            layout = CpuLayout(problem)
            weights = stack_experts([plausible_weight(shape, seed) for seed in range(EXPERTS)])
            with monkeypatch.context() as patch:
                patch.setattr(packing, "library", lambda: None)
                want = packed(layout, shape, weights)
            got = packed(layout, shape, weights)
            assert all(same_bits(got[name], want[name]) for name in want), shape
