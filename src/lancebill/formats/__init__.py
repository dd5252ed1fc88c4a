"""The registry of checkpoint formats.

Each module of this folder that defines `FORMAT` is a format; other packages add theirs through the
entry point group `lancebill.formats`. Nothing is listed by hand.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from importlib.metadata import entry_points

from lancebill.errors import UnsupportedFormat
from lancebill.formats.base import Config, Format

ENTRY_POINTS = "lancebill.formats"


@lru_cache(maxsize=1)
def registry() -> dict[str, Format]:
    """All formats by name."""
    found: dict[str, Format] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        candidate = vars(module).get("FORMAT")
        if isinstance(candidate, Format):
            _add(found, candidate)
    for point in entry_points(group=ENTRY_POINTS):
        candidate = point.load()
        if not isinstance(candidate, Format):
            raise UnsupportedFormat("an entry point must name a Format", where=point.value)
        _add(found, candidate)
    return dict(sorted(found.items()))


def detect(config: Config) -> Format:
    """The one format that matches, or an error that lists what was found."""
    matching = [f for f in registry().values() if f.matches(config)]
    if len(matching) == 1:
        return matching[0]
    method = repr(config.method)
    if not matching:
        raise UnsupportedFormat(
            f"no format reads quant_method {method}",
            where=config.source,
            expected=f"one of {', '.join(registry())}",
            got=f"keys {', '.join(sorted(config.quant)) or 'none'}",
        )
    names = ", ".join(f.name for f in matching)
    raise UnsupportedFormat(f"more than one format claims quant_method {method}: {names}", where=config.source)


def _add(found: dict[str, Format], candidate: Format) -> None:
    if candidate.name in found:
        raise UnsupportedFormat(f"two formats are called '{candidate.name}'")
    found[candidate.name] = candidate
