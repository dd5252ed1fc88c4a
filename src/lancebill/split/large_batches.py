"""Large batches of a split layer on a GPU: some experts of the host's part are copied for the batch.

The host must know which experts the rows use before it can queue copies, so such a call waits for the router, and
cannot be captured: in a graph the CPU computes its whole part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Problem
from lancebill.numbers.unusual import any_set, assuming, repeating
from lancebill.split.batch_maps import BatchMaps, wave_maps
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.copy_lane import CudaLane, pin_in_place
from lancebill.split.cpu_rows import STEP, CpuRows, few_enough, padded, take_rows
from lancebill.split.gpu_queues import SideStream
from lancebill.split.measure_rates import measure_rates
from lancebill.split.run_part import HostPart
from lancebill.split.streamed import BUFFERS, Stage, add_streamed, copy_wave, first_wave, waves_of
from lancebill.split.ways import ASSUMED, ExpertSize, Rates, Ways, choose_ways, expected_ways, size_of

FEWEST = 64  # tokens: below, experts are never copied, and nothing is measured
_STAGES: dict[tuple[Problem, str, str, str], Stage] = {}  # shared by layers: their calls run one after the other
_RATES: dict[tuple[Problem, str, str, str], Rates] = {}


@dataclass(frozen=True, eq=False)
class StreamedBatch:
    """The rows of a batch, and the experts that are copied for it."""

    stage: Stage
    lane: CudaLane
    waves: Sequence[Sequence[int]]
    room: BatchMaps
    x: Tensor
    dispatch: Indexed


class LargeBatches:
    """What a split layer does if many rows come at once."""

    def __init__(self, own: Executor, host: HostPart, shared: int = 0) -> None:
        """`shared` is how many of the host's experts are on the device, too."""
        self.own, self.host, self.shared = own, host, shared
        self._expected: dict[int, bool] = {}  # by number of tokens
        self._maps: dict[torch.device, BatchMaps] = {}

    @cached_property
    def size(self) -> ExpertSize:
        return expert_size(self.host.executor)

    def may_stream(self, x: Tensor) -> bool:
        """Whether copying is likely to pay, so that waiting for the router does."""
        tokens = x.shape[0]
        if (
            tokens < FEWEST
            or torch.cuda.is_current_stream_capturing()
            or not isinstance(self.host.executor, CpuExecutor)
        ):
            return False
        if tokens not in self._expected:
            self._expected[tokens] = bool(self.expected(tokens, x.device).streamed)
        return self._expected[tokens]

    def expected(self, tokens: int, device: torch.device) -> Ways:
        """The division for rows that are routed to all experts alike."""
        problem = self.host.executor.problem
        rates = self._measured(device)
        absent = problem.experts - self.shared
        return expected_ways(absent, tokens, problem.top_k, problem.global_experts, self.size, rates)

    def run(self, x: Tensor, dispatch: Indexed, host_map: Tensor, out: Tensor) -> Tensor | None:
        """One batch: the CPU's experts on a stream of their own, copies on another, the rest on the caller's.

        Waits until the device has chosen the experts. The wire takes longest, so the copies of the first wave are
        queued before the others are divided. None: copying does not pay, so nothing is computed.
        """
        rates, lane = self._measured(x.device), lane_of(x.device.index or 0)
        chosen = ChosenExperts(dispatch.ids, host_map.numel())  # the map may be complete only then
        counts, stage = chosen.counts(host_map), self._stage(x.device)
        with lane.batch():
            lane.begin_batch()
            first = first_wave(counts, stage.experts)
            self._copy(stage, lane, [first], 0)
            ways = choose_ways(counts, len(x), self.size, rates)
            if not ways.streamed:
                return None
            waves, room = waves_of(ways.streamed, stage.experts, first), self._room(host_map, x)
            places = room.write(host_map, [slot for wave in waves for slot in wave], ways.cpu)
            return self._run(StreamedBatch(stage, lane, waves, room, x, dispatch), chosen, places, ways, out)

    def _run(self, batch: StreamedBatch, chosen: ChosenExperts, places: Tensor, ways: Ways, out: Tensor) -> Tensor:
        """`places` is the CPU's map."""
        stage, lane, waves, x = batch.stage, batch.lane, batch.waves, batch.x
        used = chosen.rows(places) if ways.cpu else []
        some = bool(used) and few_enough(len(used), len(x))
        if some:
            batch.room.add_rows(padded(used))
        copied, numbers = batch.room.on_device()
        rows = take_rows(x, batch.dispatch, numbers, len(used)) if some else None
        side, sums = None, None
        try:
            if used:
                side = SideStream(x.device)
                given = (x, batch.dispatch) if rows is None else (rows.x, rows.dispatch)
                sums = self.host.calls.queue(side, self.host.executor, places, *given, fetch=True)
            self._copy(stage, lane, waves, 1)
            maps = wave_maps(copied, len(waves), stage.experts)
            with assuming() as flags:  # an answer at once would make the host wait for every wave
                total = self._on_gpu(batch, maps)
        finally:
            if side is not None:
                side.join()
        if flags and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            batch = replace(batch, x=x.clone())  # the result may be written over it before it is read again
        out.copy_(_together(total, sums, rows))
        if flags and _was_unusual(lane, flags):
            lane.begin_batch()
            for number in range(BUFFERS):
                self._copy(stage, lane, waves, number)
            with repeating():
                out.copy_(_together(self._on_gpu(batch, maps), sums, rows))
        return out

    def _copy(self, stage: Stage, lane: CudaLane, waves: Sequence[Sequence[int]], number: int) -> None:
        copy_wave(stage, lane, self.host.executor.tensors.packed(), waves, number)

    def _room(self, host_map: Tensor, x: Tensor) -> BatchMaps:
        held = self._maps.get(x.device)
        if held is None or held.tokens < len(x):
            tokens = 1 << (max(len(x), STEP) - 1).bit_length()
            held = BatchMaps(self.host.executor.problem.experts, host_map.numel(), tokens, x.device)
            self._maps[x.device] = held
        return held

    def _on_gpu(self, batch: StreamedBatch, maps: Tensor) -> Tensor:
        """The GPU's own experts and those that are copied, fp32."""
        x, dispatch = batch.x, batch.dispatch
        if self.own.problem.experts:
            total = self.own.run(x, dispatch, torch.empty_like(x)).to(torch.float32, copy=True)
        else:
            total = torch.zeros_like(x, dtype=torch.float32)
        held = self.host.executor.tensors.packed()
        add_streamed(batch.stage, batch.lane, held, batch.waves, maps, x, dispatch, total)
        return total

    def known_rates(self) -> Rates:
        """As measured when a large batch first needed them; assumed before."""
        return _RATES.get(self._key(self.own.tensors.device), ASSUMED)

    def _key(self, device: torch.device) -> tuple[Problem, str, str, str]:
        return self.host.executor.problem, self.own.backend.name, self.host.executor.backend.name, str(device)

    def _stage(self, device: torch.device) -> Stage:
        key = self._key(device)
        if key not in _STAGES:
            _STAGES[key] = Stage.make(self.own, self.host.executor, device)
        for tensors in self.host.executor.tensors.packed().values():
            for tensor in tensors.values():
                pin_in_place(tensor)
        return _STAGES[key]

    def _measured(self, device: torch.device) -> Rates:
        key, executor, lane = self._key(device), self.host.executor, lane_of(device.index or 0)
        if key not in _RATES:
            assert isinstance(executor, CpuExecutor)
            with lane.batch():  # it fills the same buffers
                if key not in _RATES:  # by another thread, meanwhile
                    _RATES[key] = measure_rates(executor, self._stage(device), lane)
        return _RATES[key]


def _was_unusual(lane: CudaLane, flags: list[Tensor]) -> bool:
    """Asked when the last wave is packed: the host need not wait until it is computed."""
    with lane.packed():
        return bool(any_set(flags))


def _together(total: Tensor, sums: Tensor | None, rows: CpuRows | None) -> Tensor:
    """The GPU's sums and those of the CPU, which has all rows or some."""
    if sums is None:
        return total
    return total.add_(sums) if rows is None else rows.add_to(total, sums)


def expert_size(host: Executor) -> ExpertSize:
    """The sizes that decide which way an expert goes, with the bytes as they are packed."""
    packed = host.tensors.packed()
    stored = sum(t.nbytes // max(1, t.shape[0]) for tensors in packed.values() for t in tensors.values())
    return replace(size_of(host.problem), bytes=stored)


@cache
def lane_of(device: int) -> CudaLane:
    """The copies of a GPU."""
    return CudaLane(torch.device("cuda", device))
