"""The story `make demo` tells: a model is built, quantised, looked at, spoken with, and measured."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import typer
from rich.markup import escape
from rich.rule import Rule

from lancebill.cli import console as ui
from lancebill.cli.convert import run, target_of
from lancebill.cli.main import app
from lancebill.demo.package import FILE, PACKAGE, cache_folder, made, weights_file
from lancebill.demo.text import QUESTIONS
from lancebill.errors import CheckpointError


def main() -> None:
    """Build a mixture of experts from a real language model, quantise it, look at it, ask it, measure it."""
    folder = cache_folder()
    with ui.reported(as_json=False):
        if find_spec("transformers") is None:
            _instead("transformers is not installed (pip install 'lancebill[transformers]')")
            return
        try:
            model, small = prepare(folder)
        except CheckpointError as error:
            _instead(error.render())
            return
        show(model, small)
        answer(small)
        measure(model, folder)


def prepare(folder: Path) -> tuple[Path, Path]:
    """The mixture of experts and its MXFP4 form, made on the first run."""
    model, small = made(folder) / "bf16", folder / "mxfp4"
    _say(f"SmolLM2-135M-Instruct, from the package {PACKAGE}, as a mixture of experts with the same output:")
    _note("each feed-forward matrix cut into 8 experts of 192, all 8 active, nothing rounded on the way")
    if not model.exists():
        from lancebill.demo.model import build

        build(weights_file(folder), model)
        (folder / FILE).unlink(missing_ok=True)
    _note(f"kept in {folder}")
    _say("Its experts in MXFP4: 4-bit floats, a shared power of two for 32 of them.")
    if not small.exists():
        done = run(model, small, target_of("mxfp4"), {})
        loss, sizes = done["loss"]["total"], done["bytes"]
        _note(
            f"{loss['count']:,} weights in {done['seconds']:.1f} s, RMS error {loss['rms_error']:.1%}, "
            f"{ui.size(sizes['before'])} to {ui.size(sizes['after'])} with everything else left in bf16"
        )
    return model, small


def show(model: Path, small: Path) -> None:
    _lancebill("inspect", small)
    _say("Which backend computes them here, and why not the others.")
    _lancebill("explain", small)


def answer(small: Path) -> None:
    """Questions to the quantised model, answered as the tokens come."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from lancebill.integrations.transformers.pretrained import from_pretrained
    from lancebill.integrations.transformers.streaming import chat_prompt, speak

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(small)
    model = from_pretrained(small, dtype=torch.float32, activations="bf16")
    _say(f"It speaks: MXFP4 experts on {model.lancebill_reports()[0].choice.backend.name}.")
    out = ui.console()
    for question in QUESTIONS:
        out.print(f"\n[green]>[/] [bold]{escape(question)}[/]")
        said = speak(model, tokenizer, chat_prompt(tokenizer, question), write=_stream, max_new_tokens=48)
        out.print(f"\n[dim]{said}[/]")


def measure(model: Path, folder: Path) -> None:
    from lancebill.demo.variants import WINDOW, rows, variants

    _say("What each way to hold the experts costs, and how fast it speaks (batch 1).")
    table = ui.table("weights", "activations", "backend", ">experts", ">perplexity", ">± stderr", ">tokens/s")
    with ui.progress("variants", len(variants())) as advance:
        found = rows(model, folder / "table.json", advance)
    for row in found:
        cells = f"{row.megabytes:.0f} MB", f"{row.perplexity:.2f}", f"{row.stderr:.2f}", f"{row.tokens_per_second:.1f}"
        table.add_row(row.weights, row.activations, row.backend, *cells)
    out = ui.console()
    out.print()
    out.print(table)
    _note(f"perplexity on {WINDOW} tokens of a story that comes with lancebill")
    _note("figures of this machine, kept for the next run")


def _instead(why: str) -> None:
    """Without the real model: the same tools on a small generated one."""
    import tempfile

    from lancebill.testing.demo import demo

    ui.console().print(f"[yellow]No language model here:[/] {escape(why)}", soft_wrap=True)
    ui.console().print("So here is a tour with a small generated model.", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="lancebill-demo-") as folder:
        demo(Path(folder))


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    out = ui.console()
    out.print()
    out.print(Rule(style="dim"))
    out.print(f"[bold]{escape(text)}[/]", soft_wrap=True)


def _note(text: str) -> None:
    ui.console().print(f"[dim]{escape(text)}[/]", soft_wrap=True)


def _lancebill(*words: object) -> None:
    shown = " ".join(word.name if isinstance(word, Path) else str(word) for word in words)
    ui.console().print(f"\n[green]$[/] [bold]lancebill {escape(shown)}[/]", soft_wrap=True)
    app([str(word) for word in words], standalone_mode=False)


if __name__ == "__main__":
    typer.run(main)
