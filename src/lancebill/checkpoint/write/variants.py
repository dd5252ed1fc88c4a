"""The variants of a spec in which formats store it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from lancebill.errors import CannotEncode
from lancebill.numbers.dtypes import BF16, F16, F32, INV127
from lancebill.numbers.spec import CHANNEL, DIV, MUL, TENSOR, QuantSpec, Scale, is_integer

Made = TypeVar("Made")


def first_that_holds(spec: QuantSpec, make: Callable[[QuantSpec], Made]) -> tuple[QuantSpec, Made]:
    """The first variant that `make` accepts, and what it made; raises what it said about the spec itself."""
    first_error: CannotEncode | None = None
    for variant in _variants(spec):
        try:
            return variant, make(variant)
        except CannotEncode as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _variants(spec: QuantSpec) -> Iterator[QuantSpec]:
    """The spec itself, then variants in which other formats store it: an outer scale that divides instead of
    multiplying, scales of another float dtype, bitsandbytes' int8 rows."""
    yield spec
    if len(spec.scales) == 2:
        outer = spec.scales[1]
        yield replace(spec, scales=(spec.scales[0], replace(outer, op=MUL if outer.op == DIV else DIV)))
    if len(spec.scales) == 1 and spec.scales[0].dtype in (BF16, F16, F32):
        for dtype in (F16, BF16, F32):
            yield replace(spec, scales=(replace(spec.scales[0], dtype=dtype),))
    if is_integer(spec) and spec.dtype.bits == 8 and spec.zero is None and spec.scales[0].block == CHANNEL:
        yield replace(spec, scales=(Scale(F32, CHANNEL), Scale(INV127, TENSOR)))
