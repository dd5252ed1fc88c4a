"""Dequantising against scalar arithmetic; quantising against brute force over every code."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import MX, SPECS, number, random_matrices, random_matrix, random_weight, scalar_dequantize, steps
from torch import Tensor

from lancebill.errors import BadValue, SpecError, WrongShape
from lancebill.numbers import blocks
from lancebill.numbers.codec import dequantize, loss, quantize, requantize
from lancebill.numbers.dtypes import E4M3
from lancebill.numbers.rotation import rotate
from lancebill.numbers.scales import CEIL, FLOOR
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight, same_bits

QUANTIZED = [name for name in SPECS if SPECS[name].quantized]
FLUSHES = settings(max_examples=60, deadline=None)


def spec_of(name: str) -> QuantSpec:
    return SPECS[name]


# --- dequantize -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("n", "k", "perm"), [(5, 37, False), (4, 64, True), (1, 1, False), (7, 20, True)])
def test_dequantize_equals_the_scalar_formula(name: str, n: int, k: int, perm: bool) -> None:
    weight = random_weight(spec_of(name), n, k, seed=n * k, perm=perm)
    assert same_bits(dequantize(weight), scalar_dequantize(weight))


@pytest.mark.parametrize("name", SPECS)
def test_results_do_not_depend_on_the_chunk_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_matrix(37, 70, 1)
    whole = quantize(values, spec_of(name))
    other = random_weight(spec_of(name), 37, 70, 2)
    dense, cost = dequantize(other), loss(values, whole)
    for chunk in (1, 3 * 70, 1000):
        monkeypatch.setattr(blocks, "_CPU_CHUNK", chunk)
        assert quantize(values, spec_of(name)).equals(whole)
        assert same_bits(dequantize(other), dense)
        chunked = loss(values, whole)
        assert (chunked.saturated, chunked.flushed, chunked.count) == (cost.saturated, cost.flushed, cost.count)
        assert chunked.rms_error == pytest.approx(cost.rms_error, rel=1e-9)


def test_a_dense_weight_is_not_modified() -> None:
    weight = LogicalWeight(SPECS["fp32"], torch.randn(4, 8))
    before = weight.codes.clone()
    loss(torch.randn(4, 8), weight)
    requantize(weight, SPECS["int4-g32-zp"])
    assert torch.equal(weight.codes, before)
    assert torch.equal(dequantize(weight), before)


# --- quantize: every code is the nearest one ------------------------------------------------------------


def reachable(weight: LogicalWeight) -> Tensor:
    """[codes, n, k]: the value of every code at every element, in fp64."""
    spec, n, k = weight.spec, weight.n, weight.k
    table = torch.tensor([spec.dtype.table[c] for c in spec.dtype.valid_codes], dtype=torch.float64)
    factor, shift, minimum = steps(weight), torch.zeros(n, k), torch.zeros(n, k, dtype=torch.float64)
    if spec.zero is not None and weight.zero is not None:
        shift = torch.tensor([[float(number(spec.zero, weight.zero, r, c)) for c in range(k)] for r in range(n)])
    if spec.minimum:
        parts = [
            torch.tensor([[float(number(s, t, r, c)) for c in range(k)] for r in range(n)], dtype=torch.float64)
            for s, t in zip(spec.minimum, weight.minimum)
        ]
        minimum = math.prod(parts[1:], start=parts[0])
    return (table.view(-1, 1, 1) - shift.double()) * factor - minimum


@FLUSHES
@given(st.sampled_from(QUANTIZED), random_matrices(), st.sampled_from([FLOOR, CEIL]))
def test_every_code_is_the_nearest(name: str, values: Tensor, rule: str) -> None:
    weight = quantize(values, spec_of(name), mx_rule=rule)
    got = dequantize(weight).double()
    best = (reachable(weight) - values.double()).abs().amin(0)
    rounding = 2.0**-21 * (got.abs() + values.double().abs() + steps(weight))
    assert ((got - values.double()).abs() <= best + rounding).all()


NEVER_SATURATE = ["int2-g16", "int3-g64", "int4-g128", "int5-tensor", "int7-g3:fp32", "int8", "int4-g32-zp",
                  "int4-g32-zp:fp16", "int8-zp", "int4-tensor-zp", "twos4-g32", "nf4", "fp8-tensor", "fp8-channel",
                  "fp8-b3x5", "nvfp4", "nvfp4-div", "e4m3fnuz-channel", "iq4-g32:fp16", "bnbfp4-g64"]  # fmt: skip


@FLUSHES
@given(st.sampled_from(NEVER_SATURATE + MX), random_matrices())
def test_errors_stay_within_half_a_step(name: str, values: Tensor) -> None:
    """With the ceil rule and fitted scales, the error is at most half the widest step plus the scale's rounding."""
    spec = spec_of(name)
    values = values.clamp(-(2.0**30), 2.0**30) if "fp16" in name else values
    weight = quantize(values, spec, mx_rule=CEIL)
    values_of = sorted({spec.dtype.table[c] for c in spec.dtype.valid_codes})
    widest = max(b - a for a, b in itertools.pairwise(values_of))
    step = widest / 2 + max(spec.dtype.max, -spec.dtype.min) * 2.0**-8
    tiny = {"int4-g32-zp:fp16": 2.0**-12, "iq4-g32:fp16": 2.0**-12}.get(name, 0.0)  # fp16 scales underflow
    limit = torch.maximum(steps(weight) * step, torch.tensor(tiny, dtype=torch.float64))
    if tiny and float(values.abs().max()) > 60000:
        return  # fp16 scales overflow
    assert ((dequantize(weight) - values).double().abs() <= limit).all()


def test_int4_error_is_half_a_step_exactly_with_exact_scales() -> None:
    values = torch.linspace(-7.5, 7.5, 301).view(1, -1)
    weight = quantize(values, parse_spec("int4-channel:fp32"))
    assert weight.scales[0].item() == 1.0
    assert (dequantize(weight) - values).abs().max() == 0.5
    assert loss(values, weight).saturated == 0


# --- the rules of scales ---------------------------------------------------------------------------------


def mx_byte(amax: float, name: str, rule: str) -> int:
    values = torch.zeros(1, 32)
    values[0, 5] = -amax
    return int(quantize(values, spec_of(name), mx_rule=rule).scales[0][0, 0])


def below(value: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(0.0)).item()


def above(value: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(math.inf)).item()


@pytest.mark.parametrize(
    ("name", "amax", "floor", "ceil"),
    [
        # e2m1: emax 2, maximum 6
        ("mxfp4", 6.0, 127, 127),
        ("mxfp4", 4.0, 127, 127),
        ("mxfp4", below(4.0), 126, 127),
        ("mxfp4", 3.0, 126, 126),
        ("mxfp4", above(3.0), 126, 127),
        ("mxfp4", above(6.0), 127, 128),
        ("mxfp4", 7.0, 127, 128),
        ("mxfp4", below(8.0), 127, 128),
        ("mxfp4", 8.0, 128, 128),
        ("mxfp4", 1.0, 125, 125),
        # e2m3: emax 2, maximum 7.5; e3m2: 4 and 28; e4m3: 8 and 448; e5m2: 15 and 57344
        ("mxfp6-e2m3", 7.5, 127, 127),
        ("mxfp6-e2m3", below(8.0), 127, 128),
        ("mxfp6-e3m2", 28.0, 127, 127),
        ("mxfp6-e3m2", 30.0, 127, 128),
        ("mxfp8", 448.0, 127, 127),
        ("mxfp8", above(448.0), 127, 128),
        ("mxfp8", 512.0, 128, 128),
        ("mxfp8-e5m2", 57344.0, 127, 127),
        ("mxfp8-e5m2", 65535.0, 127, 128),
        # the ends of the range: scales stop at 2**-127, and 3e38 still fits
        ("mxfp4", 2.0**-125, 0, 0),
        ("mxfp4", 2.0**-130, 0, 0),
        ("mxfp4", 2.0**-149, 0, 0),
        ("mxfp4", 2.0**-124, 1, 1),
        ("mxfp4", 3.4e38, 252, 253),
        ("mxfp4", 0.0, 127, 127),
    ],
)
def test_mx_exponents(name: str, amax: float, floor: int, ceil: int) -> None:
    assert (mx_byte(amax, name, FLOOR), mx_byte(amax, name, CEIL)) == (floor, ceil)


def test_mx_floor_saturates_and_ceil_does_not() -> None:
    values = torch.tensor([[7.9, -7.5, 7.0, 6.5, 6.0, 1.0] + [0.0] * 26])
    floor, ceil = (quantize(values, SPECS["mxfp4"], mx_rule=rule) for rule in (FLOOR, CEIL))
    assert dequantize(floor)[0, :6].tolist() == [6, -6, 6, 6, 6, 1]
    assert dequantize(ceil)[0, :6].tolist() == [8, -8, 8, 6, 6, 1]
    assert (loss(values, floor).saturated, loss(values, ceil).saturated) == (2, 0)  # 7.9 and -7.5 are beyond 6 + 1
    with pytest.raises(SpecError, match="floor or ceil"):
        quantize(values, SPECS["mxfp4"], mx_rule="nearest")


@given(st.floats(2.0**-100, 2.0**100, width=32), st.integers(0, 10**6))
@FLUSHES
def test_scales_follow_their_definition(amax: float, seed: int) -> None:
    values = torch.rand(3, 64, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    values[1, 7] = 1.0
    values = (values / values.abs().max()) * amax
    peak = values.abs().max().double()
    rows = values.abs().amax(1, keepdim=True).double()
    assert same_bits(quantize(values, SPECS["fp8-tensor"]).scales[0].view(()), (peak / 448).float())
    assert same_bits(quantize(values, SPECS["fp8-channel"]).scales[0], (rows / 448).float())
    assert same_bits(quantize(values, SPECS["int8"]).scales[0], (rows / 127).bfloat16())
    assert same_bits(quantize(values, parse_spec("int4")).scales[0], (rows / 7.5).bfloat16())
    assert same_bits(quantize(values, SPECS["nf4"]).scales[0], rows.float())
    nvfp4 = quantize(values, SPECS["nvfp4"])
    outer = (peak / 2688).float()
    assert same_bits(nvfp4.scales[1].view(()), outer)
    groups = values.abs().view(3, 4, 16).amax(-1).double()
    assert torch.equal(nvfp4.scales[0], E4M3.encode((groups / 6 / outer.double()).float().clamp(min=2.0**-9)))
    divides = quantize(values, SPECS["nvfp4-div"])
    assert same_bits(divides.scales[1].view(()), (2688 / peak).float())


def test_zero_points_follow_their_definition() -> None:
    values = torch.tensor([[-1.0, 0.0, 2.0, 1.25], [1.0, 2.0, 3.0, 4.0], [-4.0, -3.0, -2.0, -1.0]])
    weight = quantize(values, parse_spec("int2-channel:fp32-zp"))
    assert weight.scales[0].view(-1).tolist() == pytest.approx([1, 4 / 3, 4 / 3])
    assert weight.zero is not None
    assert weight.zero.view(-1).tolist() == [1, 0, 3]
    assert dequantize(weight)[0].tolist() == [-1, 0, 2, 1]


def test_blocks_of_zeros() -> None:
    """Blocks of zeros get a scale of one and do not affect the outer scale."""
    for name in QUANTIZED:
        zeros = quantize(torch.zeros(3, 70), spec_of(name))
        assert not dequantize(zeros).any() or name in ("iq4-g32:fp16",), name
    values = torch.full((2, 32), 1e-6)
    values[0, :16] = 0
    weight = quantize(values, SPECS["nvfp4"])
    assert weight.scales[1].item() == (values.max().double() / 2688).float().item()
    assert E4M3.decode(weight.scales[0]).tolist() == [[1.0, 448.0], [448.0, 448.0]]
    assert torch.allclose(dequantize(weight), values, rtol=2e-2)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(name: str, bad: float) -> None:
    for row, column in ((0, 0), (4, 69), (2, 33)):
        values = random_matrix(5, 70, 3)
        values[row, column] = bad
        with pytest.raises(BadValue, match="NaN or infinity"):
            quantize(values, spec_of(name))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-126, 1e-30, 1e30, 2e38])
def test_tiny_and_huge_values_stay_finite(name: str, size: float) -> None:
    if "inv127" in name and size > 1e37:
        return  # the formula itself overflows: code times scale comes before the 1/127
    values = random_matrix(4, 70, 4).clamp(-1, 1) * size
    weight = quantize(values, spec_of(name))
    assert dequantize(weight).isfinite().all()
    cost = loss(values, weight)
    assert math.isfinite(cost.max_error)
    assert math.isfinite(cost.rms_error)
    wide_range = {"mxfp4", "mxfp8", "nf4", "int8", "fp8-channel", "fp8-tensor", "fp8-b3x5", "bf16", "fp32", "int4-g128"}
    if name in wide_range and size > 2.0**-126:
        assert cost.rms_error < 0.25


def test_small_scales_of_fp16_use_its_subnormals() -> None:
    values = torch.tensor([[7.5e-6, -7.5e-6, 3e-6, 1e-6]])
    weight = quantize(values, parse_spec("int4-channel:fp16"))
    assert weight.scales[0].item() == pytest.approx(1e-6, rel=0.03)
    assert loss(values, weight).max_error < 0.1


def test_float_scales_of_small_blocks_do_not_round_to_zero() -> None:
    values = torch.ones(1, 32)
    values[0, :16] = 1e-7
    weight = quantize(values, SPECS["nvfp4"])
    assert weight.scales[0].tolist() == [[1, 0x7E]]  # 2**-9, not zero
    assert loss(values, weight).saturated == 0


def test_integer_scales_may_round_to_zero() -> None:
    """All values of the block are then flushed to the code of zero."""
    values = torch.ones(1, 64)
    values[0, :16] = 1e-4
    weight = quantize(values, SPECS["int6-g16:int8-g64:fp16"])
    assert weight.scales[0][0, 0] == 0
    assert weight.codes[0, :16].tolist() == [32] * 16
    cost = loss(values, weight)
    assert (cost.flushed, cost.saturated) == (16, 0)


def test_dividing_powers_of_two_mirror_multiplying_ones() -> None:
    values = random_matrix(5, 70, 14)
    for rule in (FLOOR, CEIL):
        one, other = (quantize(values, SPECS[name], mx_rule=rule) for name in ("mxfp4", "e2m1-/g32:e8m0"))
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(254 - one.scales[0].int(), other.scales[0].int())
        assert same_bits(dequantize(one), dequantize(other))


# Root-mean-square error on a Gaussian with correctly fitted levels.
RMS = {
    "bf16": 0.0017, "fp16": 0.0002, "mxfp4": 0.114, "mxfp6-e2m3": 0.028, "mxfp6-e3m2": 0.054, "mxfp8": 0.029,
    "nvfp4": 0.095, "nvfp4-div": 0.095, "nf4": 0.092, "int3-g64": 0.219, "int4-g128": 0.111, "int8": 0.0072,
    "int6-g16:int8-g64:fp16": 0.0204, "int4-g32-zp": 0.081, "int8-zp": 0.0067, "uint5-g32:fp16-min.g32:fp16": 0.0378,
    "uint4-g8:uint6-g16:fp16-min.g8:uint6-min.g16": 0.0498, "iq4-g32:fp16": 0.089, "bnbfp4-g64": 0.122,
    "fp8-tensor": 0.0264, "fp8-channel": 0.0262, "fp8-block": 0.0263, "e3m4-g16": 0.0109, "ternary-tensor": 0.512,
    "int4-g16:e4m3fn-b2xall:bf16": 0.086, "e2m1-tensor-g16:e4m3fn": 0.095, "int8-channel:fp32-tensor:inv127": 0.0072,
    "int4-g32:fp16-channel:fp32": 0.0945, "int4-g32-channel": 0.0945, "e2m1-g16:ue5m3-/channel": 0.0954,
}  # fmt: skip


@pytest.mark.parametrize("name", RMS)
def test_rms_error_of_each_format(name: str) -> None:
    values = torch.randn(96, 384, generator=torch.Generator().manual_seed(0)) * 0.02
    assert loss(values, quantize(values, spec_of(name))).rms_error == pytest.approx(RMS[name], rel=0.06)


# --- symmetries ------------------------------------------------------------------------------------------


@FLUSHES
@given(
    st.sampled_from([*MX, "twos8-g32:e8m0"]), st.integers(-60, 60), st.integers(0, 999), st.sampled_from([FLOOR, CEIL])
)
def test_power_of_two_scales_shift_with_the_values(name: str, shift: int, seed: int, rule: str) -> None:
    values = random_matrix(3, 70, seed).clamp(-100, 100)
    values[values.abs() < 2.0**-20] = 0
    one, other = (quantize(v, spec_of(name), mx_rule=rule) for v in (values, values * 2.0**shift))
    assert torch.equal(one.codes, other.codes)
    moved = (values != 0).float() @ torch.ones(70, 1) > 0
    assert torch.equal(dequantize(other), dequantize(one) * 2.0**shift)
    assert moved.any()


@FLUSHES
@given(st.sampled_from(["fp8-channel", "fp8-tensor", "nf4", "nvfp4", "int7-g3:fp32"]), st.integers(-20, 20))
def test_fp32_scales_shift_with_powers_of_two(name: str, shift: int) -> None:
    values = random_matrix(3, 64, 5)
    one, other = (quantize(v, spec_of(name)) for v in (values, values * 2.0**shift))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(dequantize(other), dequantize(one) * 2.0**shift)


@FLUSHES
@given(st.sampled_from([*MX, "nvfp4", "nvfp4-div", "fp8-tensor", "fp8-b3x5", "int8", "e3m4-g16"]), random_matrices())
def test_quantisation_is_symmetric_in_sign(name: str, values: Tensor) -> None:
    assert torch.equal(dequantize(quantize(-values, spec_of(name))), -dequantize(quantize(values, spec_of(name))))


@FLUSHES
@given(st.sampled_from([*MX, "int8", "nf4", "fp8-channel:bf16"]), random_matrices(), st.sampled_from([FLOOR, CEIL]))
def test_quantisation_is_idempotent(name: str, values: Tensor, rule: str) -> None:
    spec = parse_spec(name)
    once = dequantize(quantize(values, spec, mx_rule=rule))
    assert torch.equal(dequantize(quantize(once, spec, mx_rule=rule)), once)


@FLUSHES
@given(random_matrices())
def test_rounding_is_monotone_within_a_block(values: Tensor) -> None:
    for name in ("int4-tensor-zp", "fp8-tensor", "int5-tensor"):
        got = dequantize(quantize(values, spec_of(name)))
        order = values.reshape(-1).argsort()
        assert (got.reshape(-1)[order].diff() >= 0).all()


# --- rotations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [2, 16, 128])
def test_a_rotation_is_the_product_with_a_hadamard_matrix(block: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    rows = torch.randn(3, 256)
    expected = (rows.double().view(3, -1, block) @ matrix / math.sqrt(block)).view(3, 256)
    torch.testing.assert_close(rotate(rows, block).double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotate(rotate(rows, block), block), rows, rtol=0, atol=2e-6)
    assert same_bits(rotate(rows, block)[1:2], rotate(rows[1:2], block)), "bits depend on other rows"


@pytest.mark.parametrize("name", ["int4-g64-h64", "mxfp4-h32", "nvfp4-h16", "fp8-channel-h128", "int4-g32-zp-h32"])
def test_a_rotated_spec_stores_the_rotated_matrix(name: str) -> None:
    spec = parse_spec(name)
    assert str(spec) == name and spec.widest % spec.rotation == 0
    values = torch.randn(32, 256)
    values[:, 5] *= 30  # an outlier
    weight, plain = quantize(values, spec), quantize(rotate(values, spec.rotation), spec.unrotated)
    assert same_bits(weight.codes, plain.codes)
    torch.testing.assert_close(dequantize(weight), rotate(dequantize(plain), spec.rotation), rtol=0, atol=1e-5)
    back, lost = requantize(weight, spec.unrotated)
    assert back.spec.rotation == 0 and lost.rms_error > 0
    assert loss(values, weight).rms_error == pytest.approx(
        loss(rotate(values, spec.rotation), plain).rms_error, rel=1e-4
    )


def test_outliers_cost_less_in_a_rotated_matrix() -> None:
    values = torch.randn(64, 256)
    values[:, ::64] *= 30
    rotated, plain = (loss(values, quantize(values, parse_spec(name))) for name in ("int4-g64-h64", "int4-g64"))
    assert rotated.rms_error < plain.rms_error


def test_rotations_are_not_cut() -> None:
    weight = quantize(torch.randn(8, 128), parse_spec("int4-g32-h64"))
    assert weight.cut((0, 8), (64, 128)).k == 64
    with pytest.raises(BadValue, match="inside a block of a rotation"):
        weight.cut((0, 8), (32, 64))
    with pytest.raises(WrongShape, match="must fill a row"):
        quantize(torch.randn(8, 96), parse_spec("int4-g32-h64"))
    for name in ("int4-g32-h48", "mxfp4-h1", "mxfp4-h0"):
        with pytest.raises(SpecError):
            parse_spec(name)
