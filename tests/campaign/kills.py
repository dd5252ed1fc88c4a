"""kill -9 at random moments of convert, save, publishing a kernel and refit: nothing is lost, and the next run works.

    python tests/campaign/kills.py --kills 1000 --record

A child overwrites a checkpoint (or stores a kernel) and is killed after a random time. The destination must then be the
old or the new checkpoint, byte for byte; the next writer must succeed and leave no hidden folder behind.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally
from conversion import SIZE, dense_source, find_example, find_row, run_conversion
from safetensors.torch import load_file

from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.formats.stored import Stored
from lancebill.jit.cache import Cache, read_entry
from lancebill.jit.compile import Binary
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.testing.checkpoints import generate, save

ELEMENTS = 1 << 18
KEY = "0" * 64
TRIES = 5  # to time an action


@dataclass(frozen=True)
class Action:
    """Something to interrupt; `versions` are the two contents that it alternates between."""

    name: str
    run: Callable[[int], None]  # write version 0 or 1
    content: Callable[[], object]  # what is at the destination now
    leftovers: Callable[[], list[str]]


def _convert(folder: Path) -> Action:
    source, destination = dense_source(folder), folder / "converted"
    return Action(
        "convert",
        lambda version: run_conversion(source, destination, ("int4-g32", "mxfp4")[version], overwrite=True) and None,
        lambda: _digest(destination),
        lambda: _hidden(folder),
    )


def _save(folder: Path) -> Action:
    destination = folder / "saved"

    def run(version: int) -> None:
        headers = {name: Stored("F32", (ELEMENTS,)) for name in ("a", "b", "c")}
        with CheckpointWriter(destination, headers, overwrite=True, max_shard_bytes=5 * ELEMENTS) as out:
            for name in headers:
                out.write(name, torch.full((ELEMENTS,), float(version)))
            out.write_json("config.json", {"version": version})

    return Action("save", run, lambda: _digest(destination), lambda: _hidden(folder))


def _publish(folder: Path) -> Action:
    """Store another kernel under the same key, as `Cache.get` does once it is built."""
    cache = Cache(folder / "cache", must_keep=True)
    binaries = [Binary(bytes([version]) * (1 << 20), "kernel", 0, 128, 32) for version in (0, 1)]

    def run(version: int) -> None:
        with ExitStack() as stack:
            cache._lock(KEY, stack)
            cache._store(KEY, binaries[version])

    def content() -> object:
        found = read_entry(cache.folder, KEY)
        if found is None:
            raise ValueError("the entry is missing or damaged")
        return binaries.index(found)

    return Action("cache publish", run, content, lambda: [str(file) for file in cache.folder.glob("*.part")])


def _refit(folder: Path) -> Action:
    """Push one checkpoint into a live layer of another; only the process may be lost, not a byte of the files."""
    row = find_row("qwen3_moe")
    made = [generate(find_example("dense", "bf16"), row, row.forms[0], SIZE, seed=version) for version in (0, 1)]
    sources = [save(one, folder / f"refit{version}") for version, one in enumerate(made)]

    def run(version: int) -> None:
        layer = RoutedExperts.from_checkpoint(sources[0], layer=0)
        layer.load_weights(load_file(next(sources[version].glob("*.safetensors"))).items())
        layer.finish()

    return Action("refit", run, lambda: [_digest(source) for source in sources], lambda: _hidden(folder))


def _digest(folder: Path) -> object:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def _hidden(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.name.startswith(".")]


def kill_once(action: Action, version: int, delay: float) -> bool:
    """Run the action in a child, killed after `delay` seconds; whether it was killed before it finished."""
    child = os.fork()
    if child == 0:
        action.run(version)
        os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def campaign(action: Action, kills: int, rng: random.Random, tally: Tally) -> int:
    """Kill until `kills` children died; returns how often the new version was there already."""
    wanted = []
    durations = []
    for version in [0, 1] * TRIES:
        start = time.perf_counter()
        action.run(version)
        durations.append(time.perf_counter() - start)
        wanted.append(action.content())
    old, new, longest, killed, published = wanted[-2], wanted[-1], 2 * statistics.median(durations), 0, 0
    while killed < kills:
        action.run(0)
        if not kill_once(action, 1, rng.random() * longest):
            continue
        killed += 1
        tally.add(_fault(action, old, new))
        published += action.content() == new
        action.run(0)
        left = action.leftovers()
        tally.add(f"{action.name}: the next run leaves {left}" if left or action.content() != old else None, cases=0)
    return published


def _fault(action: Action, old: object, new: object) -> str | None:
    try:
        found = action.content()
    except (OSError, ValueError) as error:
        return f"{action.name}: {error}"
    return None if found in (old, new) else f"{action.name}: neither the old nor the new content"


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    total = Tally.total(tallies.values())
    each = ", ".join(f"{tally.cases:,} of {name}" for name, tally in tallies.items())
    return {"C2": total.figure(f"{each}: {total.failures} lost or unusable")}


def main() -> None:
    part = Part("kills", __doc__, figures, kills=1000, seed=0)
    torch.set_num_threads(1)
    rng, tallies, published = random.Random(part.arguments.seed), dict[str, Tally](), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder:
        for make in (_convert, _save, _publish, _refit):
            action = make(Path(folder))
            tallies[action.name] = Tally()
            published[action.name] = campaign(action, part.arguments.kills, rng, tallies[action.name])
            part.report_now_and_then(tallies)
    part.finish(tallies, {"new content after the kill": published})


if __name__ == "__main__":
    main()
