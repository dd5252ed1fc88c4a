"""Runs the parts of the campaign that need no GPU on many cores, for a limited time, and adds up what they counted.

    python tests/campaign/shards.py run FOLDER --workers 12 --minutes 20
    python tests/campaign/shards.py merge FOLDER [FOLDER ...]

A shard is a part with a seed of its own. Short parts come first; then kernels and fuzzing share the remaining time.
Shards that are stopped have counted up to their last report. `merge` makes one record for each part and machine, below
benchmarks/results, which lists the commits and how many shards ran at each. Results that a run found outside the bounds
are judged again by today's, which may be wider; the record says how many were.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bookkeeping import ROOT, Tally, write_record
from random_problems import judged_again

from lancebill.backends.cpu.native.abi import IsaLevel

HERE = Path(__file__).parent
DAMAGE_SHARDS, SOAKING = 6, 3  # processes
PROBLEMS = ("--problems", "1500", "--repeats", "200")


@dataclass(frozen=True)
class Shard:
    part: str
    seed: int
    options: tuple[str, ...] = ()

    def command(self, folder: Path) -> list[str]:
        out = folder / f"{self.part}-{self.seed}.json"
        seed = () if self.part == "io_faults" else ("--seed", str(self.seed))
        return [sys.executable, str(HERE / f"{self.part}.py"), *seed, *self.options, "--out", str(out)]


def short_shards() -> list[Shard]:
    """The parts of a fixed size, the longest first."""
    return [
        *(Shard("kills", seed, ("--kills", "200")) for seed in range(5)),
        *(Shard("damage", seed, ("--shards", str(DAMAGE_SHARDS))) for seed in range(DAMAGE_SHARDS)),
        Shard("cache", 0),
        *(Shard("refits", seed, ("--refits", "250")) for seed in range(4)),
        Shard("io_faults", 0),
    ]


def all_shards(first: int, minutes: float) -> Iterator[Shard]:
    """Soak for the whole time; short parts, if the first seed is 0; then kernels and fuzzing without end."""
    yield from (Shard("soak", seed, ("--minutes", f"{minutes:.2f}")) for seed in range(first, first + SOAKING))
    yield from short_shards() if first == 0 else ()
    for seed in itertools.count(first):
        yield Shard("kernels", 2 * seed, PROBLEMS)
        yield Shard("fuzz", seed, ("--seconds", "90"))
        yield Shard("kernels", 2 * seed + 1, PROBLEMS)


def run(folder: Path, workers: int, minutes: float, first: int) -> None:
    """Keep all workers busy until the time is over, then stop what still runs."""
    folder.mkdir(parents=True, exist_ok=True)
    end, shards, lock = time.monotonic() + 60 * minutes, all_shards(first, minutes - 0.5), threading.Lock()

    def work() -> None:
        while time.monotonic() < end:
            with lock:
                shard = next(shards)
            with (folder / f"{shard.part}-{shard.seed}.log").open("w") as log:
                process = subprocess.Popen(shard.command(folder), stdout=log, stderr=log, cwd=ROOT)
                try:
                    process.wait(max(1.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def merge(folders: Sequence[Path]) -> None:
    """One record for each part and machine. A seed that ran twice at one commit is counted once."""
    groups: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("*.json"))):
        record = json.loads(file.read_text(encoding="utf-8"))
        shard = record["commit"], file.name
        groups.setdefault((record["part"], record["machine"]["name"]), {})[shard] = record
    for (part, machine), records in groups.items():
        merged = merged_record(part, list(records.values()))
        when = f"{merged['date']}t{merged['time'].replace(':', '')}"
        folder = ROOT / "benchmarks" / "results" / "reliability" / part / machine
        write_record(folder / f"{when}-{merged['commit'][:7]}.json", merged)
        for name, figure in merged["figures"].items():
            print(f"{name}: {figure['reached']}" + (f" ({figure['failures']} FAILED)" if figure["failures"] else ""))


def merged_record(part: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of shards; the part's own words for the figures. Its date is that of the newest."""
    tallies = {name: _sum(records, name) for name in dict.fromkeys(name for r in records for name in r["tallies"])}
    before = sum(record.get("outside bounds when run", _failures(record)) for record in records)
    if part in ("kernels", "soak"):
        best = str(IsaLevel.AMX) if records[0]["machine"]["name"] == "xeon-amx" else ""
        tallies = {name: _again(tally, best if part == "soak" else name) for name, tally in tallies.items()}
    figures = importlib.import_module(part).figures(tallies, [record["details"] for record in records])
    newest = max(records, key=lambda record: (record["date"], record.get("time", "")))
    return {
        "part": part,
        "command": f"python tests/campaign/shards.py run (e.g. {newest['command']})",
        **{key: newest.get(key, "") for key in ("commit", "date", "time", "machine")},
        "commits": dict(Counter(record["commit"] for record in records)),
        "shards": len(records),
        "stopped": sum(not record["details"].get("finished", False) for record in records),
        **{key: sum(record[key] for record in records) for key in ("seconds", "cpu_seconds")},
        "outside bounds when run": before,
        "figures": {name: vars(figure) for name, figure in figures.items()},
        "details": {"shards": [_short(record["details"]) for record in records]},
        "tallies": {name: [tally.cases, tally.failures] for name, tally in tallies.items()},
        "failed": {name: tally.examples for name, tally in tallies.items() if tally.examples},
    }


def _failures(record: dict[str, Any]) -> int:
    return sum(failures for _, failures in record["tallies"].values())


def _again(tally: Tally, level: str) -> Tally:
    """The failures that are failures by today's bounds; those whose text was not kept stay failures."""
    kept = [example for example in tally.examples if judged_again(example, level)]
    return Tally(tally.cases, tally.failures - len(tally.examples) + len(kept), kept)


def _sum(records: list[dict[str, Any]], name: str) -> Tally:
    counts = [record["tallies"].get(name, (0, 0)) for record in records]
    examples = [example for record in records for example in record["failed"].get(name, ())]
    return Tally(sum(cases for cases, _ in counts), sum(failures for _, failures in counts), examples)


def _short(details: dict[str, Any]) -> dict[str, Any]:
    """Without the long lists of a single run."""
    return {key: value for key, value in details.items() if not isinstance(value, list)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--minutes", type=float, default=60.0)
    running.add_argument("--first", type=int, default=0, help="the first seed; another one continues an earlier run")
    actions.add_parser("merge").add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.action == "merge":
        merge(arguments.folders)
    else:
        run(arguments.folder, arguments.workers, arguments.minutes, arguments.first)


if __name__ == "__main__":
    main()
