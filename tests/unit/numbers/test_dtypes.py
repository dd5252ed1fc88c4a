"""Every code, every midpoint and its neighbours, and all bf16 inputs, against independent references."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from lancebill.errors import SpecError
from lancebill.numbers.coding import _search_tables
from lancebill.numbers.dtypes import (
    BF16,
    BNB_FP4,
    E2M1,
    E2M3,
    E3M2,
    E3M4,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E8M0,
    F16,
    F32,
    INV127,
    IQ4,
    NF4,
    TERNARY,
    UE5M3,
    ZERO16,
    DType,
    biased_type,
    codebook,
    int_type,
    uint_type,
)

CPU = torch.device("cpu")
MINIFLOATS = [E2M1, E2M3, E3M2, E3M4, E4M3, E4M3FNUZ, E5M2, UE5M3]
INTEGERS = [make(bits) for make in (int_type, uint_type, biased_type) for bits in range(1, 9)]
UNSORTED = codebook([0.5, -3.0, 2.0, 0.0, -0.25, 7.0, 1.0, -8.0])
CROWDED = codebook([1.0, 1.0 + 2**-20, 1.0 + 2**-19, 1.0 + 3 * 2**-20])  # several values share their top 16 bits
TABLES = [*MINIFLOATS, *INTEGERS, E8M0, NF4, BNB_FP4, IQ4, TERNARY, INV127, UNSORTED, CROWDED]

# Types that ml_dtypes defines the same way. Intended differences: ours saturate, its types overflow to infinity or
# NaN; a tie between two powers of two rounds to the even code in ours and up in its e8m0, which also has no 2**-127.
REFERENCE_TYPES: list[tuple[DType, type]] = [
    (E2M1, ml_dtypes.float4_e2m1fn),
    (E2M3, ml_dtypes.float6_e2m3fn),
    (E3M2, ml_dtypes.float6_e3m2fn),
    (E3M4, ml_dtypes.float8_e3m4),
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E4M3FNUZ, ml_dtypes.float8_e4m3fnuz),
    (E5M2, ml_dtypes.float8_e5m2),
    (E8M0, ml_dtypes.float8_e8m0fnu),
]
REFERENCE_INTEGERS: list[tuple[DType, type]] = [
    (int_type(2), ml_dtypes.int2),
    (int_type(4), ml_dtypes.int4),
    (uint_type(2), ml_dtypes.uint2),
    (uint_type(4), ml_dtypes.uint4),
]


def names(value: object) -> str:
    return str(value) if isinstance(value, DType) else ""


def decode(dtype: DType, codes: list[int] | range) -> list[float]:
    values: list[float] = dtype.decode(torch.tensor(list(codes), dtype=torch.uint8)).tolist()
    return values


def encode(dtype: DType, *values: float) -> list[int]:
    codes: list[int] = dtype.encode(torch.tensor(values, dtype=torch.float32)).tolist()
    return codes


def all_bf16() -> Tensor:
    bits = torch.arange(1 << 16, dtype=torch.int64) << 16
    return bits.to(torch.int32).view(torch.float32)


def probes(dtype: DType) -> Tensor:
    """Every value, every midpoint between neighbours, and one float either side of each."""
    values = torch.tensor(sorted({dtype.table[c] for c in dtype.valid_codes}), dtype=torch.float32)
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    base = torch.cat([values, middles])
    up, down = torch.full_like(base, math.inf), torch.full_like(base, -math.inf)
    return torch.cat([base, torch.nextafter(base, up), torch.nextafter(base, down)])


def random_floats(count: int, seed: int) -> Tensor:
    """Every bit pattern equally likely: all magnitudes, subnormals, infinities, NaNs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def nearest(dtype: DType, value: float) -> set[int]:
    """The correct codes for a finite value, by exact arithmetic on its two neighbours in the table."""
    if dtype.kind == "integer":
        rounded = min(max(round(Fraction(value)), int(dtype.min)), int(dtype.max))
        return {dtype.table.index(float(rounded))}
    value = min(max(value, dtype.min), dtype.max)
    below = max(v for v in dtype.table if v <= value)
    above = min(v for v in dtype.table if v >= value)
    codes = {v: {c for c, entry in enumerate(dtype.table) if entry == v} for v in (below, above)}
    to_below, to_above = Fraction(value) - Fraction(below), Fraction(above) - Fraction(value)
    if to_below != to_above:
        return codes[below if to_below < to_above else above]
    even = [v for v in (below, above) if all(c % 2 == 0 for c in codes[v])]
    return codes[even[0] if len(even) == 1 else below]


# --- values from the specifications -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "samples"),
    [
        (E2M1, {0: 0, 1: 0.5, 2: 1, 3: 1.5, 4: 2, 5: 3, 6: 4, 7: 6, 9: -0.5, 10: -1, 11: -1.5, 15: -6}),
        (E2M3, {0x01: 0.125, 0x07: 0.875, 0x08: 1, 0x0F: 1.875, 0x10: 2, 0x1F: 7.5, 0x3F: -7.5}),
        (E3M2, {0x01: 0.0625, 0x04: 0.25, 0x07: 0.4375, 0x0C: 1, 0x1F: 28, 0x3F: -28}),
        (E4M3, {1: 0.001953125, 8: 0.015625, 0x30: 0.5, 0x38: 1, 0x3C: 1.5, 0x48: 4, 0x7E: 448}),
        (E4M3FNUZ, {0x38: 0.5, 0x40: 1, 0x7F: 240}),
        (E5M2, {0x3C: 1, 0x3E: 1.5, 0x7B: 57344}),
        (E8M0, {0: 2.0**-127, 0x7E: 0.5, 0x7F: 1, 0x80: 2, 254: 2.0**127}),
        (UE5M3, {254: 114688, 1: 2.0**-17}),
        (NF4, {0: -1, 1: -0.6961928009986877, 7: 0, 8: 0.07958029955625534, 14: 0.7229568362236023, 15: 1}),
        (biased_type(4), {0: -8, 8: 0, 15: 7}),
        (int_type(4), {0: 0, 7: 7, 8: -8, 15: -1}),
        (TERNARY, {0: -1, 1: 0, 2: 1}),
        (IQ4, {0: -127, 8: 1, 15: 113}),
    ],
    ids=names,
)
def test_sample_codes(dtype: DType, samples: dict[int, float]) -> None:
    assert decode(dtype, list(samples)) == list(samples.values())
    assert encode(dtype, *samples.values()) == list(samples)


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest", "bits"),
    [
        (E2M1, 6, 0.5, 4),
        (E2M3, 7.5, 0.125, 6),
        (E3M2, 28, 0.0625, 6),
        (E3M4, 31, 2.0**-6, 8),
        (E4M3, 448, 2.0**-9, 8),
        (E4M3FNUZ, 240, 2.0**-10, 8),
        (E5M2, 57344, 2.0**-16, 8),
        (E8M0, 2.0**127, 2.0**-127, 8),
        (UE5M3, 114688, 2.0**-17, 8),
        (F16, 65504, 2.0**-24, 16),
        (BF16, float.fromhex("0x1.fep127"), 2.0**-133, 16),
        (F32, float.fromhex("0x1.fffffep127"), 2.0**-149, 32),
        (ZERO16, 32767, 1, 16),
    ],
    ids=names,
)
def test_range(dtype: DType, largest: float, smallest: float, bits: int) -> None:
    assert (dtype.max, dtype.min_positive, dtype.bits) == (largest, smallest, bits)
    if dtype not in (E8M0, UE5M3, ZERO16):
        assert dtype.min == -largest
    assert 2.0**dtype.max_exponent <= largest < 2.0 ** (dtype.max_exponent + 1)


def test_nan_and_infinity_codes() -> None:
    def nans(dtype: DType) -> list[int]:
        return [c for c, v in enumerate(dtype.table) if math.isnan(v)]

    assert nans(E4M3) == [0x7F, 0xFF]
    assert nans(E4M3FNUZ) == [0x80]
    assert nans(E5M2) == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert (E5M2.table[0x7C], E5M2.table[0xFC]) == (math.inf, -math.inf)
    assert nans(E8M0) == nans(UE5M3) == [0xFF]
    assert nans(TERNARY) == [3]
    assert all(nans(t) == [] for t in (E2M1, E2M3, E3M2, E3M4, NF4, *INTEGERS))


def test_integer_tables_exhaustively() -> None:
    for bits in range(1, 9):
        half = 1 << (bits - 1)
        assert decode(uint_type(bits), range(2 * half)) == list(range(2 * half))
        assert decode(biased_type(bits), range(2 * half)) == list(range(-half, half))
        assert decode(int_type(bits), range(2 * half)) == [*range(half), *range(-half, 0)]
        for dtype in (uint_type(bits), biased_type(bits), int_type(bits)):
            assert encode(dtype, *dtype.table) == list(range(2 * half))
            assert encode(dtype, -1e9, 1e9, -math.inf, math.inf) == 2 * encode(dtype, dtype.min, dtype.max)


def test_rounding_of_fp4_at_every_tie() -> None:
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
    assert decode(E2M1, encode(E2M1, *ties)) == list(ties.values())


def test_bitsandbytes_fp4_table_in_fp32() -> None:
    positive = [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25]
    assert decode(BNB_FP4, range(8)) == positive
    assert decode(BNB_FP4, range(8, 16)) == [-v for v in positive]


# --- against ml_dtypes ------------------------------------------------------------------------------------


def reference_values(dtype: DType, reference: type, codes: np.ndarray) -> np.ndarray:
    values: np.ndarray = codes.view(reference).astype(np.float32)
    if dtype == E3M4:  # theirs uses the top binade for infinity and NaN, ours does not
        values[(codes & 0x70) == 0x70] = np.nan
    return values


@pytest.mark.parametrize(("dtype", "reference"), REFERENCE_TYPES, ids=names)
def test_decode_equals_ml_dtypes_on_every_code(dtype: DType, reference: type) -> None:
    codes = np.arange(1 << dtype.bits, dtype=np.uint8)
    theirs = reference_values(dtype, reference, codes)
    ours = dtype.decode(torch.from_numpy(codes)).numpy()
    alike = ~np.isnan(theirs) if dtype == E3M4 else np.ones_like(codes, dtype=bool)
    both_nan = np.isnan(theirs) & np.isnan(ours)
    assert np.all((ours.view(np.int32) == theirs.view(np.int32)) | both_nan | ~alike)
    assert alike.sum() == (224 if dtype == E3M4 else 1 << dtype.bits)


@pytest.mark.parametrize(("dtype", "reference"), REFERENCE_TYPES, ids=names)
def test_encode_equals_ml_dtypes_within_the_finite_range(dtype: DType, reference: type) -> None:
    inputs = torch.cat([probes(dtype), all_bf16(), random_floats(1 << 17, 1), torch.randn(1 << 16)])
    limit = 15.5 if dtype == E3M4 else dtype.max  # e3m4: the largest value both have
    inside = inputs[inputs.abs() <= limit]
    if dtype == E8M0:
        inside = inside[(inside >= 2.0**-126) & (inside.frexp().mantissa != 0.75)]
    theirs = torch.from_numpy(inside.numpy().astype(reference).view(np.uint8).copy())
    ours = dtype.encode(inside)
    wrong = inside[ours != theirs]
    assert not len(wrong), (wrong[:8], ours[ours != theirs][:8], theirs[ours != theirs][:8])


@pytest.mark.parametrize(("dtype", "reference"), REFERENCE_INTEGERS, ids=names)
def test_integers_equal_ml_dtypes(dtype: DType, reference: type) -> None:
    values = np.array([dtype.table[c] for c in range(1 << dtype.bits)], dtype=np.float32)
    assert (values.astype(reference).astype(np.float32) == values).all()
    mask = (1 << dtype.bits) - 1
    theirs = values.astype(reference).astype(np.int32) & mask
    assert encode(dtype, *values.tolist()) == theirs.tolist()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E4M3FNUZ], ids=names)
def test_torch_conversion_equals_the_table(dtype: DType) -> None:
    """The fast path through torch's types, against the table."""
    values = decode(dtype, range(256))
    for code, (ours, table) in enumerate(zip(values, dtype.table)):
        assert ours == table or (math.isnan(ours) and math.isnan(table)), hex(code)
        assert math.copysign(1, ours) == math.copysign(1, table) or math.isnan(table)


# --- against exact arithmetic over the table --------------------------------------------------------------


@pytest.mark.parametrize("dtype", TABLES, ids=names)
def test_every_code_decodes_and_encodes_back(dtype: DType) -> None:
    values = dtype.decode(torch.tensor(dtype.valid_codes, dtype=torch.uint8))
    assert values.tolist() == [dtype.table[c] for c in dtype.valid_codes]
    again = dtype.decode(dtype.encode(values))
    assert torch.equal(values, again)
    if dtype in (*MINIFLOATS, E8M0):  # every value has one code only
        assert torch.equal(dtype.encode(values), torch.tensor(dtype.valid_codes, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", TABLES, ids=names)
def test_encode_is_nearest_at_every_boundary(dtype: DType) -> None:
    for value, code in zip((inputs := probes(dtype)).tolist(), dtype.encode(inputs).tolist()):
        assert code in nearest(dtype, value), (value, code)


@pytest.mark.parametrize("dtype", TABLES, ids=names)
def test_encode_is_nearest_on_random_floats(dtype: DType) -> None:
    inputs = torch.cat([random_floats(300, 2), torch.randn(300) * dtype.max / 3])
    inputs = inputs[inputs.isfinite()]
    for value, code in zip(inputs.tolist(), dtype.encode(inputs).tolist()):
        assert code in nearest(dtype, value), (value, code)


@pytest.mark.parametrize("dtype", [t for t in TABLES if t.kind != "integer"], ids=names)
def test_fast_encoders_equal_a_table_search(dtype: DType) -> None:
    """All bf16 inputs and a million fp32 patterns, against an independent numpy search."""
    inputs = torch.cat([all_bf16(), random_floats(1 << 20, 3), probes(dtype)])
    inputs = inputs[~inputs.isnan()]
    values = sorted({dtype.table[c] for c in dtype.valid_codes})
    table = np.array(values, dtype=np.float64)
    code_of = {v: dtype.table.index(v) for v in values}
    x = np.clip(inputs.numpy().astype(np.float64), table[0], table[-1])
    right = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    below, above = table[right - 1], table[right]
    low_parity, high_parity = (np.array([code_of[v] % 2 for v in values])[i] for i in (right - 1, right))
    up = (x - below > above - x) | ((x - below == above - x) & (low_parity == 1) & (high_parity == 0))
    got = dtype.decode(dtype.encode(inputs)).numpy().astype(np.float64)
    assert (got == np.where(up, above, below)).all()


def test_only_tables_with_close_values_need_a_search() -> None:
    searched = [t for t in (E8M0, NF4, BNB_FP4, IQ4, UNSORTED, CROWDED) if _search_tables(t, CPU)[2] is None]
    assert searched == [CROWDED]


# --- the stated rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TABLES, ids=names)
def test_saturation(dtype: DType) -> None:
    assert decode(dtype, encode(dtype, math.inf, 3e38, -math.inf, -3e38)) == [dtype.max] * 2 + [dtype.min] * 2


@pytest.mark.parametrize("dtype", TABLES, ids=names)
def test_nan(dtype: DType) -> None:
    value = decode(dtype, encode(dtype, math.nan))[0]
    if dtype.nan_code is not None:
        assert math.isnan(value)
    else:
        assert value == decode(dtype, encode(dtype, 0.0))[0]


@pytest.mark.parametrize("dtype", [E2M1, E2M3, E3M2, E3M4, E4M3, E5M2], ids=names)
def test_signed_zeros_are_kept(dtype: DType) -> None:
    sign = 1 << (dtype.bits - 1)
    tiny = dtype.min_positive / 4
    assert encode(dtype, 0.0, tiny, -0.0, -tiny, 2.0**-149, -(2.0**-149)) == [0, 0, sign, sign, 0, sign]
    assert [math.copysign(1, v) for v in decode(dtype, [0, sign])] == [1, -1]


@pytest.mark.parametrize("dtype", [E4M3FNUZ, UE5M3], ids=names)
def test_types_with_one_zero(dtype: DType) -> None:
    assert encode(dtype, 0.0, -0.0, -(2.0**-40), 2.0**-40) == [0, 0, 0, 0]


def test_16_bit_types_saturate_and_keep_nan() -> None:
    values = torch.tensor([1e30, -math.inf, 65519.0, math.nan, 1e-8])
    half = F16.encode(values)
    assert half.dtype == torch.float16
    assert half[:3].tolist() == [65504, -65504, 65504]
    assert half[3].isnan()
    assert BF16.encode(torch.tensor([3.4e38])).item() == BF16.max
    assert ZERO16.encode(torch.tensor([2.5, -1e9, 16.0, math.nan])).tolist() == [2, -32768, 16, 0]


@pytest.mark.parametrize("dtype", TABLES, ids=names)
def test_shapes_strides_and_empty_tensors(dtype: DType) -> None:
    values = torch.randn(6, 10) * dtype.max / 2
    assert torch.equal(dtype.encode(values.t()), dtype.encode(values).t())
    codes = dtype.encode(values)
    assert torch.equal(dtype.decode(codes.t()), dtype.decode(codes).t())
    assert dtype.encode(values[:0]).shape == (0, 10)
    assert dtype.decode(codes[:0]).shape == (0, 10)
    assert dtype.encode(torch.tensor(1.0)).shape == ()


def test_encode_does_not_modify_its_input() -> None:
    for dtype in TABLES:
        values = torch.randn(64)
        before = values.clone()
        dtype.encode(values)
        assert torch.equal(values, before), dtype


def test_equality_is_by_name_and_table() -> None:
    assert uint_type(4) == uint_type(4)
    assert hash(uint_type(4)) == hash(uint_type(4))
    assert E4M3 == E4M3
    assert len({*INTEGERS, *MINIFLOATS}) == len(INTEGERS) + len(MINIFLOATS)
    one, other = codebook([0, 1, 2, 3], "mine"), codebook([0, 1, 2, 4], "mine")
    assert one != other
    assert (decode(one, [3]), decode(other, [3])) == ([3], [4])


def test_codebooks() -> None:
    assert codebook(NF4.table) is NF4
    assert codebook(BNB_FP4.table) is BNB_FP4
    mine = codebook([float(v) for v in range(16)])
    assert mine.name.startswith("codebook16#")
    assert mine == codebook([float(v) for v in range(16)])
    assert mine != codebook([float(v) for v in range(1, 17)])
    for bad in ([], [1.0], [1.0] * 3, [0.0] * 512, [0.0, math.nan], [0.0, math.inf], [0.0, 1e300]):
        with pytest.raises(SpecError):
            codebook(bad)
    for bits in (0, 9):
        with pytest.raises(SpecError):
            int_type(bits)


def test_rounding_range() -> None:
    """The range ends half a step beyond the outermost value."""
    ranges = {E2M1: 7, E4M3: 464, E3M2: 30, int_type(4): 7.5, uint_type(8): 255.5, F16: 65520, ZERO16: 32767.5}
    assert {t: t.rounding_range[1] for t in ranges} == ranges
    assert (uint_type(8).rounding_range[0], int_type(4).rounding_range[0]) == (-0.5, -8.5)
    assert TERNARY.rounding_range == (-1.5, 1.5)
    assert NF4.rounding_range == pytest.approx((-1.1519, 1.13852), rel=1e-4)
