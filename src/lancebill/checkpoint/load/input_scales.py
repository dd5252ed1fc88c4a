"""What a checkpoint says of a product's input, kept beside the product's weights.

Two facts, for each expert: the scale a statically quantised input is divided by, and a vector it is
multiplied by first (exports whose weights were smoothed). They are rows of buffers like everything
else that makes an expert, so that pulling, pushing and moving experts treat them alike.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import BadValue, MissingTensor
from lancebill.moe.layout import Packed, as_integer
from lancebill.numbers.spec import ActivationSpec

SCALE, PRE_SCALE = "input_scale", "pre_scale"  # the buffers
DIVISOR, RECIPROCAL, FACTORS = "input_scale", "input_global_scale", "pre_quant_scale"  # roles of stored tensors


@dataclass(frozen=True)
class ProductInputs:
    """What one product's input is divided by, and what it is multiplied by first; fp32."""

    scale: Tensor | None = None  # []
    pre_scale: Tensor | None = None  # [K]

    def write(self, rows: Mapping[str, Tensor]) -> None:
        """Into one expert's rows of the buffers, where there are any."""
        for name, tensor in ((SCALE, self.scale), (PRE_SCALE, self.pre_scale)):
            if name in rows:
                if tensor is None:
                    raise MissingTensor(f"an expert without its {name.replace('_', ' ')}")
                rows[name].copy_(as_integer(tensor))


def product_inputs(projections: Sequence[Mapping[str, Tensor]]) -> ProductInputs:
    """One product's facts from those of its projections, by role.

    Gate and up share an input: the larger of their scales serves both, and their factors must be
    one vector. `input_global_scale` is stored as the reciprocal of what divides.
    """
    scales, factors = [], []
    for held in projections:
        if DIVISOR in held:
            scales.append(held[DIVISOR].float().reshape(()))
        elif RECIPROCAL in held:
            scales.append(1 / held[RECIPROCAL].float().reshape(()))
        if FACTORS in held:
            factors.append(held[FACTORS].float().reshape(-1))
    if any(not torch.equal(factor, factors[0]) for factor in factors):
        raise BadValue("gate and up share an input but have different pre-quantisation scales")
    return ProductInputs(torch.stack(scales).amax() if scales else None, factors[0] if factors else None)


def check_static(roles: Container[str], spec: ActivationSpec, where: str) -> None:
    """Raise where activations are static and the checkpoint stores no scale for them."""
    if spec.static and not _has_scale(roles):
        raise MissingTensor(
            f"{spec} activations need an input scale for every expert",
            where=where,
            hint="use dynamic activations, for example fp8",
        )


def _has_scale(roles: Container[str]) -> bool:
    return DIVISOR in roles or RECIPROCAL in roles


def allocate_inputs(
    roles: Container[str], spec: ActivationSpec, k: int, experts: int, device: torch.device, where: str
) -> Packed:
    """Buffers for what the checkpoint stores (`roles`) and a product with these activations needs."""
    check_static(roles, spec, where)
    held: Packed = {}
    if spec.spec.quantized and _has_scale(roles):
        held[SCALE] = torch.empty(experts, dtype=torch.int32, device=device)
    if FACTORS in roles:
        held[PRE_SCALE] = torch.empty(experts, k, dtype=torch.int32, device=device)
    return held
