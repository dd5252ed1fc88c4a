"""Every branch of the Hopper kernels under compute-sanitizer, on shapes so small that it ends in minutes.

    python benchmarks/sanitize.py [--tools memcheck,racecheck] [--out sanitize.json] [--limit 60] [--jobs 8]
    python benchmarks/sanitize.py --list              the matrix, and what the backend refuses of it; no GPU

The matrix is cut into shards; each (tool, shard) is a process of its own under the sanitizer, several at once, each
with a time limit. Kernels are compiled before, without it. Data are made on the CPU and copied, so that
the sanitizer meets hardly a kernel but ours; every tensor is an allocation of its own, so that memcheck sees where
it ends. Exits with 1 if any tool found anything or did not finish.
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
from typing import Any

from hazards import Forms, count, explain

TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "synccheck": (),
    "initcheck": (),
}
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 9  # the exit status that means: the tool reported something
SPECS = (
    "mxfp4", "nvfp4", "int4", "int4-g32", "int4-g64", "int4-g128", "int4-zp", "int4-g32-zp", "int4-g128-zp", "int8",
    "int8-g128", "fp8", "fp8-block",
)  # fmt: skip
KEPT_LINES = 120


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
    wide = Case(tokens=16, experts=2, hidden=1664, intermediate=832)  # enough tiles that K is not split
    yield from (wide, replace(wide, activations="fp8"))
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
    from colibri.activation import Activation
    from colibri.testing.layers import layer_problem

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
    from colibri.backends import registry
    from colibri.problem import Device

    taken, refused = [], {}
    for case in dict.fromkeys(matrix()):
        reasons = [str(reason) for reason in registry()["hopper"].check(problem_of(case), Device("cuda", 90))]
        if reasons:
            refused[case.label] = reasons[0]
        else:
            taken.append(case)
    return taken, refused


def work(shard: int, shards: int) -> None:
    """What runs under the sanitizer: each case once, its result looked at."""
    import torch

    for number, case in enumerate(accepted()[0][shard::shards]):
        print(f"case {number}: {case.label}", flush=True)
        result = compute(case)
        assert not torch.isnan(result).any(), f"NaN in the result of {case.label}"
    print("all cases done", flush=True)


def compute(case: Case) -> Any:
    """The result, on the CPU; rows of no expert are zeros."""
    import torch

    from colibri.dispatch import Indexed, to_batched, to_contiguous
    from colibri.layout import as_integer
    from colibri.problem import Device
    from colibri.testing.layers import make_layer, routing

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
    layer.backend.run(plan, x.cuda(), moved, weights, out)
    return out.cpu()


def compile_all(cases: list[Case]) -> int:
    """Fill the cache; the sanitized processes may not compile."""
    from colibri.backends.hopper.plan import make_plan
    from colibri.backends.hopper.steps import steps
    from colibri.jit.build import build_all

    sources = {step.source for case in cases for step in steps(make_plan(problem_of(case), case.rows))}
    failed = build_all(sources)
    for source, why in failed.items():
        print("does not compile:", source.label, why[-300:])
    return len(sources)


def sanitize(tool: str, shard: int, shards: int, limit: float) -> dict[str, Any]:
    """One shard under one tool."""
    command = [
        SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only",
        "--print-limit", "100", "--launch-timeout", "60", "--show-backtrace", "no", *TOOLS[tool],
        sys.executable, __file__, "--work", f"{shard}/{shards}",
    ]  # fmt: skip
    environment = {
        **os.environ, "COLIBRI_NO_COMPILE": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1",
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
    return {
        "tool": tool,
        "shard": shard,
        "seconds": round(time.perf_counter() - start, 1),
        "status": child.returncode,
        "finished": "all cases done" in output,
        "cases": len(re.findall(r"^case ", output, re.MULTILINE)),
        "summary": re.findall(r"=========\s+(.*SUMMARY.*)", output),
        "said": [line for line in output.splitlines() if line.startswith(("=====", "case", "Traceback", "colibri"))]
        if child.returncode
        else [],
        "tail": output.splitlines()[-12:] if child.returncode else [],
    }


def forms_of(cases: list[Case]) -> Forms:
    """Disassembled kernels, by case and name."""
    from colibri.backends.hopper.plan import make_plan
    from colibri.backends.hopper.steps import steps

    by_label = {case.label: case for case in cases}

    def forms(label: str, kernel: str) -> dict[str, str]:
        case = by_label.get(label)
        found = steps(make_plan(problem_of(case), case.rows)) if case else ()
        return {told(step.source): disassembled(step.source) for step in found if step.source.kernel == kernel}

    return forms


def told(source: Any) -> str:
    """What distinguishes forms of a kernel."""
    constants = dict(source.constants)
    return " ".join(f"{name}={constants[name]}" for name in ("KIND", "ACT", "CODE", "T", "U") if name in constants)


@cache
def disassembled(source: Any) -> str:
    from triton import knobs

    from colibri.jit.build import binary

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary(source).cubin)
        file.flush()
        return subprocess.run([knobs.nvidia.nvdisasm.path, file.name], capture_output=True, text=True).stdout


def clean(result: dict[str, Any]) -> bool:
    """It finished, and what it found, if anything, is the compiler's hand-over, which barriers order."""
    return bool(result["finished"] and not result["other"] and result["status"] in (0, FOUND))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=60, help="seconds for each (tool, shard)")
    parser.add_argument("--total", type=float, default=3600, help="seconds for all of them: none runs on after that")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=8, help="sanitizers at once")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--work", metavar="I/N", help="run shard I of N here (what the sanitizer starts)")
    arguments = parser.parse_args()
    if arguments.work:
        work(*map(int, arguments.work.split("/")))
        return
    cases, refused = accepted()
    for label, reason in refused.items():
        print(f"refused: {label}: {reason}")
    if arguments.list:
        print(*(f"case: {case.label}" for case in cases), sep="\n")
        return
    print(f"{len(cases)} cases, {compile_all(cases)} kernels", flush=True)
    tasks = [(tool, shard) for shard in range(arguments.shards) for tool in arguments.tools.split(",")]
    end = time.perf_counter() + arguments.total

    def within(task: tuple[str, int]) -> dict[str, Any]:
        return sanitize(*task, arguments.shards, min(arguments.limit, end - time.perf_counter()))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(within, tasks))
    results.sort(key=lambda result: (result["tool"], result["shard"]))
    forms = forms_of(cases)
    for result in results:
        result["handed_over"], result["other"] = count(result["said"], forms)
        verdict = "clean" if clean(result) else "FOUND" if result["finished"] else "NOT FINISHED"
        print(f"{result['tool']} {result['shard']}: {verdict}, {result['cases']} cases in {result['seconds']} s",
              *result["summary"],
              *[f"({result['handed_over']} hand-overs of the compiler at barrier 1)"] * bool(result["handed_over"]),
              flush=True)  # fmt: skip
        result["instructions"] = explain(result["said"], forms)
        shown = [] if clean(result) else result["said"][:KEPT_LINES]
        print(*(f"  {line}" for line in (*shown, *result["instructions"])), sep="\n", flush=True)
    if arguments.out:
        record = {"cases": [case.label for case in cases], "refused": refused, "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(0 if all(map(clean, results)) else 1)


if __name__ == "__main__":
    main()
