"""The kernels that a wheel contains compiled: all that a few specs and shapes launch at any batch size."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.hopper.steps import kernels
from lancebill.backends.hopper.tuning.policy import buckets
from lancebill.jit.compile import KernelSource
from lancebill.moe.layout import W2, W13, MatrixShape
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import parse_activation, parse_spec

SPECS = (("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g128", "bf16"))  # weights, activations
SHAPES = ((4096, 2048, 256, 6), (2880, 2880, 128, 4), (2048, 768, 128, 8))  # hidden, intermediate, experts, top-k
TOKENS = buckets(16384)


def shipped() -> Iterator[KernelSource]:
    """Every kernel of the set, without duplicates."""
    seen: set[KernelSource] = set()
    for problem in problems():
        for tokens in TOKENS:
            for source in kernels(problem, tokens):
                if source not in seen:
                    seen.add(source)
                    yield source


def problems() -> Iterator[Problem]:
    for name, activations in SPECS:
        spec = parse_spec(name)
        for hidden, intermediate, experts, top_k in SHAPES:
            if intermediate % (spec.group or 1) or hidden % (spec.group or 1):
                continue
            w13 = MatrixShape(W13, 2 * intermediate, hidden, spec.stacked(intermediate))
            w2 = MatrixShape(W2, hidden, intermediate, spec)
            yield Problem(w13, w2, experts, experts, top_k, activations=parse_activation(activations))
