"""The kernel that packs codes, in Triton's interpreter, against the definition in torch.

Not collected by pytest: `test_hopper_dispatch.py` runs it in a separate process, where TRITON_INTERPRET is set before
Triton is imported.
"""

from __future__ import annotations

import pytest
import torch

from lancebill.backends.gpu.kernels import pack_codes as kernel
from lancebill.backends.gpu.kernels.weight_form import ROWS
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.gpu.pack_on_gpu import source
from lancebill.numbers.bit_packing import pack_bits
from lancebill.numbers.weight import stack_experts
from lancebill.testing.layers import layer_problem, plausible_weight

FORMS = [
    ("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g32-zp", "bf16"), ("int4-g128-zp", "fp8"), ("int8", "bf16"),
    ("fp8-channel", "fp8"), ("mxfp8", "bf16"), ("int2-g32", "bf16"), ("int3-g32-zp", "bf16"), ("nf4-g32", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "activations"), FORMS)
def test_kernel_follows_the_definition(spec: str, activations: str) -> None:
    hidden, intermediate = (384, 128) if "g128" in spec else (160, 96)
    problem = layer_problem(spec, activations, hidden=hidden, intermediate=intermediate, experts=2, top_k=1)
    layout = FragmentLayout(problem)
    for experts, shape in zip((2, 1), problem.matrices.values()):
        form, (n, k) = layout.form(shape), layout.padded(shape)
        weights = stack_experts([plausible_weight(shape, seed) for seed in range(experts)])
        want = layout.allocate(shape, experts)
        layout.pack(shape, weights, want)
        rows = pack_bits(weights.codes, 4, torch.uint8) if form.bits == 4 else weights.codes
        got = torch.full_like(want["codes"], 85)
        units, slices = n // ROWS, k // form.slice_columns
        constants = dict(source(form, problem.is_gated(shape.name)).constants)
        kernel.pack_codes[(experts * units * slices,)](rows, got, shape.n, rows.shape[-1], units, slices, **constants)
        assert torch.equal(got, want["codes"])
