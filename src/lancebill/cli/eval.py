"""`lancebill eval`: how well a model does with its experts held in different ways, and whether it matters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lancebill.cli import console as ui
from lancebill.cli import models
from lancebill.cli.console import Json
from lancebill.cli.env import describe
from lancebill.errors import SpecError

if TYPE_CHECKING:
    from lancebill.evaluate.questions import Question
    from lancebill.evaluate.run import Variant


def evaluate(
    path: models.Model,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", help="weights/activations/backend, the last two optional; 'stored' keeps weights. Repeatable."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="A text file: perplexity.")] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help="JSON lines as GSM8K's: exact match, strict and flexible.")
    ] = None,
    examples: Annotated[Path | None, typer.Option("--examples", help="Questions to show with answers.")] = None,
    shots: Annotated[int, typer.Option("--shots", min=0, help="How many of the examples to show.")] = 5,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only so many questions.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--text-tokens", min=2, help="Only so many tokens of text.")] = None,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens a prediction may see.")] = 1024,
    stride: Annotated[int, typer.Option("--stride", min=1, help="Tokens from one window to the next.")] = 512,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Of an answer, at most.")] = 256,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows or questions computed together.")] = 1,
    answers: Annotated[
        Path | None, typer.Option("--answers", help="Write every answer here when it is given, as a line of JSON.")
    ] = None,
    device: models.Device = "cpu",
    dtype: models.Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity and exact match of variants of one model, with paired tests against the first."""
    with ui.reported(as_json):
        ui.existing(path, as_json)
        if text is None and questions is None:
            raise SpecError("nothing to evaluate on", hint="give --text, --questions, or both")
        for file in filter(None, (text, questions, examples)):
            ui.existing(file, as_json)
        with _kept(answers) as heard:
            found = _run(path, variants or ["stored"], text, questions, examples, shots, limit, device, dtype, {
                "window": window, "stride": stride, "max_text_tokens": max_tokens, "answer_tokens": answer_tokens,
                "batch": batch, "heard": heard,
            })  # fmt: skip
    if as_json:
        given = {"text": text, "questions": questions, "examples": examples}
        options: dict[str, Any] = {name: None if file is None else file.name for name, file in given.items()}
        options |= {"shots": shots, "limit": limit, "window": window, "stride": stride, "answer_tokens": answer_tokens}
        options |= {"batch": batch}
        ui.print_json({"path": str(path), "options": options, "machine": describe(), "variants": found})
    else:
        _show(found, ui.console())


def _run(
    path: Path,
    variants: list[str],
    text: Path | None,
    questions: Path | None,
    examples: Path | None,
    shots: int,
    limit: int | None,
    device: str,
    dtype: str,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    from lancebill.evaluate.questions import read_questions, read_text
    from lancebill.evaluate.run import Variant
    from lancebill.evaluate.run import evaluate as run

    how: list[dict[str, Any]] = []

    def load(variant: Variant) -> tuple[Any, Any]:
        chosen = {"weights": variant.weights, "activations": variant.activations, "backend": variant.backend}
        model, tokenizer = models.load(path, device=device, dtype=dtype, **chosen)
        models.announce(path, model, ui.console(error=True))
        how.append(models.describe(model))
        return model, tokenizer

    asked = read_questions(questions)[:limit] if questions is not None else []
    shown = read_questions(examples)[:shots] if examples is not None else []
    body = None if text is None else read_text(text)
    parsed = [Variant.parse(variant) for variant in variants]
    with ui.progress("evaluating", 0) as advance:
        results = run(load, parsed, text=body, questions=asked, examples=shown, progress=advance, **options)
    for result, loaded in zip(results, how):
        result.how = loaded
    return [result.describe(results[0]) for result in results]


@contextmanager
def _kept(file: Path | None) -> Iterator[Callable[[Variant, Question, str], None]]:
    """What writes answers to `file` line by line, so that a run that is cut short leaves what it heard."""
    if file is None:
        yield lambda *_: None
        return
    with file.open("w", encoding="utf-8") as out:

        def heard(variant: Variant, question: Question, answer: str) -> None:
            row = {"variant": str(variant), "question": question.text, "right": question.answer, "answer": answer}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()

        yield heard


def _show(found: list[dict[str, Any]], out: Console) -> None:
    measures = [name for name in ("perplexity", "strict", "flexible") if name in found[0]]
    table = ui.table("variant", ">experts", *(column for name in measures for column in (f">{name}", ">p")))
    for row in found:
        cells = []
        for name in measures:
            value, error, p = row[name]["value"], row[name]["stderr"], row[name].get("p")
            shown = f"{value:.3f} ± {error:.3f}" if name == "perplexity" else f"{value:.1%} ± {error:.1%}"
            cells += [shown, "" if p is None else f"{p:.3g}"]
        table.add_row(row["variant"], ui.size(row["expert_bytes"]), *cells)
    out.print(table)
    if len(found) > 1:
        out.print("[dim]p: how probable a difference from the first row so large is by chance (paired tests)[/]")
