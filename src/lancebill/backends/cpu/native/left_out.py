"""Levels that this machine runs and the library lacks.

A library that is built in place has the levels of the machine that built it. In a shared folder or in the image of a
container it may come to a machine that has more, where it would silently be slower.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.native.build import COMMAND, KERNELS, CppSource

log = logging.getLogger("lancebill")

_CPUINFO = Path("/proc/cpuinfo")


def warn_of_left_out(best: IsaLevel) -> None:
    names = ", ".join(map(str, left_out(best)))
    if names:
        why = "the CPU kernels were built on a machine without %s, which this one has; to build them again: %s"
        log.warning(why, names, f"{COMMAND} --everywhere")


def left_out(best: IsaLevel) -> list[IsaLevel]:
    """Levels above `best` whose instructions this processor has. Only Linux on x86 lists these by name."""
    has = _instructions()
    return [level for level in IsaLevel if level > best and needed(level) <= has]


def needed(level: IsaLevel) -> set[str]:
    """The instruction sets of a level: those of its compiler flags, without hyphens."""
    source = CppSource.read(KERNELS.folder / f"level_{level}.cpp")
    flags = [flag.removeprefix("?") for flag in source.flags]  # AMX needs its optional one, too
    return {flag.removeprefix("-m").replace("-", "") for flag in flags if flag.startswith("-m")}


def _instructions() -> set[str]:
    """The instruction sets of this processor as the kernel names them, without underscores."""
    try:
        with _CPUINFO.open() as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return set()
    return set(line.partition(":")[2].replace("_", "").split())
