"""The definition of truth against scalar arithmetic; rounding against brute force over every code."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import NAMES, SPECS, number, random_weight, scalar_dequantize, steps
from torch import Tensor

from lancebill.errors import BadValue, SpecError
from lancebill.numbers import blocks
from lancebill.numbers.codec import CEIL, FLOOR, Loss, dequantize, loss, quantize, recast, requantize
from lancebill.numbers.dtypes import E4M3, TERNARY
from lancebill.numbers.spec import DIV, QuantSpec
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight, same_bits

QUANTIZED = [name for name in SPECS if SPECS[name].quantized]
MX = ["mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8", "mxfp8-e5m2"]
FLUSHES = settings(max_examples=60, deadline=None)


def matrix(n: int, k: int, seed: int, scale: float = 1.0) -> Tensor:
    """Magnitudes over many binades, some exact zeros, one block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator) * torch.exp2(torch.randn(n, k, generator=generator) * 2)
    values[torch.rand(n, k, generator=generator) < 0.05] = 0
    values[0, : k // 2] = 0
    return values * scale


def matrices() -> st.SearchStrategy[Tensor]:
    exponent = st.integers(-40, 40)
    return st.builds(
        lambda n, k, seed, e: matrix(n, k, seed, 2.0**e),
        st.integers(1, 9), st.integers(1, 70), st.integers(0, 10**6), exponent,
    )  # fmt: skip


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
    values = matrix(37, 70, 1)
    whole = quantize(values, spec_of(name))
    other = random_weight(spec_of(name), 37, 70, 2)
    dense, cost = dequantize(other), loss(values, whole)
    for chunk in (1, 3 * 70, 1000):
        monkeypatch.setattr(blocks, "_CPU_CHUNK", chunk)
        assert quantize(values, spec_of(name)).equals(whole)
        assert same_bits(dequantize(other), dense)
        again = loss(values, whole)
        assert (again.saturated, again.flushed, again.count) == (cost.saturated, cost.flushed, cost.count)
        assert again.rms_error == pytest.approx(cost.rms_error, rel=1e-9)


def test_a_dense_weight_is_not_modified() -> None:
    weight = LogicalWeight(SPECS["fp32"], torch.randn(4, 8))
    before = weight.codes.clone()
    loss(torch.randn(4, 8), weight)
    requantize(weight, SPECS["int4-g32-zp"])
    assert torch.equal(weight.codes, before)
    assert torch.equal(dequantize(weight), before)


# --- quantize: every code is the nearest one ------------------------------------------------------------


def reachable(weight: LogicalWeight) -> Tensor:
    """[codes, n, k]: what every code would stand for at every place, fp64."""
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
@given(st.sampled_from(QUANTIZED), matrices(), st.sampled_from([FLOOR, CEIL]))
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
@given(st.sampled_from(NEVER_SATURATE + MX), matrices())
def test_errors_stay_within_half_a_step(name: str, values: Tensor) -> None:
    """Under the ceil rule and for every fitted scale: at most half the widest step, and a scale's rounding."""
    spec = spec_of(name)
    values = values.clamp(-(2.0**30), 2.0**30) if "fp16" in name else values
    weight = quantize(values, spec, mx_rule=CEIL)
    values_of = sorted({spec.dtype.table[c] for c in spec.dtype.valid_codes})
    widest = max(b - a for a, b in itertools.pairwise(values_of))
    step = widest / 2 + max(spec.dtype.max, -spec.dtype.min) * 2.0**-8
    tiny = {"int4-g32-zp:fp16": 2.0**-12, "iq4-g32:fp16": 2.0**-12}.get(name, 0.0)  # where fp16 scales end
    limit = torch.maximum(steps(weight) * step, torch.tensor(tiny, dtype=torch.float64))
    if tiny and float(values.abs().max()) > 60000:
        return  # beyond the scales of fp16
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
    """A scale of one for them, and no say in anyone else's: the outer scale comes from the rest."""
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
        values = matrix(5, 70, 3)
        values[row, column] = bad
        with pytest.raises(BadValue, match="NaN or infinity"):
            quantize(values, spec_of(name))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-126, 1e-30, 1e30, 2e38])
def test_tiny_and_huge_values_stay_finite(name: str, size: float) -> None:
    if "inv127" in name and size > 1e37:
        return  # the formula itself overflows: code times scale comes before the 1/127
    values = matrix(4, 70, 4).clamp(-1, 1) * size
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
    """Then nothing of the block is left, and its codes are those of zero."""
    values = torch.ones(1, 64)
    values[0, :16] = 1e-4
    weight = quantize(values, SPECS["int6-g16:int8-g64:fp16"])
    assert weight.scales[0][0, 0] == 0
    assert weight.codes[0, :16].tolist() == [32] * 16
    cost = loss(values, weight)
    assert (cost.flushed, cost.saturated) == (16, 0)


def test_dividing_powers_of_two_mirror_multiplying_ones() -> None:
    values = matrix(5, 70, 14)
    for rule in (FLOOR, CEIL):
        one, other = (quantize(values, SPECS[name], mx_rule=rule) for name in ("mxfp4", "e2m1-/g32:e8m0"))
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(254 - one.scales[0].int(), other.scales[0].int())
        assert same_bits(dequantize(one), dequantize(other))


# Root-mean-square error on a Gaussian: what a format costs when its levels are fitted as they should be.
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
    values = matrix(3, 70, seed).clamp(-100, 100)
    values[values.abs() < 2.0**-20] = 0
    one, other = (quantize(v, spec_of(name), mx_rule=rule) for v in (values, values * 2.0**shift))
    assert torch.equal(one.codes, other.codes)
    moved = (values != 0).float() @ torch.ones(70, 1) > 0
    assert torch.equal(dequantize(other), dequantize(one) * 2.0**shift)
    assert moved.any()


@FLUSHES
@given(st.sampled_from(["fp8-channel", "fp8-tensor", "nf4", "nvfp4", "int7-g3:fp32"]), st.integers(-20, 20))
def test_fp32_scales_shift_with_powers_of_two(name: str, shift: int) -> None:
    values = matrix(3, 64, 5)
    one, other = (quantize(v, spec_of(name)) for v in (values, values * 2.0**shift))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(dequantize(other), dequantize(one) * 2.0**shift)


@FLUSHES
@given(st.sampled_from([*MX, "nvfp4", "nvfp4-div", "fp8-tensor", "fp8-b3x5", "int8", "e3m4-g16"]), matrices())
def test_quantisation_is_symmetric_in_sign(name: str, values: Tensor) -> None:
    assert torch.equal(dequantize(quantize(-values, spec_of(name))), -dequantize(quantize(values, spec_of(name))))


@FLUSHES
@given(st.sampled_from([*MX, "int8", "nf4", "fp8-channel:bf16"]), matrices(), st.sampled_from([FLOOR, CEIL]))
def test_quantisation_is_idempotent(name: str, values: Tensor, rule: str) -> None:
    spec = parse_spec(name)
    once = dequantize(quantize(values, spec, mx_rule=rule))
    assert torch.equal(dequantize(quantize(once, spec, mx_rule=rule)), once)


@FLUSHES
@given(matrices())
def test_rounding_is_monotone_within_a_block(values: Tensor) -> None:
    for name in ("int4-tensor-zp", "fp8-tensor", "int5-tensor"):
        got = dequantize(quantize(values, spec_of(name)))
        order = values.reshape(-1).argsort()
        assert (got.reshape(-1)[order].diff() >= 0).all()


# --- loss ------------------------------------------------------------------------------------------------


def beyond(weight: LogicalWeight, value: float, row: int, column: int) -> bool:
    """Whether a value is further outside its block than half of the last step and a scale's rounding."""
    spec = weight.spec
    if not spec.quantized:
        return abs(value) > spec.dtype.rounding_range[1]
    table = sorted({spec.dtype.table[c] for c in spec.dtype.valid_codes})
    low, high = table[0] - (table[1] - table[0]) / 2, table[-1] + (table[-1] - table[-2]) / 2
    sliver = max(high, -low) / 256
    zero = 0.0 if spec.zero is None or weight.zero is None else float(number(spec.zero, weight.zero, row, column))
    factor = minimum = 1.0
    for scale, tensor in zip(spec.scales, weight.scales):
        own = float(number(scale, tensor, row, column))
        factor = factor / own if scale.op == DIV else factor * own
    for scale, tensor in zip(spec.minimum, weight.minimum):
        minimum *= float(number(scale, tensor, row, column))
    if factor == 0:
        return False
    place = (value + (minimum if spec.minimum else 0)) / factor + zero
    return place > high + sliver or place < low - sliver


def naive_loss(values: Tensor, weight: LogicalWeight) -> Loss:
    """Element by element in fp64, from the words of `Loss`."""
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
    for values in (matrix(4, 40, 7), dequantize(weight) * 1.7, dequantize(weight)):
        assert close(loss(values, weight), naive_loss(values, weight)), (
            loss(values, weight),
            naive_loss(values, weight),
        )


def test_values_beyond_half_a_step_count_as_saturated() -> None:
    weight = LogicalWeight(parse_spec("int4-channel:fp32"), torch.tensor([[15, 15, 0, 0, 15, 8]], dtype=torch.uint8),
                           (torch.ones(1, 1),))  # fmt: skip
    values = torch.tensor([[7.5, 7.52, -8.5, -9.0, 40.0, 0.4]])  # 7.52 is within the sliver, 9.0 and 40 are not
    assert loss(values, weight).saturated == 2


@FLUSHES
@given(st.sampled_from([*MX, "int4-g128", "int3-g64", "int8", "int4-g32-zp", "nf4", "fp8-b3x5"]), matrices())
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
        weight = quantize(matrix(6, 64, 10), parse_spec(old))
        result, cost = requantize(weight, parse_spec(new))
        values, again = dequantize(weight), dequantize(result)
        assert ((again - values).abs() <= values.abs() * bound).all(), (old, new)
        assert close(cost, loss(values, result))


@pytest.mark.parametrize(("old", "new"), [("nvfp4", "nvfp4-div"), ("nvfp4-div", "nvfp4")])
def test_a_multiplying_scale_can_become_a_divisor(old: str, new: str) -> None:
    """Codes and block scales no fit would choose stay as they are; only the inverse is rounded."""
    weight = random_weight(parse_spec(old), 6, 64, 15, perm=True)
    result, cost = requantize(weight, parse_spec(new))
    assert torch.equal(result.codes, weight.codes)
    assert torch.equal(result.scales[0], weight.scales[0])
    assert torch.equal(result.scales[1], 1 / weight.scales[1])
    assert 0 < cost.rms_error < 2.0**-22


def test_power_of_two_scales_become_e8m0_exactly() -> None:
    weight = quantize(matrix(6, 64, 11), parse_spec("fp8-g32"))
    rounded = LogicalWeight(weight.spec, weight.codes, (torch.exp2(weight.scales[0].log2().round()),))
    result, cost = requantize(rounded, SPECS["mxfp8"])
    assert same_bits(dequantize(result), dequantize(rounded))
    assert cost == Loss(count=6 * 64)
    refitted, cost = requantize(weight, SPECS["mxfp8"])  # scales a byte cannot hold: fitted anew
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
    """An fp32 copy of this matrix would be 128 MiB; chunks and block grids need far less."""
    done = subprocess.run([sys.executable, "-c", PEAK, name], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 72 << 20


def test_every_kind_of_type_is_covered() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert {parse_spec(n).dtype.kind for n in NAMES} == {"integer", "float", "codebook"}
