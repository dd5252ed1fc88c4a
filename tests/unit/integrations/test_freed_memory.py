"""Free memory of the C library's heap is given back."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from lancebill.integrations.transformers.freed_memory import give_back_freed


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
