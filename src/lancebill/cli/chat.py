"""`lancebill chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import typer
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli import models
from lancebill.cli.answering import (
    Answering,
    AnswerOptions,
    Temperature,
    TopK,
    TopP,
    accept_any_bytes,
    check_text,
    typed_lines,
)
from lancebill.cli.option_groups import with_options
from lancebill.errors import SpecError

HELP = "Enter sends; Ctrl-C stops an answer; /clear starts again; /quit or Ctrl-D ends."


@with_options(models.ModelOptions)
def chat(
    path: models.Model,
    system: Annotated[str | None, typer.Option("--system", help="A system message.", show_default=False)] = None,
    tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum new tokens of an answer.")] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    *,
    options: models.ModelOptions,
) -> None:
    """Talk to a model; it sees the whole conversation."""
    with ui.reported(as_json=False):
        wanted = AnswerOptions(tokens, temperature, top_p, top_k)
        check_text(system or "")
        path, model, tokenizer = models.open_model(path, options, as_json=False)
        if tokenizer.chat_template is None:
            raise SpecError("this model has no chat template", where=str(path), hint="lancebill generate PATH --raw")
        out = ui.console(error=True)
        models.announce(path, model, out)
        out.print(f"[dim]{HELP}[/]")
        opening = [] if system is None else [{"role": "system", "content": system}]
        _talk(Answering(model, tokenizer, seed), opening, wanted)


def _talk(answering: Answering, opening: list[dict[str, str]], wanted: AnswerOptions) -> None:
    messages, out = list(opening), ui.console(error=True)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/clear":
            messages = list(opening)
            continue
        if re.fullmatch(r"/\w*", line):
            out.print(f"no such command: {escape(line)}; {HELP}")
            continue
        messages.append({"role": "user", "content": line})
        try:
            check_text(line)
            messages.append({"role": "assistant", "content": _answer(answering, messages, wanted)})
        except SpecError as error:  # the conversation is too long, or the chat template refuses it
            messages.pop()
            ui.print_error(error, out)


def _answer(answering: Answering, messages: list[dict[str, str]], wanted: AnswerOptions) -> str:
    """Print an answer as it is generated; what was printed until Ctrl-C is the answer too."""
    from lancebill.integrations.transformers.streaming import chat_prompt

    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        reply = answering.answer(chat_prompt(answering.tokenizer, messages), wanted, write)
        ending = f"[dim]{reply}[/]"
    except KeyboardInterrupt:
        ending = "[dim]stopped[/]"
    sys.stdout.write("\n")
    sys.stdout.flush()
    ui.console(error=True).print(ending)
    return "".join(pieces)


def _lines() -> Iterator[str]:
    """What is typed, line by line, with the arrow keys' history in a terminal; or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from typed_lines()
        return
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  (input() uses it)
    accept_any_bytes()
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        if line:
            yield line
