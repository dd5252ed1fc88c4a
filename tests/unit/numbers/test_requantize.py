"""The measured loss against a scalar computation; requantising exactly and by fitting new scales."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import MX, NAMES, SPECS, number, random_matrices, random_matrix, random_weight, scalar_dequantize
from torch import Tensor

from lancebill.errors import BadValue
from lancebill.numbers.codec import dequantize, loss, quantize, requantize
from lancebill.numbers.dtypes import TERNARY
from lancebill.numbers.loss import Loss
from lancebill.numbers.recast import recast
from lancebill.numbers.scales import CEIL
from lancebill.numbers.spec import DIV, QuantSpec
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight, same_bits

FLUSHES = settings(max_examples=60, deadline=None)


def spec_of(name: str) -> QuantSpec:
    return SPECS[name]


# --- loss ------------------------------------------------------------------------------------------------


def beyond(weight: LogicalWeight, value: float, row: int, column: int) -> bool:
    """Whether a value is outside its block's range by more than half the last step plus the scale's rounding."""
    spec = weight.spec
    if not spec.quantized:
        return abs(value) > spec.dtype.rounding_range[1]
    table = sorted({spec.dtype.table[c] for c in spec.dtype.valid_codes})
    low, high = table[0] - (table[1] - table[0]) / 2, table[-1] + (table[-1] - table[-2]) / 2
    tolerance = max(high, -low) / 256
    zero = 0.0 if spec.zero is None or weight.zero is None else float(number(spec.zero, weight.zero, row, column))
    factor = minimum = 1.0
    for scale, tensor in zip(spec.scales, weight.scales):
        value_of_scale = float(number(scale, tensor, row, column))
        factor = factor / value_of_scale if scale.op == DIV else factor * value_of_scale
    for scale, tensor in zip(spec.minimum, weight.minimum):
        minimum *= float(number(scale, tensor, row, column))
    if factor == 0:
        return False
    position = (value + (minimum if spec.minimum else 0)) / factor + zero
    return position > high + tolerance or position < low - tolerance


def naive_loss(values: Tensor, weight: LogicalWeight) -> Loss:
    """The definition of `Loss`, element by element in fp64."""
    got, want = scalar_dequantize(weight).double(), values.double()
    worst = peak = squares = energy = 0.0
    saturated = flushed = 0
    for r in range(weight.n):
        for c in range(weight.k):
            stored = c if weight.perm is None else weight.perm.tolist().index(c)
            off, w = abs(got[r, c].item() - want[r, c].item()), want[r, c].item()
            worst, peak = max(worst, off), max(peak, abs(w))
            squares, energy = squares + off**2, energy + w**2
            flushed += got[r, c].item() == 0 and w != 0
            saturated += beyond(weight, w, r, stored)
    root = math.sqrt(squares / energy) if energy else 0.0
    return Loss(worst / peak if peak else 0.0, root, saturated, flushed, want.numel())


def close(one: Loss, other: Loss) -> bool:
    return (
        (one.flushed, one.count, one.saturated) == (other.flushed, other.count, other.saturated)
        and one.max_error == pytest.approx(other.max_error, rel=1e-5, abs=1e-12)
        and one.rms_error == pytest.approx(other.rms_error, rel=1e-5, abs=1e-12)
    )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("perm", [False, True])
def test_loss_equals_a_scalar_computation(name: str, perm: bool) -> None:
    weight = random_weight(spec_of(name), 4, 40, 6, perm=perm)
    for scale in (s for s in weight.scales if s.dtype == torch.uint8):
        scale.clamp_(max=200)  # powers of two whose products fp32 can hold
    for values in (random_matrix(4, 40, 7), dequantize(weight) * 1.7, dequantize(weight)):
        assert close(loss(values, weight), naive_loss(values, weight)), (
            loss(values, weight),
            naive_loss(values, weight),
        )


def test_values_beyond_half_a_step_count_as_saturated() -> None:
    weight = LogicalWeight(parse_spec("int4-channel:fp32"), torch.tensor([[15, 15, 0, 0, 15, 8]], dtype=torch.uint8),
                           (torch.ones(1, 1),))  # fmt: skip
    values = torch.tensor([[7.5, 7.52, -8.5, -9.0, 40.0, 0.4]])  # 7.52 is within the tolerance, 9.0 and 40 are not
    assert loss(values, weight).saturated == 2


@FLUSHES
@given(st.sampled_from([*MX, "int4-g128", "int3-g64", "int8", "int4-g32-zp", "nf4", "fp8-b3x5"]), random_matrices())
def test_nothing_saturates_if_the_scale_covers_the_block(name: str, values: Tensor) -> None:
    assert loss(values, quantize(values, spec_of(name), mx_rule=CEIL)).saturated == 0


def test_fp16_saturates() -> None:
    values = torch.tensor([[1.0, 65504.0, 65519.0, 65536.0, -1e9, 1e-9]])
    weight = quantize(values, SPECS["fp16"])
    assert weight.codes[0].tolist() == [1.0, 65504.0, 65504.0, 65504.0, -65504.0, 0.0]
    cost = loss(values, weight)
    assert (cost.saturated, cost.flushed) == (2, 1)


def test_merging_losses() -> None:
    one, other = Loss(0.1, 0.3, 1, 2, 100), Loss(0.2, 0.4, 3, 4, 300)
    merged = one.merge(other)
    assert (merged.max_error, merged.saturated, merged.flushed, merged.count) == (0.2, 4, 6, 400)
    assert merged.rms_error == pytest.approx(math.sqrt((0.09 * 100 + 0.16 * 300) / 400))
    assert Loss().merge(one) == one


# --- requantize -------------------------------------------------------------------------------------------

EXACT = [
    ("int4-g32", "int4-g16"),
    ("int4-g32:fp16", "int4-g32:fp32"),
    ("int4-g32", "int4-g32-zp"),
    ("int4-channel", "int4-g32-zp"),
    ("int4-g32", "int8-g32"),
    ("int4-g32-zp", "int4-g16-zp"),
    ("mxfp4", "e2m1-g32:bf16"),
    ("mxfp4", "e2m1-g16:e8m0"),
    ("mxfp4", "mxfp8"),
    ("mxfp4", "mxfp6-e2m3"),
    ("fp8-tensor", "fp8-channel"),
    ("fp8-tensor", "fp8-b2x8"),
    ("fp8-b4x32", "fp8-g32"),
    ("fp8-channel:bf16", "fp8-channel"),
    ("nvfp4", "e2m1-g16:fp16-channel"),
    ("ternary-tensor:fp32", "int2-tensor:fp32"),
    ("uint4-g8:uint6-g16:fp16-min.g8:uint6-min.g16", "uint4-g8:fp16-g8:fp32-min.g8:fp32-min.g8:fp32"),
    ("int8", "int8"),
]


@pytest.mark.parametrize(("old", "new"), EXACT)
def test_recasting_is_exact(old: str, new: str) -> None:
    weight = random_weight(parse_spec(old), 6, 70, 8, perm=True)
    result, cost = requantize(weight, parse_spec(new))
    assert result.spec == parse_spec(new)
    assert same_bits(dequantize(result), dequantize(weight))
    assert cost == Loss(count=6 * 70)
    direct = recast(weight, parse_spec(new))
    assert direct is not None
    assert direct.equals(result)
    assert result.bias is weight.bias
    assert result.perm is weight.perm


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int4-g32", "int4-g64"),
        ("int4-g32:fp32", "int4-g32"),
        ("int8-g32", "int4-g32"),
        ("nvfp4", "nvfp4-div"),
        ("nvfp4", "mxfp4"),
        ("int4-g32-zp", "int4-g32"),
        ("fp8-channel", "fp8-tensor"),
        ("e5m2-channel", "fp8-channel"),
        ("bf16", "int8"),
        ("mxfp4", "bf16"),
    ],
)
def test_recast_returns_none_if_it_may_round(old: str, new: str) -> None:
    assert recast(random_weight(parse_spec(old), 4, 64, 9), parse_spec(new)) is None


def test_codes_are_kept_if_only_scale_types_change() -> None:
    for old, new, bound in (
        ("nvfp4", "nvfp4-div", 2.0**-22),
        ("nvfp4-div", "nvfp4", 2.0**-22),
        ("int4-g32:fp32", "int4-g32", 2.0**-8),
        ("int4-g32:fp16", "int8-g16", 2.0**-8),
        ("int4-g32-zp:fp16", "int4-g32-zp:fp32", 0.0),
    ):
        weight = quantize(random_matrix(6, 64, 10), parse_spec(old))
        result, cost = requantize(weight, parse_spec(new))
        values, again = dequantize(weight), dequantize(result)
        assert ((again - values).abs() <= values.abs() * bound).all(), (old, new)
        assert close(cost, loss(values, result))


@pytest.mark.parametrize(("old", "new"), [("nvfp4", "nvfp4-div"), ("nvfp4-div", "nvfp4")])
def test_a_multiplying_scale_can_become_a_divisor(old: str, new: str) -> None:
    """Random codes and block scales are kept; only the inverse of the global scale is rounded."""
    weight = random_weight(parse_spec(old), 6, 64, 15, perm=True)
    result, cost = requantize(weight, parse_spec(new))
    assert torch.equal(result.codes, weight.codes)
    assert torch.equal(result.scales[0], weight.scales[0])
    assert torch.equal(result.scales[1], 1 / weight.scales[1])
    assert 0 < cost.rms_error < 2.0**-22


def test_power_of_two_scales_become_e8m0_exactly() -> None:
    weight = quantize(random_matrix(6, 64, 11), parse_spec("fp8-g32"))
    rounded = LogicalWeight(weight.spec, weight.codes, (torch.exp2(weight.scales[0].log2().round()),))
    result, cost = requantize(rounded, SPECS["mxfp8"])
    assert same_bits(dequantize(result), dequantize(rounded))
    assert cost == Loss(count=6 * 64)
    refitted, cost = requantize(weight, SPECS["mxfp8"])  # e8m0 cannot represent these scales: new ones are fitted
    assert not torch.equal(refitted.codes, weight.codes)
    assert cost.rms_error > 0


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("new", ["mxfp4", "nvfp4", "int4-g32", "fp8-b3x5", "nf4", "bf16"])
@pytest.mark.parametrize("old", ["int4-g32-zp", "nvfp4", "fp8-b3x5", "uint5-g32:fp16-min.g32:fp16", "bf16"])
def test_requantize_equals_quantize_of_the_values(old: str, new: str, perm: bool) -> None:
    weight = random_weight(parse_spec(old), 6, 70, 12, perm=perm)
    result, cost = requantize(weight, parse_spec(new), mx_rule=CEIL)
    if old == new:
        assert result is weight
        return
    values = dequantize(weight)
    fresh = quantize(values, parse_spec(new), mx_rule=CEIL)
    assert torch.equal(dequantize(result), dequantize(fresh))
    assert close(cost, loss(values, fresh))
    assert result.bias is weight.bias
    assert result.perm is None


def test_an_invalid_code_is_not_recast() -> None:
    weight = random_weight(parse_spec("ternary-tensor:fp32"), 2, 8, 13)
    weight.codes[0, 0] = 3
    assert weight.spec.dtype == TERNARY
    assert recast(weight, parse_spec("int2-tensor:fp32")) is None
    with pytest.raises(BadValue):
        requantize(weight, parse_spec("int2-tensor:fp32"))


# --- resources -------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch
from lancebill.numbers.codec import requantize
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
requantize(LogicalWeight(parse_spec("bf16"), torch.ones(8, 64, dtype=torch.bfloat16)), parse_spec(sys.argv[1]))
weight = LogicalWeight(parse_spec("bf16"), torch.empty(8192, 4096, dtype=torch.bfloat16).normal_())
before = peak()
result, _ = requantize(weight, parse_spec(sys.argv[1]))
print(peak() - before - result.codes.numel())
"""


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_temporary_memory_is_bounded(name: str) -> None:
    """An fp32 copy of this matrix would take 128 MiB; row chunks need far less."""
    done = subprocess.run([sys.executable, "-c", PEAK, name], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 72 << 20


def test_every_kind_of_type_is_covered() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert {parse_spec(n).dtype.kind for n in NAMES} == {"integer", "float", "codebook"}
