"""Single calls of a layer with cold weights: which caches are emptied before a call, and what runs in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from pin_cores import are_within, cache_neighbours, pin, pin_apart, process_threads
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.bench.peers_ggml import Ggml
from lancebill.bench.timing import Call, CpuClock
from lancebill.bench.workload import Batch
from lancebill.moe.problem import Problem

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]

PRIVATE_CACHE_BYTES = 16 << 20  # fills the caches of a single core
SETTLE_SECONDS = 1e-3  # our own threads, which have emptied the caches, no longer spin after that
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
    """Empties the shared cache from neighbouring cores: the timed cores alone would take long to read past it.

    Make it before anything is computed: the process that sweeps is a fork.
    """

    def __init__(self, helpers: int, threads: int) -> None:
        super().__init__()
        self.private = torch.ones(threads * PRIVATE_CACHE_BYTES // 4)
        self.helper = Helper(self.buffer, helpers) if helpers > 0 else None
        self.sleepers: list[Ggml] = []  # contestants whose threads spin after a call

    def place(self, timed: list[int], cores: list[int]) -> None:
        """Pin timed threads to one core each, and sweepers to the neighbouring cores."""
        pin_apart(process_threads(), timed)
        assert are_within(process_threads(), timed)
        if self.helper is not None:
            pin(process_threads(self.helper.process.pid), cache_neighbours(timed, cores))

    def sweep(self) -> None:
        if self.helper is not None:
            self.helper.sweep()
        else:
            read(self.buffer, torch.get_num_threads())

    def empty_private_caches(self) -> None:
        threads = torch.get_num_threads()
        read(self.private[: threads * PRIVATE_CACHE_BYTES // 4], threads)

    def evict(self) -> Tensor:
        """Also empties the timed cores' private caches, before and after: what they evict goes to the shared cache.

        Nothing here runs in OpenMP's threads: they would spin on timed cores for milliseconds.
        """
        for contestant in self.sleepers:
            contestant.sleep()
        self.empty_private_caches()
        for _ in range(SWEEPS):
            self.sweep()
        self.empty_private_caches()
        time.sleep(SETTLE_SECONDS)
        return self.private

    def time(self, call: Call) -> float:
        self.evict()
        assert isinstance(call, Turn)
        call.warm_up()
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    def end(self) -> None:
        if self.helper is not None:
            self.helper.end()


class Helper:
    """A process that reads a buffer when asked. In our own process, callers share teams of threads: those that sweep
    might be those that are timed."""

    def __init__(self, buffer: Tensor, threads: int) -> None:
        processes = get_context("fork")
        self.connection, other_end = processes.Pipe()
        self.process = processes.Process(
            target=sweep_when_asked, args=(other_end, self.connection, buffer, threads), daemon=True
        )
        self.process.start()
        other_end.close()
        self.sweep()  # starts its threads, which can then be pinned

    def sweep(self) -> None:
        self.connection.send_bytes(b"sweep")
        self.connection.recv_bytes()

    def end(self) -> None:
        self.connection.close()
        self.process.join()


def sweep_when_asked(connection: Connection, other_end: Connection, buffer: Tensor, threads: int) -> None:
    other_end.close()  # or this process would not see that the other one has ended
    with suppress(EOFError, KeyboardInterrupt):
        while connection.recv_bytes():
            read(buffer, threads)
            connection.send_bytes(b"done")


def read(buffer: Tensor, threads: int) -> None:
    kernels = native.library()
    assert kernels is not None  # whoever measures has checked it
    kernels.read(buffer, threads)
