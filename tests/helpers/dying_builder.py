"""A compiler for tests of `build_all`, in worker processes: of one kernel it dies."""

from __future__ import annotations

import os
from pathlib import Path

from lancebill.jit.compile import KernelSource

DEADLY = "deadly"


def build(source: KernelSource, folder: Path | None) -> str | None:
    if source.kernel == DEADLY:
        os._exit(1)
    return "does not compile" if source.kernel == "wrong" else None
