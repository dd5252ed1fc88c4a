"""Exact match on questions (GSM8K's format) that a server answers, for variants of one model, with paired tests.

    python benchmarks/serve_accuracy.py --questions test.jsonl --examples train.jsonl --model PATH \
        --variant stored --variant mxfp4 --variant mxfp4/fp8 [--engine vllm] [--limit 100] [-- --max-model-len 4096]
    python benchmarks/serve_accuracy.py --questions test.jsonl --examples train.jsonl --url stored=http://host:8000/v1

For each variant `lancebill serve` is started, asked greedily, and stopped. Words after -- are options of the server.
`--url NAME=URL`, repeated, asks servers that are already running instead. The record holds right or wrong for every
question, never a question or an answer. `--likelihood N` also asks how likely the first N reference solutions are, a
finer score for models that solve few questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import answer_likelihood
from machine import origin, result_path, whole_model_machine
from result_files import write_record

from lancebill.cli.engines import running_server
from lancebill.errors import LaunchError
from lancebill.evaluate.load import Server
from lancebill.evaluate.paired import mcnemar
from lancebill.evaluate.questions import Question, Score, prompt, read_questions, score
from lancebill.evaluate.run import NEXT, Variant

READINGS = ("strict", "flexible")


def main() -> None:
    chosen = arguments()
    known = read_questions(chosen.questions)
    questions, solved = known[: chosen.limit], known[: chosen.likelihood]
    examples = read_questions(chosen.examples)[: chosen.shots] if chosen.examples else []
    rows: list[dict[str, Any]] = []
    first: dict[str, Score] = {}
    first_readings: list[answer_likelihood.Reading] = []
    for name, address in servers(chosen):
        start = time.perf_counter()
        with address as url:
            server = Server(url, chosen.timeout, chosen.api_key)
            answers = ask(server, questions, examples, chosen)
            readings = answer_likelihood.read_solutions(server, solved, chosen.concurrency)
        scores = score(answers, questions)
        first, first_readings = first or scores, first_readings or readings
        row = {"variant": name, "seconds": round(time.perf_counter() - start, 1), **described(scores, first)}
        rows.append(row | ({"likelihood": answer_likelihood.described(readings, first_readings)} if solved else {}))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "right"}), flush=True)
        save(chosen, len(questions), rows)  # after every variant, so that an interrupted run keeps its results


def arguments() -> argparse.Namespace:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with `question` and `answer`")
    parser.add_argument("--examples", type=Path, help="questions for the few-shot prompt")
    parser.add_argument("--shots", type=int, default=5, help="few-shot examples")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--likelihood", type=int, default=0, help="solutions whose likelihood is asked; needs vLLM")
    parser.add_argument("--model", type=Path, help="a checkpoint to serve")
    parser.add_argument(
        "--variant", action="append", help="weights[/activations[/backend]]; the first is compared with"
    )
    parser.add_argument("--engine", help="vllm or transformers")
    parser.add_argument("--url", action="append", help="NAME=URL of a running server")
    parser.add_argument("--api-key", help="of running servers")
    parser.add_argument("--completions", action="store_true", help="continue a text instead of answering in a chat")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--concurrency", type=int, default=32, help="questions at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for an answer")
    parser.add_argument("--device", default="cpu", help="cpu or cuda: names the machine in the record")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/serve-accuracy")
    chosen = parser.parse_args(words[:cut])
    if (chosen.model is None) == (chosen.url is None):
        parser.error("give either --model or --url")
    chosen.options = words[cut + 1 :]
    chosen.out = chosen.out or result_path("serve-accuracy", chosen.device)
    return chosen


def servers(chosen: argparse.Namespace) -> Iterator[tuple[str, AbstractContextManager[str]]]:
    """A name and an address of each variant."""
    for pair in chosen.url or ():
        name, _, url = pair.partition("=")
        yield name, nullcontext(url)
    for text in (chosen.variant or ["stored"]) if chosen.model else ():
        variant = Variant.parse(text)
        options = {"--engine": chosen.engine, "--weights": variant.weights, "--activations": variant.activations}
        words = [word for option, value in options.items() if value is not None for word in (option, value)]
        yield text, running_server([str(chosen.model), *words, "--backend", variant.backend, *chosen.options])


def ask(
    server: Server, questions: Sequence[Question], examples: Sequence[Question], chosen: argparse.Namespace
) -> list[str]:
    """Greedy answers in the order of the questions."""
    model = server.model()
    page = "completions" if chosen.completions else "chat/completions"

    def answer(question: Question) -> str:
        text = prompt(question, examples)
        asked = {"prompt": text} if chosen.completions else {"messages": [{"role": "user", "content": text}]}
        body = {"model": model, "temperature": 0, "max_tokens": chosen.tokens, "stop": [NEXT], **asked}
        response = server.request("POST", page, body)
        if response.status != 200:
            raise LaunchError("the server refused a question", got=f"{response.status} {response.read(300)!r}")
        choice = json.loads(response.read())["choices"][0]
        return str(choice["text"] if chosen.completions else choice["message"]["content"] or "").split(NEXT)[0]

    with ThreadPoolExecutor(chosen.concurrency) as pool:
        return list(pool.map(answer, questions))


def described(scores: dict[str, Score], first: dict[str, Score]) -> dict[str, Any]:
    """Share of right answers, McNemar's exact p-value against the first variant, and each question's outcome."""
    facts: dict[str, Any] = {}
    for reading in READINGS:
        mine, theirs = scores[reading], first[reading]
        facts[reading] = {"value": mine.value, "stderr": mine.stderr}
        if mine is not theirs:
            facts[reading] |= {
                "gained": int((mine.right & ~theirs.right).sum()),
                "lost": int((theirs.right & ~mine.right).sum()),
                "p": mcnemar(theirs.right, mine.right),
            }
    right = {reading: "".join(str(int(each)) for each in scores[reading].right.tolist()) for reading in READINGS}
    return {**facts, "right": right}


def save(chosen: argparse.Namespace, questions: int, rows: list[dict[str, Any]]) -> None:
    document = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine(chosen.device),
        "model": None if chosen.model is None else chosen.model.name,
        "questions": questions,
        "shots": chosen.shots if chosen.examples else 0,
        "tokens": chosen.tokens,
        "chat": not chosen.completions,
        "solutions": chosen.likelihood,
        "variants": rows,
    }
    write_record(chosen.out, document)


if __name__ == "__main__":
    main()
