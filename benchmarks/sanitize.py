"""Every branch of the Hopper kernels under compute-sanitizer, on shapes so small that it ends in minutes.

    python benchmarks/sanitize.py [--tools memcheck,racecheck] [--out sanitize.json] [--total 230] [--jobs 12]
    python benchmarks/sanitize.py --list              the matrix, and what the backend refuses of it; no GPU
    python benchmarks/sanitize.py --judge FILE        what was saved, judged again: by the same kernels; no GPU

Several processes run under each tool at once and take cases off its list one by one, the largest first: so they end
together, whatever a case costs. Kernels are compiled before, without a tool. Data are made on the CPU and copied, so
that the sanitizer meets hardly a kernel but ours; every tensor is an allocation of its own, so that memcheck sees where
it ends. Exits with 1 if any tool found anything or did not come to the end of its list.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sanitize_report import Forms, count, explain, findings

TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),  # a pair of instructions once, not once for each byte
    "synccheck": (),
    "initcheck": (),
}
SHARES = {"memcheck": 3, "racecheck": 5, "synccheck": 2, "initcheck": 2}  # of the processes; races take longest to find
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 9  # the exit status that means: the tool reported something
SPECS = (
    "mxfp4", "nvfp4", "int4", "int4-g32", "int4-g64", "int4-g128", "int4-zp", "int4-g32-zp", "int4-g128-zp", "int8",
    "int8-g128", "fp8", "fp8-block",
)  # fmt: skip
KEPT_LINES = 120
START = 20  # seconds a process takes to come to its first case: with less time it would be of no help
MOST_FINDINGS = "10000"  # printed by one process
DONE = "all cases done"
LOST = ("Maximum number of hazards", "print limit")  # the tool says that it kept something to itself


@dataclass(frozen=True)
class Case:
    """One layer and one batch."""

    spec: str = "mxfp4"
    activations: str = "bf16"
    tokens: int = 18
    experts: int = 4
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 128
    routing: str = "uniform"
    dispatch: str = "indexed"
    activation: str = "silu"
    bias: bool = False
    act_order: bool = False
    weight_on_input: bool = False
    pre_scale: bool = False
    linear: bool = False  # one matrix, no experts
    processors: int = 0  # whose blocks compute it; 0: all that there are

    @property
    def rows(self) -> int:
        """Rows of the input in its dispatch form."""
        return self.tokens * {"indexed": 1, "contiguous": self.top_k, "batched": self.experts}[self.dispatch]

    @property
    def label(self) -> str:
        """What differs from the plainest case."""
        plain, mine = vars(Case()), vars(self)
        said = [f"{name}={value}" for name, value in mine.items() if value != plain[name]]
        return " ".join(said) or "plain"


def matrix() -> Iterator[Case]:
    """Decode is up to 32 slots; above, the rows an expert gets decide the tiles."""
    for tokens in (5, 18):
        yield from (Case(spec, "bf16", tokens) for spec in SPECS)
        yield from (Case(spec, "fp8", tokens) for spec in ("mxfp4", "nvfp4", "int4-g128", "fp8", "fp8-block"))
        for few in (Case(tokens=tokens), Case(activations="fp8", tokens=tokens)):
            yield replace(few, hidden=288, intermediate=96)  # tiles and slices that are not full
            yield replace(few, routing="holes", bias=True, activation="swigluoai")
            yield replace(few, activation="relu2_no_mul")
            yield replace(few, top_k=1, weight_on_input=True)
            yield replace(few, pre_scale=True)
            yield replace(few, linear=True, experts=1, top_k=1, dispatch="contiguous")
        yield Case(activations="fp8-static", tokens=tokens)
        yield Case("int4-g128", "fp16", tokens)
        yield Case("int4-g128", tokens=tokens, act_order=True)
        yield from (Case(activations=act, tokens=tokens, dispatch=form)
                    for act in ("bf16", "fp8") for form in ("contiguous", "batched"))  # fmt: skip
    wide = Case(tokens=16, experts=2, hidden=1536, intermediate=768)  # as many tiles as blocks: K is not split
    for whole in (wide, replace(wide, activations="fp8")):
        yield from (whole, replace(whole, bias=True, activation="swigluoai"))
        yield replace(whole, bias=True, activation="relu2_no_mul", intermediate=1536)
    for spec, activations in (("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g128", "fp8")):
        few = Case(spec, activations, 20, experts=16, hidden=1024, intermediate=512, processors=1)
        # A block takes one tile after another, of several stages and of one.
        yield from (few, replace(few, hidden=128), replace(few, intermediate=128), replace(few, tokens=5))
    for activations in ("bf16", "fp8"):
        every = Case(activations=activations)
        yield replace(every, tokens=20, experts=16)  # the fewest rows an expert has: the smallest tiles
        yield replace(every, tokens=60)
        yield replace(every, tokens=200, routing="zipf")
        yield replace(every, tokens=200, routing="one")
        yield replace(every, tokens=700, routing="zipf")  # four rows a dispatching block
        yield replace(every, tokens=1100, hidden=128, intermediate=64)  # dispatch in three launches
        yield replace(every, tokens=4200, hidden=128, intermediate=64, routing="holes")  # in larger chunks


def problem_of(case: Case) -> Any:
    from lancebill.moe.activation import Activation
    from lancebill.testing.layers import layer_problem

    limit = 7.0 if case.activation == "swigluoai" else None
    problem = layer_problem(
        case.spec, case.activations, hidden=case.hidden, intermediate=case.intermediate, experts=case.experts,
        top_k=case.top_k, activation=Activation(case.activation, limit=limit), bias=case.bias,
        act_order=case.act_order, weight_on_input=case.weight_on_input,
    )  # fmt: skip
    w2 = None if case.linear else problem.w2
    return replace(problem, dispatch=case.dispatch, pre_scale=case.pre_scale, w2=w2)


def accepted() -> tuple[list[Case], dict[str, str]]:
    """Cases the backend takes, and why not the others."""
    from lancebill.backends.registry import registry
    from lancebill.moe.problem import Device

    taken, refused = [], {}
    for case in dict.fromkeys(matrix()):
        reasons = [str(reason) for reason in registry()["hopper"].check(problem_of(case), Device("cuda", 90))]
        if reasons:
            refused[case.label] = reasons[0]
        else:
            taken.append(case)
    return taken, refused


def work(tool: str, taken: Path) -> None:
    """What runs under a tool: cases that no other process of it has, each once, its result looked at."""
    import torch

    for number, case in reversed(list(enumerate(accepted()[0]))):
        if not take(taken / f"{tool}-{number}"):
            continue
        print(f"case {number}: {case.label}", flush=True)
        start = time.perf_counter()
        result = compute(case)
        assert not torch.isnan(result).any(), f"NaN in the result of {case.label}"
        print(f"took {time.perf_counter() - start:.2f} s", flush=True)
    print(DONE, flush=True)


def take(mark: Path) -> bool:
    """Whether this process is the one that made the mark."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def compute(case: Case) -> Any:
    """The result, on the CPU; rows of no expert are zeros."""
    import torch

    from lancebill.moe.dispatch import Indexed, to_batched, to_contiguous
    from lancebill.moe.layout import as_integer
    from lancebill.moe.problem import Device
    from lancebill.testing.layers import make_layer, routing

    torch.manual_seed(0)
    problem = problem_of(case)
    layer = make_layer(problem, "hopper", "cpu", distinct=2)
    for name, held in layer.weights.items():
        if case.pre_scale:
            held["pre_scale"] = as_integer(torch.rand(case.experts, problem.matrices[name].k) + 0.5)
        if problem.activations.static:
            held["input_scale"] = as_integer(torch.rand(case.experts) * 0.01 + 0.01)
    weights = {name: {role: t.cuda() for role, t in held.items()} for name, held in layer.weights.items()}
    x = torch.randn(case.tokens, case.hidden).to(problem.input.storage)
    routed: Any = routing(problem, case.tokens, 1, "cpu", case.routing)
    if case.routing == "holes":  # whatever is no expert's
        wild = torch.tensor([-1, case.experts, -9, 1 << 20]).repeat(case.tokens)[: routed.ids.numel()]
        routed = Indexed(torch.where(routed.ids < 0, wild.view_as(routed.ids), routed.ids).int(), routed.weights)
    if case.dispatch == "contiguous":
        x, routed, _ = to_contiguous(x, routed, case.experts)
    elif case.dispatch == "batched":
        x, routed, _ = to_batched(x, routed, case.experts, case.tokens)
        x = x.nan_to_num(0.0)
    moved = type(routed)(*(tensor.cuda() for tensor in vars(routed).values()))
    fill = float("nan") if isinstance(routed, Indexed) else 0.0
    shape = (*x.shape[:-1], problem.w13.n if problem.w2 is None else problem.hidden)
    out = torch.full(shape, fill, dtype=x.dtype).cuda()
    plan = layer.backend.plan(problem, case.rows, Device("cuda", 90))
    there = torch.cuda.get_device_properties(0).multi_processor_count
    facts = SimpleNamespace(multi_processor_count=case.processors or there)
    with patch.object(torch.cuda, "get_device_properties", lambda device: facts):
        layer.backend.run(plan, x.cuda(), moved, weights, out)
    return out.cpu()


def as_large() -> None:
    """Small layers take the tiles of large ones, which have some of their own."""
    from lancebill.backends.hopper.tuning.policy import data

    for entry in (*data()["16-bit"], *data()["8-bit"]):
        entry.pop("units_from", None)


def compile_all(cases: list[Case]) -> int:
    """Fill the cache; the sanitized processes may not compile."""
    from lancebill.backends.hopper.steps import kernels
    from lancebill.jit.build import build_all

    sources = {source for case in cases for source in kernels(problem_of(case), case.rows)}
    failed = build_all(sources)
    for source, why in failed.items():
        print("does not compile:", source.label, why[-300:])
    return len(sources)


def sanitize(tool: str, taken: Path, limit: float) -> dict[str, Any]:
    """One process under one tool."""
    command = [
        SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only",
        "--print-limit", MOST_FINDINGS, "--launch-timeout", "60", "--show-backtrace", "no", *TOOLS[tool],
        sys.executable, __file__, "--work", tool, "--taken", str(taken),
    ]  # fmt: skip
    environment = {
        **os.environ, "LANCEBILL_NO_COMPILE": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    start = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
    begun = re.findall(r"^case \d+: (.*)", output, re.MULTILINE)
    took = [float(seconds) for seconds in re.findall(r"^took (.*) s", output, re.MULTILINE)]
    kept = ("=====", "case", "Traceback", "lancebill")
    return {
        "tool": tool,
        "seconds": round(time.perf_counter() - start, 1),
        "status": child.returncode,
        "finished": DONE in output,
        "cases": dict(zip(begun, took)),
        "not_ended": begun[len(took) :],
        "summary": re.findall(r"=========\s+(.*SUMMARY.*)", output),
        "lost": [line for line in output.splitlines() if any(words in line for words in LOST)],
        "said": [line for line in output.splitlines() if line.startswith(kept)] if child.returncode else [],
        "tail": output.splitlines()[-12:] if child.returncode else [],
    }


def forms_of(cases: list[Case], said: list[str]) -> Forms:
    """Disassembled kernels by case and name; those that a report names are disassembled side by side."""
    from lancebill.backends.hopper.steps import kernels

    by_label = {case.label: case for case in cases}

    def sources(label: str, kernel: str) -> list[Any]:
        case = by_label.get(label)
        found = kernels(problem_of(case), case.rows) if case else []
        return [source for source in found if source.kernel == kernel]

    @cache
    def forms(label: str, kernel: str) -> dict[str, str]:
        return {f"{n}: {told(source)}": disassembled(source) for n, source in enumerate(sources(label, kernel))}

    named = {(label, place.kernel) for label, places in findings(said) for place in places}
    with ThreadPoolExecutor() as pool:
        list(pool.map(disassembled, {source for pair in named for source in sources(*pair)}))
    return forms


def told(source: Any) -> str:
    """What mostly distinguishes forms of a kernel."""
    names = "KIND", "ACT", "CODE", "TOKENS", "UNITS"
    return " ".join(f"{name}={value}" for name, value in source.constants if name in names)


@cache
def disassembled(source: Any) -> str:
    from lancebill.jit.build import binary
    from lancebill.testing.sass import disassemble

    return disassemble(binary(source).cubin)


def clean(result: dict[str, Any]) -> bool:
    """It finished, and all it reported, if anything, is of hand-overs that barriers order (see `hazards.count`)."""
    if not result["finished"] or result["lost"] or result["other"]:
        return False
    if not result["cases"] and not result["not_ended"]:  # every case was taken: a tool calls it an error to do nothing
        return True
    counts = [int(number) for line in result["summary"] for number in re.findall(r"SUMMARY: (\d+)", line)]
    return bool(result["status"] == 0 or (result["status"] == FOUND and sum(counts) == result["handed_over"] > 0))


def judged(tool: str, results: list[dict[str, Any]], cases: list[Case]) -> dict[str, Any]:
    """What the processes of a tool come to."""
    ended = {label: seconds for result in results for label, seconds in result["cases"].items()}
    missing = [case.label for case in cases if case.label not in ended]
    found = any(result["other"] or (result["finished"] and not clean(result)) for result in results)
    slowest = sorted(ended.items(), key=lambda item: -item[1])[:5]
    return {
        "tool": tool,
        "verdict": "FOUND" if found else "clean" if results and not missing else "NOT FINISHED",
        "ended": len(ended),
        "missing": missing,
        "hand_overs": sum(result["handed_over"] for result in results),
        "others": sum(result["other"] for result in results),
        "slowest": dict(slowest),
    }


def run(tools: list[str], cases: list[Case], jobs: int, limit: float, total: float) -> list[dict[str, Any]]:
    """As many processes as asked for at a time; when one ends, another helps whoever has cases left."""
    first = [tool for tool in tools for _ in range(max(1, jobs * SHARES[tool] // sum(SHARES[t] for t in tools)))]
    helping = sorted(tools, key=lambda tool: -SHARES[tool]) * jobs
    end = time.perf_counter() + total
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder)

        def within(task: tuple[int, str]) -> dict[str, Any] | None:
            number, tool = task
            cases_left = len(cases) - len(list(taken.glob(f"{tool}-*")))
            time_left = min(limit, end - time.perf_counter())
            if number >= len(first) and (cases_left < 2 * SHARES[tool] or time_left < START):
                return None
            return sanitize(tool, taken, time_left)

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(within, enumerate([*first, *helping])))
    return [result for result in results if result is not None]


def report(tool: str, results: list[dict[str, Any]], cases: list[Case]) -> dict[str, Any]:
    """Every process of a tool in a line, what it found, and what they come to."""
    forms = forms_of(cases, [line for result in results for line in result["said"]])
    for result in results:
        result["handed_over"], result["other"] = count(result["said"], forms)
        result["instructions"] = [] if clean(result) else explain(result["said"], forms)
        print(f"{tool}: {'clean' if clean(result) else 'NOT CLEAN' if result['finished'] else 'NOT FINISHED'},",
              f"{len(result['cases'])} cases in {result['seconds']} s", *result["summary"],
              *[f"({result['handed_over']} hand-overs that barriers order)"] * bool(result["handed_over"]),
              *[f"not ended: {label}" for label in result["not_ended"]], flush=True)  # fmt: skip
        shown = [] if clean(result) else [*result["said"][:KEPT_LINES], *result["tail"]]
        print(*(f"  {line}" for line in (*shown, *result["instructions"])), sep="\n", flush=True)
    return judged(tool, results, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=600, help="seconds for each process")
    parser.add_argument("--total", type=float, default=3600, help="seconds for all of them: none runs on after that")
    parser.add_argument("--jobs", type=int, default=12, help="processes at once")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="what an earlier run saved")
    parser.add_argument("--work", metavar="TOOL", help="compute cases here (what the sanitizer starts)")
    parser.add_argument("--taken", type=Path, help="the folder where processes mark the cases they took")
    arguments = parser.parse_args()
    as_large()
    if arguments.work:
        work(arguments.work, arguments.taken)
        return
    cases, refused = accepted()
    for label, reason in refused.items():
        print(f"refused: {label}: {reason}")
    if arguments.list:
        print(*(f"case: {case.label}" for case in cases), sep="\n")
        return
    tools = arguments.tools.split(",")
    if arguments.judge:
        record: dict[str, Any] = json.loads(arguments.judge.read_text())
    else:
        print(f"{len(cases)} cases, {compile_all(cases)} kernels", flush=True)
        results = run(tools, cases, arguments.jobs, arguments.limit, arguments.total)
        record = {"cases": [case.label for case in cases], "refused": refused, "results": results}
        if arguments.out:  # before they are explained, which takes a while where much was found
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    of_tools = {tool: [result for result in record["results"] if result["tool"] == tool] for tool in tools}
    record["verdicts"] = [report(tool, results, cases) for tool, results in of_tools.items()]
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    for verdict in record["verdicts"]:
        print(", ".join(f"{name} {value}" for name, value in verdict.items()))
    sys.exit(0 if all(verdict["verdict"] == "clean" for verdict in record["verdicts"]) else 1)


if __name__ == "__main__":
    main()
