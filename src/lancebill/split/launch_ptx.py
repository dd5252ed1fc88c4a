"""Launches kernels that are written in PTX: one block, arguments of 64 bits."""

from __future__ import annotations

import struct
from functools import cache

from lancebill.jit import driver


def launch_ptx(ptx: str, kernel: str, threads: int, device: int, stream: int, *values: int) -> None:
    given = [(f"argument{i}", struct.pack("Q", value)) for i, value in enumerate(values)]
    with driver.in_context(device):
        driver.Launch(_function(ptx, kernel, device), threads, 0, stream, given, False, {})(stream)


@cache
def _function(ptx: str, kernel: str, device: int) -> int:
    with driver.uncaptured():
        return driver.load_function(ptx.encode() + b"\0", kernel, 0)
