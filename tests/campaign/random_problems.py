"""Random layers for the campaign, and what must hold of every one of them on a CPU level.

Against the reference backend: the worst row is within a bound. With quantised inputs the last bit of a hidden value may
decide to which side it is rounded; such a row differs by about one step (large if the scale is static and the values
are small), so there the median row has the tight bound. So it has with fp32 inputs, which the kernels read as integers
of 22 bits, and with bf16 inputs: where the terms of a row cancel, what is left of it is little more than their rounding
(one row of bf16 in 82,824 problems reached 4.4e-3). Few rows have no median: theirs is the bound of the worst. AMX
tiles round weights that have no eight bits (docs/numerics.md).
Bit for bit: the same call again, with other numbers of threads, and (in batch-invariant order) of the rows in other
batches.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lancebill.backends.base import Backend
from lancebill.backends.cpu import Cpu, native
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.bench.workload import Weights
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.moe.problem import BATCH_INVARIANT, FAST, Problem
from lancebill.numbers.dtypes import CODEBOOK
from lancebill.numbers.spec_names import parse_activation
from lancebill.testing.layers import layer_problem, row_errors

CPU = Device("cpu")
GROUPS = (16, 32, 64, 128)
NAMED_SPECS = (
    "mxfp4", "nvfp4", "nvfp4-div", "nf4", "mxfp8", "mxfp6-e2m3", "mxfp6-e3m2", "int8", "int4", "fp8-tensor",
    "fp8-channel", "fp8-block", "ternary-tensor", "uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256:fp16",
)  # fmt: skip
ACTIVATIONS = (
    Activation("silu"), Activation("silu", limit=0.5), Activation("gelu"), Activation("gelu_tanh"),
    Activation("swigluoai", limit=7.0), Activation("swiglustep", limit=0.5), Activation("relu2_no_mul"),
)  # fmt: skip
FEW_ROWS = 8
ROUNDED_WEIGHTS = (6e-3, 1e-2)  # 16-bit inputs on AMX tiles
# Bounds on the relative error of the median row and of the worst row (see docs/numerics.md for the first three).
BOUNDS = {
    "bf16": (4e-3, 5e-3), "fp16": (2e-3, 2e-3), "fp32": (2e-6, 2e-5), "int8": (6e-3, 2e-2), "int8-g64": (6e-3, 2e-2),
    "fp8": (6e-3, 1e-1), "fp8-g128": (6e-3, 1e-1), "int8-static": (6e-3, 2e-1), "fp8-static": (6e-3, 2e-1),
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A problem with weights and one batch."""

    problem: Problem
    activations: str
    weights: Weights
    x: Tensor
    routed: Indexed

    def __str__(self) -> str:
        p = self.problem
        sizes = f"{p.hidden}x{p.w13.n} {p.experts} experts top {p.top_k} {len(self.x)} tokens"
        return f"{p.w13.spec} x {self.activations} {p.activation} bias {p.w13.bias} {sizes}"

    def packed(self, backend: Backend) -> dict[str, Packed]:
        return self.weights.packed(backend.layout(self.problem))

    @cached_property
    def reference(self) -> Tensor:
        plan = REFERENCE.plan(self.problem, len(self.x), CPU)
        out = torch.empty(self.x.shape, dtype=torch.float32)
        return REFERENCE.run(plan, self.x, self.routed, self.packed(REFERENCE), out)


def random_sample(rng: random.Random, *, tokens: int | None = None) -> Sample:
    """A problem that the CPU kernels take, with weights and a batch that may have empty slots."""
    problem, activations = _random_problem(rng)
    count, g = tokens or rng.choice((1, 1, 2, 3, 5, 9, 17, 33)), torch.Generator().manual_seed(rng.getrandbits(32))
    scores = torch.rand(count, problem.experts, generator=g)
    ids = scores.topk(problem.top_k).indices.to(torch.int32)
    if rng.random() < 0.3:
        ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
    x = torch.randn(count, problem.hidden, generator=g).to(problem.input.storage)
    routed = Indexed(ids, torch.rand(ids.shape, generator=g) + 0.25)
    return Sample(problem, activations, Weights(problem, torch.device("cpu"), rng.getrandbits(32)), x, routed)


def _random_problem(rng: random.Random) -> tuple[Problem, str]:
    while True:
        zero = rng.choice(("", "", "-zp"))
        integer = f"int{rng.randint(1 if zero else 2, 8)}-g{rng.choice(GROUPS)}{zero}"
        activations, top_k = rng.choice(tuple(BOUNDS)), rng.randint(1, 4)
        problem = layer_problem(
            rng.choice((integer, integer, *NAMED_SPECS)),
            activations if activations in ("fp16", "fp32") else "bf16",
            hidden=rng.choice((1, 2, 3, 4, 5)) * rng.choice((32, 64, 128)),
            intermediate=rng.choice((1, 2, 3)) * rng.choice((32, 64, 128)),
            experts=rng.randint(top_k, 8),
            top_k=top_k,
            activation=rng.choice(ACTIVATIONS),
            bias=rng.random() < 0.3,
            weight_on_input=top_k == 1 and rng.random() < 0.2,
        )
        problem = replace(problem, activations=parse_activation(activations))
        if next(iter(Cpu().check(problem, CPU)), None) is None:
            return problem, activations


def computed(
    backend: Backend, sample: Sample, packed: dict[str, Packed], rows: Tensor | None = None, order: str = FAST
) -> Tensor:
    """The result of the sample's batch, or of some of its rows, written over NaN."""
    problem = replace(sample.problem, order=order)
    x, routed = sample.x, sample.routed
    if rows is not None:
        x, routed = x[rows], Indexed(routed.ids[rows], routed.weights[rows])
    return backend.run(backend.plan(problem, len(x), CPU), x, routed, packed, torch.full_like(x, torch.nan))


def accuracy_fault(sample: Sample, got: Tensor, level: IsaLevel | None = None) -> str | None:
    """What is wrong with a result, compared with the reference; None if nothing is. Without a level, the best one."""
    if not got.isfinite().all():
        return f"{sample}: not finite"
    busy = sample.reference.norm(dim=1) > 0
    errors = row_errors(got[busy], sample.reference[busy]) if busy.any() else torch.zeros(1)
    tiles = (best_level() if level is None else level) == IsaLevel.AMX
    codebook = sample.problem.w13.spec.dtype.kind == CODEBOOK
    worst, median = float(errors.max()), float(errors.median())
    if bool(got[~busy].any()) or not within(sample.activations, worst, median, len(errors), tiles, codebook):
        return f"{sample}: worst row {worst:.1e}, median row {median:.1e}"
    return None


def within(activations: str, worst: float, median: float, rows: int, tiles: bool, codebook: bool) -> bool:
    """Whether the errors of the worst and of the median row are allowed."""
    limits = ROUNDED_WEIGHTS if tiles and activations == "bf16" else BOUNDS[activations]
    most = [max(limit, 1e-2) if codebook else limit for limit in limits]  # codebooks are rounded to 14 bits
    return worst <= most[1] and (rows <= FEW_ROWS or median <= most[0])


def judged_again(failure: str, level: str) -> bool:
    """Whether a failure that an earlier run recorded is one by today's bounds."""
    found = re.fullmatch(r"(\S+) x (\S+) .* (\d+) tokens: worst row (\S+), median row (\S+)", failure)
    if found is None:
        return True
    spec, activations, rows, worst, median = found.groups()
    return not within(activations, float(worst), float(median), int(rows), level == str(IsaLevel.AMX), spec == "nf4")


def best_level() -> IsaLevel:
    library = native.library()
    assert library is not None
    return max(library.levels)


def odd_batches(rng: random.Random, tokens: int) -> Iterator[Tensor]:
    """Every row alone, all rows shuffled, and a few prefixes."""
    everything = torch.arange(tokens)
    yield from everything.split(1)
    yield torch.tensor(rng.sample(range(tokens), tokens))
    for _ in range(2):
        yield everything[: rng.randint(1, tokens)]


def other_threads_fault(sample: Sample, backend: Backend, packed: dict[str, Packed], want: Tensor) -> str | None:
    """The same call with 1, 2 and 3 threads."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            if not torch.equal(computed(backend, sample, packed), want):
                return f"{sample}: other bits with {threads} threads"
    finally:
        torch.set_num_threads(before)
    return None


def invariance_fault(
    rng: random.Random, sample: Sample, backend: Backend, packed: dict[str, Packed]
) -> tuple[int, str | None]:
    """Rows compared between batches in batch-invariant order, and what differs."""
    whole, compared = computed(backend, sample, packed, order=BATCH_INVARIANT), 0
    for rows in odd_batches(rng, len(sample.x)):
        compared += len(rows)
        if not torch.equal(computed(backend, sample, packed, rows, BATCH_INVARIANT), whole[rows]):
            return compared, f"{sample}: other bits for rows {rows.tolist()}"
    return compared, None
