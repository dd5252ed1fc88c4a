"""W4AFP8 (`quant_method: w4afp8`): experts of 4-bit integers in groups of 128, everything else FP8 in blocks.

DeepSeek checkpoints for SGLang and TensorRT-LLM. Experts have static input scales for fp8 activations.
"""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.formats._floats import WEIGHT, is_unquantized, scale_part, stored_as
from lancebill.formats._integers import SignedNibbles
from lancebill.formats.base import (
    BIAS,
    FLOAT_TYPES,
    FLOATS,
    SCALAR,
    Config,
    Example,
    Format,
    Module,
    Scheme,
    dense,
    optional,
    part,
)
from lancebill.formats.fp8 import block_sides, fp8_scheme
from lancebill.numbers.spec import FP8_BLOCK_SIDES, FP8_TENSOR, ActivationSpec, fp8_spec, group, int_spec

METHOD = "w4afp8"
GROUP = 128
SCALE = (".weight_scale_inv", "_weight_scale_inv")
INPUT_SCALE = (".input_scale", "_input_scale")


def expert_scheme(scale: str, size: int = GROUP) -> SignedNibbles:
    """`weight` int8 [N, K/2], the even column in the low nibble; `weight_scale_inv` multiplies."""
    spec = int_spec(4, group(size), scale=FLOAT_TYPES[scale])
    parts = (
        part("codes", WEIGHT, ("I8", "U8"), "n k^", bits=4),
        scale_part("scale", SCALE, spec.scales[0]),
        part("input_scale", INPUT_SCALE, FLOATS, SCALAR, optional=True),
        BIAS,
    )
    return SignedNibbles(spec, parts)


class W4AFp8(Format):
    name = METHOD
    used = frozenset(
        {"group_size", "weight_block_size", "activation_scheme", "ignored_layers", "modules_to_not_convert"}
    )
    ignored = frozenset(
        {"linear_activation_scheme", "moe_activation_scheme", "fmt", "kv_cache_scheme", "ignore"}
    )  # the last says what the tensors say

    def matches(self, config: Config) -> bool:
        return config.method == METHOD

    def scheme(self, config: Config, module: Module) -> Scheme:
        if is_unquantized(config, module, SCALE):
            return dense(module)
        scale = stored_as(module, SCALE, ("F32", *FLOATS))
        if module.dtype(*WEIGHT, default="I8") == "F8_E4M3":
            return fp8_scheme(fp8_spec(block_sides(config) or FP8_BLOCK_SIDES, scale=FLOAT_TYPES[scale]), scale)
        return expert_scheme(scale, optional(config, "group_size", int, GROUP, (32, 64, GROUP)))

    def activations(self, config: Config, module: Module) -> ActivationSpec | None:
        spec = self.scheme(config, module).spec
        if not spec.quantized:
            return None
        if module.dtype(*WEIGHT, default="I8") == "F8_E4M3":
            return ActivationSpec(fp8_spec(group(spec.group)))
        return ActivationSpec(FP8_TENSOR, static=True) if any(map(module.has, INPUT_SCALE)) else None

    def examples(self) -> Iterator[Example]:
        config = Config(quant={"quant_method": METHOD}, method=METHOD)
        for scale in ("F32", "BF16"):
            yield Example(f"experts-{scale}", config, expert_scheme(scale), inputs={"input_scale": ()})
        yield Example("fp8-block", config, fp8_scheme(fp8_spec(FP8_BLOCK_SIDES), "F32"), 320, 448)


FORMAT = W4AFp8()
