"""The bytes of a layer's activated experts, only read: what two kernels that depend on each other need at least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lancebill.bench.read_kernel import CHAINED_READERS, fastest_read, make_sink, read_in_turn
from lancebill.bench.timing import Call
from lancebill.bench.workload import Batch
from lancebill.moe.layout import Packed

READ = "read"
MOST_READ_TOKENS = 4  # more tokens take more launches than two


class LayerReader:
    """Buffers with as many bytes for each expert as w13 and w2 have. One launch reads those of a batch's experts in the
    first, the next one in the second."""

    def __init__(self, packed: Mapping[str, Packed], device: torch.device) -> None:
        self.matrices = [_like(tensors, device) for tensors in packed.values()]

    def contestants(self, batches: Sequence[Batch]) -> dict[str, list[Call]]:
        """The calls of every way to read, one for each batch."""
        rows = [batch.ids[batch.ids >= 0].unique().to(torch.int32) for batch in batches]
        return {
            reader.name: [partial(read_in_turn, self.matrices, row, sink, reader) for row in rows]
            for reader in CHAINED_READERS
            for sink in [make_sink(batches[0].x.device, reader)]
        }


def _like(tensors: Packed, device: torch.device) -> torch.Tensor:
    """Words [experts, words of an expert]."""
    experts = next(iter(tensors.values())).shape[0]
    words = sum(tensor.nbytes for tensor in tensors.values()) // experts // 4
    return torch.empty(experts, words, dtype=torch.int32, device=device).random_()


def take_read(times: dict[str, dict[str, Any]], ours: float) -> dict[str, Any]:
    """Remove the readers from the contestants' times; the fastest one and its time over ours."""
    readers = {reader.name for reader in CHAINED_READERS} & {*times}
    if not readers:
        return {}
    name, us = fastest_read({reader: float(times[reader]["us"]) for reader in readers})
    found = times[name]
    for reader in readers:
        del times[reader]
    return {READ: found | {"reader": name, "of_read": round(us / ours, 4)}}
