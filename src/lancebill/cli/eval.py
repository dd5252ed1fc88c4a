"""`lancebill eval`: compare variants of a model by perplexity and accuracy, with significance tests."""

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
            "--variant",
            help="weights/activations/backend/rest, the last three optional; 'stored' keeps the weights. Repeatable.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="Measure perplexity on this text file.")] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help="Measure exact match on these questions (JSON lines like GSM8K).")
    ] = None,
    examples: Annotated[Path | None, typer.Option("--examples", help="Questions for the few-shot prompt.")] = None,
    shots: Annotated[int, typer.Option("--shots", min=0, help="Number of few-shot examples.")] = 5,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N questions.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--text-tokens", min=2, help="Use only the first N tokens of the text.")
    ] = None,
    window: Annotated[int, typer.Option("--window", min=2, help="Context of a prediction, in tokens.")] = 1024,
    stride: Annotated[int, typer.Option("--stride", min=1, help="Tokens from one window to the next.")] = 512,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Maximum tokens per answer.")] = 256,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows or questions per batch.")] = 1,
    answers: Annotated[
        Path | None, typer.Option("--answers", help="Write every answer to this file, as a JSON line.")
    ] = None,
    revision: ui.Revision = None,
    device: models.Device = "cpu",
    dtype: models.Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure perplexity and exact match of variants of a model; test each against the first variant."""
    with ui.reported(as_json):
        if text is None and questions is None:
            raise SpecError("nothing to evaluate on", hint="give --text, --questions, or both")
        for file in filter(None, (text, questions, examples)):
            ui.existing(file, as_json)
        ui.check_path(path, as_json)
        chosen = _checked(variants or ["stored"], device, dtype)
        path = ui.located(path, revision, as_json)
        with _answer_log(answers) as log:
            options: dict[str, Any] = {
                "window": window, "stride": stride, "max_text_tokens": max_tokens, "answer_tokens": answer_tokens,
                "batch": batch, "on_answer": log,
            }  # fmt: skip
            rows = _evaluate_variants(path, chosen, text, questions, examples, shots, limit, device, dtype, options)
    if as_json:
        given = {"text": text, "questions": questions, "examples": examples}
        used: dict[str, Any] = {name: None if file is None else file.name for name, file in given.items()}
        used |= {"shots": shots, "limit": limit, "window": window, "stride": stride, "answer_tokens": answer_tokens}
        used |= {"batch": batch}
        ui.print_json({"path": str(path), "options": used, "machine": describe(), "variants": rows})
    else:
        _show(rows, ui.console())


def _checked(variants: list[str], device: str, dtype: str) -> list[Variant]:
    """The variants; raises for a wrong one before a model is downloaded or loaded."""
    from lancebill.evaluate.run import Variant

    parsed = [Variant.parse(variant) for variant in variants]
    for variant in parsed:
        models.check_options(device=device, dtype=dtype, **_options(variant))
    return parsed


def _options(variant: Variant) -> dict[str, Any]:
    weights = models.with_rest(variant.weights, variant.rest)
    return {"weights": weights, "activations": variant.activations, "backend": variant.backend}


def _evaluate_variants(
    path: Path,
    variants: list[Variant],
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
    from lancebill.evaluate.run import evaluate as evaluate_model
    from lancebill.numbers.torch_defaults import torch_defaults

    loaded: list[dict[str, Any]] = []

    def load(variant: Variant) -> tuple[Any, Any]:
        model, tokenizer = models.load(path, device=device, dtype=dtype, **_options(variant))
        if body is not None:
            _check_window(model, tokenizer, body, options)
        models.announce(path, model, ui.console(error=True))
        loaded.append(models.describe(model))
        return model, tokenizer

    test_questions = read_questions(questions)[:limit] if questions is not None else []
    few_shot = read_questions(examples)[:shots] if examples is not None else []
    body = None if text is None else read_text(text)
    with ui.progress("evaluating", 0) as advance, torch_defaults():
        results = evaluate_model(
            load, variants, text=body, questions=test_questions, examples=few_shot, progress=advance, **options
        )
    for result, description in zip(results, loaded):
        result.how = description
    return [result.describe(results[0]) for result in results]


def _check_window(model: Any, tokenizer: Any, text: str, options: dict[str, Any]) -> None:
    """Raise if a window would be longer than what the model was trained for: its perplexity would mean nothing."""
    from lancebill.serving.context import longest_context

    window, context = options["window"], longest_context(model.config)
    if window > context:
        tokens = len(tokenizer(text)["input_ids"])
        if min(window, tokens, options["max_text_tokens"] or tokens) > context:
            what = "the window is longer than the model's context"
            raise SpecError(what, where="--window", expected=f"at most {context:,} tokens", got=f"{window:,}")


@contextmanager
def _answer_log(file: Path | None) -> Iterator[Callable[[Variant, Question, str], None]]:
    """Yields a function that writes each answer to `file` at once, so that an interrupted run keeps them."""
    if file is None:
        yield lambda *_: None
        return
    with file.open("w", encoding="utf-8") as out:

        def write_answer(variant: Variant, question: Question, answer: str) -> None:
            row = {"variant": str(variant), "question": question.text, "right": question.answer, "answer": answer}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()

        yield write_answer


def _show(rows: list[dict[str, Any]], out: Console) -> None:
    measures = [name for name in ("perplexity", "strict", "flexible") if name in rows[0]]
    table = ui.table("variant", ">experts", *(column for name in measures for column in (f">{name}", ">p")))
    for row in rows:
        cells = []
        for name in measures:
            value, error, p = row[name]["value"], row[name]["stderr"], row[name].get("p")
            cell = f"{value:.3f} ± {error:.3f}" if name == "perplexity" else f"{value:.1%} ± {error:.1%}"
            cells += [cell, "" if p is None else f"{p:.3g}"]
        table.add_row(row["variant"], ui.size(row["expert_bytes"]), *cells)
    out.print(table)
    if len(rows) > 1:
        out.print(
            "[dim]p: probability of a difference from the first row at least this large by chance (paired test)[/]"
        )
