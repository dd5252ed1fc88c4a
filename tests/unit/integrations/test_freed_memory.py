"""What a load needs beside its results is given back: the C library's free memory, and what transformers converts."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.integrations.transformers.freed_memory import give_back_freed
from lancebill.integrations.transformers.other_tensors import LazyTensor


def _resident() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
def test_freed_pieces_below_one_that_is_in_use() -> None:
    pieces = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(1024)]  # small enough to be on the heap
    last = torch.ones(64 << 10, dtype=torch.uint8)
    del pieces
    before = _resident()
    give_back_freed()
    assert before - _resident() > 32 << 20 and bool(last.all())


def test_large_tensors_are_read_to_memory_of_their_own(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = torch.arange(1 << 20, dtype=torch.int32).view(4, -1)
    save_file({"matrix": stored}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "model.safetensors")
    read = LazyTensor(lambda: checkpoint.read("matrix"))[...]
    assert torch.equal(read, stored)
    assert read.data_ptr() % 4096 == 0, "a tensor of the C library has its header before it"
