"""`make demo`: build a mixture of experts from a language model, quantise it, ask it, and measure it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import typer
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.convert import run_conversion, target_of
from lancebill.demo.narrate import heading, note, run_command
from lancebill.demo.package import FILE, PACKAGE, cache_folder, create_folder, weights_file
from lancebill.demo.text import QUESTIONS
from lancebill.errors import CheckpointError


def main() -> None:
    """Build a mixture of experts from a language model, quantise it, ask it questions, and measure it."""
    folder = cache_folder()
    with ui.reported(as_json=False):
        if find_spec("transformers") is None:
            _use_generated_model("transformers is not installed (pip install 'lancebill[transformers]')")
            return
        try:
            model, small = prepare(folder)
        except CheckpointError as error:
            _use_generated_model(error.render())
            return
        inspect_model(small)
        answer_questions(small)
        measure_variants(model, folder)


def prepare(folder: Path) -> tuple[Path, Path]:
    """The mixture of experts in bf16 and in MXFP4; the first run creates both."""
    model, small = create_folder(folder) / "bf16", folder / "mxfp4"
    heading(f"SmolLM2-135M-Instruct, from the package {PACKAGE}, as a mixture of experts with the same output:")
    note("each feed-forward matrix is split into 8 experts of 192, all 8 active, without any rounding")
    if not model.exists():
        from lancebill.demo.model import build

        build(weights_file(folder), model)
        (folder / FILE).unlink(missing_ok=True)
    note(f"stored in {folder}")
    heading("Its experts in MXFP4: 4-bit floats with one power-of-two scale per 32.")
    if not small.exists():
        summary = run_conversion(model, small, target_of("mxfp4"), {})
        loss, sizes = summary["loss"]["total"], summary["bytes"]
        note(
            f"{loss['count']:,} weights in {summary['seconds']:.1f} s, RMS error {loss['rms_error']:.1%}, "
            f"{ui.size(sizes['before'])} to {ui.size(sizes['after'])} with all other tensors in bf16"
        )
    return model, small


def inspect_model(small: Path) -> None:
    run_command("inspect", small)
    heading("Which backend runs them on this machine, and why the others do not.")
    run_command("explain", small)


def answer_questions(small: Path) -> None:
    """Ask the quantised model and stream its answers."""
    from transformers.utils import logging

    from lancebill.integrations.transformers.loaders import load_tokenizer
    from lancebill.integrations.transformers.pretrained import from_pretrained
    from lancebill.integrations.transformers.streaming import chat_prompt, generate_streamed

    logging.disable_progress_bar()
    tokenizer = load_tokenizer(small)
    model = from_pretrained(small, dtype=torch.float32, activations="bf16")
    heading(f"Ask it: MXFP4 experts on {model.lancebill_reports()[0].choice.backend.name}.")
    out = ui.console()
    for question in QUESTIONS:
        out.print(f"\n[green]>[/] [bold]{escape(question)}[/]")
        reply = generate_streamed(model, tokenizer, chat_prompt(tokenizer, question), write=_stream, max_new_tokens=48)
        out.print(f"\n[dim]{reply}; {model.lancebill_decoding}[/]")


def measure_variants(model: Path, folder: Path) -> None:
    from lancebill.demo.variants import TOKENS, WINDOW, measured_rows, variants

    heading("Perplexity and speed of each weight and activation format (batch 1).")
    table = ui.table("weights", "activations", "backend", ">experts", ">perplexity", ">± stderr", ">tokens/s")
    with ui.progress("variants", len(variants())) as advance:
        rows = measured_rows(model, folder / "table.json", advance)
    for row in rows:
        cells = f"{row.megabytes:.0f} MB", f"{row.perplexity:.2f}", f"{row.stderr:.2f}", f"{row.tokens_per_second:.1f}"
        table.add_row(row.weights, row.activations, row.backend, *cells)
    out = ui.console()
    out.print()
    out.print(table)
    note(f"perplexity on {WINDOW} tokens of a story that is part of lancebill; tokens/s over only {TOKENS} tokens")
    note("measured on this machine; the next run reuses the figures")


def _use_generated_model(why: str) -> None:
    """Show the same commands on a small generated model."""
    import tempfile

    from lancebill.demo.generated import run_tour

    ui.console().print(f"[yellow]No language model:[/] {escape(why)}", soft_wrap=True)
    ui.console().print("This demo uses a small generated model instead.", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="lancebill-demo-") as folder:
        run_tour(Path(folder))


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
