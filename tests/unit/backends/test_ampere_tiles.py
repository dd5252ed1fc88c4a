"""Pipelines of the mma.sync GEMMs: they fit every card, and sampled kernels use the instructions they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancebill.backends.ampere import kernel_sources, tiles
from lancebill.backends.gpu.kernels.weight_form import BF16, E4M3, S8, WeightForm
from lancebill.jit.compile import compile_kernel
from lancebill.testing.sass import disassemble

FORMS = [
    WeightForm("e2m1", "e8m0", 32, BF16),
    WeightForm("e2m1", "e4m3", 16, BF16),
    WeightForm("int4", "bf16", 32, BF16, zero=True),
    WeightForm("int4", "fp32", 128, BF16),
    WeightForm("int8", "none", 0, BF16),
    WeightForm("e4m3", "fp32", 128, BF16),
    WeightForm("e4m3", "e8m0", 32, BF16),
    WeightForm("int8", "fp16", 32, BF16),
    WeightForm("int2", "bf16", 64, BF16),
    WeightForm("int3", "bf16", 64, BF16, zero=True),
    WeightForm("nf4", "fp32", 64, BF16),
    WeightForm("e2m1", "e8m0", 32, E4M3),
    WeightForm("int4", "fp32", 128, S8),
]
CARDS = {"sm_80": 164 << 10, "sm_86": 100 << 10, "sm_90": 228 << 10}  # shared memory of an SM


@pytest.mark.parametrize("shared", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_pipelines_fit_the_card(form: WeightForm, shared: int) -> None:
    for tokens in tiles.SIZES:
        for slices in (1, 5, 64):
            tile = tiles.tile(form, (tokens, 8), False, slices, shared)
            staging = min(tokens, 32) * 128 * 2
            used = tile.stages * tiles.stage_bytes(form, tokens, tile.slices, tile.units) + staging + 512
            assert tile.blocks * (used + 1024) <= shared
            assert used <= shared - 1024  # a block cannot have all of it
            assert tile.blocks * tile.registers * 128 <= 65536
            assert 2 <= tile.stages <= 1 + -(-slices // tile.slices)  # copies run at most one tile ahead
    decode = tiles.decode_tile(form, 64, shared)
    assert decode.blocks * (decode.stages * tiles.stage_bytes(form, 1, decode.slices) + 1536) <= shared


@pytest.mark.parametrize(
    ("form", "tokens", "arch", "instruction"),
    [
        (FORMS[0], 8, 80, "HMMA.16816.F32.BF16"),
        (FORMS[-2], 8, 89, "QMMA.16832.F32.E4M3.E4M3"),
        (FORMS[-2], 8, 120, "QMMA.16832.F32.E4M3.E4M3"),
        (FORMS[-1], 8, 80, "IMMA.16832.S8.S8"),
    ],
    ids=["bf16", "e4m3-sm_89", "e4m3-sm_120", "s8"],
)
def test_kernels_use_the_cards_instructions(form: WeightForm, tokens: int, arch: int, instruction: str) -> None:
    """They compile without spills and copy weights past the first-level cache. Sums of a group become floats without a
    conversion, which older GPUs make slowly."""
    tile = tiles.tile(form, (tokens,), True, 64, CARDS["sm_80"], paired=True)
    source = kernel_sources.grouped_gemm(form, tile, "bf16", "gated", "silu", bias=False)
    compiled = compile_kernel(replace(source, arch=arch))
    listing = disassemble(compiled.cubin)
    assert not compiled.spills and instruction in listing and "LDGSTS.E.BYPASS" in listing and " I2F R" not in listing


def test_integer_sums_are_bits_of_a_float() -> None:
    """The largest sums of 128 products of int8 numbers keep the exponent of the number they start with."""
    mainloop = pytest.importorskip("lancebill.backends.ampere.kernels.mainloop")
    sums = torch.tensor([-(128**3), -1, 0, 1, 128**3], dtype=torch.int32)
    floats = (sums + mainloop.FLOAT_BITS.value).view(torch.float32) - mainloop.FLOAT_START.value
    assert torch.equal(floats, sums.float())
