"""The inputs and outputs of a benchmark as plain values: what to measure, the work of a call, the measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lancebill.backends import oracle
from lancebill.bench.ceilings import Ceilings
from lancebill.bench.timing import Times
from lancebill.bench.workload import Batch
from lancebill.moe.device import Device
from lancebill.moe.model_shapes import Shape
from lancebill.moe.problem import FAST, Problem
from lancebill.numbers.spec import ActivationSpec
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.split.moves import OFF


@dataclass(frozen=True)
class BenchSetup:
    """What to measure: one layer, the batch sizes, and the backends and peers that run it."""

    shape: Shape
    weights: str
    activations: str = "bf16"
    device: str = "cpu"
    tokens: tuple[int, ...] = (1, 16, 64)
    routing: str = "uniform"
    backends: tuple[str, ...] = (oracle.AUTO,)
    peers: tuple[str, ...] = ()
    threads: int | None = None
    repeats: int = 20
    host: bool = False  # also time the host side of eager calls
    distinct: int | None = None  # number of different experts; the remaining ones repeat their values
    order: str = FAST
    split: int | None = None  # experts on the device, the rest in host memory; None: all on the device
    moves: str = OFF  # whether experts move between device and host during the measurement
    cpu_threads: int | None = None  # threads for experts in host memory beside a GPU

    def problem(self) -> Problem:
        problem = self.shape.problem(parse_spec(self.weights), parse_activation(self.activations))
        return replace(problem, order=self.order)


def expert_bytes(problem: Problem) -> float:
    """The size of one expert's matrices as their specs store them."""
    return sum(s.n * s.k * s.spec.bits_per_weight(s.n, s.k) / 8 for s in problem.matrices.values())


@dataclass(frozen=True)
class BenchCase:
    """The least work that any implementation of a call has to do, averaged over the batches."""

    flops: float
    bytes: float
    experts: float  # activated
    activations: ActivationSpec

    @classmethod
    def of(cls, problem: Problem, batches: Sequence[Batch]) -> BenchCase:
        tokens, rows = batches[0].x.shape[0], sum(batch.rows for batch in batches) / len(batches)
        elements = sum(shape.n * shape.k for shape in problem.matrices.values())
        activated = sum(batch.experts for batch in batches) / len(batches)
        in_and_out = 2 * tokens * problem.hidden * problem.input.storage.itemsize
        moved = activated * expert_bytes(problem) + in_and_out
        return cls(2.0 * rows * elements, moved, activated, problem.activations)


@dataclass(frozen=True)
class BenchRow:
    """The measurements of one part of the layer at one number of tokens."""

    part: str
    backend: str
    tokens: int
    times: Times
    work: BenchCase
    ceilings: Ceilings
    peers: Mapping[str, Times] = field(default_factory=dict)
    error: float | None = None
    host: Mapping[str, float] = field(default_factory=dict)

    @property
    def floor_us(self) -> float:
        return self.ceilings.floor_us(self.work.flops, self.work.bytes, self.work.activations)

    def describe(self) -> dict[str, Any]:
        us = self.times.median
        return {
            "tokens": self.tokens,
            "part": self.part,
            "backend": self.backend,
            "us": us,
            "min_us": min(self.times.us),
            "spread": list(self.times.quartiles),
            "timed_by": self.times.method,
            "tflops": self.work.flops / us / 1e6,
            "gbs": self.work.bytes / us / 1e3,
            "floor_us": self.floor_us,
            "roofline": self.floor_us / us,
            "experts": self.work.experts,
            "error": self.error,
            "peers": {name: times.median for name, times in self.peers.items()},
            "peers_min": {name: min(times.us) for name, times in self.peers.items()},
            "peers_spread": {name: list(times.quartiles) for name, times in self.peers.items()},
            "host_us": dict(self.host),
            "peers_timed_by": {name: times.method for name, times in self.peers.items()},
        }


@dataclass(frozen=True)
class BenchResult:
    """The result of one benchmark; `absent` gives the reason for each peer that was not timed."""

    setup: BenchSetup
    device: Device
    threads: int | None
    ceilings: Ceilings
    evicted: int  # bytes read before every timed call to empty the caches
    rows: tuple[BenchRow, ...]
    absent: Mapping[str, str]
