"""GGUF: blocks that contain codes and scales; each tensor has its own block type.

The file reader presents a quantised tensor as bytes [n, blocks, bytes per block] and puts the types by
tensor name into the config as `types`. The table in `_gguf_blocks` defines the bytes of a block; this
file converts between blocks and a `LogicalWeight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats._gguf_blocks import BLOCK_TYPES, BlockType
from lancebill.formats._gguf_grids import GRID_TYPES, TERNARY_TYPE, GridType, TernaryType
from lancebill.formats.base import (
    BIAS,
    SCALAR,
    Config,
    Example,
    Format,
    Module,
    Part,
    Scheme,
    Stored,
    checked,
    dense,
    part,
    require,
    scalar,
)
from lancebill.numbers.dtypes import F32, FLOAT
from lancebill.numbers.spec import TENSOR, Scale
from lancebill.numbers.weight import LogicalWeight

DENSE_TYPES = ("F32", "F16", "BF16")
WITH_TENSOR_SCALE = ("NVFP4",)  # types with per-tensor scales of weight and input outside the blocks
AnyBlock = BlockType | GridType | TernaryType
TYPES: dict[str, AnyBlock] = {**BLOCK_TYPES, **GRID_TYPES, TERNARY_TYPE.name: TERNARY_TYPE}
ANY = "*"  # in `types`: every tensor without an entry


@dataclass(frozen=True)
class GgufScheme(Scheme):
    """`.weight` [n, k / columns, bytes]; NVFP4 has its outermost scale outside the blocks."""

    batched = True

    block: AnyBlock

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        lead = self.lead(stored)
        codes, levels = self.block.split(stored["codes"].reshape(*lead, n, -1, self.block.size))
        inner = len(self.block.scales)
        negative = self._negative_scale(levels)
        if negative is not None:
            raise BadValue("a negative scale", where=self.block.name, got=negative)
        scales = levels[:inner]
        if len(self.spec.scales) > inner:
            # Files written without calibration omit the tensor's scale, which is then one.
            outer = stored.get("scale_2")
            scales.append(
                torch.ones(*lead, 1, 1, dtype=torch.float32, device=codes.device)
                if outer is None
                else scalar(outer, lead)
            )
        return LogicalWeight(self.spec, codes, tuple(scales), minimum=tuple(levels[inner:]))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        if weight.k % self.block.columns:
            raise CannotEncode(
                f"{self.block.name} needs rows of whole blocks",
                expected=f"a multiple of {self.block.columns}",
                got=weight.k,
            )
        inner = len(self.block.scales)
        levels = [*weight.scales[:inner], *weight.minimum]
        negative = self._negative_scale(levels)
        if negative is not None:
            raise CannotEncode(f"{self.block.name} cannot store negative scales", got=negative)
        packed = {"codes": self.block.join([weight.codes, *levels])}
        if len(weight.scales) > inner:
            packed["scale_2"] = weight.scales[inner].reshape(())
        return packed

    def random_stored(self, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor] | None:
        if not isinstance(self.block, GridType):
            return None
        size, device = (n, k // self.block.columns, self.block.size), generator.device
        data = torch.randint(256, size, generator=generator, device=device)
        exponents = torch.rand(data.shape[:-1], generator=generator, dtype=torch.float32, device=device) * 6 - 5
        outer = torch.exp2(exponents).half().view(torch.int16)
        parts = self.block.read(data.int())._replace(outer=outer.int().unsqueeze(-1))
        return {"codes": self.block.write(parts).to(torch.uint8)}

    def _negative_scale(self, levels: Sequence[Tensor]) -> str | None:
        """The first negative mini-float scale, if any: e8m0 and GGUF's unsigned e4m3 have no sign."""
        for field, codes in zip(self.block.scales, levels):
            if field.dtype.kind == FLOAT and field.dtype.table:
                negative = codes[field.dtype.decode(codes).signbit()]
                if negative.numel():
                    return f"code {int(negative[0]):#x}"
        return None


def gguf_scheme(block: AnyBlock) -> GgufScheme:
    spec = block.spec
    parts: tuple[Part, ...] = (part("codes", ".weight", "U8", f"n k/{block.columns} {block.size}"), BIAS)
    if block.name in WITH_TENSOR_SCALE:
        spec = replace(spec, scales=(*spec.scales, Scale(F32, TENSOR)))
        parts += (
            part("scale_2", ".scale", "F32", SCALAR, optional=True),
            part("input_scale", ".input_scale", "F32", SCALAR, optional=True),
        )
    return GgufScheme(spec, parts, block)


class Gguf(Format):
    name = "gguf"
    used = frozenset({"types"})
    stacked = True

    def matches(self, config: Config) -> bool:
        return config.method == "gguf"

    def scheme(self, config: Config, module: Module) -> Scheme:
        types = require(config, "types", dict)
        tensor = module.name + ".weight"
        kind = types.get(tensor, types.get(ANY))
        if kind is None or kind in DENSE_TYPES:
            return dense(module)
        block = TYPES.get(checked(kind, f"types.{tensor}", str, (), config.source))
        if block is None:
            legal = ", ".join((*DENSE_TYPES, *TYPES))
            raise UnsupportedFormat(
                "unsupported GGUF type", where=f"{config.source}: {tensor}", expected=legal, got=kind
            )
        return gguf_scheme(block)

    def examples(self) -> Iterator[Example]:
        for name in DENSE_TYPES:
            yield Example(name, _config(name), dense(Module("", {".weight": Stored(name, ())})))
        for name, block in TYPES.items():
            n, k = (64, 4 * block.columns) if block.columns > 64 else (128, 256)
            inputs: dict[str, tuple[int, ...]] = {"input_scale": ()} if name in WITH_TENSOR_SCALE else {}
            yield Example(name, _config(name), gguf_scheme(block), n, k, inputs, bias=name == "MXFP4")


def _config(name: str) -> Config:
    return Config({"model_type": "gguf"}, {"types": {ANY: name}}, "gguf")


FORMAT = Gguf()
