"""`lancebill generate`: stream text from a model whose experts stay packed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from lancebill.cli import console as ui
from lancebill.cli import models
from lancebill.cli.answering import Answering, AnswerOptions, Temperature, TopK, TopP, check_text, typed_lines
from lancebill.cli.console import Json
from lancebill.cli.option_groups import with_options
from lancebill.errors import SpecError


@with_options(models.ModelOptions)
def generate(
    path: models.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; the default is to read prompts from stdin, one per line.")
    ] = None,
    tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum new tokens.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text without a chat template.")] = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    *,
    options: models.ModelOptions,
    as_json: Json = False,
) -> None:
    """Answer a prompt, token by token, and show tokens per second."""
    with ui.reported(as_json):
        wanted = AnswerOptions(tokens, temperature, top_p, top_k)
        check_text(prompt or "")
        path, model, tokenizer = models.open_model(path, options, as_json)
        if not as_json:
            models.announce(path, model, ui.console(error=True))
        answering = Answering(model, tokenizer, seed)
        if prompt is not None:
            answers = [_answer(answering, prompt, raw, as_json, wanted)]
        else:
            answers = _answer_lines(answering, raw, as_json, wanted)
        if as_json:
            ui.print_json({"path": str(path), **models.describe(model), "answers": answers})
        if any("error" in answer for answer in answers):
            raise typer.Exit(ui.PROBLEM)


def _answer_lines(answering: Answering, raw: bool, as_json: bool, wanted: AnswerOptions) -> list[dict[str, Any]]:
    """An answer for each line of stdin; a prompt that is refused, such as a too long one, does not end the others."""
    if sys.stdin.isatty():
        ui.console(error=True).print("[dim]one prompt per line; Ctrl-D ends[/]")
    answers = []
    for line in typed_lines():
        try:
            check_text(line)
            answers.append(_answer(answering, line, raw, as_json, wanted))
        except SpecError as error:
            prompt = line.encode(errors="backslashreplace").decode()  # also where it is not text
            answers.append({"prompt": prompt, "error": ui.facts(error)})
            if not as_json:
                ui.print_error(error, ui.console(error=True))
    return answers


def _answer(answering: Answering, line: str, raw: bool, quiet: bool, wanted: AnswerOptions) -> dict[str, Any]:
    from lancebill.integrations.transformers.streaming import chat_prompt

    tokenizer = answering.tokenizer
    prompt = dict(tokenizer(line, return_tensors="pt")) if raw else chat_prompt(tokenizer, line)
    if not prompt["input_ids"].numel():
        raise SpecError("the tokenizer turns the prompt into no tokens", got=repr(line))
    reply = answering.answer(prompt, wanted, (lambda _: None) if quiet else _stream)
    if not quiet:
        _stream("\n")
        ui.console(error=True).print(f"[dim]{reply}; {answering.how}[/]")
    return {"prompt": line, **asdict(reply)}


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
