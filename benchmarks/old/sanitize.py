"""Every branch of the GPU kernels under compute-sanitizer, with layers small enough to finish in minutes.

    python benchmarks/sanitize.py [--tools memcheck,racecheck] [--out FILE] [--total 230] [--jobs 12]
    python benchmarks/sanitize.py --gpus sm_80        only kernels of these GPUs
    python benchmarks/sanitize.py --list              the cases, and those that the backend refuses; needs no GPU
    python benchmarks/sanitize.py --compile           only fill the kernel cache; needs no GPU
    python benchmarks/sanitize.py --judge FILE        judge a saved run again, with the same kernels; needs no GPU

Several processes run under each tool at the same time. Each takes the next case from the tool's list, largest first, so
that they finish together. Kernels are compiled beforehand, without a tool. Inputs are made on the CPU and copied, so
that the sanitizer sees almost only our kernels; every tensor is its own allocation, so that memcheck detects accesses
past its end. Exits with 1 if a tool found something or did not finish its list.
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
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from machine import gpu_machine, origin, result_path
from result_files import write_record
from sanitize_cases import HOPPER, Case, compute, kernels_of, supported_cases, use_tiles_of_large_layers
from sanitize_report import Variants, count_ordered, explain, findings

TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),  # one finding for a pair of instructions, not for each byte
    "synccheck": (),
    "initcheck": (),
}
SHARES = {"memcheck": 3, "racecheck": 5, "synccheck": 2, "initcheck": 2}  # of the processes; racecheck takes longest
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 9  # exit status if the tool reported something
KEPT_LINES = 120
START_SECONDS = 20  # until a process reaches its first case; with less time left none is started
PRINT_LIMIT = "10000"  # findings of one process
DONE = "all cases done"
LOST = ("Maximum number of hazards", "print limit")  # the tool left out findings


def compute_cases(tool: str, taken: Path, cases: list[Case]) -> None:
    """Runs under a tool: computes each case that no other process has taken, and checks the result for NaN."""
    import torch

    for number, case in reversed(list(enumerate(cases))):
        if not take_case(taken / f"{tool}-{number}"):
            continue
        print(f"case {number}: {case.label}", flush=True)
        start = time.perf_counter()
        result = compute(case)
        assert not torch.isnan(result).any(), f"NaN in the result of {case.label}"
        print(f"took {time.perf_counter() - start:.2f} s", flush=True)
    print(DONE, flush=True)


def take_case(mark: Path) -> bool:
    """Whether this process was the first to create the file that marks a case as taken."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def compile_all(cases: list[Case]) -> int:
    """Fill the kernel cache: processes under a tool must not compile."""
    from lancebill.jit.build import build_all

    sources = {source for case in cases for source in kernels_of(case)}
    failed = build_all(sources)
    for source, why in failed.items():
        print("does not compile:", source.label, why[-300:])
    return len(sources)


def run_process(tool: str, taken: Path, limit: float, gpus: str) -> dict[str, Any]:
    """One process under one tool."""
    command = [
        SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only",
        "--print-limit", PRINT_LIMIT, "--launch-timeout", "60", "--show-backtrace", "no", *TOOLS[tool],
        sys.executable, __file__, "--work", tool, "--taken", str(taken), "--gpus", gpus,
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
    started = re.findall(r"^case \d+: (.*)", output, re.MULTILINE)
    seconds = [float(text) for text in re.findall(r"^took (.*) s", output, re.MULTILINE)]
    kept = ("=====", "case", "Traceback", "lancebill")
    return {
        "tool": tool,
        "seconds": round(time.perf_counter() - start, 1),
        "status": child.returncode,
        "finished": DONE in output,
        "cases": dict(zip(started, seconds)),
        "not_ended": started[len(seconds) :],
        "summary": re.findall(r"=========\s+(.*SUMMARY.*)", output),
        "lost": [line for line in output.splitlines() if any(words in line for words in LOST)],
        "said": [line for line in output.splitlines() if line.startswith(kept)] if child.returncode else [],
        "tail": output.splitlines()[-12:] if child.returncode else [],
    }


def kernel_variants(cases: list[Case], lines: list[str]) -> Variants:
    """Disassembled kernels by case and name; those that a report names are disassembled in parallel.

    Of PTX there are none: its machine code is the driver's, so nothing excuses a finding.
    """
    by_label = {case.label: case for case in cases}

    def sources(label: str, kernel: str) -> list[Any]:
        case = by_label.get(label)
        of_case = kernels_of(case) if case and case.gpu == HOPPER else []
        return [source for source in of_case if source.kernel == kernel]

    @cache
    def variants(label: str, kernel: str) -> dict[str, str]:
        return {f"{n}: {description(source)}": disassembled(source) for n, source in enumerate(sources(label, kernel))}

    named = {(label, place.kernel) for label, places in findings(lines) for place in places}
    with ThreadPoolExecutor() as pool:
        list(pool.map(disassembled, {source for pair in named for source in sources(*pair)}))
    return variants


def description(source: Any) -> str:
    """The constants that usually distinguish variants of a kernel."""
    names = "KIND", "ACT", "CODE", "TOKENS", "UNITS"
    return " ".join(f"{name}={value}" for name, value in source.constants if name in names)


@cache
def disassembled(source: Any) -> str:
    from lancebill.jit.build import get_binary
    from lancebill.testing.sass import disassemble

    return disassemble(get_binary(source).cubin)


def clean(result: dict[str, Any]) -> bool:
    """It finished, and reported nothing but accesses that barriers order (see `sanitize_report.count_ordered`)."""
    if not result["finished"] or result["lost"] or result["unordered"]:
        return False
    if (
        not result["cases"] and not result["not_ended"]
    ):  # all cases were taken already; the tool reports a process without kernels as an error
        return True
    counts = [int(number) for line in result["summary"] for number in re.findall(r"SUMMARY: (\d+)", line)]
    return bool(result["status"] == 0 or (result["status"] == FOUND and sum(counts) == result["ordered"] > 0))


def verdict_of(tool: str, results: list[dict[str, Any]], cases: list[Case]) -> dict[str, Any]:
    """The verdict of all processes of a tool."""
    finished = {label: seconds for result in results for label, seconds in result["cases"].items()}
    missing = [case.label for case in cases if case.label not in finished]
    found = any(result["unordered"] or (result["finished"] and not clean(result)) for result in results)
    slowest = sorted(finished.items(), key=lambda item: -item[1])[:5]
    return {
        "tool": tool,
        "verdict": "FOUND" if found else "clean" if results and not missing else "NOT FINISHED",
        "ended": len(finished),
        "missing": missing,
        "ordered": sum(result["ordered"] for result in results),
        "unordered": sum(result["unordered"] for result in results),
        "slowest": dict(slowest),
    }


def run_tools(tools: list[str], cases: list[Case], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run up to `jobs` processes at a time; when one ends, another starts for a tool with cases left."""
    jobs = arguments.jobs
    initial = [tool for tool in tools for _ in range(max(1, jobs * SHARES[tool] // sum(SHARES[t] for t in tools)))]
    helpers = sorted(tools, key=lambda tool: -SHARES[tool]) * jobs
    end = time.perf_counter() + arguments.total
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder)

        def run_if_useful(task: tuple[int, str]) -> dict[str, Any] | None:
            number, tool = task
            cases_left = len(cases) - len(list(taken.glob(f"{tool}-*")))
            time_left = min(arguments.limit, end - time.perf_counter())
            if number >= len(initial) and (cases_left < 2 * SHARES[tool] or time_left < START_SECONDS):
                return None
            return run_process(tool, taken, time_left, arguments.gpus)

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(run_if_useful, enumerate([*initial, *helpers])))
    return [result for result in results if result is not None]


def report(tool: str, results: list[dict[str, Any]], cases: list[Case]) -> dict[str, Any]:
    """Print one line for each process and its findings; return the verdict of the tool."""
    variants = kernel_variants(cases, [line for result in results for line in result["said"]])
    for result in results:
        result["ordered"], result["unordered"] = count_ordered(result["said"], variants)
        result["instructions"] = [] if clean(result) else explain(result["said"], variants)
        print(f"{tool}: {'clean' if clean(result) else 'NOT CLEAN' if result['finished'] else 'NOT FINISHED'},",
              f"{len(result['cases'])} cases in {result['seconds']} s", *result["summary"],
              *[f"({result['ordered']} findings that barriers order)"] * bool(result["ordered"]),
              *[f"not finished: {label}" for label in result["not_ended"]], flush=True)  # fmt: skip
        shown = [] if clean(result) else [*result["said"][:KEPT_LINES], *result["tail"]]
        print(*(f"  {line}" for line in (*shown, *result["instructions"])), sep="\n", flush=True)
    return verdict_of(tool, results, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: all four")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/sanitize")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each process")
    parser.add_argument("--total", type=float, default=3600, help="seconds for all processes")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--gpus", default="", help="for example sm_90,sm_80; default: all")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--compile", action="store_true", help="only fill the kernel cache")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="a file that an earlier run saved")
    parser.add_argument("--work", metavar="TOOL", help="compute cases in this process (the sanitizer starts it)")
    parser.add_argument("--taken", type=Path, help="folder in which processes mark the cases they took")
    arguments = parser.parse_args()
    use_tiles_of_large_layers()
    cases, refused = supported_cases()
    cases = [case for case in cases if case.gpu in (arguments.gpus or case.gpu).split(",")]
    if arguments.work:
        compute_cases(arguments.work, arguments.taken, cases)
        return
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
        if arguments.compile:
            return
        results = run_tools(tools, cases, arguments)
        record = {"machine": gpu_machine(), **origin(Path(__file__).name), "cases": [case.label for case in cases]}
        record |= {"refused": refused, "results": results}
        if arguments.out is None:
            arguments.out = result_path("sanitize", "cuda")
        # Saved before the findings are explained, which may take long.
        write_record(arguments.out, record)
    of_tools = {tool: [result for result in record["results"] if result["tool"] == tool] for tool in tools}
    record["verdicts"] = [report(tool, results, cases) for tool, results in of_tools.items()]
    if arguments.out:
        write_record(arguments.out, record)
    for verdict in record["verdicts"]:
        print(", ".join(f"{name} {value}" for name, value in verdict.items()))
    sys.exit(0 if all(verdict["verdict"] == "clean" for verdict in record["verdicts"]) else 1)


if __name__ == "__main__":
    main()
