"""Weights and routed batches of a problem: random, never zeros, every expert in memory of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.moe.layout import Layout, MatrixShape, Packed, as_integer
from lancebill.moe.problem import Problem
from lancebill.moe.simulation import Simulation
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec import ActivationSpec
from lancebill.numbers.weight import LogicalWeight

SOURCES = 2  # experts quantised for real; the others are these with their codes in other rows
INPUT_RANGE = 8.0  # static input scales reach so far: beyond it inputs are rare


Made = TypeVar("Made")


@dataclass(frozen=True)
class Batch:
    """Tokens and where they go."""

    x: Tensor  # [M, H]
    ids: Tensor  # [M, k] int32
    weights: Tensor  # [M, k] fp32

    @property
    def experts(self) -> int:
        """How many distinct experts have work."""
        return int(self.ids.unique().numel())


class Weights:
    """A layer's experts, made on demand and the same each time.

    Quantising all of a large layer takes minutes, so only a few experts are: expert e has the codes
    of one of them, moved down by e rows. Its bytes are its own, its numbers are spread alike. With
    `distinct` the numbers repeat after so many experts, each copy in memory of its own: packing is slow too.
    """

    def __init__(self, problem: Problem, device: torch.device, seed: int = 0, distinct: int | None = None) -> None:
        self.problem, self.device, self._seed = problem, device, seed
        self.distinct = min(distinct or problem.experts, problem.experts)
        self._dense: dict[tuple[str, torch.dtype], Tensor] = {}
        self._made: dict[str, object] = {}

    @cached_property
    def _sources(self) -> dict[str, list[LogicalWeight]]:
        g = torch.Generator(self.device).manual_seed(self._seed)
        count = min(SOURCES, self.problem.experts)
        return {m: [_random(shape, g) for _ in range(count)] for m, shape in self.problem.matrices.items()}

    def logical(self, matrix: str, expert: int) -> LogicalWeight:
        """One expert's matrix."""
        sources, expert = self._sources[matrix], expert % self.distinct
        source = sources[expert % len(sources)]
        return replace(source, codes=source.codes.roll(expert // len(sources), dims=0))

    def packed(self, layout: Layout, experts: Iterable[int] | None = None) -> dict[str, Packed]:
        """These experts (all of them unless told) as a backend wants them."""
        chosen = list(range(self.problem.experts) if experts is None else experts)
        specs = {"w13": self.problem.activations, "w2": self.problem.second_activations}
        out: dict[str, Packed] = {}
        for matrix, shape in self.problem.matrices.items():
            require(len(chosen) * layout.bytes(shape), self.device)
            out[matrix] = layout.allocate(shape, len(chosen), self.device)
            done: dict[int, int] = {}
            for slot, expert in enumerate(chosen):
                first = done.setdefault(expert % self.distinct, slot)
                if first < slot:
                    for tensor in out[matrix].values():
                        tensor[slot] = tensor[first]
                else:
                    row = {name: tensor[slot] for name, tensor in out[matrix].items()}
                    layout.pack(shape, self.logical(matrix, expert), row)
            if specs[matrix].static:
                out[matrix]["input_scale"] = self._input_scale(specs[matrix], len(chosen))
        return out

    def dense(self, matrix: str, dtype: torch.dtype) -> Tensor:
        """All experts dequantised, [E, n, k]: what peers without quantised weights compute with."""
        if (matrix, dtype) not in self._dense:
            shape, experts = self.problem.matrices[matrix], self.problem.experts
            require(experts * shape.n * shape.k * dtype.itemsize, self.device)
            out = torch.empty(experts, shape.n, shape.k, dtype=dtype, device=self.device)
            for expert in range(experts):
                known = expert >= self.distinct
                out[expert] = out[expert % self.distinct] if known else dequantize(self.logical(matrix, expert))
            self._dense[matrix, dtype] = out
        return self._dense[matrix, dtype]

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What several peers make of these weights, made once."""
        if name not in self._made:
            self._made[name] = make()
        return cast("Made", self._made[name])

    def bias(self, matrix: str, dtype: torch.dtype) -> Tensor | None:
        """All experts' biases, [E, n]."""
        if not self.problem.matrices[matrix].bias:
            return None
        held = (self.logical(matrix, expert).bias for expert in range(self.problem.experts))
        return torch.stack([bias for bias in held if bias is not None]).to(dtype)

    def _input_scale(self, activations: ActivationSpec, experts: int) -> Tensor:
        """The outermost scale such that everything inside it together reaches `INPUT_RANGE`."""
        reach = activations.spec.dtype.max
        for level in activations.spec.scales[:-1]:
            reach *= level.dtype.max
        return as_integer(torch.full((experts,), INPUT_RANGE / reach, device=self.device))


def require(count: int, device: torch.device) -> None:
    """Raise where the memory is not there: without asking first, a CPU process is killed without a word."""
    free = _available(device)
    if free is not None and count > free:
        raise LaunchError(
            "the weights do not fit in memory",
            where=str(device),
            expected=f"{count / 1e9:.1f} GB",
            got=f"{free / 1e9:.1f} GB free",
            hint="a smaller shape, or fewer peers",
        )


def _available(device: torch.device) -> int | None:
    """Free bytes; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    known = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    told = re.search(r"^MemAvailable:\s*(\d+) kB", known, re.MULTILINE)
    return 1024 * int(told[1]) if told else None


def batches(problem: Problem, tokens: int, routing: str, count: int, device: torch.device) -> list[Batch]:
    """Different tokens routed differently: in turns, they keep caches from knowing what comes."""
    made = []
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        ids, _ = Simulation(routing, seed).draw(tokens, problem.experts, problem.top_k, torch.device("cpu"))
        weights = torch.rand(tokens, problem.top_k, generator=g) + 0.5
        x = torch.randn(tokens, problem.hidden, generator=g).to(problem.input.storage)
        made.append(Batch(x.to(device), ids.to(device, torch.int32), (weights / weights.sum(1, True)).to(device)))
    return made


def _random(shape: MatrixShape, g: torch.Generator) -> LogicalWeight:
    """A normal with rows of unlike size that keeps the size of what it multiplies."""
    rows = torch.exp2(0.5 * torch.randn(shape.n, 1, generator=g, device=g.device))
    values = torch.randn(shape.n, shape.k, generator=g, device=g.device).mul_(rows).div_(shape.k**0.5)
    bias = torch.randn(shape.n, generator=g, device=g.device) if shape.bias else None
    return replace(quantize(values, shape.spec), bias=bias)
