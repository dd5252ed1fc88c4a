"""silu(gate) * up as an epilogue for triton_kernels, whose own SwiGLU computes silu(gate) * (up + 1)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def silu_and_multiply(input):  # type: ignore[no-untyped-def]
    gate, up = tl.split(tl.reshape(input, (input.shape[0], input.shape[1] // 2, 2)))
    gate = gate.to(tl.float32)
    return gate / (1 + tl.exp(-gate)) * up.to(tl.float32)
