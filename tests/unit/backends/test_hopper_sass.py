"""The SASS of every shipped kernel: no instruction overwrites registers that an outstanding wgmma reads."""

from __future__ import annotations

import pytest

from lancebill.jit.build import get_binary
from lancebill.testing import sass
from lancebill.testing.layers import layer_problem

pytest.importorskip("triton")

from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.shipped import shipped
from lancebill.backends.hopper.steps import steps

MULTIPLY = "QGMMA.64x64x32.F32.E4M3.E4M3"


def test_shipped_kernels_keep_registers_of_outstanding_wgmmas() -> None:
    # Kernels that differ only in these constants have the same main loop.
    ignored = ("DEPEND", "PREFETCH", "SLOTS", "PIECES")
    gemms = {
        (
            source.kernel,
            source.options,
            *(constant for constant in source.constants if constant[0] not in ignored),
        ): source
        for source in shipped()
        if source.kernel in ("grouped_gemm", "decode_gemm")
    }
    assert gemms
    for source in gemms.values():
        assert sass.overwritten(get_binary(source).cubin) == [], source.label


@pytest.mark.parametrize("spec", ["fp8", "fp8-block", "int4-g128-zp"])
def test_other_forms_with_fp8_inputs_keep_them_too(spec: str) -> None:
    plan = make_plan(layer_problem(spec, "fp8", hidden=1024, intermediate=512, experts=8, top_k=2), 2000)
    for source in {step.source for step in steps(plan) if step.source.kernel == "grouped_gemm"}:
        assert sass.overwritten(get_binary(source).cubin) == [], source.label


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
