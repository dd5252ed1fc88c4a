"""The checkpoints of real tools by format, for docs/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools import ENOUGH

from lancebill.formats import registry

HEAD = f"""\
## Checkpoints of real tools

R7 by format: who wrote the checkpoints and decoded them, and how many. The target is {ENOUGH} for each format;
[checkpoints of other tools](guides/tools.md) says what was tried, and why a format has none.

| format | checkpoints | tools |
|---|---|---|"""


def section(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table, from the newest record of each machine."""
    tools: dict[str, dict[str, int]] = {}
    for _, record in sorted(runs.items()):
        tools |= record.get("details", {}).get("tools", {})
    return [HEAD, *(_row(name, tools) for name in sorted(registry())), ""]


def _row(name: str, tools: Mapping[str, Mapping[str, int]]) -> str:
    found = {tool: counts[name] for tool, counts in sorted(tools.items()) if counts.get(name)}
    each = ", ".join(f"{tool} {count}" for tool, count in found.items())
    return f"| {name} | {sum(found.values())} | {each or 'none'} |"
