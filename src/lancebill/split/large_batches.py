"""Large batches of a split layer on a GPU: some experts of the host's part are copied for the batch.

The host must know which experts the rows use before it can queue copies, so such a call waits for the router, and
cannot be captured: in a graph the CPU computes its whole part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Problem
from lancebill.numbers.unusual import any_set, assuming, repeating
from lancebill.split.batch_maps import BatchMaps, wave_maps
from lancebill.split.copy_lane import CudaLane, pin_in_place
from lancebill.split.cpu_rows import CpuRows, rows_of_experts
from lancebill.split.gpu_queues import SideStream
from lancebill.split.measure_rates import measure_rates
from lancebill.split.run_part import HostPart
from lancebill.split.streamed import BUFFERS, Stage, add_streamed, copy_wave, count_tokens, waves_of
from lancebill.split.ways import ASSUMED, ExpertSize, Rates, Ways, choose_ways, expected_ways, size_of

FEWEST = 64  # tokens: below, experts are never copied, and nothing is measured
_STAGES: dict[tuple[Problem, str, str, str], Stage] = {}  # shared by layers: their calls run one after the other
_RATES: dict[tuple[Problem, str, str, str], Rates] = {}


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

    def choose(self, dispatch: Indexed, host_map: Tensor) -> Ways:
        """The division for these rows. Waits until the device has chosen their experts.

        `host_map` says which experts the host's part has in this call; it may be complete only then.
        """
        rates = self._measured(dispatch.ids.device)
        return choose_ways(count_tokens(dispatch.ids, host_map), dispatch.ids.shape[0], self.size, rates)

    def run(self, x: Tensor, dispatch: Indexed, host_map: Tensor, ways: Ways, out: Tensor) -> Tensor:
        """One batch: the CPU's experts on a stream of their own, copies on another, the rest on the caller's."""
        stage, lane = self._stage(x.device), lane_of(x.device.index or 0)
        with lane.batch():
            return self._run(stage, lane, x, dispatch, host_map, ways, out)

    def _run(
        self, stage: Stage, lane: CudaLane, x: Tensor, dispatch: Indexed, host_map: Tensor, ways: Ways, out: Tensor
    ) -> Tensor:
        """The wire takes longest, so the copies of the first wave are queued before everything else."""
        waves = waves_of(ways.streamed, stage.experts)
        lane.begin_batch()
        self._copy(stage, lane, waves, 0)
        room = self._room(host_map, x.device)
        places = room.write(host_map, ways.streamed, ways.cpu)
        copied, on_cpu = room.on_device()
        side, sums, rows = None, None, None
        try:
            if ways.cpu:
                rows = rows_of_experts(x, dispatch, on_cpu) if ways.rows < x.shape[0] else None
                given, slots = (x, dispatch) if rows is None else (rows.x, rows.dispatch)
                side = SideStream(x.device)
                sums = self.host.calls.queue(side, self.host.executor, places, given, slots, fetch=True)
            self._copy(stage, lane, waves, 1)
            maps = wave_maps(copied, len(waves), stage.experts)
            with assuming() as flags:  # an answer at once would make the host wait for every wave
                total = self._on_gpu(stage, lane, waves, maps, x, dispatch)
        finally:
            if side is not None:
                side.join()
        if flags and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            x = x.clone()  # the result may be written over it before it is read again
        out.copy_(_together(total, sums, rows))
        if flags and bool(any_set(flags)):
            lane.begin_batch()
            for number in range(BUFFERS):
                self._copy(stage, lane, waves, number)
            with repeating():
                out.copy_(_together(self._on_gpu(stage, lane, waves, maps, x, dispatch), sums, rows))
        return out

    def _copy(self, stage: Stage, lane: CudaLane, waves: Sequence[Sequence[int]], number: int) -> None:
        copy_wave(stage, lane, self.host.executor.tensors.packed(), waves, number)

    def _room(self, host_map: Tensor, device: torch.device) -> BatchMaps:
        if device not in self._maps:
            self._maps[device] = BatchMaps(self.host.executor.problem.experts, host_map.numel(), device)
        return self._maps[device]

    def _on_gpu(
        self, stage: Stage, lane: CudaLane, waves: Sequence[Sequence[int]], maps: Tensor, x: Tensor, dispatch: Indexed
    ) -> Tensor:
        """The GPU's own experts and those that are copied, fp32."""
        if self.own.problem.experts:
            total = self.own.run(x, dispatch, torch.empty_like(x)).to(torch.float32, copy=True)
        else:
            total = torch.zeros_like(x, dtype=torch.float32)
        add_streamed(stage, lane, self.host.executor.tensors.packed(), waves, maps, x, dispatch, total)
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
        key = self._key(device)
        if key not in _RATES:
            executor = self.host.executor
            assert isinstance(executor, CpuExecutor)
            _RATES[key] = measure_rates(executor, self._stage(device), lane_of(device.index or 0))
        return _RATES[key]


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
