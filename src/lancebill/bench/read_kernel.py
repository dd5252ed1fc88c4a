"""A kernel that only reads memory, to measure read bandwidth: torch's reductions do not always reach it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, PER_PROCESSOR = 4096, 8


def read_tensor(source: Tensor) -> Tensor:
    """Read all of `source`. The XOR of what each program read is stored, so the compiler cannot drop the loads."""
    return read_words(source.view(-1).view(torch.int32), make_sink(source.device))


def make_sink(device: torch.device) -> Tensor:
    """A word for each program: more would take time of its own beside a small source."""
    programs = PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return torch.empty(programs, dtype=torch.int32, device=device)


def read_words(words: Tensor, sink: Tensor) -> Tensor:
    _read[(sink.shape[0],)](words, sink, words.numel(), BLOCK, num_warps=8)
    return sink


@triton.jit
def _read(words, sink, count, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    result = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        result ^= tl.load(words + start + offsets, mask=start + offsets < count, other=0)
    tl.store(sink + tl.program_id(0), tl.xor_sum(result, 0))
