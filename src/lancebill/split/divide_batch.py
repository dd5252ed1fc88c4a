"""How a large batch begins: the host learns which experts its rows use, and divides them between copies and the CPU.

The wire takes longest, so the copies of some experts are queued before the others are divided; in a batch that uses
nearly all experts, before the router has chosen. These are always the same: a result does not depend on other batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.split.batch_maps import BatchMaps
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.copy_lane import CudaLane
from lancebill.split.cpu_rows import CpuRows, few_enough, padded, take_rows
from lancebill.split.streamed import Stage, copy_wave, first_wave, pack_wave
from lancebill.split.waves import shortest_wave, waves_of
from lancebill.split.ways import ExpertSize, Rates, choose_ways, used_share

NEARLY_ALL = 0.9  # of the experts are used, if a router chooses all equally often
_TIMES = 5


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

    def copy(self, waves: Sequence[Sequence[int]], number: int) -> None:
        copy_wave(self.stage, self.lane, self.held, waves, number)

    def pack(self, waves: Sequence[Sequence[int]], number: int) -> None:
        pack_wave(self.stage, self.lane, self.held, waves, number)


@dataclass(frozen=True, eq=False)
class Begun:
    """The experts that a batch uses, and the first wave that is copied."""

    chosen: ChosenExperts
    counts: dict[int, float]
    first: Sequence[int]


@dataclass(frozen=True, eq=False)
class Division:
    """Which way each expert of a batch goes."""

    waves: Sequence[Sequence[int]]
    copied: Tensor  # for `wave_maps`, on the device
    cpu_map: Tensor  # of the CPU, in host memory
    on_cpu: bool  # whether the CPU has experts
    rows: CpuRows | None  # that it gets; None: all


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
    chosen = ChosenExperts(batch.room.fetch(batch.dispatch.ids), batch.host_map.numel())
    counts = chosen.counts(batch.host_map)  # the map may be complete only now
    if not first:
        costs = rates.wave_costs(batch.size, len(batch.x))
        first = first_wave(counts, shortest_wave(batch.stage.experts, costs, rates.divide_us))
        batch.copy([first], 0)
    return Begun(chosen, counts, first)


def divide_batch(batch: LargeBatch, begun: Begun, rates: Rates) -> Division | None:
    """Queues the copies of the second wave, too. None: nothing should be copied."""
    x, room, each = batch.x, batch.room, batch.stage.experts
    ways = choose_ways(begun.counts, len(x), batch.size, rates, begun=begun.first)
    if not ways.streamed:
        return None
    waves = waves_of(ways.streamed, each, rates.wave_costs(batch.size, len(x)), begun.first)
    batch.copy(waves, 1)
    cpu_map = room.write(batch.host_map, waves, each, ways.cpu)
    used = begun.chosen.rows(cpu_map)
    some = len(used) > 0 and few_enough(len(used), len(x))
    if some:
        room.add_rows(padded(used))
    copied, numbers = room.on_device()
    rows = take_rows(x, batch.dispatch, numbers, len(used)) if some else None
    return Division(waves, copied, cpu_map, len(used) > 0, rows)


def host_us(batch: LargeBatch, rates: Rates, ask_cpu: Callable[[LargeBatch, Division], object]) -> tuple[float, float]:
    """How many microseconds the host takes until this batch's first copies are queued, and then to divide it."""
    taken = []
    for _ in range(_TIMES):
        torch.cuda.synchronize()
        batch.lane.begin_batch()
        start = time.perf_counter()
        first = copy_unasked(batch)
        then = time.perf_counter()
        division = divide_batch(batch, begin_batch(batch, rates, first), rates)
        if division is not None:
            ask_cpu(batch, division)
        taken.append((then - start, time.perf_counter() - then))
    torch.cuda.synchronize()
    begin, divide = (median(each) * 1e6 for each in zip(*taken))
    return begin, divide
