"""How many tokens a prompt and its answer may have together."""

from __future__ import annotations

import sys
from typing import Any


def longest_context(config: Any) -> int:
    """The positions of a model, `sys.maxsize` if its config does not say.

    YaRN adds to them. `max_position_embeddings` counts what it adds only if its author raised that number too.
    """
    values = config.get_text_config().to_dict()
    stored = values.get("max_position_embeddings")
    if not isinstance(stored, int):
        return sys.maxsize
    rotary = values.get("rope_parameters") or {}
    if rotary.get("rope_type") != "yarn":
        return stored
    original = rotary.get("original_max_position_embeddings") or stored
    return max(stored, int(original * (rotary.get("factor") or 1)))
