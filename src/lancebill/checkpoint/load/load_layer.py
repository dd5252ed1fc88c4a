"""Load all local experts of a layer, slices of experts at a time.

On a CPU a few threads do everything for a slice, from reading to packing: allocators tend not to reuse memory that one
thread allocates and another frees. While one reads, others decode and pack. On a GPU threads only read ahead, and the
calling thread decodes and packs on its stream. What is on the GPU already is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lancebill.checkpoint.load.expert_weights import pack_experts
from lancebill.checkpoint.load.layer_plan import LayerPlan
from lancebill.checkpoint.load.load_experts import load_matrices, reads_of_experts
from lancebill.checkpoint.load.scratch import Scratch
from lancebill.checkpoint.load.slice_sizes import (
    PIECES,
    READERS,
    held_step,
    pinned_step,
    read_ahead,
    read_step,
    scratch_bytes,
    slices_of,
    step_for,
    workers_for,
)
from lancebill.checkpoint.load.staging import DeviceReader, Fetched, Read, TensorSource
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.worker_threads import map_in_order
from lancebill.moe.layout import W2, W13, Layout, Packed
from lancebill.numbers.loss import Loss
from lancebill.numbers.unusual import any_set, assuming, repeating

Slots = Sequence[int]
Filled = tuple[list[tuple[str, Loss]], Tensor | None]


def load_layer(
    read: Reader,
    plan: LayerPlan,
    layout: Layout,
    *,
    out: Mapping[str, Packed] | None = None,
    slots: Slots | None = None,
    losses: Callable[[str, Loss], None] | None = None,
    progress: Callable[[int], None] | None = None,
    source: TensorSource = TensorSource.FILES,
) -> dict[str, Packed]:
    """Load all local experts into new buffers on the CPU, or into those of `out`, on the device that holds them.

    With `slots` only the experts of these slots are loaded. `progress` is called with the number of experts that were
    packed. `source`: where the tensors are that `read` returns.
    """
    count = len(plan.experts)
    packed = {W13: layout.allocate(plan.w13, count), W2: layout.allocate(plan.w2, count)} if out is None else dict(out)
    device, pinned = next(iter(packed[W13].values())).device, source is TensorSource.PINNED
    reader = DeviceReader(read, device, pinned=pinned)
    work = _Work(reader, read if source is TensorSource.DEVICE else reader, plan, layout, packed)
    doubts: list[tuple[Slots, Tensor]] = []
    for done, (cost, doubt) in work.filled(range(count) if slots is None else slots, source):
        if losses is not None:
            for matrix, loss in cost:  # in expert order, so that floating-point sums are reproducible
                losses(matrix, loss)
        if doubt is not None:
            doubts.append((done, doubt))
        if progress is not None:
            progress(len(done))
    with repeating():
        for again in _unusual_slices(doubts):
            work.fill(again)
    reader.finish()
    return packed


@dataclass(frozen=True)
class _Piece:
    """Some of the reads of a slice, which one thread does; and all that is read of the slice."""

    slots: Slots
    fetched: Fetched
    reads: Sequence[Read]
    last: bool  # of its slice


class _Work:
    """How the slices of one load are filled."""

    def __init__(
        self, reader: DeviceReader, read: Reader, plan: LayerPlan, layout: Layout, packed: Mapping[str, Packed]
    ) -> None:
        self.reader, self.read, self.plan, self.layout, self.packed = reader, read, plan, layout, packed

    def filled(self, slots: Slots, source: TensorSource) -> Iterator[tuple[Slots, Filled]]:
        """Fills slice after slice, and says which."""
        plan, device = self.plan, self.reader.device
        if not self.reader.asynchronous:
            slices = slices_of(slots, step_for(plan, device))
            fill = partial(self._fill_reusing, Scratch(scratch_bytes(plan, device)))
            yield from map_in_order(fill, slices, workers_for(plan, len(slices)))
        elif source is TensorSource.FILES:
            ahead = PIECES * (read_ahead(plan, device) - 1)  # they begin inside a slice
            for piece, _ in map_in_order(self._fetch, self._pieces(slots), READERS, ahead):
                if piece.last:
                    with self.reader.using(piece.fetched):
                        yield piece.slots, self._fill_as_usual(piece.slots)
        else:  # threads would only take turns with this one
            step = held_step(plan) if source is TensorSource.DEVICE else pinned_step(plan, device)
            yield from ((each, self._fill_as_usual(each)) for each in slices_of(slots, step))

    def fill(self, slots: Slots, scratch: Scratch | None = None) -> list[tuple[str, Loss]]:
        cost: list[tuple[str, Loss]] = []
        for weights in load_matrices(self.read, self.plan, self._experts(slots), lambda *loss: cost.append(loss)):
            pack_experts(self.plan, self.layout, weights, self.packed, slots)
            del weights  # their memory is free for the next matrix
            if scratch is not None:
                scratch.clear()
        return cost

    def _fill_reusing(self, scratch: Scratch, slots: Slots) -> Filled:
        """On a CPU. Matrices that are loaded one by one are rounded or reordered: what was read of one is not kept."""
        if self.plan.one_by_one:
            return self.fill(slots), None
        with scratch.used():
            return self.fill(slots, scratch), None

    def _fill_as_usual(self, slots: Slots) -> Filled:
        """Also a flag on the device: whether something was not as usual, so that the slice must be filled again."""
        if self.plan.one_by_one:
            return self.fill(slots), None
        with assuming() as flags:
            cost = self.fill(slots)
        return cost, any_set(flags) if flags else None

    def _pieces(self, slots: Slots) -> Iterator[_Piece]:
        """What the threads read, slice after slice."""
        for each in slices_of(slots, read_step(self.plan, self.reader.device)):
            reads = list(reads_of_experts(self.plan, self._experts(each)))
            fetched, count = Fetched(self.reader.device), len(reads)
            for i in range(PIECES):  # as many of each slice, so that they count how many slices are read ahead
                piece = reads[count * i // PIECES : count * (i + 1) // PIECES]
                yield _Piece(each, fetched, piece, last=i == PIECES - 1)

    def _fetch(self, piece: _Piece) -> None:
        self.reader.fetch(piece.reads, piece.fetched)

    def _experts(self, slots: Slots) -> list[int]:
        return [self.plan.experts[slot] for slot in slots]


def _unusual_slices(doubts: Sequence[tuple[Slots, Tensor]]) -> list[Slots]:
    """The slices whose flags are set. Waits for the device, once for all of them."""
    found = torch.stack([flag for _, flag in doubts]).tolist() if doubts else []
    return [slots for (slots, _), flag in zip(doubts, found) if flag]
