"""The SASS of GEMM kernels: no instruction overwrites registers that an outstanding wgmma reads."""

from __future__ import annotations

import pytest
from kernel_samples import each_size_once

from lancebill.jit.build import get_binary
from lancebill.jit.compile import KernelSource
from lancebill.testing import sass
from lancebill.testing.layers import layer_problem

pytest.importorskip("triton")

from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import steps

Listings = dict[KernelSource, list[sass.Instruction]]
MULTIPLY = "QGMMA.64x64x32.F32.E4M3.E4M3"


@pytest.fixture(scope="module")
def listings(shipped_kernels: list[KernelSource], all_kernels: bool) -> Listings:
    """Of every GEMM of the sample, and of those with fp8 inputs, which are not shipped for these weights."""
    found = [source for source in shipped_kernels if source.kernel in ("grouped_gemm", "decode_gemm")]
    assert found
    for number, spec in enumerate(("fp8", "fp8-block", "int4-g128-zp")):
        plan = make_plan(layer_problem(spec, "fp8", hidden=1024, intermediate=512, experts=8, top_k=2), 2000)
        sources = [step.source for step in steps(plan) if step.source.kernel == "grouped_gemm"]
        assert sources
        found += sources if all_kernels else each_size_once(sources, number)
    return dict(zip(found, sass.instructions([get_binary(source).cubin for source in found])))


def test_kernels_keep_registers_of_outstanding_wgmmas(listings: Listings) -> None:
    assert {source.label for source, listing in listings.items() if sass.overwritten(listing)} == set()


def test_kernels_have_the_barriers_of_the_protocol(listings: Listings) -> None:
    """A full and an empty barrier per stage, and a barrier per entry of the ring of next tiles, which has one more.

    `test_hopper_tile_order.py` explores why.
    """
    grouped = {source: listing for source, listing in listings.items() if source.kernel == "grouped_gemm"}
    assert len({dict(source.constants)["STAGES"] for source in grouped}) > 2
    for source, listing in grouped.items():
        made = sum(name.startswith("SYNCS.EXCH") for name, _ in listing)
        assert made == 3 * dict(source.constants)["STAGES"] + 1, source.label


def test_kernels_are_disassembled_together_as_one_by_one(listings: Listings) -> None:
    smallest = sorted(listings, key=lambda source: len(get_binary(source).cubin))[:2]
    for source in smallest:
        alone = [instruction for _, instruction in sass._instructions(sass.disassemble(get_binary(source).cubin))]
        assert len(alone) == len(listings[source]) > 100
        for one, other in zip(alone, listings[source]):
            assert one == other or (one[0] == other[0] and ".L_x_" in one[1]), one  # labels of jumps are lost


def test_the_checker_finds_overwritten_registers() -> None:
    """Across the back edge of a loop too."""
    all_done, one_left = ("WARPGROUP.DEPBAR.LE", "gsb0, 0x0"), ("WARPGROUP.DEPBAR.LE", "gsb0, 0x1")
    first, second = (MULTIPLY, "R56, R24, gdesc[UR12], RZ, !UPT, gsb0"), (MULTIPLY, "R88, R32, gdesc[UR12], R88, gsb0")
    load = ("LDS.128", "R24, [R3]")
    assert sass._conflicts([first, load, all_done]) == ["LDS.128 R24, [R3]"]
    assert sass._conflicts([first, all_done, load]) == []
    assert sass._conflicts([first, ("STS", "[R24], R5"), all_done]) == []
    assert sass._conflicts([load, first, second, one_left] * 2) == []
    assert sass._conflicts([load, second, first, one_left] * 2) == ["LDS.128 R24, [R3]"]
