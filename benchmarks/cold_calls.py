"""Single calls of a layer with cold weights: which caches are emptied before a call, and what runs in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from pin_cores import cache_neighbours, pin, pin_apart, process_threads
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.bench.peers_ggml import Ggml
from lancebill.bench.timing import Call, CpuClock
from lancebill.bench.workload import Batch
from lancebill.moe.problem import Problem

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]

PRIVATE_CACHE_BYTES = 16 << 20  # fills the caches of a single core
SWEEPS = 2  # reads of the buffer: one alone may not evict everything, whatever the replacement policy


@dataclass(frozen=True)
class Turn:
    """A timed call, and the one right before it."""

    layer: Layer
    batch: Batch
    before: Batch | None

    def __call__(self) -> Tensor:
        return self.layer(self.batch.x, self.batch.ids, self.batch.weights)

    def warm_up(self) -> None:
        if self.before is not None:
            self.layer(self.before.x, self.before.ids, self.before.weights)


def turns(layer: Layer, work: list[Batch], problem: Problem) -> list[Turn]:
    return [Turn(layer, batch, with_other_experts(batch, problem)) for batch in work]


def with_other_experts(batch: Batch, problem: Problem) -> Batch | None:
    """One token with experts that `batch` does not use."""
    others = torch.tensor(sorted(set(range(problem.experts)) - set(batch.ids.flatten().tolist())), dtype=torch.int32)
    if len(others) < problem.top_k:
        return None
    return Batch(batch.x[:1], others[None, : problem.top_k].contiguous(), batch.weights[:1])


class Sweeper(CpuClock):
    """Empties the shared cache from neighbouring cores: the timed cores alone would take long to read past it."""

    def __init__(self, helpers: int) -> None:
        super().__init__()
        self.private, self.helpers = torch.ones(PRIVATE_CACHE_BYTES // 4), helpers
        self.sleepers: list[Ggml] = []  # contestants whose threads spin after a call
        self.sweepers = ThreadPoolExecutor(1)
        before = process_threads()
        self.sweep()
        self.sweeper_threads = process_threads() - before if helpers > 0 else set()

    def place(self, timed: list[int], cores: list[int]) -> None:
        """Pin timed threads to one core each, and sweepers to the neighbouring cores."""
        pin_apart(process_threads() - self.sweeper_threads, timed)
        pin(self.sweeper_threads, cache_neighbours(timed, cores))

    def sweep(self) -> None:
        if self.helpers > 0:
            self.sweepers.submit(read, self.buffer, self.helpers).result()
        else:
            read(self.buffer, torch.get_num_threads())

    def evict(self) -> Tensor:
        """Also empties the timed cores' private caches, before and after: what they evict goes to the shared cache.

        Nothing here runs in OpenMP's threads: they would spin on timed cores for milliseconds.
        """
        for contestant in self.sleepers:
            contestant.sleep()
        read(self.private, torch.get_num_threads())
        for _ in range(SWEEPS):
            self.sweep()
        read(self.private, torch.get_num_threads())
        return self.private

    def time(self, call: Call) -> float:
        self.evict()
        assert isinstance(call, Turn)
        call.warm_up()
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    def end(self) -> None:
        self.sweepers.shutdown()


def read(buffer: Tensor, threads: int) -> None:
    kernels = native.library()
    assert kernels is not None  # whoever measures has checked it
    kernels.read(buffer, threads)
