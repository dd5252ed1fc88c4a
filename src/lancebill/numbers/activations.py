"""How a product's input is represented: what an `ActivationSpec` does to rows.

Dynamic scales belong to one row, never to the batch, so that a row's bits do not depend on the
rows it came with.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec import ALL, CHANNEL, TENSOR, ActivationSpec, QuantSpec
from lancebill.numbers.weight import LogicalWeight


def represent(rows: Tensor, activations: ActivationSpec, static: Tensor | None = None) -> Tensor:
    """`rows` [M, K] as a kernel with these activations sees them, in fp32.

    `static` is the checkpoint's input scale, which divides the input; with a two-level spec (NVFP4)
    it is the outer level. A row that is not finite has no scale: it becomes NaN, and no other row does.
    """
    spec = activations.spec
    if rows.shape[0] == 0:
        return rows.float()
    if not spec.quantized:
        return rows.to(spec.dtype.storage).float()
    if activations.static and static is None:
        raise LaunchError(f"{activations} activations need an input scale from the checkpoint")
    lost = ~rows.isfinite().all(dim=1, keepdim=True)
    rows = rows.masked_fill(lost, 0)
    if static is not None and spec.scales[-1].block == TENSOR:
        return _with_outer_scale(rows, spec, static).masked_fill_(lost, math.nan)
    return dequantize(quantize(rows, _per_row(spec))).masked_fill_(lost, math.nan)


def _with_outer_scale(rows: Tensor, spec: QuantSpec, static: Tensor) -> Tensor:
    """The outermost level is given; the levels inside it are measured on the rows."""
    factor = static.float()
    scaled = rows.float() / factor
    inner = replace(spec, scales=spec.scales[:-1])
    if inner.scales:
        return dequantize(quantize(scaled, inner)) * factor
    return dequantize(LogicalWeight(inner, spec.dtype.encode(scaled))) * factor


def _per_row(spec: QuantSpec) -> QuantSpec:
    return replace(spec, scales=tuple(replace(s, block=CHANNEL) if s.block == (ALL, ALL) else s for s in spec.scales))
