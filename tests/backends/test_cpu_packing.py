"""The library packs codes from wherever checkpoints have them; torch defines what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from codes_apart import codes_apart
from torch import Tensor

from lancebill.backends.cpu.layout import CpuLayout
from lancebill.backends.cpu.native import library, packing
from lancebill.backends.cpu.native.row_source import Order, source_of
from lancebill.moe.activation import Activation
from lancebill.moe.layout import MatrixShape
from lancebill.moe.problem import Problem
from lancebill.native.build import KERNELS
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.spec import DENSE_BF16
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.numbers.weight import LogicalWeight, expert_of, same_bits

EXPERTS = 3
# Whole tiles; several strips that share lines, and a part of one; rows and columns that end inside a tile.
SIZES = ((64, 64), (544, 96), (48, 40), (16, 8), (272, 200))

needs_library = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")


def random_weights(n: int, k: int) -> LogicalWeight:
    g = torch.Generator().manual_seed(n * k)
    codes = torch.randint(16, (EXPERTS, n, k), dtype=torch.uint8, generator=g)
    return LogicalWeight(parse_spec("int4-channel"), codes, (torch.ones(EXPERTS, n, 1, dtype=torch.bfloat16),))


def layout_of(n: int, k: int, *, gated: bool) -> tuple[CpuLayout, MatrixShape]:
    shape = MatrixShape("w13", n, k, parse_spec("int4-channel"))
    w2 = MatrixShape("w2", k, n // 2 if gated else n, DENSE_BF16)
    activation = Activation("silu") if gated else Activation("relu2_no_mul")
    return CpuLayout(Problem(shape, w2, EXPERTS, EXPERTS, 1, activation, activations=ACTIVATIONS["bf16"])), shape


def packed_codes(layout: CpuLayout, shape: MatrixShape, weight: LogicalWeight) -> Tensor:
    packed = layout.allocate(shape, *weight.lead)
    for tensor in packed.values():
        tensor.fill_(85)  # pack must write every byte
    layout.pack(shape, weight, packed)
    return packed["codes"]


def ways(weights: LogicalWeight, *, gated: bool) -> Iterator[Nibbles]:
    """The same codes in every order of memory: apart, in one tensor, at other strides, alternating."""
    for nibbles in codes_apart(weights, gated=gated):
        yield nibbles
        if len(nibbles.apart) == EXPERTS:
            yield Nibbles(torch.stack(nibbles.apart), nibbles.turn)
    data = codes_apart(weights, gated=False)[0].data
    yield Nibbles(torch.nn.functional.pad(data, (0, 4))[..., :-4])
    yield Nibbles(data.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)).split_rows(2)


@needs_library
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(("n", "k"), SIZES, ids=str)
def test_codes_are_packed_from_where_they_are(n: int, k: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(n, k)
    layout, shape = layout_of(n, k, gated=gated)
    got = [
        packed_codes(layout, shape, replace(weights, stored=stored))
        for stored in (*ways(weights, gated=gated), weights.codes)
    ]
    apart = replace(weights, stored=codes_apart(weights, gated=gated)[-1])
    one = packed_codes(layout, shape, expert_of(apart, slice(1, 2)))
    monkeypatch.setattr(packing, "library", lambda: None)
    want = packed_codes(layout, shape, weights)
    assert all(same_bits(each, want) for each in got)
    assert same_bits(one, want[1:2])


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_codes_are_neither_stacked_nor_turned(gated: bool) -> None:
    """Nothing but addresses is computed where whole words can be read."""
    weights = random_weights(64, 96)
    for nibbles in ways(weights, gated=gated):
        inside = [*nibbles.apart, nibbles.source]
        if nibbles.turn is not None and nibbles.source.dim() == 4 and not nibbles.apart and not gated:
            continue  # rows that alternate between two matrices are those of gate and up
        source = source_of(nibbles, gated=gated)
        assert source is not None and len(source.addresses) == EXPERTS * (1 + gated)
        for address in source.addresses:
            assert any(0 <= address - t.data_ptr() < t.untyped_storage().nbytes() for t in inside)


def test_orders_are_those_of_the_header() -> None:
    header = (KERNELS.folder / "pack.h").read_text(encoding="utf-8")
    for order in Order:
        assert f"LANCEBILL_{order.name} = {order.value}" in header
