"""Output of the demo: headings, notes, and commands that are shown before they run."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.rule import Rule

from lancebill.cli import console as ui
from lancebill.cli.main import app


def heading(text: str) -> None:
    out = ui.console()
    out.print()
    out.print(Rule(style="dim"))
    out.print(f"[bold]{escape(text)}[/]", soft_wrap=True)


def note(text: str) -> None:
    ui.console().print(f"[dim]{escape(text)}[/]", soft_wrap=True)


def run_command(*words: object) -> None:
    """Print a `lancebill` command, with paths shortened to their last part, and run it."""
    shown = " ".join(word.name if isinstance(word, Path) else str(word) for word in words)
    ui.console().print(f"\n[green]$[/] [bold]lancebill {escape(shown)}[/]", soft_wrap=True)
    app([str(word) for word in words], standalone_mode=False)
