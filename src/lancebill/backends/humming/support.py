"""Which problems humming-kernels supports, with a reason for each that it does not. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from lancebill.backends.base import Reason
from lancebill.moe.layout import MatrixShape
from lancebill.moe.problem import EXPERTS, FAST, INDEXED, Problem
from lancebill.numbers.dtypes import BF16, E2M1, E4M3, E8M0, F16, F32, biased_type
from lancebill.numbers.spec import ALL, DENSE_BF16, DENSE_F16, FP8_CHANNEL, MXFP4

PACKAGE = "humming-kernels"
ACTIVATIONS = ("silu", "swigluoai")
_DENSE = {BF16: DENSE_BF16, F16: DENSE_F16}


def missing() -> str | None:
    """Why the package cannot be used; None if it can."""
    for name in (PACKAGE, "triton"):
        try:
            version(name)
        except PackageNotFoundError:
            return f"{name} is not installed"
    return None


def unsupported(problem: Problem) -> Iterator[Reason]:
    """All reasons against a problem. Allows rounded biases and folded scales, as for a benchmark peer."""
    if problem.kind != EXPERTS or problem.dispatch != INDEXED:
        yield Reason("dispatch", f"only computes experts by token ids, got {problem.kind} with {problem.dispatch} rows")
    if problem.activation.name not in ACTIVATIONS:
        yield Reason("activation", f"{problem.activation} activation", f"use {' or '.join(ACTIVATIONS)}")
    if problem.order != FAST:
        yield Reason("order", "the order of sums depends on the batch")
    if problem.weight_on_input or problem.pre_scale:
        yield Reason("input-scale", "does not scale its inputs")
    if problem.input not in _DENSE:
        yield Reason("input", f"{problem.input} inputs", "use bf16 or fp16")
    dense = problem.input if problem.input in _DENSE else " or ".join(map(str, _DENSE))
    for name, shape in problem.matrices.items():
        inputs = problem.inputs_of(name)
        fp8 = inputs.spec == FP8_CHANNEL and not inputs.static
        if not fp8 and inputs.spec != _DENSE.get(problem.input):
            yield Reason("activations", f"{inputs} activations", f"use {dense} or fp8")
        if fp8 and shape.spec != MXFP4:
            yield Reason("spec", f"{shape.spec} x fp8", "use mxfp4")
        yield from _shape(name, shape, problem)


def _shape(name: str, shape: MatrixShape, problem: Problem) -> Iterator[Reason]:
    if not readable(shape, problem):
        yield Reason(
            "spec", f"{name} is {shape.spec}", "use mxfp4, int4 by group, int8 by channel, or fp8 in blocks of 128"
        )
    if shape.act_order:
        yield Reason("act-order", f"the columns of {name} are permuted")
    if shape.n % 8 or shape.k % 32:
        yield Reason("sizes", f"{name} is {shape.n} x {shape.k}", "K must be a multiple of 32, N of 8")


def readable(shape: MatrixShape, problem: Problem) -> bool:
    """Whether the package has a schema for these weights."""
    spec = shape.spec
    if len(spec.scales) != 1 or spec.zero is not None or spec.minimum:
        return False
    level = spec.scales[0]
    high, wide = level.block
    if spec.dtype == E2M1:
        return level.dtype == E8M0 and level.block == (1, 32)
    if spec.dtype == biased_type(4):
        return level.dtype == problem.input and high == 1 and wide in (32, 64, 128) and shape.k % wide == 0
    if spec.dtype == biased_type(8):
        return level.dtype == problem.input and level.block == (1, ALL)
    return (
        spec.dtype == E4M3 and level.dtype == F32 and level.block == (128, 128) and not (shape.n % 128 or shape.k % 128)
    )
