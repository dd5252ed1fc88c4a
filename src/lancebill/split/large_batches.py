"""Large batches of a split layer on a GPU: some experts of the host's part are copied for the batch.

The host must know which experts the rows use before it can divide them, so such a call waits for the router, and cannot
be captured: in a graph the CPU computes its whole part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.errors import LaunchError
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Problem
from lancebill.numbers.unusual import any_set, assuming, repeating
from lancebill.split.batch_maps import BatchMaps, wave_maps
from lancebill.split.copy_lane import CudaLane, pin_in_place
from lancebill.split.cpu_rows import CpuSums
from lancebill.split.divide_batch import (
    Begun,
    LargeBatch,
    Waves,
    begin_batch,
    copy_unasked,
    divide_batch,
    host_us,
    queue_waves,
    rows_of_cpu,
)
from lancebill.split.gpu_queues import SideStream
from lancebill.split.host_calls import RowsCall
from lancebill.split.measure_rates import measure_rates
from lancebill.split.run_part import HostPart, run_part
from lancebill.split.streamed import BUFFERS, Stage
from lancebill.split.ways import ASSUMED, ExpertSize, Rates, Ways, expected_ways, size_of

FEWEST = 64  # tokens; smaller batches never copy experts and never measure
_TIMED = 2048  # tokens of the batch that measures the host's time
_STAGES: dict[tuple[Problem, str, str, str], Stage] = {}  # shared by layers: their calls run one after the other
_RATES: dict[tuple[Problem, str, str, str], Rates] = {}


class LargeBatches:
    """Computes large batches of a split layer."""

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

        Waits until the device has chosen the experts. None: copying does not pay, so nothing is computed.
        """
        rates = self._measured(x.device)
        with lane_of(x.device.index or 0).batch():
            batch = self._batch(x, dispatch, host_map)
            first = copy_unasked(batch) if not self.shared else ()  # those that move may be on the device
            batch.room.ask(dispatch)
            self.host.calls.check()
            call = self._prepare_cpu(batch)
            begun = begin_batch(batch, rates, first)
            ways = divide_batch(batch, begun, rates)
            return self._run(batch, begun, ways, rates, call, out) if ways.streamed else None

    def _batch(self, x: Tensor, dispatch: Indexed, host_map: Tensor) -> LargeBatch:
        host, lane = self._cpu, lane_of(x.device.index or 0)
        held, room = host.tensors.packed(), self._room(host_map, x)
        return LargeBatch(x, dispatch, host_map, held, self.size, self._stage(x.device), lane, room, host.native)

    def _room(self, host_map: Tensor, x: Tensor) -> BatchMaps:
        held = self._maps.get(x.device)
        if held is None or held.tokens < len(x):
            problem, tokens = self.host.executor.problem, 1 << (len(x) - 1).bit_length()
            held = BatchMaps(problem.experts, host_map.numel(), tokens, problem.top_k, x.device)
            self._maps[x.device] = held
        return held

    @property
    def _cpu(self) -> CpuExecutor:
        executor = self.host.executor
        assert isinstance(executor, CpuExecutor)
        return executor

    def _prepare_cpu(self, batch: LargeBatch) -> RowsCall:
        """All that can be done for the CPU's part before the router's ids are there."""
        return self.host.calls.prepare_rows(SideStream(batch.x.device), self._cpu, batch.room.cpu_map, batch.x)

    def _run(self, batch: LargeBatch, begun: Begun, ways: Ways, rates: Rates, call: RowsCall, out: Tensor) -> Tensor:
        x, rows = batch.x, rows_of_cpu(batch, begun, ways)
        try:
            on_cpu = None if rows is None else call.send(rows)
            waves = queue_waves(batch, begun, ways, rates)
            with assuming() as flags:  # an answer at once would make the host wait for every wave
                computed = self._on_gpu(batch, waves, flags)
        finally:
            if rows is not None:
                call.queue.join()  # what is queued reads rows and writes sums, also if the rest fails
        if flags and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            batch = replace(batch, x=x.clone())  # the result may be written over it before it is read again
        _add(*computed, on_cpu, out)
        if flags and batch.room.answer():
            for number in range(BUFFERS):
                batch.copy(waves.experts, number)
            with repeating():
                _add(*self._on_gpu(batch, waves), on_cpu, out)
        return out

    def _on_gpu(self, batch: LargeBatch, waves: Waves, flags: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """fp32 sums of the GPU's own experts and of copied ones; the last wave's sums separately.

        Packing sets `flags`. The host can read them before the last wave is computed.
        """
        asked = 0

        def pack(number: int) -> None:
            nonlocal asked
            batch.pack(waves.experts, number)
            if flags and number + 1 == len(waves.experts):
                asked = len(flags)
                batch.room.ask_whether(any_set(flags))

        x = batch.x
        pack(0)  # at once, so that its buffer can be filled again
        if self.own.problem.experts:
            total = self.own.run(x, batch.dispatch, torch.empty_like(x)).to(torch.float32, copy=True)
        else:
            total = torch.zeros_like(x, dtype=torch.float32)
        compute = partial(run_part, batch.stage.executor, x, batch.dispatch, dtype=x.dtype)
        maps = wave_maps(waves.places, len(waves.experts), batch.stage.experts)
        last = compute(maps[0])
        for number in range(1, len(waves.experts)):
            total.add_(last)
            pack(number)
            last = compute(maps[number])
        if len(flags) != asked:  # only packing asks questions
            raise LaunchError("a question about a batch was asked after the answers were fetched")
        return total, last

    def _host_us(self, rates: Rates, device: torch.device) -> tuple[float, float, float]:
        """Of a batch that is routed to all experts alike."""
        problem = self.host.executor.problem
        x = torch.zeros(_TIMED, problem.hidden, dtype=problem.input.storage, device=device)
        slots = torch.arange(_TIMED * problem.top_k, dtype=torch.int32, device=device)
        ids = (slots % problem.global_experts).view(_TIMED, problem.top_k)
        places = torch.arange(problem.global_experts, dtype=torch.int32, device="cpu")
        places[places >= problem.experts] = -1
        dispatch = Indexed(ids, torch.ones_like(ids, dtype=torch.float32))
        return host_us(self._batch(x, dispatch, places), rates, self._prepare_cpu)

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
        key, lane = self._key(device), lane_of(device.index or 0)
        if key not in _RATES:
            with lane.batch():  # it fills the same buffers
                if key not in _RATES:  # by another thread, meanwhile
                    timed = partial(self._host_us, device=device)
                    _RATES[key] = measure_rates(self._cpu, self._stage(device), lane, timed)
        return _RATES[key]


def _add(total: Tensor, last: Tensor, on_cpu: CpuSums | None, out: Tensor) -> None:
    """The GPU's sums and those of the CPU, which has all rows or some."""
    if on_cpu is None:
        torch.add(total, last, out=out)
    else:
        out.copy_(on_cpu.add_to(total.add_(last)))


def expert_size(host: Executor) -> ExpertSize:
    """The sizes that decide which way an expert goes, with the bytes as they are packed."""
    packed = host.tensors.packed()
    stored = sum(t.nbytes // max(1, t.shape[0]) for tensors in packed.values() for t in tensors.values())
    return replace(size_of(host.problem), bytes=stored)


@cache
def lane_of(device: int) -> CudaLane:
    """The copies of a GPU."""
    return CudaLane(torch.device("cuda", device))
