"""The packed weights of the CPU backend, decoded as native/lancebill.h describes, equal the original weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lancebill.backends.cpu.form import CpuForm, NoForm, matrix_form
from lancebill.backends.cpu.layout import CpuLayout, _code_map_on
from lancebill.backends.cpu.native import abi
from lancebill.errors import BadValue
from lancebill.moe.activation import Activation
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import BNB_FP4, IQ4, NF4, codebook
from lancebill.numbers.spec import DENSE_BF16, QuantSpec, Scale, group
from lancebill.numbers.spec_names import ACTIVATIONS, parse_activation, parse_spec
from lancebill.numbers.weight import LogicalWeight

SPECS = (
    "mxfp4", "nvfp4", "nvfp4-div", "nf4", "int4-g32", "int4-g128", "int4-g32-zp", "int4-g64:fp16", "int4-g32:fp32",
    "int3-g64", "int2-g64-zp", "ternary-tensor", "twos4-g32", "int8", "twos8", "int8-zp", "int5-g32", "twos6-g32",
    "int6-g16-zp", "int7-g64-zp", "int8-g32-zp", "mxfp8", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "fp8-tensor",
    "fp8-channel", "fp8-block", "e4m3fnuz-channel", "e3m4-channel", "int4-g256", "int4-g96", "int4-b4x32",
    "int4-g32-zp.g64", "int4-g32-zp:fp16", "int4-g32-channel:fp32", "int4-/g32:fp32",
    "uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256:fp16", "int4-channel-min.g32:fp16",
    "uint2-g16:uint4-g256:fp16-min.g16:uint4-min.g256:fp16", "int6-g16:int8-g256:fp16", "iq4-g32:uint6b32-g256:fp16",
    "iq2-g16:odd4-g256:fp16", "int4-g64:uint6-g64:bf16", "int6-g16:int8-g64:fp32-channel:fp32",
    "int4-g32:uint6-g128:fp16-zp", "uint4-g32:uint6-g64:fp16-min.g32:uint6-min.g128:fp16", "int4-g32:uint6-g96:fp16",
    "int4-g32:uint8-g64:fp16", "int4-g32:ternary-g64:fp16",
)  # fmt: skip
SIZES = ((64, 256), (48, 160), (24, 96))


def packed_weight(
    spec: QuantSpec, n: int, k: int, *, gated: bool
) -> tuple[CpuLayout, MatrixShape, LogicalWeight, Packed]:
    g = torch.Generator().manual_seed(n * k)
    values = torch.randn(n, k, generator=g) * torch.exp2(torch.randn(n, 1, generator=g))
    shape = MatrixShape("w13", n, k, spec.stacked(n // 2) if gated else spec, bias=True)
    weight = quantize(values, shape.spec)
    weight = LogicalWeight(
        shape.spec, weight.codes, weight.scales, weight.zero, weight.minimum, bias=torch.randn(n, generator=g)
    )
    w2 = MatrixShape("w2", k, n // 2 if gated else n, DENSE_BF16)
    activation = Activation("silu") if gated else Activation("relu2_no_mul")
    layout = CpuLayout(Problem(shape, w2, 1, 1, 1, activation, activations=ACTIVATIONS["bf16"]))
    packed = layout.allocate(shape, 1)
    for tensor in packed.values():
        tensor.fill_(85)  # pack must write every byte
    layout.pack(shape, weight, {name: t[0] for name, t in packed.items()})
    return layout, shape, weight, packed


def decode_as_in_header(form: CpuForm, shape: MatrixShape, packed: Packed, *, gated: bool) -> Tensor:
    """float64 [n, k]: decodes every element at the position that the header specifies."""
    columns = -(-shape.k // max(form.group, 32)) * max(form.group, 32)
    values, half = form.values, shape.n // 2
    n, k = torch.arange(shape.n).unsqueeze(1), torch.arange(shape.k).unsqueeze(0)
    side, row = (n // half, n % half) if gated else (torch.zeros_like(n), n)
    block, r, g = (2 * (row // 16) + side if gated else row // 16), row % 16, k // form.group
    codes = packed["codes"][0].reshape(-1).long()
    if values.codes == abi.Codes.TABLE4:
        byte = codes[block // 2 * 16 * columns + k // 4 * 64 + 4 * r + k % 4]
        numbers = torch.tensor(values.table)[torch.where(block % 2 == 1, byte >> 4, byte & 15)].double()
    elif values.codes == abi.Codes.BITS6:
        first, unit = block * 12 * columns + k // 16 * 192 + 4 * r + k % 4, k % 16 // 4
        pairs = sum((codes[first + 64 * line] >> 6) << (2 * line) for line in range(3))
        numbers = torch.where(unit == 3, pairs, codes[first + 64 * unit.clamp(max=2)] & 63).double()
    elif values.codes == abi.Codes.BYTE:
        numbers = codes[block * 16 * columns + k // 4 * 64 + 4 * r + k % 4].double()
    else:
        floats = torch.tensor([minifloat(code, values.mantissa) for code in range(256)], dtype=torch.float64)
        numbers = floats[codes[block * 16 * columns + k // 4 * 64 + 16 * (k % 4) + r]]
    center = torch.tensor(0.0 if values.codes == abi.Codes.FLOAT8 else float(values.center))
    offset = torch.tensor(0.0)
    if form.zero == abi.ZeroKind.U8:
        center = packed["zeros"][0][block, g, r]
    elif form.zero == abi.ZeroKind.OFFSET_F32:
        offset = packed["zeros"][0].view(torch.float32)[block, g, r]
    elif form.zero == abi.ZeroKind.OFFSET_I8:
        offset = with_factors(form, packed["zeros"][0], block, k, r)
    if form.scale == abi.ScaleKind.I8:
        scale = with_factors(form, packed["scales"][0], block, k, r)
    else:
        scale = group_scales(form.scale, packed)[block, g, r] if form.scale else torch.tensor(1.0)
    factor = packed["row_scale"][0].view(torch.float32)[block * 16 + r] if form.row_scale else torch.tensor(1.0)
    return factor.double() * (scale.double() * values.step * (numbers - center.double()) - offset.double())


def with_factors(form: CpuForm, packed: Tensor, block: Tensor, k: Tensor, r: Tensor) -> Tensor:
    record = packed[block, k // form.factor]
    group = k % form.factor // form.group
    number = record.gather(-1, (64 + 16 * group + r).unsqueeze(-1)).squeeze(-1).view(torch.int8)
    factor = record[..., :64].contiguous().view(torch.float32).gather(-1, (r + 0 * k).unsqueeze(-1)).squeeze(-1)
    return number.double() * factor.double()


def minifloat(code: int, mantissa: int) -> float:
    bias = 2 ** (6 - mantissa) - 1
    sign, exponent, fraction = code >> 7, (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
    lead = 1 if exponent else 0
    return (-1) ** sign * math.ldexp(lead + fraction / (1 << mantissa), max(exponent, 1) - bias)


def group_scales(kind: abi.ScaleKind, packed: Packed) -> Tensor:
    stored = packed["scales"][0]
    if kind == abi.ScaleKind.E8M0:
        return torch.exp2(stored.double() - 127)
    views = {
        abi.ScaleKind.BF16: torch.bfloat16, abi.ScaleKind.F16: torch.float16, abi.ScaleKind.F32: torch.float32,
        abi.ScaleKind.E4M3: torch.float8_e4m3fn,
    }  # fmt: skip
    return stored.view(views[kind]).double()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("name", SPECS)
def test_decoded_weights_match(name: str, gated: bool) -> None:
    for n, k in SIZES:
        layout, shape, weight, packed = packed_weight(parse_spec(name), n, k, gated=gated)
        got = decode_as_in_header(layout.form(shape), shape, packed, gated=gated)
        want = dequantize(weight).double()
        assert (got - want).abs().max() <= 2e-4 * want.abs().max()  # codebooks are rounded to 14 bits
        if shape.spec.dtype != NF4:
            assert torch.allclose(got, want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("name", SPECS)
def test_unpack_is_exact(name: str, gated: bool) -> None:
    for n, k in SIZES:
        layout, shape, weight, packed = packed_weight(parse_spec(name), n, k, gated=gated)
        assert layout.unpack(shape, {key: t[0] for key, t in packed.items()}).equals(weight)


K_QUANTS = {
    "int3-g16:uint6b32-g256:fp16": 4.625, "uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256:fp16": 4.75,
    "int6-g16:int8-g256:fp16": 6.625, "iq4-g32:uint6b32-g256:fp16": 4.375,
}  # fmt: skip


@pytest.mark.parametrize("name", K_QUANTS)
def test_small_scales_take_a_byte_and_a_factor(name: str) -> None:
    """Nothing else is kept: packed, GGUF's K-quants take about as much memory as in their file."""
    shape = MatrixShape("w13", 64, 512, parse_spec(name))
    w2 = MatrixShape("w2", 512, 32, DENSE_BF16)
    layout = CpuLayout(Problem(shape, w2, 1, 1, 1, activations=ACTIVATIONS["bf16"]))
    assert layout.bytes(shape) * 8 == K_QUANTS[name] * shape.n * shape.k


@pytest.mark.parametrize("dtype", [NF4, BNB_FP4, IQ4], ids=str)
def test_codebooks_fit_the_table(dtype: object) -> None:
    spec = QuantSpec(dtype, (Scale(parse_spec("nf4").scales[0].dtype, group(64)),))  # type: ignore[arg-type]
    values = matrix_form(MatrixShape("w13", 16, 64, spec), ACTIVATIONS["bf16"]).values
    assert max(values.table) <= 16383 and min(values.table) >= 0
    for entry, value in zip(values.table, spec.dtype.table):
        assert abs(values.step * (entry - values.center) - value) <= 2e-4 * spec.dtype.max


def test_unsupported_forms_have_a_reason() -> None:
    def why(spec: str, activations: str = "bf16") -> str:
        with pytest.raises(NoForm) as caught:
            matrix_form(MatrixShape("w13", 32, 64, parse_spec(spec)), parse_activation(activations))
        return str(caught.value.reason)

    assert "not quantised" in why("bf16")
    assert "groups of 8" in why("int4-g8")
    assert "mxfp4 activations" in why("mxfp4", "mxfp4")
    assert "groups of 8" in why("int4-g32", "int8-g8")


def test_weight_groups_divide_input_groups() -> None:
    shape = MatrixShape("w13", 32, 256, parse_spec("int4-g128"))
    assert matrix_form(shape, ACTIVATIONS["int8"]).group == 128
    assert matrix_form(shape, parse_activation("int8-g32")).group == 32


def test_nan_codes_are_rejected() -> None:
    _, shape, weight, packed = packed_weight(parse_spec("fp8-channel"), 32, 64, gated=False)
    layout = CpuLayout(Problem(shape, None, 1, 1, 1))
    weight.codes[3, 5] = 0x7F
    by_column = replace(weight, stored=weight.codes.t().contiguous().t())  # which the library does not read
    for given in (weight, by_column):
        with pytest.raises(BadValue, match="NaN or infinite"):
            layout.pack(shape, given, {name: t[0] for name, t in packed.items()})


def test_a_table_of_codes_is_never_freed() -> None:
    """The packing of copied experts is recorded with its address, and other models come meanwhile."""
    signed, device = parse_spec("twos8").dtype, torch.device("cpu")
    table = _code_map_on(signed, 1, device)
    for number in range(100):
        assert _code_map_on(codebook([0.0, 1.0, 2.0, 3.0 + number]), 1, device) is None
    assert table is not None and _code_map_on(signed, 1, device) is table
