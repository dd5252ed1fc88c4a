"""How many experts are loaded together, and by how many threads: larger slices mean fewer calls, but more memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lancebill.checkpoint.load.layer_plan import LayerPlan
from lancebill.checkpoint.load.memory import expert_bytes, level_bytes
from lancebill.checkpoint.load.staging import BUFFER_BYTES

# Bytes of a slice of experts, as packed. Temporary memory is at most a few times that for each thread.
SLICE_BYTES = {"cpu": 10 << 20, "cuda": 64 << 20}
MOST_CPU_BYTES = 16 << 20  # a slice of a large layer: Python takes as long for several experts as for one
CPU_SHARE = 32  # a slice has at most 1/32 of such a layer's bytes
HELD_BYTES = 256 << 20  # bytes copied for a slice whose tensors are already on the GPU or in pinned memory
WORKING_BYTES = 192 << 20  # all threads together
READ_BYTES = 256 << 20  # pinned memory
READ_BUFFERS = 3  # buffers per slice that is read ahead: with smaller ones, packing would take longer than reading
COPIED = 3  # buffers that may not be free yet, as they are copied
FEWEST_AHEAD = 3  # slices, however large
READERS = 6  # threads: a disk needs several reads at a time to reach its rate, but more take Python from the packing
PIECES = 6  # of a slice, each read by one thread: slices are complete in their order


def slices_of(slots: Sequence[int], step: int) -> list[Sequence[int]]:
    """Slots that are loaded together."""
    return [slots[first : first + step] for first in range(0, len(slots), step)]


def step_for(plan: LayerPlan, device: torch.device) -> int:
    """How many experts a slice has."""
    return _experts_in(plan, SLICE_BYTES["cuda"] if device.type == "cuda" else _cpu_bytes(plan))


def read_step(plan: LayerPlan, device: torch.device) -> int:
    """How many experts a slice has that is read ahead for a GPU: as many as fit a few buffers."""
    return min(step_for(plan, device), _experts_in(plan, READ_BUFFERS * BUFFER_BYTES))


def pinned_step(plan: LayerPlan, device: torch.device) -> int:
    """Experts per copy and packing call if their tensors are in pinned memory: with fewer calls the host
    is as fast as the copies."""
    return _experts_in(plan, HELD_BYTES) if plan.views_codes else step_for(plan, device)


def held_step(plan: LayerPlan) -> int:
    """Experts per packing call if their tensors are already on the GPU.

    Codes are not copied then and take no memory, and one call costs the host as much as reading a hundred experts.
    """
    if not plan.views_codes:
        return _experts_in(plan, HELD_BYTES)
    return max(1, HELD_BYTES // max(1, level_bytes(plan)))


def workers_for(plan: LayerPlan, slices: int) -> int:
    """Threads of a load to a CPU: as many as torch has, if their working memory allows it; at least two."""
    each = max(expert_bytes(plan), _cpu_bytes(plan))
    return min(slices, max(2, min(torch.get_num_threads(), WORKING_BYTES // each))) or 1


def scratch_bytes(plan: LayerPlan, device: torch.device) -> int:
    """About the most that is read of a slice on a CPU, at a byte for each code: pages that are not used are free."""
    return step_for(plan, device) * expert_bytes(plan)


def read_ahead(plan: LayerPlan, device: torch.device) -> int:
    """How many slices are read for a GPU, or wait to be packed."""
    buffers = -(-read_step(plan, device) * _packed_bytes(plan) // BUFFER_BYTES) or 1
    return max(FEWEST_AHEAD, (READ_BYTES // BUFFER_BYTES - COPIED) // buffers)


def _cpu_bytes(plan: LayerPlan) -> int:
    """Bytes of a slice on a CPU, as packed."""
    return max(SLICE_BYTES["cpu"], min(MOST_CPU_BYTES, len(plan.experts) * _packed_bytes(plan) // CPU_SHARE))


def _experts_in(plan: LayerPlan, most: int) -> int:
    """How many experts have at most so many bytes, as packed; at least one."""
    return max(1, most // max(1, _packed_bytes(plan)))


def _packed_bytes(plan: LayerPlan) -> int:
    """About the bytes of one expert in a packed layer, or in a file."""
    return expert_bytes(plan) * max(plan.w13.spec.dtype.bits, plan.w2.spec.dtype.bits) // 8
