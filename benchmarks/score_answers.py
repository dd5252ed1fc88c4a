"""Scores of a run of `lancebill eval --questions --answers FILE` that was cut short, from the answers it had kept.

    python benchmarks/questions.py --answers gsm8k-answers.jsonl --options shots=3,answer_tokens=192 --run run.json

Only questions that every variant answered count, so that the paired tests are of the same ones. Where the run was, and
of which sources, is taken from the file of another benchmark of that run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from machine import command

from lancebill.evaluate.questions import Question, score
from lancebill.evaluate.run import EvalResult, Variant

OUT = Path(__file__).parent / "results" / "gsm8k.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--options", default="", help="name=number, ...: what the run was called with")
    parser.add_argument("--run", type=Path, required=True, help="a result of the same run")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    run = json.loads(chosen.run.read_text(encoding="utf-8"))
    pairs = (pair.partition("=") for pair in filter(None, chosen.options.split(",")))
    document = {
        "command": command(Path(__file__).name),
        **{name: run[name] for name in ("commit", "date", "machine")},
        "note": "The run was cut at its time limit: scored are the questions that every variant here had answered.",
        "options": {name: int(value) for name, _, value in pairs},
        "variants": scored([json.loads(line) for line in chosen.answers.read_text(encoding="utf-8").splitlines()]),
    }
    chosen.out.write_text(json.dumps(document, indent=1) + "\n")


def scored(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """One row a variant, in the order they ran, as `lancebill eval` describes them."""
    said: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        said.setdefault(row["variant"], {})[row["question"]] = row
    common = [text for text in next(iter(said.values())) if all(text in answers for answers in said.values())]
    results = []
    for name, answers in said.items():
        asked = [Question(text, f"#### {answers[text]['right']}") for text in common]
        scores = score([answers[text]["answer"] for text in common], asked)
        results.append(EvalResult(Variant.parse(name), scores=scores))
    described = [result.describe(results[0]) for result in results]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in described]


if __name__ == "__main__":
    main()
