"""GPU kernels against the reference, in every manner of calling them; also the soak of the GPU.

    python tests/campaign/gpu.py --seconds 300 --record

Every random layer has a pool of rows with known results. Random rows of it are one problem, called in one manner: on
another stream, with strided rows, 64-bit or transposed ids, into a given output, captured and replayed. The order of
all problems is fast; the same rows are compared between batches in batch-invariant order, bit for bit, and in fast
order, where some must differ (else the comparison is void). Calls are repeated while a second stream is busy. After
each layer everything is dropped and memory is measured, without the workspaces, of which each stream keeps one as large
as its largest call. Kernels are compiled first; `--seconds 0` does only that.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from bookkeeping import ROOT, Details, Figure, Part, Tallies, Tally
from torch import Tensor

from lancebill.backends import oracle
from lancebill.backends.gpu.workspace import WORKSPACES
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import BATCH_INVARIANT, FAST, Problem
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing.layers import SampleLayer, layer_problem, make_layer, routing

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
from calls import GPU, OURS, check_error, gpu_backend, sources_of

DEVICE = "cuda"
SILU, OAI, RELU = Activation("silu"), Activation("swigluoai", limit=0.7), Activation("relu2_no_mul")
KINDS = (
    ("mxfp4", "bf16", OAI, True), ("mxfp4", "bf16", SILU, False), ("mxfp4", "fp8", SILU, False),
    ("nvfp4", "bf16", SILU, False), ("nvfp4", "fp16", RELU, False), ("int4-g32", "bf16", SILU, True),
    ("int4-g128", "fp16", SILU, False), ("int4-g128", "fp8", SILU, False), ("int8", "bf16", SILU, False),
    ("fp8", "bf16", SILU, False), ("fp8", "fp8", SILU, False), ("fp8-block", "fp8", SILU, False),
)  # fmt: skip
TOKENS = (1, 3, 9, 33, 100, 300)
WIDTHS, INTERMEDIATES, EXPERTS = ((512, 4), (1152, 1)), (128, 256, 640), (4, 16)  # hidden and top k go together
POOL = 2 * max(TOKENS)
PROBLEMS_A_LAYER, REPEATS_A_LAYER = 24, 50
MOST_DRIFT = 1 << 20  # bytes
TALLIES = ("problems", "captured", "streams", "strided", "rows", "repeats", "fast order", "layers", "leaks")


@dataclass(frozen=True)
class Pool:
    """A layer, rows for it, and what the reference makes of them."""

    problem: Problem
    x: Tensor
    routed: Indexed

    @cached_property
    def ours(self) -> SampleLayer:
        return make_layer(self.problem, OURS, DEVICE)

    def layer(self, order: str) -> RoutedExperts:
        problem = replace(self.problem, order=order)
        return RoutedExperts(LayerParts(oracle.select(problem, DEVICE, OURS), self.ours.weights))

    @cached_property
    def want(self) -> Tensor:
        return self._reference(self.problem)

    @cached_property
    def unquantised(self) -> Tensor:
        plain = ACTIVATIONS["bf16"]
        quantised = self.problem.activations == ACTIVATIONS["fp8"]
        return self._reference(replace(self.problem, activations=plain)) if quantised else self.want

    def _reference(self, problem: Problem) -> Tensor:
        return make_layer(problem, "reference", DEVICE)(
            self.x, self.routed, torch.empty_like(self.x, dtype=torch.float32)
        )

    def fault(self, got: Tensor, rows: Tensor) -> str | None:
        """What is wrong with the results of these rows."""
        busy = (self.routed.ids >= 0).any(1)
        kept = busy[rows]
        if got[~kept].any():
            return f"{self}: rows without an expert are not zero"
        if not kept.any():
            return None
        among = (busy.cumsum(0) - 1)[rows[kept]]
        try:
            check_error(got[kept], self.want[busy], self.unquantised[busy], among)
        except AssertionError as error:
            return f"{self}, {len(rows)} rows: {error}"
        return None

    def __str__(self) -> str:
        p = self.problem
        return f"{p.w13.spec} x {p.activations} {p.activation} {p.hidden}x{p.w13.n} {p.experts} experts top {p.top_k}"


def problems(kinds: int = len(KINDS)) -> list[Problem]:
    """Every layer that is drawn, of the first kinds; without those that this GPU does not compute."""
    made = [
        layer_problem(
            spec, inputs, hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k,
            activation=activation, bias=bias,
        )
        for spec, inputs, activation, bias in KINDS[:kinds]
        for hidden, top_k in WIDTHS
        for intermediate in INTERMEDIATES
        for experts in EXPERTS
    ]  # fmt: skip
    return [problem for problem in made if not list(gpu_backend().reasons(problem, GPU))]


def random_pool(rng: random.Random, problem: Problem) -> Pool:
    seed, kind = rng.getrandbits(30), rng.choice(("uniform", "zipf", "one", "holes"))
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(POOL, problem.hidden, generator=generator, device=DEVICE).to(problem.input.storage)
    return Pool(problem, x, routing(problem, POOL, seed, DEVICE, kind))


@dataclass(frozen=True)
class Batch:
    """Some rows of a pool, in memory of their own."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def of(cls, pool: Pool, rows: Tensor) -> Batch:
        return cls(pool.x[rows], pool.routed.ids[rows], pool.routed.weights[rows])

    def run(self, layer: RoutedExperts, out: Tensor | None = None) -> Tensor:
        return layer(self.x, topk_ids=self.ids, topk_weights=self.weights, out=out)


def plainly(layer: RoutedExperts, pool: Pool, rows: Tensor) -> Tensor:
    return Batch.of(pool, rows).run(layer)


def into_an_output(layer: RoutedExperts, pool: Pool, rows: Tensor) -> Tensor:
    batch = Batch.of(pool, rows)
    return batch.run(layer, torch.full_like(batch.x, torch.nan))


def on_another_stream(layer: RoutedExperts, pool: Pool, rows: Tensor) -> Tensor:
    """Two streams compute other batches of the layer at the same time."""
    streams, outs = side_streams()[:2], []
    batches = [Batch.of(pool, rows), Batch.of(pool, rows.flip(0))]
    for stream, batch in zip(streams, batches):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs.append(batch.run(layer))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    outs[0][::2] = outs[1].flip(0)[::2]
    torch.cuda.synchronize()
    return outs[0]


def with_odd_strides(layer: RoutedExperts, pool: Pool, rows: Tensor) -> Tensor:
    """Every other row of a larger batch, ids of 64 bits and weights as columns of larger tensors."""
    batch = Batch.of(pool, rows)
    wide = torch.full((2 * len(rows), *batch.x.shape[1:]), torch.nan, dtype=batch.x.dtype, device=DEVICE)
    wide[::2] = batch.x
    ids = torch.full((batch.ids.shape[1] + 3, len(rows)), 10_000, dtype=torch.int64, device=DEVICE)
    ids[: batch.ids.shape[1]] = batch.ids.T
    weights = torch.full((len(rows), batch.ids.shape[1] + 1), torch.nan, device=DEVICE)
    weights[:, 1:] = batch.weights
    return Batch(wide[::2], ids[: batch.ids.shape[1]].T, weights[:, 1:]).run(layer)


def captured(layer: RoutedExperts, pool: Pool, rows: Tensor) -> Tensor:
    """Captured with other rows, then replayed with these."""
    batch, graph = Batch.of(pool, rows.flip(0)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.run(layer)
    wanted = Batch.of(pool, rows)
    batch.x.copy_(wanted.x), batch.ids.copy_(wanted.ids), batch.weights.copy_(wanted.weights)
    graph.replay()
    result = out.clone()
    torch.cuda.synchronize()
    return result


MANNERS: dict[Callable[[RoutedExperts, Pool, Tensor], Tensor], str] = {
    plainly: "", into_an_output: "", on_another_stream: "streams", with_odd_strides: "strided", captured: "captured",
}  # fmt: skip


def try_layer(rng: random.Random, pool: Pool, tallies: dict[str, Tally]) -> None:
    fast, invariant = pool.layer(FAST), pool.layer(BATCH_INVARIANT)
    whole, fast_whole = (torch.cat([b.run(layer) for b in _pieces(pool)]) for layer in (invariant, fast))
    for _ in range(PROBLEMS_A_LAYER):
        rows = torch.tensor(rng.sample(range(POOL), rng.choice(TOKENS)), device=DEVICE)
        manner = rng.choice(list(MANNERS))
        got = manner(fast, pool, rows)
        fault = pool.fault(got, rows)
        tallies["problems"].add(fault and f"{manner.__name__}: {fault}")
        if MANNERS[manner]:
            tallies[MANNERS[manner]].add()
        tallies["fast order"].add(cases=int((got != fast_whole[rows]).any(1).sum()))
        again = rng.choice(list(MANNERS))(invariant, pool, rows)
        differ = int((again != whole[rows]).any(1).sum())
        tallies["rows"].add(f"{pool}: {differ} of {len(rows)} rows differ" if differ else None, cases=len(rows))
    tallies["repeats"].add(repeats_fault(rng, fast, pool), cases=REPEATS_A_LAYER)
    tallies["layers"].add()


def _pieces(pool: Pool) -> Iterator[Batch]:
    """The whole pool in batches of the largest size that kernels are compiled for."""
    for rows in torch.arange(POOL, device=DEVICE).split(max(TOKENS)):
        yield Batch.of(pool, rows)


def repeats_fault(rng: random.Random, layer: RoutedExperts, pool: Pool) -> str | None:
    """The same call again and again, while a second stream multiplies matrices and calls the same layer."""
    batch = Batch.of(pool, torch.tensor(rng.sample(range(POOL), rng.choice(TOKENS)), device=DEVICE))
    other, busy = Batch.of(pool, torch.arange(9, device=DEVICE)), torch.randn(1024, 1024, device=DEVICE)
    side = side_streams()[2]
    want, differing = batch.run(layer), torch.zeros((), dtype=torch.int64, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(REPEATS_A_LAYER):
        with torch.cuda.stream(side):
            busy @ busy
            other.run(layer)
        differing += (batch.run(layer) != want).any()
    torch.cuda.synchronize()
    return f"{pool}: {int(differing)} of {REPEATS_A_LAYER} repeats differ" if differing else None


@cache
def side_streams() -> list[torch.cuda.Stream]:
    """The same ones always: ours and torch's libraries keep memory for each stream that they see."""
    return [torch.cuda.Stream() for _ in range(3)]


def memory() -> int:
    """What is allocated beside workspaces."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() - sum(held.memory.nbytes for held in WORKSPACES.eager.values())


def drift(measured: list[int]) -> int:
    """From a quarter of the run to its end: what calls share has been allocated by then."""
    return measured[-1] - measured[len(measured) // 4]


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    problems, rows, repeats, layers = (tallies[name] for name in ("problems", "rows", "repeats", "layers"))
    minutes = sum(run["minutes"] for run in details)
    worst = max((run["drift"] for run in details), default=0)
    faults = problems.failures + rows.failures + repeats.failures
    manners = ", ".join(f"{tallies[name].cases:,} {name}" for name in ("captured", "streams", "strided"))
    differ, wrong = tallies["fast order"].cases, problems.failures
    return {
        "N4": problems.figure(f"GPU: {problems.cases:,} random problems ({manners}), {wrong} outside the bounds"),
        "D1": repeats.figure(f"GPU: {repeats.cases:,} repeats beside a busy stream, {repeats.failures} layers differ"),
        "D2": rows.figure(f"GPU: {rows.cases:,} rows, {rows.failures} batches differ"),
        "D5": Figure(f"{differ:,} of {rows.cases:,} rows differ in fast order", rows.cases, int(differ == 0)),
        "S5": Figure(
            f"GPU: {minutes:.0f} minutes in {len(details)} runs, {layers.cases:,} layers, {faults} faults;"
            f" memory drift {worst / 1024:+.0f} KiB",
            layers.cases,
            faults + tallies["leaks"].failures,
        ),
    }  # fmt: skip


def main() -> None:
    part = Part("gpu", __doc__, figures, device="cuda", seconds=300.0, seed=0, kinds=len(KINDS))
    from lancebill.jit.build import build_all

    every = problems(part.arguments.kinds)
    orders = [replace(problem, order=order) for problem in every for order in (FAST, BATCH_INVARIANT)]
    started = time.time()
    failed = build_all(sources_of((problem, tokens) for problem in orders for tokens in TOKENS))
    compiling = time.time() - started
    print(f"compiled in {compiling:.0f} s, {len(failed)} failed", flush=True)
    rng, measured = random.Random(part.arguments.seed), list[int]()
    tallies = {name: Tally() for name in TALLIES}
    started = time.time()
    details: dict[str, Any] = {"minutes": 0.0, "drift": 0}
    while time.time() - started < part.arguments.seconds:
        try_layer(rng, random_pool(rng, rng.choice(every)), tallies)
        measured.append(memory())
        details = {
            "minutes": (time.time() - started) / 60,
            "drift": drift(measured),
            "memory": measured[:: max(1, len(measured) // 20)],
            "compiling_s": round(compiling),
        }
        tallies["leaks"] = Tally(1, int(details["drift"] >= MOST_DRIFT))
        part.report_now_and_then(tallies, details)
    part.finish(tallies, details)


if __name__ == "__main__":
    main()
