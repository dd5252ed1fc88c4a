"""Load all local experts of a layer: a few threads, each with a slice of experts from reading to packing.

One thread does everything for a slice: allocators tend not to reuse memory that one thread allocates and another frees.
While one reads, others decode and pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from lancebill.checkpoint.load.load_experts import LayerPlan, load_experts, pack_experts
from lancebill.checkpoint.load.memory import expert_bytes
from lancebill.checkpoint.load.staging import DeviceReader
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.worker_threads import map_in_order
from lancebill.moe.layout import Layout, Packed
from lancebill.numbers.codec import Loss

# Bytes of a slice of experts: as packed on a CPU, one byte per code on a GPU. Temporary memory is at most a few times
# that for each thread. Larger slices mean fewer calls and launches: those of a slice take 2 to 3 ms on a CPU, and only
# one thread at a time makes them.
SLICE_BYTES = {"cpu": 10 << 20, "cuda": 256 << 20}
WORKING_BYTES = 192 << 20  # of all threads together, counted the same way
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
) -> dict[str, Packed]:
    """Load all local experts into new buffers on the CPU, or into those of `out`, on the device that holds them.

    With `slots` only the experts of these slots are loaded. `progress` is called with the number of experts that were
    packed.
    """
    count = len(plan.experts)
    packed = (
        {"w13": layout.allocate(plan.w13, count), "w2": layout.allocate(plan.w2, count)} if out is None else dict(out)
    )
    reader = DeviceReader(read, next(iter(packed["w13"].values())).device)

    def fill(slots: Sequence[int]) -> list[tuple[str, Loss]]:
        cost: list[tuple[str, Loss]] = []
        experts = [plan.experts[slot] for slot in slots]
        with reader.working():
            weights = load_experts(reader, plan, experts, lambda matrix, loss: cost.append((matrix, loss)))
            pack_experts(plan, layout, weights, packed, slots)
        return cost

    slices = list(slot_slices(plan, reader.device, range(count) if slots is None else slots))
    for done, cost in map_in_order(fill, slices, workers_for(plan, reader.device, len(slices))):
        if losses is not None:
            for matrix, loss in cost:  # in expert order, so that floating-point sums are reproducible
                losses(matrix, loss)
        if progress is not None:
            progress(len(done))
    reader.finish()
    return packed


def slot_slices(plan: LayerPlan, device: torch.device, slots: Sequence[int]) -> Iterator[Sequence[int]]:
    """Slots that are loaded together."""
    each = expert_bytes(plan)
    if device.type == "cpu":
        each = each * max(plan.w13.spec.dtype.bits, plan.w2.spec.dtype.bits) // 8
    step = max(1, SLICE_BYTES[device.type] // max(1, each))
    for first in range(0, len(slots), step):
        yield slots[first : first + step]


def workers_for(plan: LayerPlan, device: torch.device, slices: int) -> int:
    """Threads of a load: as many as torch has (a few on a GPU), if their working memory allows it; at least two."""
    each = max(expert_bytes(plan), SLICE_BYTES[device.type])
    most = MOST_GPU_THREADS if device.type == "cuda" else torch.get_num_threads()
    return min(slices, max(2, min(most, WORKING_BYTES // each))) or 1
