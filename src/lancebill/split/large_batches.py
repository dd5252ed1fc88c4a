"""Large batches of a split layer on a GPU: some experts of the host's part are copied for the batch.

The host must know which experts the rows use before it can queue copies, so such a call waits for the router, and
cannot be captured: in a graph the CPU computes its whole part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Problem
from lancebill.numbers.unusual import any_set, assuming, repeating
from lancebill.split.copy_lane import CudaLane, pin_in_place
from lancebill.split.cpu_rows import CpuRows, rows_of_experts
from lancebill.split.gpu_queues import MailboxQueue, SideStream
from lancebill.split.measure_rates import measure_rates
from lancebill.split.run_part import HostPart
from lancebill.split.streamed import Stage, add_streamed, copy_first, count_tokens, wave_maps, waves_of
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
        self._places: Tensor | None = None  # the map of the host's part, on the device
        self._cpu_map: Tensor | None = None  # of the experts that the CPU computes in the current batch

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
        size, rates = expert_size(self.host.executor), self._measured(device)
        absent = problem.experts - self.shared
        return expected_ways(absent, tokens, problem.top_k, problem.global_experts, size, rates)

    def choose(self, dispatch: Indexed, host_map: Tensor) -> Ways:
        """The division for these rows. Waits until the device has chosen their experts.

        `host_map` says which experts the host's part has in this call; it may be complete only then.
        """
        executor, ids = self.host.executor, dispatch.ids
        rates = self._measured(ids.device)
        counts = count_tokens(ids, self._on_device(host_map, ids.device), executor.problem.experts)
        return choose_ways(counts, ids.shape[0], expert_size(executor), rates)

    def _on_device(self, host_map: Tensor, device: torch.device) -> Tensor:
        if host_map is not self.host.expert_map:  # written by the device, where it can read it
            return MailboxQueue(device).mapped(host_map)
        if self._places is None or self._places.device != device:
            self._places = host_map.to(device)
        return self._places

    def run(self, x: Tensor, dispatch: Indexed, host_map: Tensor, ways: Ways, out: Tensor) -> Tensor:
        """One batch: the CPU's experts on a stream of their own, copies on another, the rest on the caller's.

        The wire takes longest, so the first copies are queued before everything else that takes time.
        """
        stage, lane = self._stage(x.device), lane_of(x.device.index or 0)
        waves = waves_of(ways.streamed, stage.experts)
        # Small copies go first: behind those of experts they would wait for milliseconds.
        places = self._map_of(ways.cpu, host_map)
        maps = torch.cat([wave_maps(host_map, waves), places.unsqueeze(0)]).to(x.device)
        self._begin(stage, lane, waves)
        rows = None
        if ways.cpu and ways.rows < x.shape[0]:
            rows = rows_of_experts(x, dispatch, maps[-1])
        side, sums = SideStream(x.device), None
        try:
            if ways.cpu:
                given, slots = (x, dispatch) if rows is None else (rows.x, rows.dispatch)
                sums = self.host.calls.queue(side, self.host.executor, places, given, slots)
            with assuming() as flags:  # an answer at once would make the host wait for every wave
                total = self._on_gpu(stage, lane, waves, maps, x, dispatch)
        finally:
            side.join()
        if flags and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            x = x.clone()  # the result may be written over it before it is read again
        out.copy_(_together(total, sums, rows))
        if flags and bool(any_set(flags)):
            with repeating():
                self._begin(stage, lane, waves)
                out.copy_(_together(self._on_gpu(stage, lane, waves, maps, x, dispatch), sums, rows))
        return out

    def _begin(self, stage: Stage, lane: CudaLane, waves: Sequence[Sequence[int]]) -> None:
        lane.begin_batch()
        copy_first(stage, lane, self.host.executor.tensors.packed(), waves)

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

    def _map_of(self, slots: tuple[int, ...], host_map: Tensor) -> Tensor:
        """The CPU's map for this batch. The last batch has ended: this one's ids were read."""
        if self._cpu_map is None:
            self._cpu_map = torch.empty_like(host_map)
        chosen = torch.zeros(self.host.executor.problem.experts + 1, dtype=torch.bool, device="cpu")
        chosen[list(slots)] = True
        return self._cpu_map.copy_(host_map.masked_fill(~chosen[host_map.long()], -1))

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
