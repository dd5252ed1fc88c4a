"""CPU kernels against the reference: random problems, batch-invariant rows, repeated calls, on every level here.

    python tests/campaign/kernels.py --problems 100000 --record

Every problem runs on every instruction set level of this machine. A twentieth of them is also run with other numbers of
threads and in batch-invariant order: every row alone, shuffled, in other batches. One problem a spec is repeated a
thousand times while a second thread computes.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally
from random_problems import (
    Sample,
    accuracy_fault,
    computed,
    invariance_fault,
    other_threads_fault,
    random_sample,
)

from lancebill.backends.cpu import Cpu, native
from lancebill.backends.cpu.native.abi import IsaLevel

ROWS_EVERY = 20  # problems


def repeats_fault(sample: Sample, backend: Cpu, times: int) -> str | None:
    """The same call again and again, with a second thread that computes another batch size of the same layer."""
    packed = sample.packed(backend)
    want, stop = computed(backend, sample, packed), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            computed(backend, sample, packed, torch.zeros(1, dtype=torch.long))

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        differing = sum(not torch.equal(computed(backend, sample, packed), want) for _ in range(times))
    finally:
        stop.set()
        busy.join()
    return f"{sample}: {differing} of {times} repeats differ" if differing else None


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    levels = {name: tally for name, tally in tallies.items() if name not in ("rows", "repeats")}
    each, total = (
        ", ".join(f"{tally.cases:,} on {level}" for level, tally in levels.items()),
        Tally.total(levels.values()),
    )
    rows, repeats = tallies["rows"], tallies["repeats"]
    return {
        "N4": total.figure(f"CPU: random problems: {each}; {total.failures} outside the bounds"),
        "D2": rows.figure(f"CPU: {rows.cases:,} rows, {rows.failures} differ"),
        "D1": repeats.figure(f"CPU: {repeats.cases:,} repeats, {repeats.failures} differ"),
    }


def main() -> None:
    part = Part("kernels", __doc__, figures, problems=100_000, repeats=1000, seed=0)
    library = native.library()
    if library is None:
        sys.exit(native.state().why)
    torch.set_num_threads(1)
    levels, rng = library.levels, random.Random(part.arguments.seed)
    accuracy, rows, repeats = {level: Tally() for level in levels}, Tally(), Tally()
    tallies = {"rows": rows, "repeats": repeats, **{str(level): tally for level, tally in accuracy.items()}}
    for level in levels:
        sample = random_sample(rng, tokens=9)
        repeats.add(repeats_fault(sample, Cpu(level), part.arguments.repeats), cases=part.arguments.repeats)
    for number in range(1, part.arguments.problems + 1):
        compares_rows = number % ROWS_EVERY == 0
        sample = random_sample(rng, tokens=rng.randint(17, 48) if compares_rows else None)
        for level in levels:
            check_level(rng, sample, level, accuracy[level], rows if compares_rows else None)
        part.report_now_and_then(tallies)
    part.finish(tallies)


def check_level(rng: random.Random, sample: Sample, level: IsaLevel, accuracy: Tally, rows: Tally | None) -> None:
    """One problem on one level; with `rows` also its bits in other batches and with other numbers of threads."""
    backend = Cpu(level)
    packed = sample.packed(backend)
    got = computed(backend, sample, packed)
    accuracy.add(accuracy_fault(sample, got, level))
    if rows is not None:
        accuracy.add(other_threads_fault(sample, backend, packed, got), cases=0)
        compared, fault = invariance_fault(rng, sample, backend, packed)
        rows.add(fault, cases=compared)


if __name__ == "__main__":
    main()
