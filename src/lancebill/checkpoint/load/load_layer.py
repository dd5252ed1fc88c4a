"""Load all local experts of a layer: a few threads, each with a slice of experts from reading to packing.

One thread does everything for a slice: allocators tend not to reuse memory that one thread allocates and another frees.
While one reads, others decode and pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from lancebill.checkpoint.load.load_experts import LayerPlan, load_experts, pack_experts
from lancebill.checkpoint.load.memory import expert_bytes, level_bytes
from lancebill.checkpoint.load.staging import DeviceReader
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.worker_threads import map_in_order
from lancebill.moe.layout import Layout, Packed
from lancebill.numbers.codec import Loss
from lancebill.numbers.unusual import any_set, assuming, repeating

# Bytes of a slice of experts, as packed. Temporary memory is at most a few times that for each thread. Larger slices
# mean fewer calls and launches, which only one thread at a time makes.
SLICE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
HELD_BYTES = 256 << 20  # copied of a slice whose tensors are on the GPU already: one thread, and nothing to read
WORKING_BYTES = 192 << 20  # of all threads together
MOST_GPU_THREADS = 3


def load_layer(
    read: Reader,
    plan: LayerPlan,
    layout: Layout,
    *,
    out: Mapping[str, Packed] | None = None,
    slots: Sequence[int] | None = None,
    losses: Callable[[str, Loss], None] | None = None,
    progress: Callable[[int], None] | None = None,
    held: bool = False,
) -> dict[str, Packed]:
    """Load all local experts into new buffers on the CPU, or into those of `out`, on the device that holds them.

    With `slots` only the experts of these slots are loaded. `progress` is called with the number of experts that were
    packed. `held`: what `read` returns is on the device already, so there is nothing to wait for.
    """
    count = len(plan.experts)
    packed = (
        {"w13": layout.allocate(plan.w13, count), "w2": layout.allocate(plan.w2, count)} if out is None else dict(out)
    )
    reader = DeviceReader(read, next(iter(packed["w13"].values())).device)
    source: Reader = read if held else reader
    working = nullcontext if held else reader.working  # what is there already is packed on the caller's stream

    def fill(slots: Sequence[int]) -> list[tuple[str, Loss]]:
        cost: list[tuple[str, Loss]] = []
        experts = [plan.experts[slot] for slot in slots]
        with working():
            weights = load_experts(source, plan, experts, lambda matrix, loss: cost.append((matrix, loss)))
            pack_experts(plan, layout, weights, packed, slots)
        return cost

    def fill_as_usual(slots: Sequence[int]) -> tuple[list[tuple[str, Loss]], Tensor | None]:
        """Also a flag on the device: whether something was not as usual, so that the slice must be filled again."""
        if not reader.asynchronous or plan.one_by_one:
            return fill(slots), None
        with assuming() as flags:
            cost = fill(slots)
        with working():
            return cost, any_set(flags) if flags else None

    step = held_step(plan) if held and reader.asynchronous else slot_step(plan, SLICE_BYTES[reader.device.type])
    slices = list(_slices(range(count) if slots is None else slots, step))
    workers = 1 if held and reader.asynchronous else workers_for(plan, reader.device, len(slices))
    doubts: list[tuple[Sequence[int], Tensor]] = []
    for done, (cost, doubt) in map_in_order(fill_as_usual, slices, workers):
        if losses is not None:
            for matrix, loss in cost:  # in expert order, so that floating-point sums are reproducible
                losses(matrix, loss)
        if doubt is not None:
            doubts.append((done, doubt))
        if progress is not None:
            progress(len(done))
    reader.finish()
    with repeating():
        for again in _unusual_slices(doubts):
            fill(again)
    reader.finish()
    return packed


def _unusual_slices(doubts: Sequence[tuple[Sequence[int], Tensor]]) -> list[Sequence[int]]:
    """The slices whose flags are set. Waits for the device, once for all of them."""
    found = torch.stack([flag for _, flag in doubts]).tolist() if doubts else []
    return [slots for (slots, _), flag in zip(doubts, found) if flag]


def slot_slices(plan: LayerPlan, device: torch.device, slots: Sequence[int]) -> Iterator[Sequence[int]]:
    """Slots that are loaded together."""
    return _slices(slots, slot_step(plan, SLICE_BYTES[device.type]))


def slot_step(plan: LayerPlan, most: int) -> int:
    """How many experts have at most so many bytes, as packed; at least one."""
    each = expert_bytes(plan) * max(plan.w13.spec.dtype.bits, plan.w2.spec.dtype.bits) // 8
    return max(1, most // max(1, each))


def held_step(plan: LayerPlan) -> int:
    """How many experts are packed together whose tensors are on the GPU: codes that stay where they are take no memory,
    and a call costs the host as much as reading a hundred experts."""
    if not plan.views_codes:
        return slot_step(plan, HELD_BYTES)
    return max(1, HELD_BYTES // max(1, level_bytes(plan)))


def _slices(slots: Sequence[int], step: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(slots), step):
        yield slots[first : first + step]


def workers_for(plan: LayerPlan, device: torch.device, slices: int) -> int:
    """Threads of a load: as many as torch has (a few on a GPU), if their working memory allows it; at least two."""
    each = max(expert_bytes(plan), SLICE_BYTES[device.type])
    most = MOST_GPU_THREADS if device.type == "cuda" else torch.get_num_threads()
    return min(slices, max(2, min(most, WORKING_BYTES // each))) or 1
