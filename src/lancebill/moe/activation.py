"""The activation functions between the two GEMMs of an expert.

Gated activations expect the gate half first and the up half second. Loading undoes any interleaving
of a checkpoint, so `swigluoai` and its uninterleaved form are one function here. Names ending in
`_no_mul` are not gated: their w13 has I rows instead of 2I.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lancebill.errors import LaunchError, SpecError


@dataclass(frozen=True)
class Activation:
    """A named function and its constants.

    Each function defines how `limit` clamps. Only swigluoai and situ use `alpha` and `beta`. The defaults are
    gpt-oss's; its limit is 7.
    """

    name: str = "silu"
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in _FUNCTIONS:
            raise SpecError(f"unknown activation '{self.name}'", expected=f"one of {', '.join(sorted(_FUNCTIONS))}")
        if self.name in _NEEDS_LIMIT and self.limit is None:
            raise SpecError(f"{self.name} needs a limit", hint="gpt-oss clamps at 7")
        if self.limit is None:
            return
        if self.name not in _TAKES_LIMIT:
            raise SpecError(f"{self.name} has no limit", expected=f"one of {', '.join(_TAKES_LIMIT)}", got=self.limit)
        if not 0 < self.limit < math.inf:
            raise SpecError(f"the limit of {self.name} must be positive and finite", expected="> 0", got=self.limit)

    @property
    def gated(self) -> bool:
        return self.name in _GATED

    def __str__(self) -> str:
        return self.name if self.limit is None else f"{self.name} (limit {self.limit:g})"

    def __call__(self, projected: Tensor) -> Tensor:
        """[..., 2I] (gates, then ups) or [..., I] to [..., I], in the input's dtype."""
        if not self.gated:
            return _UNGATED[self.name](projected)
        if projected.shape[-1] % 2:
            raise LaunchError(f"{self.name} needs gates and ups", expected="an even width", got=projected.shape[-1])
        gate, up = projected.chunk(2, dim=-1)
        return _GATED[self.name](self, gate, up)


def _silu(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """The gate is clamped from above only, the up half from both sides."""
    if a.limit is not None:
        gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    return F.silu(gate) * up


def _gelu(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def _gelu_tanh(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _swigluoai(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    assert a.limit is not None
    gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    return gate * torch.sigmoid(gate * a.alpha) * (up + a.beta)


def _swiglustep(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Clamps after the silu, not before."""
    assert a.limit is not None
    return F.silu(gate).clamp(max=a.limit) * up.clamp(-a.limit, a.limit)


def _situ(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """b*tanh(g/b)*sigmoid(g); with a limit, the up half is squashed with tanh too."""
    squashed = up if a.limit is None else a.limit * torch.tanh(up / a.limit)
    return a.beta * torch.tanh(gate / a.beta) * torch.sigmoid(gate) * squashed


_GATED: dict[str, Callable[[Activation, Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "swigluoai": _swigluoai,
    "swiglustep": _swiglustep,
    "situ": _situ,
}
_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2_no_mul": lambda x: F.relu(x).square(),
    "silu_no_mul": F.silu,
    "gelu_no_mul": F.gelu,
    "gelu_tanh_no_mul": lambda x: F.gelu(x, approximate="tanh"),
}
_FUNCTIONS = {**_GATED, **_UNGATED}
_NEEDS_LIMIT = ("swigluoai", "swiglustep")
_TAKES_LIMIT = (*_NEEDS_LIMIT, "silu", "situ")
