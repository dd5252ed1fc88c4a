"""gpt-oss MXFP4 (`quant_method: mxfp4`): blocks of 32 codes in 16 bytes, with one exponent per block.

The rows of the fused gate_up tensors alternate between gate and up; the naming table handles that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lancebill.errors import CannotEncode
from lancebill.formats._floats import FloatScheme, skip_list
from lancebill.formats.base import FLOATS, Config, Example, Format, Loading, Module, Scheme, dense, part
from lancebill.numbers.spec import MXFP4, QuantSpec

_BLOCKS, _SCALES = "_blocks", "_scales"
_SCHEME = FloatScheme(
    MXFP4,
    (
        part("codes", _BLOCKS, "U8", "n k/32 16"),
        part("scale", _SCALES, "U8", "n k/32"),
        part("bias", ("_bias", ".bias"), FLOATS, "n", optional=True),
    ),
)


class GptOssMxfp4(Format):
    name = "mxfp4"
    used = frozenset({"modules_to_not_convert"})
    ignored = frozenset({"dequantize"})
    stacked = True

    def matches(self, config: Config) -> bool:
        return config.method == "mxfp4"

    def scheme(self, config: Config, module: Module) -> Scheme:
        skipped = module.name in skip_list(config, "modules_to_not_convert")
        plain = (module.has("") or module.has(".weight")) and not (module.has(_BLOCKS) or module.has(_SCALES))
        return dense(module) if skipped or plain else _SCHEME

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        if spec != MXFP4:
            raise CannotEncode("gpt-oss checkpoints store MXFP4", expected=MXFP4, got=spec)
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(dense_modules)}, _SCHEME

    def in_transformers(self, spec: QuantSpec) -> Loading:
        return Loading.YES

    def examples(self) -> Iterator[Example]:
        quant = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        yield Example("gpt-oss", Config(quant=quant, method="mxfp4"), _SCHEME, bias=True)


FORMAT = GptOssMxfp4()
