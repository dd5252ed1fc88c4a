"""colibri: quantised Mixture-of-Experts layers for LLM inference.

    layer = colibri.RoutedExperts.from_checkpoint("path/to/model", layer=3)
    y = layer(x, topk_ids=ids, topk_weights=weights)

These few names are all most users need. They are loaded when first used, so that `import colibri`
costs nothing, touches no GPU and needs none of the optional packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from colibri import errors as errors

if TYPE_CHECKING:
    from colibri.checkpoint.files import Checkpoint as Checkpoint
    from colibri.checkpoint.placement import Placement as Placement
    from colibri.dtypes import DType as DType
    from colibri.grammar import parse_spec as parse_spec
    from colibri.layer import QuantizedLinear as QuantizedLinear
    from colibri.layer import RoutedExperts as RoutedExperts
    from colibri.oracle import explain as explain
    from colibri.problem import Problem as Problem
    from colibri.quant import QuantSpec as QuantSpec

_HOMES = {
    "Checkpoint": "colibri.checkpoint.files",
    "DType": "colibri.dtypes",
    "Placement": "colibri.checkpoint.placement",
    "Problem": "colibri.problem",
    "QuantSpec": "colibri.quant",
    "QuantizedLinear": "colibri.layer",
    "RoutedExperts": "colibri.layer",
    "explain": "colibri.oracle",
    "parse_spec": "colibri.grammar",
}
__all__ = [*_HOMES, "errors", "from_pretrained"]


def from_pretrained(path: Any, **options: Any) -> Any:
    """A transformers model whose experts stay packed; see `integrations.transformers.from_pretrained`."""
    try:
        from colibri.integrations.transformers import from_pretrained
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise errors.UnsupportedProblem(
            "transformers is not installed", hint="pip install 'colibri-moe[transformers]'"
        ) from None
    return from_pretrained(path, **options)


def __getattr__(name: str) -> Any:
    """A public name, when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'colibri' has no attribute '{name}'")
    value = globals()[name] = vars(import_module(_HOMES[name]))[name]
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
