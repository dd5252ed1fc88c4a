"""Experts that are copied from host memory to the device for one large batch.

They are copied in waves as they are in host memory, in the layout of the CPU's kernels, and brought into the device's
layout there: host memory holds every expert once. While a wave is packed and computed, the next one is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lancebill.backends.base import Executor, TensorTable
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import Problem
from lancebill.split.recorded import Recorded, record
from lancebill.split.repack import repack, rows_of
from lancebill.split.waves import wave_sizes

WAVE_BYTES = 96 << 20  # of experts that are copied, packed and computed together
BUFFERS = 3  # waves of copied bytes: two are filled while one waits for the device's own experts


class Lane(Protocol):
    """Copies beside the device's other work. Buffers are numbered."""

    def copy(self, target: Tensor, place: int, source: Tensor, first: int, count: int) -> None:
        """Queue a copy of `count` rows from host memory, from row `first` on, to rows from `place` on."""

    def begin(self, buffer: int) -> None:
        """Let the copies that follow wait until the buffer is no longer read."""

    def filled(self, buffer: int) -> None:
        """All copies into the buffer are queued."""

    def use(self, buffer: int) -> None:
        """Let the device's other work wait for the buffer's copies."""

    def release(self, buffer: int) -> None:
        """The work queued so far is the last that reads the buffer."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Room on the device for the experts of a wave: as they are in host memory, and as the device wants them."""

    host: Layout
    own: Layout
    problem: Problem  # of a wave
    raw: tuple[dict[str, Packed], ...]
    packed: dict[str, Packed]
    executor: Executor
    # On a GPU: the packing of each buffer, by the number of experts.
    recorded: list[dict[int, Recorded | None]] = field(default_factory=list)

    @classmethod
    def make(cls, own: Executor, host: Executor, device: torch.device) -> Stage:
        each = sum(tensor[0].nbytes for held in host.tensors.packed().values() for tensor in held.values())
        count = max(1, min(host.problem.experts, WAVE_BYTES // each))
        problem = replace(own.problem, experts=count)
        layout, source = own.backend.layout(problem), host.backend.layout(host.problem)
        held = host.tensors.packed()

        def room() -> dict[str, Packed]:  # zeros: whole buffers are packed, also where they were never filled
            return {
                m: {n: torch.zeros((count, *t.shape[1:]), dtype=t.dtype, device=device) for n, t in tensors.items()}
                for m, tensors in held.items()
            }

        packed = {}
        for matrix, shape in problem.matrices.items():
            packed[matrix] = layout.allocate(shape, count, device)
            others = room()[matrix]
            packed[matrix] |= {n: t for n, t in others.items() if n not in source.storage(shape)}
            for tensor in packed[matrix].values():  # kernels may read places that were never filled
                tensor.zero_()
        executor = own.backend.executor(problem, own.device, TensorTable.of(packed))
        stage = cls(source, layout, problem, tuple(room() for _ in range(BUFFERS)), packed, executor)
        if device.type == "cuda":
            stage._record(device)
            torch.cuda.current_stream(device).synchronize()  # copies have a stream of their own
        return stage

    def _record(self, device: torch.device) -> None:
        sizes = wave_sizes(self.experts)
        works = [partial(self.pack, buffer, size) for buffer in range(BUFFERS) for size in sizes]
        made = iter(record(works, device))
        self.recorded.extend({size: next(made) for size in sizes} for _ in range(BUFFERS))

    @property
    def experts(self) -> int:
        return self.problem.experts

    @cached_property
    def bytes(self) -> int:
        """Of all buffers."""
        held = (*self.raw, self.packed)
        return sum(t.nbytes for packed in held for tensors in packed.values() for t in tensors.values())

    def pack(self, buffer: int, count: int) -> None:
        """Bring the first experts of a buffer into the device's layout."""
        raw, into = rows_of(self.raw[buffer], 0, count), rows_of(self.packed, 0, count)
        repack(self.problem.matrices, (self.host, raw), (self.own, into))

    def pack_wave(self, buffer: int, count: int) -> None:
        """As `pack`, but where its kernels are recorded, perhaps of more experts than are there."""
        recorded = None
        if self.recorded:
            held = self.recorded[buffer]
            recorded = held[min(size for size in held if size >= count)]
        if recorded is None or recorded.queue():
            self.pack(buffer, count)


def first_wave(counts: NDArray[np.float64], each: int) -> list[int]:
    """The experts with the most tokens: whichever way others go, these are copied."""
    most: list[int] = (-counts).argsort(kind="stable")[: min(each, np.count_nonzero(counts))].tolist()
    return sorted(most)


def copy_wave(
    stage: Stage, lane: Lane, held: Mapping[str, Packed], waves: Sequence[Sequence[int]], number: int
) -> None:
    """Queue the copies of a wave, if there is one of this number. `held` are the tensors of the part in host memory."""
    if number >= len(waves):
        return
    buffer = number % BUFFERS
    lane.begin(buffer)
    for place, first, count in _runs(waves[number]):
        for matrix, tensors in held.items():
            for name, tensor in tensors.items():
                lane.copy(stage.raw[buffer][matrix][name], place, tensor, first, count)
    lane.filled(buffer)


def pack_wave(
    stage: Stage, lane: Lane, held: Mapping[str, Packed], waves: Sequence[Sequence[int]], number: int
) -> None:
    """Queue the packing of a wave whose copies were queued, and the copies that its buffer is free for then."""
    buffer = number % BUFFERS
    lane.use(buffer)
    stage.pack_wave(buffer, len(waves[number]))
    lane.release(buffer)
    copy_wave(stage, lane, held, waves, number + BUFFERS)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring experts are copied in one piece: the place of the first in the wave, its slot, their number."""
    for _, group in groupby(enumerate(slots), key=lambda each: each[1] - each[0]):
        run = list(group)
        yield run[0][0], run[0][1], len(run)
