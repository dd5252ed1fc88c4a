"""SGLang's int8 checkpoints: `w8a8_int8` has one scale per row, `blockwise_int8` one per block.

Both are made for activations that are quantised to int8 at run time, per row or per group of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lancebill.errors import UnsupportedFormat
from lancebill.formats._floats import WEIGHT, is_unquantized, scale_part
from lancebill.formats._integers import PlainInts
from lancebill.formats._patterns import compile_pattern
from lancebill.formats.base import (
    BIAS,
    FLOAT_TYPES,
    Config,
    Example,
    Format,
    Module,
    Scheme,
    checked,
    dense,
    optional,
    part,
)
from lancebill.formats.fp8 import block_sides
from lancebill.numbers.dtypes import F32
from lancebill.numbers.spec import CHANNEL, ActivationSpec, QuantSpec, group, int_spec

BY_ROW, BY_BLOCK = "w8a8_int8", "blockwise_int8"
SCALE = {BY_ROW: (".weight_scale", "_weight_scale"), BY_BLOCK: (".weight_scale_inv", "_weight_scale_inv")}


def int8_scheme(spec: QuantSpec, method: str) -> PlainInts:
    """`weight` int8 [N, K] and its scales."""
    scale = scale_part("scale", SCALE[method], spec.scales[0])
    return PlainInts(spec, (part("codes", WEIGHT, "I8", "n k"), scale, BIAS))


class Int8(Format):
    name = "int8"
    used = frozenset({"weight_block_size", "activation_scheme", "ignored_layers", "modules_to_not_convert", "ignore"})
    ignored = frozenset({"is_dynamic", "packed_modules_mapping", "kv_cache_scheme"})

    def matches(self, config: Config) -> bool:
        return config.method in SCALE

    def scheme(self, config: Config, module: Module) -> Scheme:
        method = str(config.method)
        if is_unquantized(config, module, SCALE[method]) or _is_ignored(config, module.name):
            return dense(module)
        optional(config, "activation_scheme", str, "dynamic", ("dynamic",))
        block = block_sides(config)
        if method == BY_BLOCK and block is None:
            raise UnsupportedFormat("'weight_block_size' is missing", where=config.source, expected="two sizes")
        scale = FLOAT_TYPES.get(module.dtype(*SCALE[method], default="F32"), F32)
        return int8_scheme(int_spec(8, block if method == BY_BLOCK and block else CHANNEL, scale=scale), method)

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        spec = self.scheme(config, module).spec
        return (
            ActivationSpec(int_spec(8, group(spec.group) if spec.group else CHANNEL, scale=F32))
            if spec.quantized
            else None
        )

    def examples(self) -> Iterator[Example]:
        for stored in ("F32", "BF16"):
            scheme = int8_scheme(int_spec(8, CHANNEL, scale=FLOAT_TYPES[stored]), BY_ROW)
            yield Example(f"rows-{stored}", _config(BY_ROW), scheme, bias=stored == "BF16")
        scheme = int8_scheme(int_spec(8, (128, 96), scale=F32), BY_BLOCK)
        yield Example("blocks", _config(BY_BLOCK, weight_block_size=[128, 96]), scheme, 320, 448)


def _is_ignored(config: Config, name: str) -> bool:
    """Whether `ignore` lists the module by its name or by a regular expression."""
    for entry in optional(config, "ignore", list, []):
        checked(entry, "ignore", str, (), config.source)
        pattern = entry.removeprefix("re:")
        if entry == name or (entry != pattern and compile_pattern(pattern, "ignore", config.source).match(name)):
            return True
    return False


def _config(method: str, **keys: Any) -> Config:
    return Config(quant={"quant_method": method, **keys}, method=method)


FORMAT = Int8()
