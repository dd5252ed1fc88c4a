"""From numbers of rows to token tiles. Pure functions; the numbers are in `ampere.json`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from lancebill.backends.gpu.tiles import Rule


@cache
def data() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "ampere.json").read_text(encoding="utf-8")))


def rule(rows: float) -> Rule:
    """The token tiles for this many rows per expert, on average. Launches do not overlap: that needs sm_90."""
    entries = data()["tiles"]
    limits = (entry for entry in entries if entry["rows_up_to"] is None or rows <= entry["rows_up_to"])
    return Rule.parse(next(limits)["tiles"], overlap=False)


def decodes(slots: int) -> bool:
    """Whether there are so few slots that each becomes a tile."""
    return slots <= int(data()["decode_slots"])


def graphed(tokens: int) -> bool:
    """Whether a call's launches are submitted as one CUDA graph. With few tokens the host is the bottleneck."""
    return tokens <= int(data()["graph_tokens"])
