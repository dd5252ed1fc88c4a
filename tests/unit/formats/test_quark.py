"""Quark's storage schemes against slow reference packers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from quark_configs import G, config, section
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode
from lancebill.formats.base import Config, Module, Scheme, Stored
from lancebill.formats.quark import FORMAT
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import BF16, E4M3, E8M0, F32, UE5M3
from lancebill.numbers.spec import CHANNEL, TENSOR, Scale, group
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import same_bits
from lancebill.testing.weights import random_weight

NAME = "model.layers.0.mlp.experts.7.gate_proj"
N, K = 16, 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ML = {"fp4": ml_dtypes.float4_e2m1fn, "fp6_e2m3": ml_dtypes.float6_e2m3fn, "fp6_e3m2": ml_dtypes.float6_e3m2fn}
RNG = np.random.default_rng(0)


def check(cfg: Config, tensors: dict[str, Any], expected: np.ndarray, n: int = N, k: int = K) -> Scheme:
    """Decode tensors by suffix, compare every value, and encode them back bit for bit."""
    arrays = {s: t if isinstance(t, Tensor) else torch.from_numpy(np.array(t, order="C")) for s, t in tensors.items()}
    headers = {s: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for s, t in arrays.items()}
    scheme = FORMAT.scheme(cfg, Module(NAME, headers))
    stored = {p.role: arrays[p.suffix[0]] for p in scheme.parts if p.suffix[0] in arrays}
    assert len(stored) == len(arrays)
    weight = scheme.decode(stored, n, k)
    assert np.array_equal(dequantize(weight).numpy(), expected.astype(np.float32))
    again = scheme.encode(weight)
    assert all(same_bits(again[role], tensor) for role, tensor in stored.items())
    return scheme


def nibbles(values: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Eight values of the last axis per word, nibble j from column order[j]."""
    out = np.zeros((*values.shape[:-1], values.shape[-1] // 8), dtype=np.uint32)
    for index in np.ndindex(out.shape):
        for j in range(8):
            out[index] |= np.uint32((int(values[(*index[:-1], 8 * index[-1] + order[j])]) & 15) << (4 * j))
    return out.view(np.int32)


def stream(values: np.ndarray, bits: int) -> np.ndarray:
    """A little-endian bit stream along the last axis, in bytes, packed one bit at a time."""
    out = np.zeros((*values.shape[:-1], -(-values.shape[-1] * bits // 8)), dtype=np.uint8)
    for index in np.ndindex(values.shape):
        for bit in range(bits):
            position = index[-1] * bits + bit
            out[(*index[:-1], position // 8)] |= ((int(values[index]) >> bit) & 1) << (position % 8)
    return out


def spread(values: np.ndarray, columns: int = K) -> np.ndarray:
    """One number per group, row or tensor to one per element."""
    if values.ndim == 2:
        return np.repeat(values, columns // values.shape[1], axis=1)
    return np.broadcast_to(values.reshape(-1, 1), (N, columns))


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.01, 2, shape).astype(np.float32)


# ---- integers: two's complement, zero points too

INTEGERS = [("int2", 2), ("int3", 3), ("int4", 4), ("uint4", 4), ("int8", 8), ("uint8", 8)]
SHAPES = {"per_tensor": (), "per_channel": (N,), "per_group": (N, K // G)}


def pack_integers(values: np.ndarray, dtype: str, order: tuple[int, ...]) -> np.ndarray:
    if dtype == "int2":
        return values.astype(np.int32)
    if dtype == "int3":
        return stream(values & 7, 3)
    if dtype in ("int4", "uint4"):
        return nibbles(values, order)
    return values.astype(np.int8 if dtype == "int8" else np.uint8)


@pytest.mark.parametrize(("dtype", "bits"), INTEGERS)
@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "per_group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pack", ["order", "reorder"])
def test_integers(dtype: str, bits: int, scheme: str, symmetric: bool, pack: str) -> None:
    order = AWQ_ORDER if pack == "reorder" else tuple(range(8))
    low, high = (0, 1 << bits) if dtype.startswith("u") else (-(1 << (bits - 1)), 1 << (bits - 1))
    codes = RNG.integers(low, high, (N, K))
    shifted = not symmetric or dtype.startswith("u")
    zero = RNG.integers(low, high, SHAPES[scheme]) if shifted else np.zeros(SHAPES[scheme], dtype=np.int64)
    zero = np.asarray(zero)
    scale = scales(*SHAPES[scheme])
    transposed = scheme == "per_group" and dtype != "int3"
    stored_zero = zero.T if transposed else zero
    if scheme == "per_tensor":
        word = {"int2": np.int32, "int3": np.uint8, "int8": np.int8, "uint8": np.uint8}.get(dtype, np.int32)
        packed_zero = np.asarray(stored_zero.astype(word))
    else:
        packed_zero = pack_integers(stored_zero, dtype, order)
    tensors = {
        ".weight": pack_integers(codes.T if transposed else codes, dtype, order),
        ".weight_scale": scale.T if transposed else scale,
        ".weight_zero_point": packed_zero,
    }
    expected = (codes - spread(zero)).astype(np.float32) * spread(scale)
    check(config(section(dtype, scheme, symmetric=symmetric), pack=pack), tensors, expected)
    if not shifted:
        del tensors[".weight_zero_point"]
        check(config(section(dtype, scheme, symmetric=True), pack=pack), tensors, expected)


def test_grouped_integers_are_stored_transposed() -> None:
    cfg = config(section("int4", "per_group", symmetric=False))
    scheme = FORMAT.scheme(cfg, Module(NAME))
    shapes = {p.role: p.shapes(N, K, p.dtypes[0])[0] for p in scheme.parts}
    assert shapes["codes"] == (K, N // 8) and shapes["scale"] == (K // G, N) and shapes["zero"] == (K // G, N // 8)
    scheme = FORMAT.scheme(config(section("int4", "per_channel", symmetric=True)), Module(NAME))
    assert scheme.part("codes").shapes(N, K, "I32") == [(N, K // 8)]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_symmetric_zero_points_are_checked(dtype: str) -> None:
    scheme = FORMAT.scheme(config(section(dtype, "per_channel", symmetric=True)), Module(NAME))
    stored = scheme.encode(random_weight(scheme, N, K, torch.Generator().manual_seed(0)))
    assert not stored["zero"].any()
    stored["zero"][0] = 1
    with pytest.raises(BadValue, match="symmetric"):
        scheme.decode(stored, N, K)


def test_an_int2_out_of_range_is_refused() -> None:
    scheme = FORMAT.scheme(config(section("int2", "per_channel", symmetric=True)), Module(NAME))
    stored = scheme.encode(random_weight(scheme, N, K, torch.Generator().manual_seed(0)))
    stored["codes"][3, 4] = 2
    with pytest.raises(BadValue, match="int2 outside its range"):
        scheme.decode(stored, N, K)


# ---- floats


def test_values_of_fp4() -> None:
    codes = np.zeros((1, 16), dtype=np.uint8)
    codes[0, :4] = [0x21, 0x7F, 0x08, 0xC3]
    tensors = {".weight": codes, ".weight_scale": np.array([[0x7E]], dtype=np.uint8)}
    values = np.zeros((1, 32))
    values[0, :8] = [0.25, 0.5, -3, 3, -0.0, 0, 0.75, -1]
    scheme = check(config(section("fp4", "per_group", scale_format="e8m0")), tensors, values, 1, 32)
    assert scheme.spec == parse_spec("mxfp4")


@pytest.mark.parametrize("dtype", list(ML))
@pytest.mark.parametrize("byte_type", ["U8", "F8_E8M0"])
def test_microscaling_floats(dtype: str, byte_type: str) -> None:
    bits = 4 if dtype == "fp4" else 6
    codes = RNG.integers(0, 1 << bits, (N, K)).astype(np.uint8)
    exponents = RNG.integers(100, 140, (N, K // 32)).astype(np.uint8)
    expected = codes.view(ML[dtype]).astype(np.float32) * spread(np.exp2(exponents.astype(np.float32) - 127))
    tensors = {".weight": stream(codes, bits), ".weight_scale": exponents}
    cfg = config(section(dtype, "per_group", scale_format="e8m0"))
    if byte_type == "U8":
        check(cfg, tensors, expected)
        return
    scheme = FORMAT.scheme(cfg, Module(NAME, {".weight_scale": Stored("F8_E8M0", (N, K // 32))}))
    stored = {
        "codes": torch.from_numpy(tensors[".weight"]),
        "scale": torch.from_numpy(exponents).view(torch.float8_e8m0fnu),
    }
    assert np.array_equal(dequantize(scheme.decode(stored, N, K)).numpy(), expected)


def test_unsigned_e5m3_scales() -> None:
    """Bias 15, subnormals down to 2**-17, 254 is the largest finite code."""
    codes = RNG.integers(0, 16, (N, K)).astype(np.uint8)
    scale = RNG.integers(0, 255, (N, K // 16)).astype(np.uint8)
    scale[0, 0], scale[0, 1], scale[0, 2] = 254, 1, 8
    e, m = (scale >> 3).astype(np.float64), (scale & 7).astype(np.float64)
    values = np.where(e == 0, m / 8 * 2.0**-14, (1 + m / 8) * 2.0 ** (e - 15))
    assert values[0, 0] == 114688 and values[0, 1] == 2.0**-17 and values[0, 2] == 2.0**-14
    expected = codes.view(ML["fp4"]).astype(np.float32) * spread(values.astype(np.float32))
    cfg = config(section("fp4", "per_group", scale_format="e5m3", group_size=16))
    scheme = check(cfg, {".weight": stream(codes, 4), ".weight_scale": scale}, expected)
    assert scheme.spec.scales == (Scale(UE5M3, group(16)),)


@pytest.mark.parametrize(("dtype", "native"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "per_block"])
def test_fp8(dtype: str, native: str, scheme: str) -> None:
    values = RNG.standard_normal((N, K)).astype(getattr(ml_dtypes, native))
    shape = {"per_tensor": (), "per_channel": (N,), "per_block": (2, 3)}[scheme]  # partial blocks at both edges
    scale = scales(*shape)
    by_block = (
        [[scale[i // 12, j // 24] for j in range(K)] for i in range(N)] if scheme == "per_block" else spread(scale)
    )
    weight = torch.from_numpy(values.view(np.uint8)).view(
        {"fp8_e4m3": torch.float8_e4m3fn}.get(dtype, torch.float8_e5m2)
    )
    cfg = config(section(dtype, scheme, block_size=[12, 24]))
    check(cfg, {".weight": weight, ".weight_scale": scale}, values.astype(np.float32) * np.asarray(by_block))


def test_stored_scale_dtypes_are_kept() -> None:
    headers = {".weight": Stored("F8_E4M3", (N, K)), ".weight_scale": Stored("BF16", (N, 1))}
    scheme = FORMAT.scheme(config(section("fp8_e4m3", "per_channel", scale_format="float32")), Module(NAME, headers))
    assert scheme.spec.scales == (Scale(BF16, CHANNEL),)


# ---- exponents stored with the codes


@pytest.mark.parametrize("element", list(ML))
def test_embedded_exponents(element: str) -> None:
    bits = 4 if element == "fp4" else 6
    codes = RNG.integers(0, 1 << bits, (N, K)).astype(np.uint8)
    exponents = RNG.integers(-20, 20, (N, K // 32))
    exponents[0, 0], exponents[0, 1] = -127, 120
    rows = []
    for row in range(N):
        packed: list[int] = []
        for block in range(K // 32):
            packed.append(int(exponents[row, block]) & 0xFF)
            elements = [int(c) for c in codes[row, 32 * block : 32 * block + 32]]
            if bits == 4:
                packed += [elements[i] | (elements[i + 1] << 4) for i in range(0, 32, 2)]
                continue
            for a, b, c, d in (elements[i : i + 4] for i in range(0, 32, 4)):
                packed.append((a >> 4) << 6 | (b >> 4) << 4 | (c >> 4) << 2 | d >> 4)
                packed += [(a & 15) << 4 | b & 15, (c & 15) << 4 | d & 15]
        rows.append(packed)
    expected = codes.view(ML[element]).astype(np.float32) * spread(np.exp2(exponents.astype(np.float32)))
    cfg = config({"dtype": "mx", "mx_element_dtype": element, "group_size": 32, "ch_axis": -1})
    scheme = check(cfg, {".weight": np.array(rows, dtype=np.uint8)}, expected)
    assert scheme.spec.scales == (Scale(E8M0, group(32)),)


def test_exponent_minus_128_is_refused() -> None:
    scheme = FORMAT.scheme(config({"dtype": "mx", "mx_element_dtype": "fp4", "group_size": 32}), Module(NAME))
    weight = random_weight(scheme, 2, 32, torch.Generator().manual_seed(0))
    stored = scheme.encode(weight)
    stored["codes"][0, 0] = 0x80
    with pytest.raises(BadValue, match="-128"):
        scheme.decode(stored, 2, 32)
    weight.scales[0][0, 0] = 255
    with pytest.raises(CannotEncode, match="NaN"):
        scheme.encode(weight)


# ---- two stages


def test_quantised_scales() -> None:
    """fp4 with fp8 scales and a per-tensor scale of these: NVFP4 under another name."""
    second = section("fp8_e4m3", "per_tensor", is_scale_quant=True)
    codes = RNG.integers(0, 16, (N, K)).astype(np.uint8)
    inner = RNG.integers(1, 0x7F, (N, K // 16)).astype(np.uint8)
    outer = np.float32(0.037)
    tensors = {
        ".weight": stream(codes, 4),
        ".weight_scale": torch.from_numpy(inner).view(torch.float8_e4m3fn),
        ".weight_scale_2": np.asarray(outer),
    }
    values = codes.view(ML["fp4"]).astype(np.float32) * spread(inner.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    scheme = check(config([section("fp4", "per_group", group_size=16), second]), tensors, values * outer)
    assert scheme.spec == parse_spec("nvfp4")


def test_int4_over_fp8() -> None:
    """fp8 per tensor, then int4 per channel: the later stage's scale is the element's scale."""
    codes = RNG.integers(-8, 8, (N, K))
    own, first = scales(N), np.float32(0.019)
    tensors = {
        ".weight": nibbles(codes, AWQ_ORDER),
        ".weight_scale_2": own,
        ".weight_scale": np.asarray(first),
        ".weight_zero_point_2": nibbles(np.zeros(N, dtype=np.int64), AWQ_ORDER),
    }
    weight = [section("fp8_e4m3", "per_tensor"), section("int4", "per_channel", symmetric=True)]
    scheme = check(config(weight), tensors, codes.astype(np.float32) * spread(own) * first)
    assert scheme.spec.scales == (Scale(F32, CHANNEL), Scale(F32, TENSOR))


def test_e4m3_scales_are_codes() -> None:
    second = section("fp8_e4m3", "per_channel", is_scale_quant=True)
    scheme = FORMAT.scheme(config([section("int4", "per_group", symmetric=True), second]), Module(NAME))
    assert scheme.spec.scales == (Scale(E4M3, group(G)), Scale(F32, CHANNEL))
    weight = random_weight(scheme, N, K, torch.Generator().manual_seed(0))
    stored = scheme.encode(weight)
    assert stored["scale"].dtype == torch.float8_e4m3fn and stored["scale"].shape == (K // G, N)
    assert scheme.decode(stored, N, K).equals(weight)
