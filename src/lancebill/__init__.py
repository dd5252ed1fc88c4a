"""lancebill: quantised Mixture-of-Experts layers for LLM inference.

    layer = lancebill.RoutedExperts.from_checkpoint("path/to/model", layer=3)
    y = layer(x, topk_ids=ids, topk_weights=weights)

Most users need only these names. Each is imported when it is first used, so that `import lancebill` is fast,
does not initialise CUDA, and needs no optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lancebill import errors as errors

if TYPE_CHECKING:
    from lancebill.backends.oracle import explain as explain
    from lancebill.checkpoint.read.files import Checkpoint as Checkpoint
    from lancebill.layer.from_tensors import ExpertTensors as ExpertTensors
    from lancebill.layer.model_experts import ModelExperts as ModelExperts
    from lancebill.layer.quantized_linear import QuantizedLinear as QuantizedLinear
    from lancebill.layer.reserve import reserve as reserve
    from lancebill.layer.routed_experts import RoutedExperts as RoutedExperts
    from lancebill.moe.placement import Placement as Placement
    from lancebill.moe.problem import Problem as Problem
    from lancebill.numbers.dtypes import DType as DType
    from lancebill.numbers.spec import QuantSpec as QuantSpec
    from lancebill.numbers.spec_names import parse_spec as parse_spec

_HOMES = {
    "Checkpoint": "lancebill.checkpoint.read.files",
    "DType": "lancebill.numbers.dtypes",
    "ExpertTensors": "lancebill.layer.from_tensors",
    "ModelExperts": "lancebill.layer.model_experts",
    "Placement": "lancebill.moe.placement",
    "Problem": "lancebill.moe.problem",
    "QuantSpec": "lancebill.numbers.spec",
    "QuantizedLinear": "lancebill.layer.quantized_linear",
    "RoutedExperts": "lancebill.layer.routed_experts",
    "explain": "lancebill.backends.oracle",
    "parse_spec": "lancebill.numbers.spec_names",
    "reserve": "lancebill.layer.reserve",
}
__all__ = [*_HOMES, "errors", "from_pretrained"]


def from_pretrained(path: Any, **options: Any) -> Any:
    """A transformers model whose experts stay packed; see `lancebill.integrations.transformers.pretrained`."""
    try:
        from lancebill.integrations.transformers.pretrained import from_pretrained
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise errors.UnsupportedProblem(
            "transformers is not installed", hint="pip install 'lancebill[transformers]'"
        ) from None
    return from_pretrained(path, **options)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lancebill' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
