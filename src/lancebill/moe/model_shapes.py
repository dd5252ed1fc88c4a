"""Sizes of known models' routed experts, by name, for commands that run without a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lancebill.errors import SpecError
from lancebill.moe.activation import Activation
from lancebill.moe.layout import W2, W13, MatrixShape
from lancebill.moe.placement import Placement
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import BF16
from lancebill.numbers.spec import ActivationSpec, QuantSpec


@dataclass(frozen=True)
class Shape:
    """The expert layers of a model, without their quantisation."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    uneven: bool = False  # shards may differ in size; the same flag as in the family's row of the naming table

    def problem(self, weights: QuantSpec, activations: ActivationSpec, *, tp: int = 1, ep: int = 1) -> Problem:
        """The problem of this layer under a spec on rank 0 of `tp` or `ep`, sharded as loading a checkpoint does."""
        placement = Placement(tp_size=tp, ep_size=ep)
        cut = placement.cut(self.intermediate, block=weights.widest, uneven=self.uneven)
        rows, stacked = weights.map_blocks(0, cut.granule), 2 if self.activation.gated else 1
        return Problem(
            MatrixShape(
                W13,
                stacked * cut.size,
                self.hidden,
                rows.stacked(cut.size) if self.activation.gated else rows,
                self.bias,
            ),
            MatrixShape(W2, self.hidden, cut.size, weights.map_blocks(1, cut.granule), self.bias),
            experts=len(placement.slots(self.experts)),
            global_experts=self.experts,
            top_k=self.top_k,
            activation=self.activation,
            input=BF16 if activations.spec.quantized else activations.spec.dtype,
            activations=activations,
        )


NAMED: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("deepseek-v4-flash", 256, 4096, 2048, 6, Activation("silu", limit=10.0)),
        Shape("gpt-oss-120b", 128, 2880, 2880, 4, Activation("swigluoai", limit=7.0), bias=True, uneven=True),
        Shape("qwen3-30b-a3b", 128, 2048, 768, 8),
        Shape("mixtral-8x7b", 8, 4096, 14336, 2),
        Shape("deepseek-v3", 256, 7168, 2048, 8),
        Shape("kimi-k2", 384, 7168, 2048, 8),
        Shape("glm-4.5-air", 128, 4096, 1408, 8),
        Shape("llama-4-scout", 16, 5120, 8192, 1),
        Shape("qwen3-235b-a22b", 128, 4096, 1536, 8),
    )
}


def parse_shape(text: str) -> Shape:
    """A named shape, or E,H,I,K: experts, hidden, intermediate, experts per token (silu, no bias)."""
    if text in NAMED:
        return NAMED[text]
    sizes = text.split(",")
    if len(sizes) != 4 or not all(re.fullmatch("[1-9][0-9]{0,8}", size) for size in sizes):
        raise SpecError(
            f"unknown shape '{text}'",
            expected=f"{', '.join(NAMED)}, or E,H,I,K such as 128,2048,768,8",
        )
    experts, hidden, intermediate, top_k = map(int, sizes)
    if top_k > experts:
        raise SpecError("more experts per token than experts", expected=f"K <= {experts}", got=top_k)
    return Shape(text, experts, hidden, intermediate, top_k)
