"""BitsAndBytes: 4-bit codebooks over the flattened matrix, and int8 rows.

4-bit blocks cover the matrix flattened row by row, so the stored tensors cannot be sliced, and a block
may span two rows. The canonical form has one scale per piece of a row that is inside one block. With
double quantisation the scales are stored in eight bits. int8 values are q * row maximum *
fp32(1/127), in that order, as the library computes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats._floats import skip_list
from lancebill.formats.base import (
    BIAS,
    FLOATS,
    SCALAR,
    Config,
    Example,
    Format,
    Module,
    Scheme,
    codes_of,
    dense,
    optional,
    part,
)
from lancebill.formats.stored import TORCH_DTYPES
from lancebill.numbers.bit_packing import Nibbles, as_bytes, pack_bits, unpack_bits
from lancebill.numbers.dtypes import BNB_FP4, F32, INV127, NF4, DType, biased_type
from lancebill.numbers.spec import CHANNEL, TENSOR, QuantSpec, Scale, group
from lancebill.numbers.weight import LogicalWeight

TABLES: dict[str, DType] = {"nf4": NF4, "fp4": BNB_FP4}
STORAGE = {"uint8": "U8", "int8": "I8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 32)  # the default first: several can fit a tiny matrix
NESTED_BLOCK = 256
MAX_STATE = 1 << 16  # limit in bytes of the JSON document of each weight; a few hundred in practice
INT8 = QuantSpec(biased_type(8), (Scale(F32, CHANNEL), Scale(INV127, TENSOR)))
# The headers do not contain row lengths: blocks are divided into pieces that divide every size in the model's config.
SIZE_KEYS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "d_model", "ffn_hidden_size")


@dataclass(frozen=True)
class Bnb4Scheme(Scheme):
    """`weight` [N*K/2, 1] with even elements in the high nibbles, and one `absmax` per block."""

    kind: str = "nf4"
    block: int = 64
    nested: bool = False

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        state = _read_state(stored["state"])
        for key, expected in {"quant_type": self.kind, "blocksize": self.block, "shape": [n, k]}.items():
            if state.get(key) != expected:
                raise BadValue(
                    f"quant_state: '{key}' contradicts the stored tensors", expected=expected, got=state.get(key)
                )
        table = torch.tensor(self.spec.dtype.table, dtype=torch.float32, device=stored["table"].device)
        if not torch.equal(stored["table"], table):
            raise BadValue(f"quant_map is not the {self.kind} table", got=stored["table"].tolist())
        codes = _codes(as_bytes(stored["codes"].reshape(-1)), n, k)
        absmax = self._denest(stored, state) if self.nested else stored["scale"]
        block = self._block_of(n, k, codes.device)
        if block is None:
            raise BadValue(
                f"with rows of {k} columns, blocks of {self.block} split pieces of {self.spec.group} columns",
                expected=f"pieces of {math.gcd(self.block, k)} columns",
                hint="the model's config must contain the sizes of the experts",
            )
        return LogicalWeight(self.spec, codes, (absmax[block],))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        if self.nested:
            raise CannotEncode("double quantisation can be read but not written", hint="export writes fp32 scales")
        n, k = weight.n, weight.k
        flat = torch.nn.functional.pad(weight.codes.reshape(-1), (0, n * k % 2))
        state = {"quant_type": self.kind, "blocksize": self.block, "dtype": "bfloat16", "shape": [n, k]}
        storage = self.parts[0].dtypes[0]
        return {
            "codes": pack_bits(flat.view(-1, 2).flip(1).reshape(-1), 4, TORCH_DTYPES[storage]).reshape(-1, 1),
            "scale": self._flatten_scales(weight.scales[0], n, k),
            "table": torch.tensor(self.spec.dtype.table, dtype=torch.float32, device="cpu"),
            "state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8, device="cpu"),
        }

    def stored_size(self, stored: Callable[[str], Tensor | None]) -> tuple[int, int] | None:
        document = stored("state")
        if document is None:
            return None
        shape = _read_state(document).get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise BadValue("quant_state: 'shape' is not the size of a matrix", expected="[n, k]", got=str(shape)[:80])
        return shape[0], shape[1]

    def _block_of(self, n: int, k: int, device: torch.device) -> Tensor | None:
        """The index of the flat block of each piece of a row: [n, pieces]; None if a block begins inside a piece."""
        size = self.spec.group
        starts = torch.arange(0, k, size, device=device)
        last = (starts + size).clamp(max=k) - 1
        rows = torch.arange(n, device=device)[:, None] * k
        first_block, last_block = (rows + starts) // self.block, (rows + last) // self.block
        return first_block if torch.equal(first_block, last_block) else None

    def _flatten_scales(self, scale: Tensor, n: int, k: int) -> Tensor:
        block = self._block_of(n, k, scale.device)
        if block is None:
            raise CannotEncode(
                f"bitsandbytes blocks of {self.block} span rows of {k} columns",
                hint=f"use groups of {math.gcd(self.block, k)} columns, which end at block boundaries",
            )
        absmax = torch.zeros(-(-n * k // self.block), dtype=torch.float32, device=scale.device)
        absmax[block] = scale
        if not torch.equal(absmax[block].view(torch.int32), scale.view(torch.int32)):
            raise CannotEncode(f"scales differ within a block of {self.block} elements of the flattened matrix")
        return absmax

    def _denest(self, stored: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
        """8-bit scales to fp32: table look-up, times the scale of 256 scales, plus the common offset."""
        if state.get("nested_blocksize") != NESTED_BLOCK:
            raise BadValue("quant_state: nested_blocksize", expected=NESTED_BLOCK, got=state.get("nested_blocksize"))
        offset = state.get("nested_offset")
        if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not abs(offset) <= F32.max:
            raise BadValue("quant_state: nested_offset is not an fp32 number", got=str(offset)[:40])
        codes = stored["scale"]
        outer = stored["nested_scale"].repeat_interleave(NESTED_BLOCK)[: codes.numel()]
        absmax: Tensor = stored["nested_table"][codes.int()] * outer
        return absmax + torch.tensor(offset, dtype=torch.float32, device=absmax.device)


def _codes(data: Tensor, n: int, k: int) -> Tensor | Nibbles:
    """The codes of bytes that have the first of two in the high nibble."""
    swapped = (data >> 4).bitwise_or_(data << 4)
    if k % 2 == 0:
        return Nibbles(swapped.view(n, k // 2))
    return unpack_bits(swapped, 4, n * k).view(n, k)


def _read_state(document: Tensor) -> dict[str, Any]:
    """The JSON document that is stored as a byte tensor with each weight."""
    if document.numel() > MAX_STATE:
        raise BadValue("quant_state is too long", expected=f"at most {MAX_STATE} bytes", got=document.numel())
    try:
        state = json.loads(bytes(document.tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadValue("quant_state is not JSON", got=str(error)) from None
    if not isinstance(state, dict):
        raise BadValue("quant_state is not a JSON object", got=type(state).__name__)
    return state


def bnb4_scheme(kind: str, block: int, *, piece: int, storage: str = "U8", nested: bool = False) -> Bnb4Scheme:
    """`piece` columns of a row share a scale: the block, or less if blocks span rows."""
    spec = QuantSpec(TABLES[kind], (Scale(F32, group(piece)),))
    parts = [
        part("codes", ".weight", storage, "n*k^ 1", bits=4),
        part("scale", ".weight.absmax", "U8" if nested else "F32", f"n*k/{block}"),
        part("table", ".weight.quant_map", "F32", "16"),
        part("state", f".weight.quant_state.bitsandbytes__{kind}", "U8", "?"),
    ]
    if nested:
        parts += [
            part("nested_scale", ".weight.nested_absmax", "F32", f"n*k/{block * NESTED_BLOCK}"),
            part("nested_table", ".weight.nested_quant_map", "F32", "256"),
        ]
    return Bnb4Scheme(spec, (*parts, BIAS), kind, block, nested)


@dataclass(frozen=True)
class Bnb8Scheme(Scheme):
    """`weight` int8 [N, K] and the largest magnitude of each row, `SCB`."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        layout = stored.get("layout")
        if layout is not None and int(layout) != 0:
            raise BadValue("weight_format: only the row layout is supported", expected=0, got=int(layout))
        constant = torch.zeros(1, 1, dtype=torch.uint8, device=stored["codes"].device)
        return LogicalWeight(self.spec, codes_of(stored["codes"]) ^ 0x80, (stored["scale"].reshape(n, 1), constant))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        return {
            "codes": (weight.codes ^ 0x80).view(torch.int8),
            "scale": weight.scales[0].reshape(-1),
            "layout": torch.zeros((), dtype=torch.uint8, device="cpu"),
        }


def bnb8_scheme() -> Bnb8Scheme:
    parts = (
        part("codes", ".weight", "I8", "n k"),
        part("scale", ".SCB", "F32", "n"),
        part("layout", ".weight_format", "U8", SCALAR, optional=True),
        BIAS,
    )
    return Bnb8Scheme(INT8, parts)


class BitsAndBytes(Format):
    name = "bitsandbytes"
    used = frozenset(
        {"load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "llm_int8_skip_modules"}
    )
    ignored = frozenset(
        {
            "_load_in_4bit", "_load_in_8bit", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype",
            "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
        }
    )  # fmt: skip

    def matches(self, config: Config) -> bool:
        return config.method == "bitsandbytes"

    def scheme(self, config: Config, module: Module) -> Scheme:
        four, eight = (optional(config, key, bool, False) for key in ("load_in_4bit", "load_in_8bit"))
        if four == eight:
            got = "both" if four else "neither"
            raise UnsupportedFormat(
                "exactly one of load_in_4bit and load_in_8bit must be true", where=config.source, got=got
            )
        if self._is_unquantized(config, module):
            return dense(module)
        if eight:
            return bnb8_scheme()
        kind = optional(config, "bnb_4bit_quant_type", str, "fp4", tuple(TABLES))
        storage = STORAGE[optional(config, "bnb_4bit_quant_storage", str, "uint8", tuple(STORAGE))]
        block = _block_size(module)
        nested = module.dtype(".weight.absmax", default="F32") == "U8"
        return bnb4_scheme(kind, block, piece=_piece(config, block), storage=storage, nested=nested)

    def _is_unquantized(self, config: Config, module: Module) -> bool:
        """By the stored tensors; without any, by the config's list of names."""
        if module.stored:
            has_scales = any(suffix.startswith((".weight.", ".SCB")) for suffix in module.stored)
            return module.dtype(".weight", default="U8") in FLOATS and not has_scales
        return module.name in skip_list(config, "llm_int8_skip_modules")

    def export(self, spec: QuantSpec, dense_modules: Sequence[str]) -> tuple[dict[str, Any], Scheme]:
        skipped = list(dense_modules) or None
        if spec == INT8:
            return _config("int8", skipped), bnb8_scheme()
        kind = next((kind for kind, table in TABLES.items() if table == spec.dtype), None)
        if kind is None or spec.group not in BLOCKS or spec != QuantSpec(spec.dtype, (Scale(F32, group(spec.group)),)):
            raise CannotEncode(
                "bitsandbytes stores nf4 and its fp4 with fp32 scales, and int8 with one scale per row",
                expected=f"nf4 or {BNB_FP4}-g<{', '.join(map(str, sorted(BLOCKS)))}> or {INT8}",
                got=spec,
            )
        return _config(kind, skipped), bnb4_scheme(kind, spec.group, piece=spec.group)

    def examples(self) -> Iterator[Example]:
        for kind in TABLES:
            config = Config(quant=_config(kind, None), method=self.name)
            yield Example(kind, config, bnb4_scheme(kind, 64, piece=64))
        config = Config(quant=_config("nf4", None, storage="bfloat16"), method=self.name)
        yield Example("nf4-g128-bf16-storage", config, bnb4_scheme("nf4", 128, piece=128, storage="BF16"))
        yield Example("int8", Config(quant=_config("int8", None), method=self.name), bnb8_scheme())


def _block_size(module: Module) -> int:
    """Elements per scale, from the sizes of `weight` and `absmax`. `unpack` checks it against the JSON document."""
    weight, absmax = module.stored.get(".weight"), module.stored.get(".weight.absmax")
    if weight is None or absmax is None or weight.dtype not in TORCH_DTYPES:
        return BLOCKS[0]
    elements = 2 * math.prod(weight.shape) * TORCH_DTYPES[weight.dtype].itemsize
    count = math.prod(absmax.shape)
    return next((block for block in BLOCKS if -(-elements // block) == count), BLOCKS[0])


def _piece(config: Config, block: int) -> int:
    """Columns per scale that divide the block and every size in the model's config."""
    text = config.model.get("text_config")
    sections = [config.model, *([text] if isinstance(text, Mapping) else [])]
    sizes = [section.get(key) for section in sections for key in SIZE_KEYS]
    return math.gcd(block, *(size for size in sizes if type(size) is int and size > 0))


def _config(kind: str, skipped: list[str] | None, storage: str = "uint8") -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind in TABLES,
        "load_in_8bit": kind not in TABLES,
        "llm_int8_skip_modules": skipped,
    }
    if kind in TABLES:
        config |= {
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_quant_storage": storage,
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    return config


FORMAT = BitsAndBytes()
