"""The SASS of GEMM kernels: no instruction overwrites registers that an outstanding wgmma reads."""

from __future__ import annotations

import pytest

from lancebill.jit.build import get_binary
from lancebill.jit.compile import KernelSource
from lancebill.testing import sass
from lancebill.testing.layers import layer_problem

pytest.importorskip("triton")

from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.shipped import shipped
from lancebill.backends.hopper.steps import steps

MULTIPLY = "QGMMA.64x64x32.F32.E4M3.E4M3"


def test_kernels_keep_registers_of_outstanding_wgmmas(shipped_kernels: list[KernelSource]) -> None:
    gemms = [source for source in shipped_kernels if source.kernel in ("grouped_gemm", "decode_gemm")]
    found = {source.label: source for source in gemms}
    assert found
    for spec in ("fp8", "fp8-block", "int4-g128-zp"):  # with fp8 inputs they are not shipped
        plan = make_plan(layer_problem(spec, "fp8", hidden=1024, intermediate=512, experts=8, top_k=2), 2000)
        sources = [step.source for step in steps(plan) if step.source.kernel == "grouped_gemm"]
        assert sources
        found |= {source.label: source for source in sources}
    listings = sass.instructions([get_binary(source).cubin for source in found.values()])
    assert {label for label, listing in zip(found, listings) if sass.overwritten(listing)} == set()


def test_kernels_are_disassembled_together_as_one_by_one() -> None:
    cubins = [get_binary(source).cubin for source in shipped() if source.kernel == "decode_gemm"][:2]
    together = sass.instructions(cubins)
    for cubin, listing in zip(cubins, together):
        alone = [instruction for _, instruction in sass._instructions(sass.disassemble(cubin))]
        assert len(alone) == len(listing) > 100
        for one, other in zip(alone, listing):
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
