"""Every backend: the modules of this folder that define `BACKEND`, and the entry points of `lancebill.backends`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from importlib.metadata import entry_points

from lancebill import backends
from lancebill.backends.base import Backend
from lancebill.errors import UnsupportedProblem

ENTRY_POINTS = "lancebill.backends"


@lru_cache(maxsize=1)
def registry() -> dict[str, Backend]:
    """All backends by name."""
    found: dict[str, Backend] = {}
    candidates = [
        getattr(importlib.import_module(f"{backends.__name__}.{info.name}"), "BACKEND", None)
        for info in pkgutil.iter_modules(backends.__path__)
    ]
    candidates += [point.load() for point in entry_points(group=ENTRY_POINTS)]
    for candidate in candidates:
        if not isinstance(candidate, Backend):
            continue
        if candidate.name in found:
            raise UnsupportedProblem(f"two backends are called '{candidate.name}'")
        found[candidate.name] = candidate
    return dict(sorted(found.items()))
