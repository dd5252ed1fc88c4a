"""torchao (`quant_method: torchao`): tensor subclasses, stored as plain tensors next to each other.

`weight` becomes `_weight_qdata`, `_weight_scale` and `_weight_zero_point`; the stacked `gate_up_proj` becomes
`_gate_up_proj_qdata` and so on. The config is a tree of class names and arguments, of which only JSON is read; one
entry may stand for each module. Layouts that serve one kernel only (tile-packed, preshuffled) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import UnsupportedFormat
from lancebill.formats._floats import FloatScheme, scale_part, skip_list, stored_as, stores_plain_floats, to_level
from lancebill.formats._integers import PlainInts
from lancebill.formats._patterns import compile_pattern
from lancebill.formats.base import (
    BIAS,
    FLOAT_TYPES,
    FLOATS,
    Config,
    Example,
    Format,
    Module,
    Part,
    Scheme,
    checked,
    codes_of,
    dense,
    part,
    require,
)
from lancebill.numbers.bit_packing import Nibbles, pack_bits
from lancebill.numbers.dtypes import F32, DType, biased_type
from lancebill.numbers.spec import (
    CHANNEL,
    FP8_CHANNEL,
    TENSOR,
    ActivationSpec,
    Block,
    QuantSpec,
    Scale,
    fp8_spec,
    group,
    int_spec,
)
from lancebill.numbers.weight import LogicalWeight

METHOD = "torchao"
CODES, SCALE, ZERO, PRE_SCALE = (
    (f"._weight_{name}", f"_{name}") for name in ("qdata", "scale", "zero_point", "act_pre_scale")
)
TABLES = {"FqnToConfig": "fqn_to_config", "ModuleFqnToConfig": "module_fqn_to_config"}  # one config per module
BY_NAME = ("fqn_to_config", "module_fqn_to_config")
DEFAULT = "_default"
WHOLE: dict[str, Block] = {"PerTensor": TENSOR, "PerRow": CHANNEL, "PerAxis": CHANNEL}
INT8_ROWS = ActivationSpec(int_spec(8, CHANNEL, scale=F32))


@dataclass(frozen=True)
class Kind:
    """What a config class stores, and the number format of its inputs."""

    stored: str  # FP8, INT4 or INTS
    inputs: ActivationSpec | None = None


FP8, INT4, INTS = "fp8", "int4", "integers"
KINDS = {
    "Float8WeightOnlyConfig": Kind(FP8),
    "Float8DynamicActivationFloat8WeightConfig": Kind(FP8, ActivationSpec(FP8_CHANNEL)),
    "Int4WeightOnlyConfig": Kind(INT4),
    "Float8DynamicActivationInt4WeightConfig": Kind(INT4, ActivationSpec(FP8_CHANNEL)),
    "Int8WeightOnlyConfig": Kind(INTS),
    "Int8DynamicActivationInt8WeightConfig": Kind(INTS, INT8_ROWS),
    "IntxWeightOnlyConfig": Kind(INTS),
    "Int8DynamicActivationIntxWeightConfig": Kind(INTS),  # its inputs have zero points, which no kernel here has
}
PACKINGS = {"int4_packing_format": ("PLAIN",), "intx_packing_format": ("UNPACKED_TO_INT8",)}


@dataclass(frozen=True)
class Int4Scheme(Scheme):
    """Signed nibbles along K; `scale` and `zero_point` [K/g, N]. A weight is code * scale + zero_point."""

    batched = True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        lead, level = self.lead(stored), self.spec.scales[0]
        scale, zero = (to_level(stored[role].mT.contiguous(), level, n, k, lead) for role in ("scale", "minimum"))
        return LogicalWeight(self.spec, Nibbles(codes_of(stored["codes"]) ^ 0x88), (scale,), minimum=(-zero,))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        return {
            "codes": (pack_bits(weight.codes, 4, torch.uint8) ^ 0x88).view(torch.int8),
            "scale": weight.scales[0].t().contiguous(),
            "minimum": -weight.minimum[0].t().contiguous(),
        }


def int4_scheme(size: int, scale: str) -> Int4Scheme:
    level, axes = Scale(FLOAT_TYPES[scale], group(size)), f"k/{size} n"
    return Int4Scheme(
        QuantSpec(biased_type(4), (level,), None, (level,)),
        (
            part("codes", CODES, ("I8", "U8"), "n k^", bits=4),
            part("scale", SCALE, scale, axes),
            part("minimum", ZERO, scale, axes),
            part("pre_quant_scale", PRE_SCALE, FLOATS, "k", optional=True),
            BIAS,
        ),
    )


def fp8_scheme(block: Block, scale: DType) -> FloatScheme:
    spec = fp8_spec(block, scale=scale)
    return FloatScheme(spec, (part("codes", CODES, "F8_E4M3", "n k"), _scale_part(spec.scales[0]), BIAS))


def integer_scheme(bits: int, block: Block, scale: DType, *, zero: bool) -> PlainInts:
    """int8 values; their zero points are stored even where all are 0."""
    spec = int_spec(bits, block, zero_point=zero, scale=scale)
    level = spec.scales[0]
    axes = _scale_part(level).axes
    parts = (
        part("codes", CODES, "I8", "n k"),
        _scale_part(level),
        part("zero", ZERO, "I8", axes, optional=not zero),
        part("pre_quant_scale", PRE_SCALE, FLOATS, "k", optional=True),
        BIAS,
    )
    return PlainInts(spec, parts)


def _scale_part(level: Scale) -> Part:
    """The scale of a whole tensor keeps both axes here."""
    return scale_part("scale", SCALE, level, ("1 1", "", "1") if level.block == TENSOR else ())


class TorchAo(Format):
    name = METHOD
    used = frozenset({"quant_type", "modules_to_not_convert"})
    ignored = frozenset({"include_input_output_embeddings", "untie_embedding_weights", "quant_type_kwargs"})

    def matches(self, config: Config) -> bool:
        return config.method == METHOD

    def scheme(self, config: Config, module: Module) -> Scheme:
        settings = self._settings(config, module)
        if settings is None:
            return dense(module)
        name, arguments = settings
        for key, legal in PACKINGS.items():
            if key in arguments:
                checked(_plain(arguments[key]).upper(), f"{name}.{key}", str, legal, config.source)
        scale = stored_as(module, SCALE, FLOATS)
        kind = KINDS[name].stored
        if kind == INT4:
            return int4_scheme(_group_size(arguments, name, config.source), scale)
        block = _block(module, arguments, config.source)
        if kind == FP8:
            e4m3 = "float8_e4m3fn"
            checked(_plain(arguments.get("weight_dtype", e4m3)), f"{name}.weight_dtype", str, (e4m3,), config.source)
            return fp8_scheme(block, FLOAT_TYPES[scale])
        bits = _bits(arguments, name, config.source)
        zero = _plain(arguments.get("mapping_type", arguments.get("weight_mapping_type", "SYMMETRIC"))) == "ASYMMETRIC"
        return integer_scheme(bits, block, FLOAT_TYPES[scale], zero=zero)

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        settings = self._settings(config, module)
        return None if settings is None else KINDS[settings[0]].inputs

    def _settings(self, config: Config, module: Module) -> tuple[str, Mapping[str, Any]] | None:
        """(config class, arguments) of a module; None if it is not quantised, as the stored tensors or names say."""
        skipped = not module.stored and module.name in skip_list(config, "modules_to_not_convert")
        if skipped or stores_plain_floats(module, (*CODES, *SCALE)):
            return None
        found = _find(config, module.name)
        if found is None:
            return None
        name = checked(found.get("_type"), "quant_type._type", str, tuple(KINDS), config.source)
        return name, checked(found.get("_data", {}), f"{name}._data", dict, (), config.source)

    def examples(self) -> Iterator[Example]:
        row = {"granularity": _entry("PerRow", dim=-1)}
        yield _example("fp8-rows", "Float8WeightOnlyConfig", row, fp8_scheme(CHANNEL, F32))
        both = {"granularity": [_entry("PerTensor"), _entry("PerTensor")]}
        yield _example("fp8-tensor", "Float8DynamicActivationFloat8WeightConfig", both, fp8_scheme(TENSOR, F32))
        blocks = {"granularity": _entry("PerBlock", block_size=[128, 128])}
        yield _example("fp8-blocks", "Float8WeightOnlyConfig", blocks, fp8_scheme((128, 128), F32), n=256)
        yield _example("int8", "Int8WeightOnlyConfig", row, integer_scheme(8, CHANNEL, F32, zero=False))
        for bits, symmetric in ((4, True), (3, False)):
            arguments = {
                "weight_dtype": _entry("torch.dtype", f"int{bits}"),
                "granularity": _entry("PerGroup", group_size=32),
                "mapping_type": _entry("MappingType", "SYMMETRIC" if symmetric else "ASYMMETRIC"),
                "intx_packing_format": _entry("IntxPackingFormat", "UNPACKED_TO_INT8"),
            }
            scheme = integer_scheme(bits, group(32), FLOAT_TYPES["BF16"], zero=not symmetric)
            yield _example(f"int{bits}", "IntxWeightOnlyConfig", arguments, scheme)
        plain = {"group_size": 64, "int4_packing_format": _entry("Int4PackingFormat", "PLAIN")}
        yield _example("int4-plain", "Int4WeightOnlyConfig", plain, int4_scheme(64, "BF16"), bias=True)


@lru_cache(maxsize=1 << 14)
def _find(config: Config, name: str) -> Mapping[str, Any] | None:
    """The entry of a module: the only one, or in a table by its name, by a regular expression, or by default."""
    types = require(config, "quant_type", dict)
    entry = checked(types.get("default"), "quant_type.default", dict, (), config.source)
    key = TABLES.get(str(entry.get("_type")))
    if key is None:
        return dict(entry)
    arguments = checked(entry.get("_data"), "quant_type.default._data", dict, (), config.source)
    table = next((arguments[k] for k in (key, *BY_NAME) if arguments.get(k)), None)
    entries = checked(table, key, dict, (), config.source)
    found = next((n for n in (f"{name}.weight", name) if n in entries), None) or next(
        (
            n
            for n in entries
            if n.startswith("re:")
            and any(compile_pattern(f"(?:{n[3:]})$", key, config.source).match(m) for m in (f"{name}.weight", name))
        ),
        DEFAULT,
    )
    chosen = entries.get(found)
    return None if chosen is None else dict(checked(chosen, f"{key}.{found}", dict, (), config.source))


def _plain(value: Any) -> str:
    """The value of an entry like {"_type": "MappingType", "_data": "SYMMETRIC"}, or a plain string."""
    value = value.get("_data") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def _group_size(arguments: Mapping[str, Any], name: str, source: str) -> int:
    size = arguments.get("group_size")
    legal = (32, 64, 128, 256)
    return int(checked(128 if size is None else size, f"{name}.group_size", int, legal, source))


def _bits(arguments: Mapping[str, Any], name: str, source: str) -> int:
    legal = tuple(f"int{bits}" for bits in range(1, 9))
    return int(checked(_plain(arguments.get("weight_dtype", "int8")), f"{name}.weight_dtype", str, legal, source)[3:])


def _block(module: Module, arguments: Mapping[str, Any], source: str) -> Block:
    """The block of a scale, by the granularity in the config: of the weight, where there are two."""
    given = arguments.get("weight_granularity") or arguments.get("granularity")
    given = given[-1] if isinstance(given, list) and given else given
    if given is None:
        scale = next((module.stored[s] for s in SCALE if module.has(s)), None)
        return TENSOR if scale is not None and scale.shape[-2:] in ((), (1,), (1, 1)) else CHANNEL
    entry = checked(given, "granularity", dict, (), source)
    name = checked(entry.get("_type"), "granularity._type", str, (*WHOLE, "PerGroup", "PerBlock"), source)
    if name in WHOLE:
        return WHOLE[name]
    data = checked(entry.get("_data"), f"{name}._data", dict, (), source)
    sides = (1, data.get("group_size")) if name == "PerGroup" else data.get("block_size")
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(type(s) is int and s > 0 for s in sides):
        raise UnsupportedFormat(f"the size of '{name}'", where=source, expected="positive numbers", got=sides)
    return sides[0], sides[1]


def _entry(name: str, data: Any = None, **arguments: Any) -> dict[str, Any]:
    return {"_type": name, "_data": arguments if data is None else data}


def _example(name: str, config: str, arguments: Mapping[str, Any], scheme: Scheme, **options: Any) -> Example:
    quant = {"quant_method": METHOD, "quant_type": {"default": _entry(config, dict(arguments))}}
    return Example(name, Config(quant=quant, method=METHOD), scheme, **options)


FORMAT = TorchAo()
