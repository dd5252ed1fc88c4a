"""The kernel cache: many processes that need one cold key, and damaged entries.

    python tests/campaign/cache.py --rounds 100 --record

Each round, all processes ask for a kernel that nobody has: one of them builds it, all get the same. An entry is cut and
flipped at 64 positions; it must never be loaded, and must be built again.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bookkeeping import Details, Figure, Part, Tallies, Tally

from lancebill.jit.cache import SUFFIX, Cache
from lancebill.jit.compile import Binary, KernelSource

POSITIONS = 64
PROCESSES = 32


def source(number: int) -> KernelSource:
    """A kernel with a key of its own; it is never compiled here."""
    constants = (("CHUNK", number), ("E", 2))
    return KernelSource(
        "lancebill.backends.hopper.kernels.dispatch_combine", "count_ids", (("ids", "*i32"),), constants
    )


def one_cold_key(cache: Cache, number: int, processes: int) -> str | None:
    """All processes ask at once; each build leaves a file."""
    builds = cache.folder.with_name(f"builds{number}")
    binary, wanted = Binary(bytes([number % 256]) * 1000, "kernel", 0, 128, 32), source(number)

    def build() -> Binary:
        (builds / str(os.getpid())).touch()
        time.sleep(0.01)
        return binary

    builds.mkdir()
    cache.find(wanted)  # hashes the sources once, in the parent
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            os._exit(0 if cache.get(wanted, build) == binary else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    built = len(list(builds.iterdir()))
    return None if not any(codes) and built == 1 else f"{built} builds, exit codes {sorted(set(codes))}"


def damaged_entries(cache: Cache, rng: random.Random, tally: Tally) -> None:
    """One entry, cut and flipped at many positions."""
    wanted, binary = source(-1), Binary(rng.randbytes(5000), "kernel", 0, 128, 32)
    before = set(cache.keys())
    cache.get(wanted, lambda: binary)
    (key,) = set(cache.keys()) - before
    path = cache.folder / f"{key}{SUFFIX}"
    sound = path.read_bytes()
    for number in range(POSITIONS):
        at = number * len(sound) // POSITIONS
        flipped = bytearray(sound)
        flipped[at] ^= 1 << rng.randrange(8)
        for what, damaged in (("cut", sound[:at]), ("flipped", bytes(flipped))):
            path.write_bytes(damaged)
            found = cache.find(wanted)
            again = cache.get(wanted, lambda: binary)
            wrong = found is not None or again != binary or path.read_bytes() != sound
            tally.add(f"{what} at {at} of {len(sound)}" if wrong else None)


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    cold, damaged = tallies["cold"], tallies["damaged"]
    return {
        "C1": cold.figure(f"{cold.cases} rounds of {PROCESSES} processes: one build in {cold.cases - cold.failures}"),
        "C3": damaged.figure(f"{damaged.cases} damaged entries, {damaged.failures} loaded"),
    }


def main() -> None:
    part = Part("cache", __doc__, figures, rounds=100, seed=0)
    tallies = {"cold": Tally(), "damaged": Tally()}
    with tempfile.TemporaryDirectory() as name:
        cache = Cache(Path(name) / "cache", Path(name) / "shipped")
        damaged_entries(cache, random.Random(part.arguments.seed), tallies["damaged"])
        for number in range(part.arguments.rounds):
            tallies["cold"].add(one_cold_key(cache, number, PROCESSES))
            part.report_now_and_then(tallies)
    part.finish(tallies)


if __name__ == "__main__":
    main()
