"""The start of a large batch: the host reads which experts its rows use, and divides them between copies and the CPU.

PCIe is the bottleneck, so a first wave of copies is queued before the rest is divided. If the batch will use nearly all
experts, the wave starts before the router has chosen, always with the same experts, so that results do not depend on
other batches. During these copies the CPU gets its part, and then the remaining copies are queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lancebill.backends.cpu.native import Library
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.split.batch_maps import BatchMaps
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.copy_lane import CudaLane
from lancebill.split.cpu_rows import CpuRows
from lancebill.split.host_calls import RowsCall
from lancebill.split.streamed import BUFFERS, Stage, copy_wave, first_wave, pack_wave
from lancebill.split.waves import shortest_wave, waves_of
from lancebill.split.ways import ExpertSize, Numbers, Rates, Ways, batch_costs, choose_ways, used_share

NEARLY_ALL = 0.9  # of the experts are used, if a router chooses all equally often
_TIMES = 9


@dataclass(frozen=True, eq=False)
class LargeBatch:
    """The rows of a batch, the experts in host memory, and what the batch needs of the device."""

    x: Tensor
    dispatch: Indexed
    host_map: Tensor
    held: Mapping[str, Packed]
    size: ExpertSize
    stage: Stage
    lane: CudaLane
    room: BatchMaps
    native: Library

    def copy(self, waves: Sequence[Sequence[int]], number: int) -> None:
        copy_wave(self.stage, self.lane, self.held, waves, number)

    def pack(self, waves: Sequence[Sequence[int]], number: int) -> None:
        pack_wave(self.stage, self.lane, self.held, waves, number)


@dataclass(frozen=True, eq=False)
class Begun:
    """The experts that a batch uses, and the first wave that is copied."""

    chosen: ChosenExperts
    counts: Numbers
    first: Sequence[int]


@dataclass(frozen=True, eq=False)
class Waves:
    """The experts that are copied together; and for `wave_maps` the place of each, on the device."""

    experts: Sequence[Sequence[int]]
    places: Tensor


def copy_unasked(batch: LargeBatch) -> Sequence[int]:
    """Queue the copies of a wave, if it is likely that its experts are used."""
    problem = batch.stage.problem
    used = used_share(len(batch.x), problem.top_k, problem.global_experts)
    first = range(batch.stage.experts) if used >= NEARLY_ALL else range(0)
    if first:
        batch.copy([first], 0)
    return first


def begin_batch(batch: LargeBatch, rates: Rates, first: Sequence[int] = ()) -> Begun:
    """Wait for the router. Without a first wave, queue copies that last as long as the host divides the experts."""
    chosen = ChosenExperts(batch.native, *batch.room.fetch(batch.dispatch))
    counts = chosen.counts(batch.host_map, batch.room.experts)  # the map may be complete only now
    if not first:
        costs = rates.wave_costs(batch.size, len(batch.x))
        first = first_wave(counts, shortest_wave(batch.stage.experts, costs, rates.divide_us))
        batch.copy([first], 0)
    return Begun(chosen, counts, first)


def divide_batch(batch: LargeBatch, begun: Begun, rates: Rates) -> Ways:
    return choose_ways(begun.counts, len(batch.x), batch.size, rates, begun=begun.first, native=batch.native)


def rows_of_cpu(batch: LargeBatch, begun: Begun, ways: Ways) -> CpuRows | None:
    """The rows that the CPU gets; None: it has no expert."""
    return batch.room.cpu_rows(begun.chosen, batch.host_map, ways.cpu) if ways.cpu else None


def queue_waves(batch: LargeBatch, begun: Begun, ways: Ways, rates: Rates) -> Waves:
    """Queue copies into all buffers but the first, which is being filled."""
    each = batch.stage.experts
    waves = waves_of(ways.streamed, each, rates.wave_costs(batch.size, len(batch.x)), begun.first)
    for number in range(1, BUFFERS):
        batch.copy(waves, number)
    return Waves(waves, batch.room.copied(batch.host_map, waves, each, ways.cpu))


def host_us(batch: LargeBatch, rates: Rates, prepare: Callable[[LargeBatch], RowsCall]) -> tuple[float, float, float]:
    """Microseconds until this batch's first copies are queued, then until the CPU is asked, and to the CPU and back.

    The round trip is timed without rows, and stays as assumed if the CPU gets none.
    """
    taken = []
    for _ in range(_TIMES):
        torch.cuda.synchronize(batch.x.device)
        start = time.perf_counter()
        first = copy_unasked(batch)
        then = time.perf_counter()
        batch.room.ask(batch.dispatch)
        call = prepare(batch)
        begun = begin_batch(batch, rates, first)
        rows = rows_of_cpu(batch, begun, divide_batch(batch, begun, rates))
        before = call.computed_us()
        sent = None if rows is None else call.send(rows)
        asked, way = time.perf_counter(), rates.call_us
        if sent is not None:
            call.wait()
            rows_us = len(sent.sums) * batch_costs(len(batch.x), batch.size, rates).row
            way = max(0.0, (time.perf_counter() - asked) * 1e6 - (call.computed_us() - before) - rows_us)
        taken.append(((then - start) * 1e6, (asked - then) * 1e6, way))
    torch.cuda.synchronize(batch.x.device)
    begin, divide, way = map(median, zip(*taken))
    return begin, divide, way
