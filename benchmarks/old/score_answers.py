"""Score the answers that an interrupted `lancebill eval --questions FILE --answers FILE` saved.

    python benchmarks/score_answers.py --answers gsm8k-answers.jsonl --options shots=3,answer_tokens=192 --run run.json

Only questions that every variant answered count, so that the paired tests compare the same questions. Machine, commit
and date come from the file of another benchmark of the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from machine import command
from result_files import RESULTS, write_record

from lancebill.evaluate.questions import Question, score
from lancebill.evaluate.run import EvalResult, Variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="the file that `eval --answers` wrote")
    parser.add_argument("--options", default="", help="name=number, ...: the options of the run")
    parser.add_argument("--run", type=Path, required=True, help="a result file of the same run, in benchmarks/results")
    parser.add_argument("--out", type=Path, help="default: the same file name in benchmarks/results/questions")
    chosen = parser.parse_args()
    run = json.loads(chosen.run.read_text(encoding="utf-8"))
    pairs = (pair.partition("=") for pair in filter(None, chosen.options.split(",")))
    document = {
        "command": command(Path(__file__).name),
        **{name: run[name] for name in ("commit", "date", "machine")},
        "note": "The run reached its time limit: only questions that every variant had answered are scored.",
        "options": {name: int(value) for name, _, value in pairs},
        "variants": score_variants(
            [json.loads(line) for line in chosen.answers.read_text(encoding="utf-8").splitlines()]
        ),
    }
    path = chosen.out or RESULTS / "questions" / chosen.run.parent.name / chosen.run.name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, document)


def score_variants(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """One row for each variant in the order they ran, in the form of `lancebill eval`."""
    by_variant: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["question"]] = row
    common = [
        text for text in next(iter(by_variant.values())) if all(text in answers for answers in by_variant.values())
    ]
    results = []
    for name, answers in by_variant.items():
        questions = [Question(text, f"#### {answers[text]['right']}") for text in common]
        scores = score([answers[text]["answer"] for text in common], questions)
        results.append(EvalResult(Variant.parse(name), scores=scores))
    described = [result.describe(results[0]) for result in results]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in described]


if __name__ == "__main__":
    main()
