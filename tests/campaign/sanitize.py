"""Every branch of the GPU kernels under compute-sanitizer, with layers small enough to finish in minutes.

    python -m benchmarks sanitize tool=memcheck,racecheck --seconds 230 --jobs 12
    python -m benchmarks sanitize --gpus sm_80        only kernels of these GPUs
    python tests/campaign/sanitize.py --cases         the layers, and those that the backend refuses; needs no GPU
    python tests/campaign/sanitize.py --judge         judge the last run again, with the same kernels; needs no GPU

Several processes run under each tool at the same time. Each takes the next case from the tool's list, largest first, so
that they finish together. Kernels are compiled beforehand, without a tool. Inputs are made on the CPU and copied, so
that the sanitizer sees almost only our kernels; every tensor is its own allocation, so that memcheck detects accesses
past its end.
"""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import sanitizer_cases as layers  # noqa: E402
from sanitizer_cases import HOPPER  # noqa: E402
from sanitizer_reports import Variants, count_ordered, explain, findings  # noqa: E402

from benchmarks.runner import Case, Run, subject  # noqa: E402

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
RAW = ROOT / "build" / "sanitize.json"  # what the tools said in the last run
LOST = ("Maximum number of hazards", "print limit")  # the tool left out findings


def compute_cases(tool: str, taken: Path, cases: list[layers.Case]) -> None:
    """Runs under a tool: computes each case that no other process has taken, and checks the result for NaN."""
    import torch

    for number, case in reversed(list(enumerate(cases))):
        if not take_case(taken / f"{tool}-{number}"):
            continue
        print(f"case {number}: {case.label}", flush=True)
        start = time.perf_counter()
        result = layers.compute(case)
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


def compile_all(cases: list[layers.Case]) -> int:
    """Fill the kernel cache: processes under a tool must not compile."""
    from lancebill.jit.build import build_all

    sources = {source for case in cases for source in layers.kernels_of(case)}
    failed = build_all(sources)
    for source, why in failed.items():
        print("does not compile:", source.label, why[-300:])
    return len(sources)


def run_process(tool: str, taken: Path, limit: float, gpus: str) -> dict[str, Any]:
    """One process under one tool."""
    command = [
        SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only",
        "--print-limit", PRINT_LIMIT, "--launch-timeout", "60", "--show-backtrace", "no", *TOOLS[tool],
        sys.executable, __file__, "--work", tool, str(taken), gpus,
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


def kernel_variants(cases: list[layers.Case], lines: list[str]) -> Variants:
    """Disassembled kernels by case and name; those that a report names are disassembled in parallel.

    Of PTX there are none: its machine code is the driver's, so nothing excuses a finding.
    """
    by_label = {case.label: case for case in cases}

    def sources(label: str, kernel: str) -> list[Any]:
        case = by_label.get(label)
        of_case = layers.kernels_of(case) if case and case.gpu == HOPPER else []
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
    """It finished, and reported nothing but accesses that barriers order (see `sanitizer_reports.count_ordered`)."""
    if not result["finished"] or result["lost"] or result["unordered"]:
        return False
    if (
        not result["cases"] and not result["not_ended"]
    ):  # all cases were taken already; the tool reports a process without kernels as an error
        return True
    counts = [int(number) for line in result["summary"] for number in re.findall(r"SUMMARY: (\d+)", line)]
    return bool(result["status"] == 0 or (result["status"] == FOUND and sum(counts) == result["ordered"] > 0))


def verdict_of(tool: str, results: list[dict[str, Any]], cases: list[layers.Case]) -> dict[str, Any]:
    """The verdict of all processes of a tool."""
    finished = {label: seconds for result in results for label, seconds in result["cases"].items()}
    missing = [case.label for case in cases if case.label not in finished]
    found = any(result["unordered"] or (result["finished"] and not clean(result)) for result in results)
    return {
        "tool": tool,
        "verdict": "FOUND" if found else "clean" if results and not missing else "NOT FINISHED",
        "ended": len(finished),
        "missing": missing,
        "ordered": sum(result["ordered"] for result in results),
        "unordered": sum(result["unordered"] for result in results),
    }


def run_tools(tools: list[str], cases: list[layers.Case], run: Run) -> list[dict[str, Any]]:
    """Run up to `jobs` processes at a time; when one ends, another starts for a tool with cases left."""
    jobs = run.options.jobs
    initial = [tool for tool in tools for _ in range(max(1, jobs * SHARES[tool] // sum(SHARES[t] for t in tools)))]
    helpers = sorted(tools, key=lambda tool: -SHARES[tool]) * jobs
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder)

        def run_if_useful(task: tuple[int, str]) -> dict[str, Any] | None:
            number, tool = task
            cases_left = len(cases) - len(list(taken.glob(f"{tool}-*")))
            time_left = min(run.options.limit, run.seconds_left)
            if number >= len(initial) and (cases_left < 2 * SHARES[tool] or time_left < START_SECONDS):
                return None
            return run_process(tool, taken, time_left, run.options.gpus)

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(run_if_useful, enumerate([*initial, *helpers])))
    return [result for result in results if result is not None]


def report(tool: str, results: list[dict[str, Any]], cases: list[layers.Case]) -> dict[str, Any]:
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


@subject(
    "sanitize", lambda: Case.product(tool=tuple(TOOLS)), device="cuda", gpus=("", "for example sm_90,sm_80; else all"),
    jobs=(12, "processes at a time"), limit=(600.0, "seconds for each process"),
)  # fmt: skip
def sanitize(run: Run) -> None:
    """Every branch of the GPU kernels under compute-sanitizer, with layers small enough to finish in minutes."""
    cases, refused = chosen_cases(run.options.gpus)
    print(f"{len(cases)} cases, {compile_all(cases)} kernels", flush=True)
    results = run_tools([case["tool"] for case in run.cases], cases, run)
    run.facts |= {"cases": len(cases), "refused": len(refused)}
    RAW.parent.mkdir(exist_ok=True)
    RAW.write_text(json.dumps(results), encoding="utf-8")  # before the findings are explained, which may take long
    for case in run.cases:
        verdict = report(case["tool"], [result for result in results if result["tool"] == case["tool"]], cases)
        run.add(case, {name: verdict[name] for name in ("verdict", "ended", "ordered", "unordered")})
        for label in verdict["missing"]:
            run.skip(f"{case['tool']}: {label}", "did not end")


def chosen_cases(gpus: str) -> tuple[list[layers.Case], dict[str, str]]:
    layers.use_tiles_of_large_layers()
    cases, refused = layers.supported_cases()
    return [case for case in cases if case.gpu in (gpus or case.gpu).split(",")], refused


def main(words: list[str]) -> None:
    if words[:1] == ["--work"]:  # the sanitizer starts it
        compute_cases(words[1], Path(words[2]), chosen_cases("".join(words[3:]))[0])
        return
    cases, refused = chosen_cases("")
    if words == ["--judge"]:
        results = json.loads(RAW.read_text(encoding="utf-8"))
        for tool in dict.fromkeys(result["tool"] for result in results):
            print(report(tool, [result for result in results if result["tool"] == tool], cases))
        return
    print(*(f"refused: {label}: {reason}" for label, reason in refused.items()), sep="\n")
    print(*(f"case: {case.label}" for case in cases), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
