"""Scales that a checkpoint stores for the input of a GEMM, kept with the weights of that GEMM.

Two per expert: the scale that divides a statically quantised input, and a per-column vector that multiplies the
input first (exports with smoothed weights, such as AWQ in ModelOpt). They are rows of buffers like the weights, so
that loading, pushing and moving an expert handle them the same way.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import BadValue, MissingTensor
from lancebill.moe.layout import Packed, as_integer
from lancebill.numbers.spec import ActivationSpec
from lancebill.numbers.weight import FACTORS

SCALE, PRE_SCALE = "input_scale", "pre_scale"  # names of the buffers
DIVISOR, RECIPROCAL = "input_scale", "input_global_scale"  # roles of stored tensors, as `FACTORS`


@dataclass(frozen=True)
class InputScales:
    """Scales of one GEMM's input, fp32: multiplied by `pre_scale`, then divided by `scale`.

    For several experts, with a leading expert dimension.
    """

    scale: Tensor | None = None  # []
    pre_scale: Tensor | None = None  # [K]

    def at(self, index: int | slice) -> InputScales:
        """One, or some, of several experts: views."""
        return InputScales(*(None if t is None else t[index] for t in (self.scale, self.pre_scale)))

    def write(self, rows: Mapping[str, Tensor]) -> None:
        """Copy them into the experts' rows of the buffers, where the layer has such buffers."""
        for name, tensor in ((SCALE, self.scale), (PRE_SCALE, self.pre_scale)):
            if name in rows:
                if tensor is None:
                    raise MissingTensor(f"this expert has no {name.replace('_', ' ')}")
                rows[name].copy_(as_integer(tensor))


def stack_inputs(experts: Sequence[InputScales]) -> InputScales:
    """The scales of several experts as one value; what one of them lacks is missing for all."""

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [t for t in tensors if t is not None]
        return torch.stack(present) if len(present) == len(tensors) else None

    return InputScales(joined([e.scale for e in experts]), joined([e.pre_scale for e in experts]))


def combine_input_scales(projections: Sequence[Mapping[str, Tensor]], lead: tuple[int, ...] = ()) -> InputScales:
    """One GEMM's input scales from the stored tensors of its projections, by role.

    Gate and up share an input: the larger of their scales is used, and their pre-scales must be equal.
    `input_global_scale` is stored as the reciprocal of the divisor. `lead`: the expert dimension, if there is one.
    """
    scales, factors = [], []
    for stored in projections:
        if DIVISOR in stored:
            scales.append(stored[DIVISOR].float().reshape(lead))
        elif RECIPROCAL in stored:
            scales.append(1 / stored[RECIPROCAL].float().reshape(lead))
        if FACTORS in stored:
            factors.append(stored[FACTORS].float().reshape(*lead, -1))
    if any(not torch.equal(factor, factors[0]) for factor in factors):
        raise BadValue("gate and up share an input but have different pre-quantisation scales")
    return InputScales(torch.stack(scales).amax(0) if scales else None, factors[0] if factors else None)


def check_static(roles: Container[str], spec: ActivationSpec, where: str) -> None:
    """Raise if activations are quantised statically and the checkpoint stores no scale for them."""
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
    """Buffers for the scales that the checkpoint stores (`roles`) and that these activations need."""
    check_static(roles, spec, where)
    buffers: Packed = {}
    with torch.inference_mode(False):  # a refit may write to them outside of it
        if spec.spec.quantized and _has_scale(roles):
            buffers[SCALE] = torch.empty(experts, dtype=torch.int32, device=device)
        if FACTORS in roles:
            buffers[PRE_SCALE] = torch.empty(experts, k, dtype=torch.int32, device=device)
    return buffers
