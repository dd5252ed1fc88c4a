"""Reads a Quark config: finds the section of a module, checks it, and returns a plan.

A section is one stage of quantisation or a list of two. Every value that affects the numbers must be
one of the supported values, so every plan has a spec.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache
from typing import Any

from lancebill.errors import UnsupportedFormat
from lancebill.formats._patterns import compile_pattern, component_runs
from lancebill.formats.base import checked
from lancebill.numbers.dtypes import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    F32,
    UE5M3,
    ZERO16,
    DType,
    biased_type,
    uint_type,
)
from lancebill.numbers.spec import ALL, CHANNEL, TENSOR, Block, QuantSpec, Scale, Zero, group

FLOAT_CODES: dict[str, DType] = {"fp4": E2M1, "fp6_e2m3": E2M3, "fp6_e3m2": E3M2, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
INT_BITS = {"int2": 2, "int3": 3, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
WIDE = ("float16", "bfloat16", "float32")  # dtypes of unquantised tensors
MX_ELEMENTS = ("fp4", "fp6_e2m3", "fp6_e3m2")
MX_BLOCK = 32
# The formats of a scale; None: a float of the dtype found in the file.
SCALE_FORMATS = {"e8m0": E8M0, "e5m3": UE5M3, "float32": None, "float16": None, "bfloat16": None}
SCALE_STAGES: dict[str, DType] = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "fp8_e5m3": UE5M3}


@dataclass(frozen=True)
class QuarkPlan:
    """A checked section. `scale` None: a float of the stored dtype."""

    dtype: str
    block: Block
    zero: bool = False
    scale: DType | None = None
    outer: Block | None = None  # the block of a second scale
    swapped: bool = False  # the element's scale comes from the later stage and is stored as `weight_scale_2`
    embedded: bool = False  # `mx`: scales are stored in the same tensor as the codes
    dynamic: bool = False  # computed at run time, not stored
    outer_dynamic: bool = False

    @property
    def transposed(self) -> bool:
        """Grouped integers are stored as [K, N], except 3-bit ones, which are a byte stream."""
        return self.block[0] == 1 and self.block[1] != ALL and self.dtype in INT_BITS and self.dtype != "int3"

    def spec(self, inner: DType = F32, outer: DType = F32) -> QuantSpec:
        """The spec; `inner` and `outer` are the dtypes of scales that the config leaves to the file."""
        scales: tuple[Scale, ...] = (Scale(self.scale or inner, self.block),)
        if self.outer is not None:
            scales += (Scale(outer, self.outer),)
        if self.dtype not in INT_BITS:
            return QuantSpec(FLOAT_CODES[self.dtype], scales)
        bits = INT_BITS[self.dtype]
        if self.zero:
            return QuantSpec(uint_type(bits), scales, Zero(ZERO16, self.block))
        return QuantSpec(biased_type(bits), scales)


def read_plan(section: Any, key: str, source: str, *, rows: tuple[int, ...] = (0, -2)) -> QuarkPlan | None:
    """The plan of a section; None if the tensor is not quantised. `rows`: values of `ch_axis` that mean rows."""
    stages = section if isinstance(section, list) else [section]
    if section is None or not stages:
        return None
    if len(stages) > 2:
        raise UnsupportedFormat(f"'{key}' has {len(stages)} stages", where=source, expected="one or two")
    for stage in stages:
        checked(stage, key, dict, (), source)
    if len(stages) == 1:
        return _read_stage(stages[0], key, source, rows)
    later_scales = stages[1].get("is_scale_quant") is True
    element, second = (stages[0], stages[1]) if later_scales else (stages[1], stages[0])
    plan = _read_stage(element, key, source, rows)
    outer = _read_block(second, "fp8", key, source, rows)
    dtype = checked(second.get("dtype"), f"{key}.dtype", str, tuple(SCALE_STAGES), source)
    if plan is None or plan.embedded or outer not in (TENSOR, CHANNEL):
        raise UnsupportedFormat(
            f"the second stage of '{key}' must be per tensor or per channel", where=source, got=section
        )
    scale = SCALE_STAGES[dtype] if later_scales else plan.scale
    dynamic = second.get("is_dynamic") is True
    return replace(plan, scale=scale, outer=outer, swapped=not later_scales, outer_dynamic=dynamic)


def _read_stage(stage: Mapping[str, Any], key: str, source: str, rows: tuple[int, ...]) -> QuarkPlan | None:
    legal = (*INT_BITS, *FLOAT_CODES, "mx", *WIDE)
    dtype = checked(stage.get("dtype"), f"{key}.dtype", str, legal, source)
    if dtype in WIDE:
        return None
    dynamic = stage.get("is_dynamic") is True
    if dtype == "mx":
        element = checked(stage.get("mx_element_dtype"), f"{key}.mx_element_dtype", str, MX_ELEMENTS, source)
        checked(stage.get("group_size"), f"{key}.group_size", int, (MX_BLOCK,), source)
        return QuarkPlan(element, group(MX_BLOCK), scale=E8M0, embedded=True, dynamic=dynamic)
    symmetric = stage.get("symmetric")
    if dtype in FLOAT_CODES and symmetric is False:
        raise UnsupportedFormat(f"'{key}': floats have no zero point", where=source, expected="symmetric true")
    zero = dtype in INT_BITS and (symmetric is False or dtype.startswith("uint"))
    scale_format = stage.get("scale_format")
    if scale_format is not None:
        checked(scale_format, f"{key}.scale_format", str, tuple(SCALE_FORMATS), source)
    scale = None if scale_format is None else SCALE_FORMATS[scale_format]
    return QuarkPlan(dtype, _read_block(stage, dtype, key, source, rows), zero, scale, dynamic=dynamic)


def _read_block(stage: Mapping[str, Any], dtype: str, key: str, source: str, rows: tuple[int, ...]) -> Block:
    schemes = ("per_tensor", "per_channel", "per_group", *(("per_block",) if dtype.startswith("fp8") else ()))
    scheme = checked(stage.get("qscheme"), f"{key}.qscheme", str, schemes, source)
    if scheme == "per_tensor":
        return TENSOR
    if scheme == "per_channel":
        checked(stage.get("ch_axis", 0), f"{key}.ch_axis", int, rows, source)
        return CHANNEL
    if scheme == "per_group":
        checked(stage.get("ch_axis", -1), f"{key}.ch_axis", int, (1, -1), source)
        size = checked(stage.get("group_size"), f"{key}.group_size", int, (), source)
        if size < 16 or size & (size - 1):
            raise UnsupportedFormat(f"'{key}.group_size'", where=source, expected="a power of two from 16 up", got=size)
        return group(size)
    sides = checked(stage.get("block_size"), f"{key}.block_size", list, (), source)
    if len(sides) != 2 or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sides):
        raise UnsupportedFormat(f"'{key}.block_size'", where=source, expected="[rows, columns]", got=sides)
    return sides[0], sides[1]


def find_entry(entries: Collection[str], name: str, key: str, source: str) -> str | None:
    """The entry of a config's list that matches this module: part of its name, a wildcard, or "re:".

    A part is a run of whole components, so that `mlp.gate` matches the router but not `mlp.gate_proj`.
    """
    if not all(isinstance(entry, str) for entry in entries):
        raise UnsupportedFormat(f"'{key}' must be a list of names", where=source, got=list(entries))
    listed, patterns = _split(tuple(entries), key, source)
    found = next((run for run in component_runs(name) if run in listed), None) if listed else None
    return found or next((entry for entry, match in patterns if match(name)), None)


@lru_cache(maxsize=64)
def _split(
    entries: tuple[str, ...], key: str, source: str
) -> tuple[frozenset[str], tuple[tuple[str, Callable[[str], object]], ...]]:
    """Names and compiled patterns, cached per config: large models list hundreds."""
    names: list[str] = []
    patterns: list[tuple[str, Callable[[str], object]]] = []
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append((entry, compile_pattern(entry[3:], key, source).match))
        elif re.search(r"[*?\[]", entry):
            patterns.append((entry, re.compile(translate(entry)).match))
        else:
            names.append(entry)
    return frozenset(names), tuple(patterns)
