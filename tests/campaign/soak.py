"""Soak: random layers are made, called, refitted, copied and dropped for hours; results stay right, memory stays.

    python tests/campaign/soak.py --minutes 120 --record

Every layer is called through `RoutedExperts`, as users do: a first call, fast calls, other numbers of tokens and
threads, from two threads at once. Once a round everything is dropped and memory is measured: bytes that malloc has
given out, which are exact and include Python's objects (the script starts itself again with PYTHONMALLOC=malloc),
Python's blocks, and resident memory. The first rounds fill our bounded caches, so drift is the median of the last
quarter of the rounds minus that of the quarter before the middle. Every format is used once before, since tables and
modules are loaded when first needed. torch keeps a thousand compiled oneDNN primitives by shape, and shapes are random
here: that cache is switched off.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally
from random_problems import CPU, Sample, accuracy_fault, random_sample
from torch import Tensor

from lancebill.backends import oracle
from lancebill.backends.registry import registry
from lancebill.checkpoint.resolve.naming import find_family
from lancebill.formats.base import Example, Format
from lancebill.formats.stored import Config
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.testing.checkpoints import Geometry, generate
from lancebill.testing.conformance import DEFAULT_FAMILY, all_examples

EXAMPLES = list(all_examples())
# Read when a process starts, or when torch is imported.
SETTINGS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1", "PYTHONMALLOC": "malloc"}
LAYERS_A_ROUND, REFITS_A_ROUND = 40, 4
MOST_DRIFT = 1 << 20  # bytes


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES.split())


@dataclass(frozen=True)
class Memory:
    malloc: int  # bytes given out
    blocks: int  # of Python's allocator
    resident: int  # bytes

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _MallInfo
        info = libc.mallinfo2()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(info.uordblks + info.hblkhd, sys.getallocatedblocks(), pages * 4096)


def drift(rounds: list[Memory], name: str) -> float:
    """How much a kind of memory grew between the second and the last quarter of the rounds."""
    values, quarter = [vars(memory)[name] for memory in rounds], max(1, len(rounds) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter] or values)


def soak_layer(rng: random.Random, calls: Tally) -> None:
    """One random layer, called in many ways; every result is compared with the first, and that with the reference."""
    sample = random_sample(rng)
    backend = registry()["cpu"]
    layer = RoutedExperts(LayerParts(oracle.select(sample.problem, CPU, "cpu"), sample.packed(backend)))
    want = _call(layer, sample)
    calls.add(accuracy_fault(sample, want))
    for threads in rng.sample((1, 1, 2, 3), 2):
        torch.set_num_threads(threads)
        got = _call(layer, sample)
        calls.add(None if torch.equal(got, want) else f"{sample}: other bits in a later call, {threads} threads")
    torch.set_num_threads(1)
    if rng.random() < 0.1:
        calls.add(_from_two_threads(layer, sample, want), cases=2)
    if rng.random() < 0.3:  # another number of tokens, then the first again
        some = torch.arange(rng.randint(0, len(sample.x)))
        layer(sample.x[some], topk_ids=sample.routed.ids[some].long(), topk_weights=sample.routed.weights[some])
        calls.add(None if torch.equal(_call(layer, sample), want) else f"{sample}: other bits after another batch")


def _call(layer: RoutedExperts, sample: Sample) -> Tensor:
    return layer(sample.x, topk_ids=sample.routed.ids, topk_weights=sample.routed.weights)


def _from_two_threads(layer: RoutedExperts, sample: Sample, want: Tensor) -> str | None:
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(_call(layer, sample))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = len(results) == 2 and all(torch.equal(result, want) for result in results)
    return None if same else f"{sample}: other bits from two threads"


def soak_refit(rng: random.Random, fmt: Format, example: Example, refits: Tally) -> None:
    """Push another checkpoint's tensors into a live layer; it then equals a layer loaded from that checkpoint."""
    row = find_family({"model_type": example.config.model.get("model_type", DEFAULT_FAMILY)})
    size = Geometry(experts=rng.randint(2, 4), hidden=example.k, intermediate=example.k)
    old, new = (generate(example, row, row.forms[0], size, seed=rng.getrandbits(20)) for _ in range(2))
    layer, fresh = (_loaded(made.config, made.tensors) for made in (old, new))
    layer.load_weights(sorted(new.tensors.items(), key=lambda _: rng.random()))
    layer.finish()
    same = all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), fresh.state_dict().values()))
    refits.add(None if same else f"{fmt.name}:{example.name}: a refitted layer differs from a fresh one")


def _loaded(config: Config, tensors: dict[str, Tensor]) -> RoutedExperts:
    layer = RoutedExperts.from_config(config, 0, router=False)
    layer.load_weights(tensors.items())
    return layer.finish()


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    calls, refits, total = tallies["calls"], tallies["refits"], Tally.total(tallies.values())
    minutes, computing = (sum(run[key] for run in details) for key in ("minutes", "computing"))
    worst = max((run["drift"]["malloc"] for run in details), default=0) / 1024
    processes = f" in {len(details)} processes" if len(details) > 1 else ""
    reached = (
        f"CPU: {minutes:.0f} minutes{processes} ({computing:.0f} of computing), {tallies['layers'].cases:,} layers,"
        f" {calls.cases:,} calls, {refits.cases:,} refits, {calls.failures + refits.failures} faults;"
        f" memory drift {worst:+.0f} KiB{' at most' if processes else ''}"
    )
    return {"S5": Figure(reached, calls.cases + refits.cases, total.failures)}


def main() -> None:
    if os.environ.get("PYTHONMALLOC") != "malloc":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    part = Part("soak", __doc__, figures, minutes=120.0, seed=0)
    torch.set_num_threads(1)
    rng, rounds = random.Random(part.arguments.seed), list[Memory]()
    tallies = {name: Tally() for name in ("calls", "refits", "layers", "leaks")}
    for fmt, example in EXAMPLES:
        soak_refit(rng, fmt, example, tallies["refits"])
    while True:
        for _ in range(LAYERS_A_ROUND):
            soak_layer(rng, tallies["calls"])
            tallies["layers"].add()
        for _ in range(REFITS_A_ROUND):
            soak_refit(rng, *rng.choice(EXAMPLES), tallies["refits"])
        rounds.append(Memory.now())
        details = _details(part, rounds)
        tallies["leaks"] = Tally(1, int(details["drift"]["malloc"] >= MOST_DRIFT))
        if part.seconds >= 60 * part.arguments.minutes:
            part.finish(tallies, details)
        part.report_now_and_then(tallies, details)


def _details(part: Part, rounds: list[Memory]) -> Details:
    return {
        "minutes": part.seconds / 60,
        "computing": time.process_time() / 60,
        "rounds": len(rounds),
        "drift": {name: round(drift(rounds, name)) for name in ("malloc", "blocks", "resident")},
        "memory": [vars(memory) for memory in rounds[:: max(1, len(rounds) // 40)]],
    }


if __name__ == "__main__":
    main()
