"""A kernel that only reads memory, to measure read bandwidth: torch's reductions do not always reach it.

It also reads some rows of a matrix (the experts of a batch), in one launch or in several dependent ones. Its time is
the lower bound for any kernel that reads the same bytes with the same number of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True)
class Reader:
    """How to read: words that a program loads at once, programs per SM, their warps. `early`: the next launch starts
    before this one ends, and then waits for it."""

    block: int = 4096
    programs: int = 8
    warps: int = 8
    early: bool = False

    @property
    def name(self) -> str:
        return "read " + "-".join(str(int(value)) for value in astuple(self))


_SHAPES = ((4096, 8, 8), (4096, 4, 8), (2048, 16, 4), (2048, 8, 4), (8192, 4, 8), (8192, 2, 16))
READERS = tuple(Reader(*shape) for shape in _SHAPES)
CHAINED_READERS = tuple(Reader(*shape, early) for shape in _SHAPES[:4] for early in (False, True))


def read_tensor(source: Tensor) -> Tensor:
    """Read all of `source`. The XOR of what each program read is stored, so the compiler cannot drop the loads."""
    return read_words(source.view(-1).view(torch.int32), make_sink(source.device))


def make_sink(device: torch.device, reader: Reader = READERS[0]) -> Tensor:
    """A word for each program: more would take time of its own beside a small source."""
    programs = reader.programs * torch.cuda.get_device_properties(device).multi_processor_count
    return torch.empty(programs, dtype=torch.int32, device=device)


def read_words(words: Tensor, sink: Tensor, reader: Reader = READERS[0]) -> Tensor:
    return read_rows(words.view(1, -1), None, sink, reader)


def read_rows(words: Tensor, rows: Tensor | None, sink: Tensor, reader: Reader = READERS[0]) -> Tensor:
    """Read these rows of a matrix (None: all). A `sink` that is longer than needed keeps its last words."""
    length, count = words.shape[1], words.shape[0] if rows is None else rows.shape[0]
    blocks = triton.cdiv(length, reader.block)
    grid = (max(1, min(sink.shape[0], count * blocks)),)
    early = {"launch_pdl": True} if reader.early else {}
    chosen = sink if rows is None else rows
    _read[grid](
        words, chosen, sink, length, blocks, count * blocks, reader.block, rows is not None, reader.early,
        num_warps=reader.warps, **early,
    )  # fmt: skip
    return sink


def read_in_turn(matrices: Sequence[Tensor], rows: Tensor, sink: Tensor, reader: Reader) -> None:
    """Read the same rows of each matrix, one launch for each."""
    for words in matrices:
        read_rows(words, rows, sink, reader)


def fastest_read(us: dict[str, float]) -> tuple[str, float]:
    """The name and the time of the fastest reader, of a dict that has other contestants too."""
    names = {reader.name for reader in (*READERS, *CHAINED_READERS)}
    name = min((name for name in us if name in names), key=us.__getitem__)
    return name, us[name]


def reading_calls(words: Tensor) -> dict[str, list[Callable[[], object]]]:
    """A call of every reader that reads all of `words`."""

    def call(reader: Reader, sink: Tensor) -> Callable[[], object]:
        return lambda: read_words(words, sink, reader)

    return {reader.name: [call(reader, make_sink(words.device, reader))] for reader in READERS}


@triton.jit
def _read(words, rows, sink, length, blocks, count, BLOCK: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.arange(0, BLOCK)
    result = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        row = i // blocks
        start = (i - row * blocks) * BLOCK
        if SOME:
            row = tl.load(rows + row)
        own = words + row.to(tl.int64) * length + start
        result ^= tl.load(own + offsets, mask=start + offsets < length, other=0)
    tl.store(sink + tl.program_id(0), tl.xor_sum(result, 0))
