"""Random weights and routed batches for a problem. Each expert has its own memory, so reads of experts never alias."""

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

SOURCES = 2  # experts that are really quantised; the others are these with rotated rows
INPUT_RANGE = 8.0  # static input scales cover +-8; larger inputs are rare


Value = TypeVar("Value")


@dataclass(frozen=True)
class Batch:
    """Tokens with their routing to the experts of this rank."""

    x: Tensor  # [M, H]
    ids: Tensor  # [M, k] int32, -1: an expert of another rank
    weights: Tensor  # [M, k] fp32

    @property
    def experts(self) -> int:
        """The number of distinct experts that tokens are routed to."""
        return int(self.ids[self.ids >= 0].unique().numel())

    @property
    def rows(self) -> int:
        """The number of rows that experts of this rank compute."""
        return int((self.ids >= 0).sum())


class Weights:
    """A layer's experts, generated on demand and deterministically.

    Quantising a large layer takes minutes, so only `SOURCES` experts are quantised; every other expert has the codes
    of one of them with its rows rotated. Packing is slow too: with `distinct`, only so many experts are packed, and
    the others are copies of them, each in its own memory.
    """

    def __init__(self, problem: Problem, device: torch.device, seed: int = 0, distinct: int | None = None) -> None:
        self.problem, self.device, self._seed = problem, device, seed
        self.distinct = min(distinct or problem.experts, problem.experts)
        self._dense: dict[tuple[str, torch.dtype], Tensor] = {}
        self._cached: dict[str, object] = {}

    @cached_property
    def _sources(self) -> dict[str, list[LogicalWeight]]:
        g = torch.Generator(self.device).manual_seed(self._seed)
        count = min(SOURCES, self.problem.experts)
        return {m: [_random(shape, g) for _ in range(count)] for m, shape in self.problem.matrices.items()}

    def logical(self, matrix: str, expert: int) -> LogicalWeight:
        """One expert's matrix."""
        sources, expert = self._sources[matrix], expert % self.distinct
        source = sources[expert % len(sources)]
        return replace(source, stored=source.codes.roll(expert // len(sources), dims=0))

    def packed(self, layout: Layout, experts: Iterable[int] | None = None) -> dict[str, Packed]:
        """These experts (by default all) packed in a backend's layout."""
        chosen = list(range(self.problem.experts) if experts is None else experts)
        out: dict[str, Packed] = {}
        for matrix, shape in self.problem.matrices.items():
            require_memory(len(chosen) * layout.bytes(shape), self.device)
            out[matrix] = layout.allocate(shape, len(chosen), self.device)
            slot_of: dict[int, int] = {}  # the slot where each distinct expert was packed
            for slot, expert in enumerate(chosen):
                original = slot_of.setdefault(expert % self.distinct, slot)
                if original < slot:
                    for tensor in out[matrix].values():
                        tensor[slot] = tensor[original]
                else:
                    row = {name: tensor[slot] for name, tensor in out[matrix].items()}
                    layout.pack(shape, self.logical(matrix, expert), row)
            if self.problem.inputs_of(matrix).static:
                out[matrix]["input_scale"] = self._input_scale(self.problem.inputs_of(matrix), len(chosen))
        return out

    def dense(self, matrix: str, dtype: torch.dtype) -> Tensor:
        """All experts dequantised, [E, n, k], for peers without quantised weights."""
        if (matrix, dtype) not in self._dense:
            shape, experts = self.problem.matrices[matrix], self.problem.experts
            require_memory(experts * shape.n * shape.k * dtype.itemsize, self.device)
            out = torch.empty(experts, shape.n, shape.k, dtype=dtype, device=self.device)
            for expert in range(experts):
                repeated = expert >= self.distinct
                out[expert] = out[expert % self.distinct] if repeated else dequantize(self.logical(matrix, expert))
            self._dense[matrix, dtype] = out
        return self._dense[matrix, dtype]

    def cached(self, name: str, make: Callable[[], Value]) -> Value:
        """`make()`, called once for each name: peers of one family share their packed weights."""
        if name not in self._cached:
            self._cached[name] = make()
        return cast("Value", self._cached[name])

    def bias(self, matrix: str, dtype: torch.dtype) -> Tensor | None:
        """All experts' biases, [E, n]."""
        if not self.problem.matrices[matrix].bias:
            return None
        biases = (self.logical(matrix, expert).bias for expert in range(self.problem.experts))
        return torch.stack([bias for bias in biases if bias is not None]).to(dtype)

    def _input_scale(self, activations: ActivationSpec, experts: int) -> Tensor:
        """The outermost scale, chosen so that the largest code times the largest inner scales gives `INPUT_RANGE`."""
        reach = activations.spec.dtype.max
        for level in activations.spec.scales[:-1]:
            reach *= level.dtype.max
        return as_integer(torch.full((experts,), INPUT_RANGE / reach, dtype=torch.float32, device=self.device))


def require_memory(count: int, device: torch.device) -> None:
    """Raise unless `count` bytes are free. Without this check the system kills a CPU process without a message."""
    free = _available(device)
    if free is not None and count > free:
        raise LaunchError(
            "the weights do not fit in memory",
            where=str(device),
            expected=f"{count / 1e9:.1f} GB",
            got=f"{free / 1e9:.1f} GB free",
            hint="use a smaller shape or fewer peers",
        )


def _available(device: torch.device) -> int | None:
    """Free bytes; None if the system does not report them."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    report = Path("/proc/meminfo").read_text(encoding="utf-8") if Path("/proc/meminfo").exists() else ""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", report, re.MULTILINE)
    return 1024 * int(match[1]) if match else None


def batches(problem: Problem, tokens: int, routing: str, count: int, device: torch.device) -> list[Batch]:
    """`count` batches with different tokens and routings. Alternating between them keeps experts out of the caches."""
    result = []
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        ids, _ = Simulation(routing, seed).draw(tokens, problem.experts, problem.top_k, torch.device("cpu"))
        weights = torch.rand(tokens, problem.top_k, generator=g, dtype=torch.float32, device=g.device) + 0.5
        x = torch.randn(tokens, problem.hidden, generator=g, dtype=torch.float32, device=g.device).to(
            problem.input.storage
        )
        result.append(Batch(x.to(device), ids.to(device, torch.int32), (weights / weights.sum(1, True)).to(device)))
    return result


def _random(shape: MatrixShape, g: torch.Generator) -> LogicalWeight:
    """A normal matrix with a random factor for each row, divided by sqrt(k) to preserve the input's magnitude."""
    factors = torch.exp2(0.5 * torch.randn(shape.n, 1, generator=g, dtype=torch.float32, device=g.device))
    values = (
        torch.randn(shape.n, shape.k, generator=g, dtype=torch.float32, device=g.device)
        .mul_(factors)
        .div_(shape.k**0.5)
    )
    bias = torch.randn(shape.n, generator=g, dtype=torch.float32, device=g.device) if shape.bias else None
    return replace(quantize(values, shape.spec), bias=bias)
