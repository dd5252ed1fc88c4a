"""Runs small PTX kernels on memory of this process: enough instructions for kernels written by hand, one block.

Threads run one after the other from barrier to barrier. Fences do nothing: what they order is not tested here.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

_TYPES = {
    "u32": ctypes.c_uint32, "s32": ctypes.c_int32, "b32": ctypes.c_uint32,
    "u64": ctypes.c_uint64, "s64": ctypes.c_int64, "b64": ctypes.c_uint64,
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "ne": lambda a, b: a != b, "eq": lambda a, b: a == b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b,
}  # fmt: skip


@cache
def variables(ptx: str) -> dict[str, Any]:
    """What a module keeps in global memory between its launches."""
    return {
        name: _TYPES[kind](0) for kind, name in re.findall(r"^\.global \.align \d \.(\w+) (\w+);", ptx, re.MULTILINE)
    }


class Kernel:
    """One entry of a PTX text."""

    def __init__(self, ptx: str, name: str) -> None:
        text = re.sub(r"//[^\n]*", "", ptx).split(f".entry {name}(", 1)[1]
        head, body = text.split(")", 1)
        self.variables = {name: ctypes.addressof(cell) for name, cell in variables(ptx).items()}
        self.parameters = re.findall(r"\.param \.u64 (\w+)", head)
        self.code: list[str] = []
        self.labels: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        for raw in body[body.index("{") + 1 : body.index("}")].replace(":", ":;").split(";"):
            line = " ".join(raw.split())
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line.startswith(".reg"):
                _, kind, names = line.split(" ", 2)
                self.kinds |= {register.strip(): kind[1:] for register in names.split(",")}
            elif line and not line.startswith(".shared"):
                self.code.append(line)

    def run(self, values: Sequence[int], threads: int) -> None:
        given, shared = dict(zip(self.parameters, values, strict=True)), {}  # type: ignore[var-annotated]
        running = [self._thread(given, shared, thread) for thread in range(threads)]
        while running:
            running = [thread for thread in running if next(thread, None) is not None]

    def _thread(self, given: dict[str, int], shared: dict[str, int], thread: int) -> Iterator[bool]:
        """Yields at barriers."""
        registers = {"%tid.x": thread, **self.variables}

        def value(word: str) -> int:
            if word == "%globaltimer":
                return time.monotonic_ns()
            return registers[word] if word in registers else int(word, 0)

        def put(register: str, number: int) -> None:
            kind = self.kinds[register]
            registers[register] = number if kind == "pred" else _TYPES[kind](number).value

        at = 0
        while True:
            line = self.code[at]
            at += 1
            guard = re.match(r"@(!?)(\w+) ", line)
            if guard:
                if bool(registers[guard[2]]) == bool(guard[1]):
                    continue
                line = line[guard.end() :]
            operation, _, rest = line.partition(" ")
            words = [word.strip() for word in rest.split(",")]
            name, *kinds = operation.split(".")
            if name == "ret":
                return
            if name == "bra":
                at = self.labels[words[0]]
            elif name == "bar":
                yield True
            elif name == "setp":
                put(words[0], _COMPARE[kinds[0]](value(words[1]), value(words[2])))
            elif name == "selp":
                put(words[0], value(words[1]) if registers[words[3]] else value(words[2]))
            elif name in ("mov", "cvt"):
                put(words[0], value(words[1]))
            elif name == "add":
                put(words[0], value(words[1]) + value(words[2]))
            elif name == "sub":
                put(words[0], value(words[1]) - value(words[2]))
            elif name == "nanosleep":
                time.sleep(value(words[0]) / 1e9)
            elif name == "shl":
                put(words[0], value(words[1]) << value(words[2]))
            elif name == "ld" and kinds[0] == "param":
                put(words[0], given[words[1][1:-1]])
            elif "shared" in kinds:
                if name == "ld":
                    put(words[0], shared[words[1]])
                else:
                    shared[words[0]] = value(words[1])
            elif name in ("ld", "st", "atom"):
                place = words[0] if name == "st" else words[1]
                register, _, offset = place[1:-1].partition("+")
                cell = _TYPES[kinds[-1]].from_address(value(register) + int(offset or 0))
                if name != "st":
                    put(words[0], cell.value)
                if name != "ld":
                    cell.value = value(words[1]) if name == "st" else cell.value + value(words[2])
            else:
                assert name == "fence", line
