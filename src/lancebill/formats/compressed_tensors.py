"""compressed-tensors: config groups name targets, each with its own arguments and format.

The most specific target wins: a module's name, then a pattern, then the class "Linear", which every
projection has. A module that is ignored, or that the file stores as floats without scales, is
unquantised. NVFP4's global scale is stored as a divisor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats import _ct_schemes as ct
from lancebill.formats._ct_config import (
    FIXED,
    FLOAT,
    INT,
    MIXED,
    NAIVE,
    ONE_LEVEL,
    PACK,
    READ,
    Args,
    ConfigGroup,
    add_group,
    dynamic_args,
    find_group,
    read_group,
    weight_args,
    write_config,
)
from lancebill.formats._ct_transforms import rotated, write_rotation
from lancebill.formats._floats import WEIGHT
from lancebill.formats.base import (
    FLOAT_NAMES,
    FLOAT_TYPES,
    FLOATS,
    Config,
    Example,
    Format,
    Loading,
    Module,
    Part,
    Scheme,
    checked,
    dense,
    optional,
    outside,
    part,
)
from lancebill.numbers.dtypes import BF16, E4M3, F16, F32, ZERO16, DType
from lancebill.numbers.spec import (
    CHANNEL,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXFP6_E2M3,
    MXFP8,
    NVFP4,
    NVFP4_DIV,
    TENSOR,
    ActivationSpec,
    Block,
    QuantSpec,
    fp8_spec,
    group,
    int_spec,
    is_integer,
)


class CompressedTensors(Format):
    name = "compressed-tensors"
    used = frozenset(
        {"format", "config_groups", "ignore", "sparsity_config", "transform_config", "moe_sparsity_config"}
    )
    ignored = frozenset(
        {
            "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version", "run_compressed",
            "total_num_heads", "total_num_kv_heads", "provider",
        }
    )  # fmt: skip

    stores_rotations = True

    def matches(self, config: Config) -> bool:
        return config.method in ("compressed-tensors", "compressed_tensors", "sparseml")

    def scheme(self, config: Config, module: Module) -> Scheme:
        _refuse_unreadable(config)
        section = find_group(config, module.name)
        if section is None or section.weights is None or ct.stores_plain_floats(module):
            return rotated(dense(module), config, module)
        scale = FLOAT_TYPES.get(module.dtype(*ct.SCALE), BF16)
        fmt = _format(config, section, section.weights, module)
        return rotated(_build(fmt, section, scale, _words(section.weights, module), config.source), config, module)

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        section = find_group(config, module.name)
        if section is None or section.inputs is None:
            return None
        if section.weights is not None and ct.stores_plain_floats(module):
            return None
        if ONE_LEVEL in (section.format, config.quant.get("format")):
            return ActivationSpec(FIXED[ONE_LEVEL][0])
        return _activation(section.inputs, config.source)

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        """Integers, FP4 and MX are written weight-only, FP8 with the dynamic activations that engines require."""
        if spec.rotation:
            config, scheme = self.export(spec.unrotated, dense_modules)
            config["transform_config"] = write_rotation(spec.rotation, dense_modules)
            return config, scheme.rotated(spec.rotation)
        if spec == NVFP4:
            raise CannotEncode("compressed-tensors stores NVFP4's global scale as a divisor", hint="use nvfp4-div")
        inputs = _input_parts(None)
        for fmt, (fixed_spec, _) in FIXED.items():
            if fixed_spec == spec and fmt != ONE_LEVEL:  # which only AutoRound reads
                return write_config(fmt, spec, ignore=dense_modules), ct.floats(spec, inputs)
        scale = spec.scales[0] if len(spec.scales) == 1 and not spec.minimum else None
        if scale is not None and scale.dtype in FLOAT_NAMES:
            if is_integer(spec) and 2 <= spec.dtype.bits <= 8 and scale.block[0] == 1:
                if spec.zero is not None and (spec.zero.dtype != ZERO16 or spec.zero.block != scale.block):
                    raise CannotEncode("zero points must be integers with the blocks of the scales", got=spec)
                return write_config(PACK, spec, ignore=dense_modules), ct.packed_ints(spec, inputs)
            if spec.dtype == E4M3:
                return write_config(FLOAT, spec, _fp8_inputs(scale.block), dense_modules), ct.floats(spec, inputs)
        raise CannotEncode(
            "compressed-tensors cannot store this spec",
            expected="int2 to int8 per group or channel, fp8, nvfp4-div, mxfp4, mxfp6-e2m3 or mxfp8",
            got=spec,
        )

    def in_transformers(self, spec: QuantSpec) -> Loading:
        """It takes codes and scales of experts, and no other tensor; FP8 scales are multiplied without their blocks."""
        if spec.rotation or spec.zero or len(spec.scales) > 1 or spec == MXFP8:
            return Loading.NO
        if spec.dtype != E4M3:
            return Loading.ALONE
        return Loading.YES if spec.scales[0].block in (CHANNEL, TENSOR) else Loading.NO

    def leave_rest(self, config: Mapping[str, Any], experts: str, dense: Sequence[str]) -> dict[str, Any]:
        return {**config, "ignore": [f"re:{outside(experts)}", *dense]}

    def add_modules(
        self, config: Mapping[str, Any], spec: QuantSpec, modules: Sequence[str]
    ) -> tuple[dict[str, Any], Scheme]:
        """One more group, whose targets are the names: they win over the class of `export`'s group."""
        if spec.rotation or config.get("transform_config"):
            raise CannotEncode("a rotation is written for all matrices or none", where=modules[0], got=spec)
        own, scheme = self.export(spec, ())
        return add_group(config or {**own, "config_groups": {}}, own["config_groups"]["group_0"], modules), scheme

    def examples(self) -> Iterator[Example]:
        for bits in range(2, 9):
            for zero_point in (False, True):
                spec = int_spec(bits, group(64), zero_point=zero_point, scale=F16 if bits == 4 else BF16)
                yield _example(PACK, spec)
                if 32 % bits:
                    yield _example(PACK, spec, words=ct.PADDED)
            yield _example(PACK, int_spec(bits, CHANNEL), words=ct.UNKNOWN if 32 % bits else ct.DENSE)
        yield _example(PACK, int_spec(3, CHANNEL, zero_point=True), words=ct.UNKNOWN)
        yield _example(PACK, int_spec(4, group(32), zero_point=True), reordered=True, bias=True)
        yield _example(PACK, int_spec(4, group(32), scale=F32), dynamic_args("token"))
        yield from self._int_examples()
        yield from self._float_examples()
        yield from self._rotated_examples()
        mixed = _example(PACK, int_spec(4, group(32), scale=F32))
        other = write_config(FLOAT, FP8_CHANNEL)["config_groups"]["group_0"]
        groups = {**mixed.config.quant["config_groups"], "group_1": {**other, "targets": ["re:.*self_attn.*"]}}
        quant = {**mixed.config.quant, "format": MIXED, "config_groups": groups}
        yield Example("mixed-precision", Config(quant=quant, method=self.name), mixed.scheme)

    def _rotated_examples(self) -> Iterator[Example]:
        for spec, block in (int_spec(4, group(64)), 64), (MXFP4, 32):
            quant, scheme = self.export(replace(spec, rotation=block), ())
            yield Example(f"rotated {spec}", Config(quant=quant, method=self.name), scheme)

    def _int_examples(self) -> Iterator[Example]:
        token = dynamic_args("token", kind="int")
        yield _example(NAIVE, int_spec(8, CHANNEL, scale=F32), token)
        yield _example(INT, int_spec(8, CHANNEL, zero_point=True, scale=F32), token)
        yield _example(INT, int_spec(8, TENSOR), _static("int"), {"input_scale": (1,)})
        yield _example(INT, int_spec(8, TENSOR, zero_point=True, scale=F32))
        yield _example(INT, int_spec(4, group(32)), token)

    def _float_examples(self) -> Iterator[Example]:
        for fmt in (FLOAT, NAIVE):
            yield _example(fmt, FP8_TENSOR, _static("float"), {"input_scale": (1,)})
            yield _example(fmt, fp8_spec(CHANNEL, scale=BF16), dynamic_args("token"))
        yield _example(FLOAT, FP8_BLOCK, dynamic_args("group", 128), n=512, k=512)
        yield _example(FLOAT, fp8_spec((32, 64), scale=BF16))
        yield _example(FLOAT, fp8_spec(group(64)))
        for fmt, (spec, _) in FIXED.items():
            yield _example(fmt, spec)
        local = {**weight_args(NVFP4_DIV), "dynamic": "local"}
        yield _example("nvfp4-pack-quantized", NVFP4_DIV, local, {"input_global_scale": (1,)})


def _refuse_unreadable(config: Config) -> None:
    """Raise for config sections that affect the numbers and are not supported."""
    sparsity = optional(config, "sparsity_config", dict, {})
    checked(sparsity.get("format", "dense"), "sparsity_config.format", str, ("dense",), config.source)
    if optional(config, "moe_sparsity_config", dict, {}):
        raise UnsupportedFormat("pruned experts are not supported: 'moe_sparsity_config'", where=config.source)


def _format(config: Config, section: ConfigGroup, weights: Args, module: Module) -> str:
    """The format of the group, else of the config, else the one that the arguments imply."""
    named = section.format or config.quant.get("format")
    if named is not None and named != MIXED:
        return str(checked(named, "format", str, READ, config.source))
    if weights.kind == "int":
        if any(module.has(s) for s in ct.PACKED):
            return PACK
        if module.dtype(*WEIGHT, default="") == "I8":
            return INT
    elif weights.bits == 8:
        return "mxfp8-quantized" if weights.scale_dtype == "uint8" else FLOAT
    for name, (spec, strategy) in FIXED.items():
        if (weights.kind, weights.bits, weights.strategy) == ("float", spec.dtype.bits, strategy):
            return name
    expected = ", ".join(READ)
    raise UnsupportedFormat("neither the config nor its groups name a format", where=config.source, expected=expected)


def _words(weights: Args, module: Module) -> str:
    """How 3-, 5-, 6- and 7-bit codes are packed: compares the packed width with K, known from the scales."""
    if 32 % weights.bits == 0:
        return ct.DENSE
    if weights.strategy != "group":
        return ct.UNKNOWN
    packed = next((module.stored[s].shape for s in ct.PACKED if module.has(s)), ())
    scales = next((module.stored[s].shape for s in ct.SCALE if module.has(s)), ())
    if not packed or not scales:
        return ct.DENSE
    dense_width, padded_width = ct.widths(weights.bits, scales[-1] * weights.block[1])
    return ct.PADDED if packed[-1] == padded_width != dense_width else ct.DENSE


@lru_cache(maxsize=256)
def _build(fmt: str, section: ConfigGroup, scale: DType, words: str, source: str) -> Scheme:
    """The scheme of a format with the arguments of a config group."""
    weights, inputs = section.weights, _input_parts(None if fmt == ONE_LEVEL else section.inputs)
    assert weights is not None
    checked(weights.dynamic, "weights.dynamic", bool, (False,), source)
    if fmt in FIXED:
        spec, strategy = FIXED[fmt]
        expected = (spec.dtype.bits, "float", True, strategy, spec.scales[0].block)
        got = (weights.bits, weights.kind, weights.symmetric, weights.strategy, weights.block)
        if got != expected:
            raise UnsupportedFormat(f"wrong weight arguments for {fmt}", where=source, expected=expected, got=got)
        return ct.floats(spec, inputs)
    kinds = {PACK: ("int",), INT: ("int",), FLOAT: ("float",), NAIVE: ("int", "float")}[fmt]
    checked(weights.kind, f"weights.type with {fmt}", str, kinds, source)
    legal: tuple[str, ...] = ("tensor", "channel", "group", "block")
    if fmt == PACK:
        legal = ("tensor", "channel", "group") if weights.symmetric else ("channel", "group")
    checked(weights.strategy, f"weights.strategy with {fmt}", str, legal, source)
    if weights.kind == "float":
        checked(weights.bits, f"weights.num_bits with {fmt}", int, (8,), source)
        checked(weights.symmetric, f"weights.symmetric with {fmt}", bool, (True,), source)
        return ct.floats(fp8_spec(weights.block, scale=scale), inputs)
    checked(weights.bits, f"weights.num_bits with {fmt}", int, range(2, 9), source)
    spec = int_spec(weights.bits, weights.block, zero_point=not weights.symmetric, scale=scale)
    if fmt == PACK:
        return ct.packed_ints(spec, inputs, words=words, reordered=weights.reordered)
    return ct.plain_ints(spec, inputs)


def _input_parts(inputs: Args | None) -> tuple[Part, ...]:
    """The activation-side tensors; required for static quantisation."""
    two_level = inputs is not None and inputs.strategy == "tensor_group" and inputs.dynamic is not True
    static = inputs is not None and inputs.dynamic is False and not two_level
    asymmetric = static and inputs is not None and not inputs.symmetric

    def one(role: str, dtypes: str | tuple[str, ...], *, needed: bool) -> Part:
        return part(role, (f".{role}", f"_{role}"), dtypes, ("1", ""), optional=not needed)

    return (
        one("input_scale", FLOATS, needed=static),
        one("input_global_scale", "F32", needed=two_level),
        one("input_zero_point", ("I8", "F8_E4M3"), needed=asymmetric),
    )


def _activation(inputs: Args, source: str) -> ActivationSpec:
    static = inputs.dynamic is False
    if inputs.kind == "int":
        return ActivationSpec(int_spec(inputs.bits, inputs.block, zero_point=not inputs.symmetric, scale=F32), static)
    if inputs.bits == 8 and inputs.scale_dtype != "uint8":
        return ActivationSpec(fp8_spec(inputs.block), static)
    blocks = {(4, 16): NVFP4, (4, 32): MXFP4, (6, 32): MXFP6_E2M3, (8, 32): MXFP8}
    spec = blocks.get((inputs.bits, inputs.block[1]))
    if spec is None:
        raise UnsupportedFormat("unsupported input_activations", where=source, got=inputs)
    return ActivationSpec(spec)


def _static(kind: str) -> dict[str, Any]:
    return {**dynamic_args("tensor", kind=kind), "dynamic": False}


def _fp8_inputs(block: Block) -> dict[str, Any] | None:
    """The dynamic activations for FP8 weights with these blocks; None for weight groups."""
    if block in (TENSOR, CHANNEL):
        return dynamic_args("tensor" if block == TENSOR else "token")
    return dynamic_args("group", block[1]) if block[0] > 1 else None


def _example(
    fmt: str,
    spec: QuantSpec,
    inputs: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    words: str = ct.DENSE,
    reordered: bool = False,
    bias: bool = False,
    n: int = 128,
    k: int = 256,
) -> Example:
    quant = write_config(fmt, spec, inputs)
    section = quant["config_groups"]["group_0"]
    if reordered:
        section["weights"]["actorder"] = "group"
    scheme = _build(fmt, read_group(section, "group_0", "example"), spec.scales[0].dtype, words, "example")
    extra = [words] if words != ct.DENSE else ["actorder"] if reordered else []
    name = "-".join([fmt, str(spec), *extra, *(shapes or ())])
    return Example(name, Config(quant=quant, method="compressed-tensors"), scheme, n, k, shapes or {}, bias)


FORMAT = CompressedTensors()
