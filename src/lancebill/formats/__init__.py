"""The registry of checkpoint formats.

Each module of this package that defines `FORMAT` is a format. Other packages add formats through the
entry point group `lancebill.formats`. There is no list to maintain.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from importlib.metadata import entry_points

from lancebill.errors import UnsupportedFormat
from lancebill.formats.base import Config, Format

ENTRY_POINTS = "lancebill.formats"

# Methods whose weights are not one code each with scales, and why.
REFUSED = {
    "exl3": "a weight is decoded from 16 bits of a stream that neighbours share (a trellis), and inputs are rotated",
    "exl2": "rows are permuted and each group of them has its own number of bits",
    "aqlm": "a code stands for a vector of several weights",
    "vptq": "a code stands for a vector of several weights",
    "higgs": "a code stands for a vector of several weights, and inputs are rotated",
    "spqr": "outliers are stored apart, as a sparse matrix",
    "fastdeploy": "PaddlePaddle stores codes in layouts of its own",
    "fp_quant": "weights are rotated by a Hadamard matrix, so inputs must be rotated too",
}


@lru_cache(maxsize=1)
def registry() -> dict[str, Format]:
    """All formats by name."""
    formats: dict[str, Format] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        candidate = getattr(module, "FORMAT", None)
        if isinstance(candidate, Format):
            _add(formats, candidate)
    for point in entry_points(group=ENTRY_POINTS):
        candidate = point.load()
        if not isinstance(candidate, Format):
            raise UnsupportedFormat("an entry point must name a Format", where=point.value)
        _add(formats, candidate)
    return dict(sorted(formats.items()))


def detect(config: Config) -> Format:
    """The format that matches the config; raises if none or several match."""
    matching = [f for f in registry().values() if f.matches(config)]
    if len(matching) == 1:
        return matching[0]
    method = repr(config.method)
    if not matching and config.method in REFUSED:
        raise UnsupportedFormat(
            f"quant_method {method} is not supported: {REFUSED[config.method]}",
            where=config.source,
            hint="use a checkpoint in another format",
        )
    if not matching:
        raise UnsupportedFormat(
            f"no format supports quant_method {method}",
            where=config.source,
            expected=f"one of {', '.join(registry())}",
            got=f"keys {', '.join(sorted(config.quant)) or 'none'}",
            hint="use a checkpoint in one of these formats",
        )
    names = ", ".join(f.name for f in matching)
    raise UnsupportedFormat(f"more than one format matches quant_method {method}: {names}", where=config.source)


def _add(formats: dict[str, Format], candidate: Format) -> None:
    if candidate.name in formats:
        raise UnsupportedFormat(f"two formats have the name '{candidate.name}'")
    formats[candidate.name] = candidate
