"""The kernels that pack weights, in Triton's interpreter on a fake GPU, against the definition in torch.

A kernel that is given a tensor of the CPU fails, and so does a weight that torch packs where kernels can.

Not collected by pytest: `test_hopper_dispatch.py` runs it in a separate process, where TRITON_INTERPRET is set before
Triton is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from codes_apart import codes_apart
from fake_gpus import memory_of, plugged_in
from interpreted import scalars
from torch import Tensor
from triton.runtime.jit import ConstexprFunction

from lancebill.backends.cpu import layout as cpu_layouts
from lancebill.backends.cpu.layout import CpuLayout
from lancebill.backends.gpu import pack_on_gpu
from lancebill.backends.gpu.kernels import pack_codes, pack_scales
from lancebill.backends.gpu.layout import FragmentLayout, Rerounded
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.numbers.bit_packing import Nibbles, pack_awq, pack_bits, turn_awq, turned_stream_codes
from lancebill.numbers.unusual import any_set, assuming, repeating
from lancebill.numbers.weight import LogicalWeight, same_bits, stack_experts
from lancebill.testing.layers import layer_problem, plausible_weight

FORMS = [  # and experts; the tests on a GPU have all forms
    ("mxfp4", "bf16", 1), ("mxfp4", "fp8", 1), ("nvfp4", "bf16", 2), ("int4-g32-zp", "bf16", 1),
    ("int4-g64:fp16", "bf16", 1), ("int4-g128-zp", "fp8", 1), ("int4-zp", "fp16", 1), ("fp8-channel", "fp8", 1),
    ("fp8-block", "bf16", 1), ("mxfp8", "fp16", 1), ("int3-g32-zp", "bf16", 1), ("nf4-g32", "bf16", 1),
]  # fmt: skip
SIZES = {"g64": (192, 64), "g128": (256, 128), "block": (256, 128)}  # hidden and intermediate, by part of the spec
TURNED = ("mxfp4", "int4-g64:fp16")
GPU = torch.device("cuda", 0)
RAN = list[str]()  # kernels of this test


def run(make: object, key: tuple[object, ...], values: pack_on_gpu.Values, programs: int, device: torch.device) -> bool:
    """The kernel of a launch, interpreted."""
    source = make(*key)  # type: ignore[operator]
    kernel = getattr(importlib.import_module(source.module), source.kernel)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    arguments = []
    for name, kind in source.arguments:
        value = values[name]
        if kind.startswith("*") and value is None:
            value = torch.zeros(1, dtype=torch.int64 if kind == "*i64" else torch.int32)
        if isinstance(value, Tensor) and values[name] is not None:
            value = memory_of(value, device)
        with torch._C.DisableTorchFunction():
            if isinstance(value, Tensor) and kind != "*fp32":
                value = value.view(integer[value.dtype.itemsize])
        arguments.append(value)
    with torch._C.DisableTorchFunction():
        kernel[(programs,)](*arguments, **dict(source.constants))
    RAN.append(source.kernel)
    return True


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    RAN.clear()
    monkeypatch.setattr(pack_on_gpu, "launch", run)
    for module in (pack_codes, pack_scales):
        monkeypatch.setattr(module, "range", scalars, raising=False)
    for name, function in vars(pack_codes).copy().items():  # would copy the whole table of moves in every call
        if isinstance(function, ConstexprFunction):
            monkeypatch.setattr(pack_codes, name, function.fn)
    monkeypatch.setattr(pack_on_gpu, "_CHUNK", 2)  # rows of several chunks
    with plugged_in(monkeypatch):
        yield


def packed(layout: FragmentLayout, shape: MatrixShape, weights: LogicalWeight, device: str = "cpu") -> Packed:
    """In memory of the CPU, wherever it was packed."""
    out, before = layout.allocate(shape, *weights.lead, device), len(RAN)
    for tensor in out.values():
        tensor.fill_(85)  # pack must write every byte
    layout.pack(shape, weights, out)
    assert RAN[before:] == (["pack_scales", "pack_codes"] if device != "cpu" else [])
    return {name: tensor.cpu() for name, tensor in out.items()}


@pytest.mark.parametrize(("spec", "activations", "experts"), FORMS)
def test_kernels_follow_the_definition(spec: str, activations: str, experts: int) -> None:
    """Of weights on the CPU, which are moved."""
    hidden, intermediate = next((size for name, size in SIZES.items() if name in spec), (96, 32))
    problem = layer_problem(spec, activations, hidden=hidden, intermediate=intermediate, experts=experts, top_k=1)
    layout = FragmentLayout(problem)
    for shape in problem.matrices.values():
        weights = stack_experts([plausible_weight(shape, seed) for seed in range(experts)])
        want = packed(layout, shape, weights)
        others = turned_codes(weights, gated=problem.is_gated(shape.name)) if spec in TURNED else []
        for stored in (*row_codes(weights), *others):
            got = packed(layout, shape, replace(weights, stored=stored), "cuda")
            assert got.keys() == want.keys()
            for name in want:
                assert same_bits(got[name], want[name]), (shape, name)


def row_codes(weights: LogicalWeight) -> list[Tensor | Nibbles]:
    """One byte per code; of 4-bit codes also two."""
    if weights.spec.dtype.bits != 4:
        return [weights.codes]
    return [weights.codes, Nibbles(pack_bits(weights.codes, 4, torch.uint8))]


def turned_codes(weights: LogicalWeight, *, gated: bool) -> list[Nibbles]:
    """4-bit codes with their rows in other orders."""
    ways = [turned(weights.codes), turned_pairs(weights.codes)]
    if gated:
        halves = weights.codes.unflatten(-2, (2, -1))
        alternating = Nibbles(pack_bits(halves.transpose(-3, -2).flatten(-3, -2), 4, torch.uint8))
        ways += [alternating.split_rows(2), turned(halves.flatten(0, 1)).join_rows(2)]
        ways += [turned_pairs(halves.flatten(0, 1)).join_rows(2)]
    return ways


def turned_pairs(codes: Tensor) -> Nibbles:
    """As AWQ stores them."""
    stored = turn_awq(pack_awq(codes.mT.contiguous()), codes.shape[-2])
    assert isinstance(stored, Nibbles) and stored.columns is not None
    return stored


def turned(codes: Tensor) -> Nibbles:
    stored = turned_stream_codes(pack_bits(codes, 4, torch.int32).mT.contiguous(), 4, codes.shape[-1])
    assert isinstance(stored, Nibbles)
    return stored


@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 32), (320, 72)])  # whole and padded strips and words
@pytest.mark.parametrize("spec", ["mxfp4", "int4-g32-zp"])
def test_codes_of_the_cpu_are_unpacked_as_defined(
    spec: str, hidden: int, intermediate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = layer_problem(spec, hidden=hidden, intermediate=intermediate, experts=2, top_k=1)
    layout = CpuLayout(problem)
    for shape in problem.matrices.values():
        weights = stack_experts([plausible_weight(shape, seed) for seed in range(2)])
        held = layout.allocate(shape, 2)
        layout.pack(shape, weights, held)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_layouts, "_unpack_nibbles", None)  # not used
            found = layout.unpack(shape, {name: tensor.to(GPU) for name, tensor in held.items()})
        assert found.device == GPU and found.to(torch.device("cpu")).equals(weights), shape


def test_codes_are_found_where_each_matrix_is(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layer_problem("mxfp4", "bf16", hidden=96, intermediate=32, experts=2, top_k=1)
    layout = FragmentLayout(problem)
    for shape in problem.matrices.values():
        weights = stack_experts([plausible_weight(shape, seed) for seed in range(2)])
        want = packed(layout, shape, weights)
        ways = codes_apart(weights.to(GPU), gated=problem.is_gated(shape.name))
        with monkeypatch.context() as patch:
            patch.setattr(Nibbles, "together", property(lambda codes: pytest.fail("the codes were copied")))
            for stored in ways:
                got = packed(layout, shape, replace(weights, stored=stored), "cuda")
                assert all(same_bits(got[name], want[name]) for name in want), shape


def test_groups_far_below_their_rows_largest_are_left_to_torch() -> None:
    problem = layer_problem("mxfp4", "fp16", hidden=96, intermediate=32, experts=1, top_k=1)
    layout, shape = FragmentLayout(problem), problem.matrices["w13"]
    weights = stack_experts([plausible_weight(shape, 0)])
    scales = weights.scales[0].clone()
    scales[0, 5, 0], scales[0, 5, 1:] = 100, 140
    weights = replace(weights, scales=(scales,))
    want = packed(layout, shape, weights)
    asked, assumed = FragmentLayout(problem), FragmentLayout(problem)
    got = packed(asked, shape, weights, "cuda")
    with assuming() as flags:
        packed(assumed, shape, weights, "cuda")
    assert bool(any_set(flags)) and assumed.rerounded.groups == 0
    with repeating():
        again = packed(assumed, shape, weights, "cuda")
    assert all(same_bits(tensors[name], want[name]) for name in want for tensors in (got, again))
    assert layout.rerounded == asked.rerounded == assumed.rerounded == Rerounded(1, scales.numel())
