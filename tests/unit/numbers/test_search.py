"""Scale search: never a larger weighted error in any block, and close to the best scale there is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lancebill.errors import CannotEncode
from lancebill.formats import registry
from lancebill.formats.base import Format
from lancebill.numbers.blocks import finest, reduce_blocks
from lancebill.numbers.codec import dequantize, quantize, requantize
from lancebill.numbers.dtypes import E2M1, E2M3, E3M2, E4M3, E5M2, NF4, TERNARY, DType, biased_type, int_type, uint_type
from lancebill.numbers.search import can_search, search_pays
from lancebill.numbers.spec import DENSE_F32, MXFP4, NVFP4, QuantSpec
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight

TYPES = (E2M1, E2M3, E3M2, E4M3, E5M2, NF4, TERNARY, biased_type(4), int_type(8), uint_type(3))


def weights(n: int = 128, k: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)
    values[:, ::37] *= 5
    values[3] = 0
    return values


def exportable() -> list[str]:
    """Every spec that some format writes."""
    found = [example.scheme.spec.unrotated for f in registry().values() for example in f.examples()]
    specs = {str(spec): spec for spec in found}
    return [n for n, spec in specs.items() if spec.quantized and any(_writes(f, spec) for f in registry().values())]


def _writes(fmt: Format, spec: QuantSpec) -> bool:
    try:
        fmt.export(spec, ())
    except CannotEncode:
        return False
    return True


def block_errors(values: Tensor, weight: LogicalWeight) -> Tensor:
    rows, columns = finest(level.block for level in weight.spec.levels)
    error = ((dequantize(weight) - values) * values).double().square()
    return reduce_blocks(torch.sum, reduce_blocks(torch.sum, error, 1, columns), 0, rows)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nearest_is_encode_and_decode(dtype: DType) -> None:
    ends = torch.tensor([0.0, dtype.min, dtype.max, 2 * dtype.min - 1, 2 * dtype.max, 1e-30])
    values = torch.cat([torch.linspace(1.5 * dtype.min, 1.5 * dtype.max, 10001), ends])
    assert torch.equal(dtype.nearest(values), dtype.decode(dtype.encode(values)))


@pytest.mark.parametrize("name", exportable())
def test_no_block_gets_worse(name: str) -> None:
    spec, values = parse_spec(name), weights()
    plain, searched = (block_errors(values, quantize(values, spec, search=search)) for search in (False, True))
    assert (searched <= plain * (1 + 1e-5) + 1e-12).all()
    assert searched.sum() <= plain.sum()


@pytest.mark.parametrize(("spec", "bound"), [(MXFP4, 1.0), (NVFP4, 1.05)], ids=str)
def test_small_float_scales_are_about_as_good_as_the_best(spec: QuantSpec, bound: float) -> None:
    values = weights(16)
    found = quantize(values, spec, search=True)
    errors = []
    for code in range(127):  # of E4M3, or the powers of two up to one
        code_of_all = torch.full_like(found.scales[0], code if spec == NVFP4 else code + 10)
        step = spec.scales[0].dtype.decode(code_of_all)
        for level, codes in zip(spec.scales[1:], found.scales[1:]):
            step = step * level.dtype.decode(codes)
        expanded = step.repeat_interleave(spec.group, 1)
        rounded = E2M1.nearest(values / expanded.clamp(min=1e-38)) * expanded
        errors.append(reduce_blocks(torch.sum, ((rounded - values) * values).double().square(), 1, spec.group))
    assert block_errors(values, found).sum() <= torch.stack(errors).amin(0).sum() * bound + 1e-12


def test_search_is_the_default_where_it_is_quick() -> None:
    names = ("mxfp4", "nvfp4", "int4-g128", "int4-g32-zp", "fp8-block", "fp8-channel", "nf4", "fp8-tensor", "bf16")
    assert [search_pays(parse_spec(name)) for name in names] == [True] * 6 + [False] * 3


def test_a_search_that_has_nothing_to_try_is_none() -> None:
    values = weights()
    for name in ("int8", "int8-g32-zp", "int7-g64-zp", "bf16"):
        assert not can_search(parse_spec(name)) and not search_pays(parse_spec(name))
    for name in ("nf4", "fp8-channel", "int7-g64", "int5-g64-zp"):
        spec = parse_spec(name)
        assert can_search(spec) and not quantize(values, spec, search=True).equals(quantize(values, spec)), name


def test_eight_bit_integers_keep_the_fitted_scale() -> None:
    values, spec = weights(), parse_spec("int8")
    assert quantize(values, spec, search=True).equals(quantize(values, spec))


def test_the_largest_value_of_a_block_decides_the_sign_of_integer_scales() -> None:
    values, spec = torch.linspace(-0.9, 1.0, 32)[None], parse_spec("int4-g32")
    assert quantize(values, spec, search=True).scales[0] < 0 < quantize(-values, spec, search=True).scales[0]
    assert quantize(values, spec).scales[0] > 0


def test_requantize_searches_too() -> None:
    values = weights()
    found, _ = requantize(LogicalWeight(DENSE_F32, values), MXFP4, search=True)
    assert found.equals(quantize(values, MXFP4, search=True))
    assert not found.equals(quantize(values, MXFP4))
