"""Estimated time of a layer on a card, from what it reads and what it multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from lancebill.backends.gpu.cards import Card
from lancebill.backends.gpu.kernels.weight_form import E4M3, S8
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.moe.problem import Problem

_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Efficiency:
    """How much of a card's rates kernels reach, and the time of a call that does almost nothing."""

    memory: float
    tensor: float
    call_us: float


def estimate_us(layout: FragmentLayout, slots: int, card: Card, reached: Efficiency) -> float:
    """The slower of reading and multiplying, in microseconds.

    Read are the weights of the experts that `slots` rows activate, and rows between the GEMMs that do not fit into the
    L2 cache. fp8 is multiplied at twice the rate of 16-bit numbers.
    """
    problem = layout.problem
    weights = activated_experts(problem, slots) * sum(layout.bytes(shape) for shape in problem.matrices.values())
    flops = 2 * slots * sum(shape.n * shape.k for shape in problem.matrices.values())
    reading = (weights + _uncached_bytes(problem, slots, card)) / (card.memory_gbs * 1e9 * reached.memory)
    inputs = layout.form(problem.w13).activations
    rate = {E4M3: 2 * card.tensor_tflops, S8: card.int8_tops}.get(inputs, card.tensor_tflops)
    multiplying = flops / (rate * 1e12 * reached.tensor)
    return max(reading, multiplying) / _MICROSECOND + reached.call_us


def activated_experts(problem: Problem, slots: int) -> float:
    """How many experts have rows, if a router chooses all experts equally often."""
    return problem.experts * (1 - (1 - 1 / problem.experts) ** slots)


def _uncached_bytes(problem: Problem, slots: int, card: Card) -> float:
    """Traffic of rows between kernels: each set of rows that exceeds the L2 cache is written and read."""
    sets = [2 * slots * shape.k for shape in problem.matrices.values()]
    if problem.w2 is not None:
        sets.append(2 * slots * problem.w2.n)
    return 2 * sum(size for size in sets if size > card.cache_mb << 20)
