"""What an `ActivationSpec` does to the input rows of a GEMM.

Dynamic scales are computed per row, never over the batch: the bits of a row do not depend on the
other rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec import ALL, CHANNEL, TENSOR, ActivationSpec, QuantSpec
from lancebill.numbers.weight import LogicalWeight


def round_activations(rows: Tensor, activations: ActivationSpec, static: Tensor | None = None) -> Tensor:
    """`rows` [M, K], quantised under `activations` and dequantised again, in fp32.

    `static` is the checkpoint's input scale, which divides the input; with a two-level spec (NVFP4)
    it is the outer level. A row with a NaN or infinity has no scale: all of that row becomes NaN.
    """
    spec = activations.spec
    if rows.shape[0] == 0:
        return rows.float()
    if not spec.quantized:
        return rows.to(spec.dtype.storage).float()
    if activations.static and static is None:
        raise LaunchError(f"{activations} activations need an input scale from the checkpoint")
    non_finite = ~rows.isfinite().all(dim=1, keepdim=True)
    rows = rows.masked_fill(non_finite, 0)
    if static is not None and spec.scales[-1].block == TENSOR:
        return _with_outer_scale(rows, spec, static).masked_fill_(non_finite, math.nan)
    return dequantize(quantize(rows, _per_row(spec))).masked_fill_(non_finite, math.nan)


def _with_outer_scale(rows: Tensor, spec: QuantSpec, static: Tensor) -> Tensor:
    """The outermost scale is `static`; the inner levels are computed from the rows."""
    factor = static.float()
    scaled = rows.float() / factor
    inner = replace(spec, scales=spec.scales[:-1])
    if inner.scales:
        return dequantize(quantize(scaled, inner)) * factor
    return dequantize(LogicalWeight(inner, spec.dtype.encode(scaled))) * factor


def _per_row(spec: QuantSpec) -> QuantSpec:
    return replace(spec, scales=tuple(replace(s, block=CHANNEL) if s.block == (ALL, ALL) else s for s in spec.scales))
