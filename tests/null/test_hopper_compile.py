"""A covering subset compiles for sm_90 with no GPU: no spills, no serialised wgmma, every layout conversion trivial."""

from __future__ import annotations

import pytest

from colibri.jit.compile import build
from colibri.kernels import forms as f
from colibri.testing.layers import layer_problem

pytest.importorskip("triton")

from colibri.backends.hopper.plan import make_plan
from colibri.backends.hopper.steps import steps


@pytest.mark.parametrize(
    ("spec", "activations", "tokens", "kernels"),
    [
        ("mxfp4", "bf16", 1, ("slotwise",)),
        ("mxfp4", "fp8", 4096, ("grouped", "prepare_rows")),
        ("int4-g128-zp", "fp16", 64, ("grouped", "dispatch_small", "combine_rows")),
        ("fp8-block", "bf16", 64, ("grouped",)),
        ("nvfp4", "bf16", 5000, ("count_ids", "place_ids", "send_rows")),
    ],
)
def test_kernels_compile(spec: str, activations: str, tokens: int, kernels: tuple[str, ...]) -> None:
    plan = make_plan(layer_problem(spec, activations, hidden=4096, intermediate=2048, experts=64, top_k=6), tokens)
    seen: set[str] = set()
    for step in steps(plan):
        kernel = step.source.kernel
        if kernel in kernels and kernel not in seen:
            seen.add(kernel)
            binary = build(step.source)
            assert binary.cubin[:4] == b"\x7fELF" and binary.registers <= 255
    assert seen == set(kernels) and f.ROWS == 128
