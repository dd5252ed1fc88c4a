"""Packed words run through the kernels' PTX in an emulator give the canonical numbers, bit for bit, for every form."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from lancebill.backends.gpu.kernels import fragment_order as fragments
from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_codebook import MAGNITUDES
from lancebill.backends.gpu.kernels.unpack_codes import MAGIC
from lancebill.backends.gpu.kernels.unpack_ptx import Unpack
from lancebill.backends.gpu.kernels.unpack_ptx_int8 import INTEGER_UNIT
from lancebill.backends.gpu.kernels.unpack_scales import code_shift, row_shift
from lancebill.backends.gpu.kernels.weight_form import WeightForm
from lancebill.backends.gpu.layout import FragmentLayout, _units
from lancebill.moe.layout import as_integer
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import IQ4, NF4
from lancebill.testing import ptx as emulator
from lancebill.testing.layers import layer_problem, plausible_weight

N, K = 128, 256
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = {
    f.E2M1_CODE: torch.cat([E2M1, -E2M1]),
    f.INT2_CODE: torch.arange(4) - 2.0,
    f.INT3_CODE: torch.arange(8) - 4.0,
    f.INT4_CODE: torch.arange(16) - 8.0,
    f.INT8_CODE: torch.arange(256) - 128.0,
    f.E4M3_CODE: torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    f.NF4_CODE: torch.tensor(NF4.table),
    f.IQ4_CODE: torch.tensor(IQ4.table),
}
TYPES = {f.BF16: torch.bfloat16, f.F16: torch.float16, f.F32_GROUP: torch.float32}
SIXTEEN = (f.BF16, f.F16)
SPECS = (
    "mxfp4", "nvfp4", "int4-g32", "int4-g64:fp16", "int4-g128", "int4-g128:fp32", "int4", "int4-g128-zp", "int4-g32-zp",
    "int4-g128:fp16-zp", "int4-zp", "int8", "int8-g128", "int8-g128:fp32", "fp8", "fp8-block",
    "int2-g32:fp16-zp", "int3-g128", "int8-g32:fp16", "mxfp8", "nf4", "iq4-g32:fp16",
)  # fmt: skip
FORMS = [
    *(WeightForm(f.E2M1_CODE, f.E8M0_G32, 32, a) for a in (*SIXTEEN, f.E4M3)),
    *(WeightForm(f.E4M3_CODE, f.E8M0_G32, 32, a) for a in SIXTEEN),
    *(
        WeightForm(c, s, g, a)
        for c, a, (s, g) in itertools.product(
            f.CODEBOOKS, SIXTEEN, ((f.BF16_GROUP, 128), (f.F16_GROUP, 32), (f.F32_GROUP, 64))
        )
    ),
    *(
        WeightForm(c, s, g, a, z)
        for c, a, (s, g), z in itertools.product(
            (f.INT2_CODE, f.INT3_CODE),
            SIXTEEN,
            ((f.BF16_GROUP, 128), (f.F16_GROUP, 32), (f.NO_SCALE, 0)),
            (False, True),
        )
    ),
    *(WeightForm(f.E2M1_CODE, f.E4M3_G16, 16, a) for a in SIXTEEN),
    *(
        WeightForm(f.INT4_CODE, s, g, a, z)
        for a, s, g, z in itertools.product(SIXTEEN, (f.BF16_GROUP, f.F16_GROUP), (32, 64, 128), (False, True))
    ),
    *(WeightForm(f.INT4_CODE, f.NO_SCALE, 0, a, z) for a, z in itertools.product(SIXTEEN, (False, True))),
    *(
        WeightForm(f.INT8_CODE, s, g, a)
        for a in SIXTEEN
        for s, g in ((f.NO_SCALE, 0), (f.BF16_GROUP, 128), (f.F16_GROUP, 32), (f.F32_GROUP, 128))
    ),
    *(WeightForm(c, f.F32_GROUP, g, a) for a in SIXTEEN for c, g in (("int4", 64), ("int4", 128), ("int3", 32))),
    *(WeightForm(f.E4M3_CODE, s, g, a) for a in SIXTEEN for s, g in ((f.NO_SCALE, 0), (f.F32_GROUP, 128))),
    WeightForm(f.E4M3_CODE, f.NO_SCALE, 0, f.E4M3),
    WeightForm(f.INT4_CODE, f.NO_SCALE, 0, f.E4M3),
    *(WeightForm(c, f.F32_GROUP, g, f.E4M3) for c in (f.E4M3_CODE, f.INT4_CODE) for g in (128, 256)),
    WeightForm(f.INT4_CODE, f.F32_GROUP, 128, f.E4M3, True),
    *(WeightForm(c, s, g, f.S8) for c in (f.INT4_CODE, f.INT8_CODE) for s, g in ((f.NO_SCALE, 0), (f.F32_GROUP, 128))),
    WeightForm(f.INT4_CODE, f.F32_GROUP, 256, f.S8, True),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_codes_round_trip(form: WeightForm) -> None:
    codes = torch.randint(0, 1 << form.bits, (N, K), dtype=torch.uint8)
    words = fragments.pack_codes(form, codes)
    assert words.numel() == fragments.code_words(form, N, K)
    assert torch.equal(fragments.unpack_codes(form, words, N, K), codes)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_ptx_gives_the_canonical_numbers(form: WeightForm) -> None:
    got, want = _unpacked(form)
    if form.byte_inputs:
        assert torch.equal(got.double() * (INTEGER_UNIT if form.sixteenfold else 1), want.double())
    elif form.two_part_scale or form.code in f.CODEBOOKS:
        kind, want = torch.finfo(got.dtype), want * 2.0 ** -row_shift(form)
        steps = kind.eps * torch.exp2(torch.frexp(want)[1].double() - 1)
        assert ((got.double() - want).abs() <= most_steps(form) * steps + kind.smallest_normal * kind.eps).all()
        assert (got == emulator.rounded(want, got.dtype)).double().mean() > (0.85 if form.code in f.CODEBOOKS else 0.98)
    else:
        assert torch.equal(got, emulator.rounded(want * 2.0 ** -row_shift(form), got.dtype))


def most_steps(form: WeightForm) -> float:
    """Rounding once is half a step of the 16-bit type. A scale that is a sum of two numbers adds a little, and so do
    the table's 16-bit magnitudes: the smallest of NF4 is wrong by 1/7 of a step of fp16, 1/60 of bf16. The product of
    its low byte, a twentieth of it, is rounded twice before it is added: 1/20 of a step."""
    if form.code == f.NF4_CODE:
        return 0.57 if form.activations == f.BF16 else 0.69
    return 0.51


@pytest.mark.parametrize(("code", "table"), [(f.NF4_CODE, NF4.table), (f.IQ4_CODE, IQ4.table)])
def test_tables_are_those_of_the_types(code: str, table: tuple[float, ...]) -> None:
    """To the nearest 16-bit magnitude; one, which has none, is a unit short of it."""
    for number, magnitude, value in zip(range(16), MAGNITUDES[code], table):
        assert (value < 0) == (number < 8) or value == 0
        assert magnitude == min(round(abs(value) * 2 ** (16 - f.CODEBOOKS[code])), 65535)


def _unpacked(form: WeightForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales through the PTX, and the numbers they stand for."""
    torch.manual_seed(0)
    codes = torch.randint(0, 1 << form.bits, (N, K), dtype=torch.uint8)
    if form.code == f.E4M3_CODE:
        codes = torch.where(codes & 127 == 127, torch.zeros_like(codes), codes)
    value = VALUES[form.code][codes.long()]
    metas, value = _scales(form, value)
    want = fragments._fragment_view(form, value)
    words = fragments._from_rows(form, fragments.pack_codes(form, codes), K).numpy().view(np.uint32)
    return _run_ptx(form, words, metas, want.shape), want


def _scales(form: WeightForm, value: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Random scale words [unit, slice, half, 4, 4, 2, words] for the emulator, and the exact scaled values."""
    groups = K // form.group if form.group else 1
    spread = lambda t: t.repeat_interleave(form.group or K, 1)  # noqa: E731
    if form.scale == f.E8M0_G32:
        ranges = {f.BF16: (-60, 2, 253), f.F16: (-23, 2, 29), f.E4M3: (-5, 7, 5)}
        if form.code == f.E4M3_CODE:
            ranges = {f.BF16: (-60, 8, 247), f.F16: (-15, 8, 23)}
        low, high, offset = ranges[form.activations]
        exponent = torch.randint(low, high, (N, groups), dtype=torch.int32)
        return _per_slice(form, fragments.pack_bytes(form, (exponent + offset).to(torch.uint8))), value * spread(
            torch.exp2(exponent.float())
        )
    if form.scale == f.E4M3_G16:
        bytes_ = torch.randint(0, 127, (N, groups), dtype=torch.int32)
        scale = bytes_.to(torch.uint8).view(torch.float8_e4m3fn).float()
        return _per_slice(form, fragments.pack_bytes(form, bytes_.to(torch.uint8))), value * spread(scale)
    if form.promoted:
        return _promoted_scales(form, value, groups)
    parts = []
    middle = 1 << form.bits - 1
    zero = torch.full((N, groups), middle)
    scale = torch.ones(N, groups)
    if form.scale != f.NO_SCALE:
        scale = ((torch.rand(N, groups) + 0.01) * (2.0**-9 if form.subnormal or form.code in f.CODEBOOKS else 1)).to(
            TYPES[form.scale]
        )
        stored = as_integer((scale.double() * _units(form, N, scale.device)).to(scale.dtype))
        pack = fragments.pack_floats if form.scale == f.F32_GROUP else fragments.pack_halves
        parts.append(pack(form, stored))
    if form.zero:
        zero = torch.randint(0, 2 * middle + 1, (N, groups))
        parts.append(fragments.pack_halves(form, (zero + MAGIC[form.activations]).to(torch.int16)))
    if form.code in f.SMALL_INTEGERS:
        value = value + middle - spread(zero)
    words = torch.cat(parts, -1).reshape(-1) if parts else None
    return None if words is None else _per_slice(form, words), value.double() * spread(scale)


def _promoted_scales(form: WeightForm, value: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales that multiply the sums, with zero points in their lowest bits; the numbers are codes minus zero points."""
    words = (torch.rand(N, groups) + 0.01).bfloat16().float().view(torch.int32)
    if form.zero:
        zero = torch.randint(0, 17, (N, groups), dtype=torch.int32)
        words, value = words | zero, value + 8 - zero.repeat_interleave(form.group, 1)
    return _per_slice(form, fragments.pack_floats(form, words).reshape(-1)), value


def _per_slice(form: WeightForm, words: torch.Tensor, n: int = N) -> torch.Tensor:
    assert words.numel() == fragments.scale_count(form, n, K)
    blocks = words.view(n // 128, -1, 2, 4, 4, 2, form.scale_words)
    slices = K // form.slice_columns
    return blocks.repeat_interleave(slices // blocks.shape[1], 1)


# The bits of a register's number that are n3, k3, k4 and k5, by packed words and the number of such bits.
PLACES = {(2, 4): (0, 1, 2, 3), (4, 4): (1, 2, 3, 0), (8, 4): (2, 3, 0, 1), (4, 3): (1, 2, 0, 0)}


def _run_ptx(form: WeightForm, words: np.ndarray, metas: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Run the PTX for every thread; the registers in the order of `_fragment_view`."""
    statements = Unpack(form)
    pack = statements.pack
    kind = torch.int8 if form.activations == f.S8 else torch.float8_e4m3fn
    out = torch.empty(shape, dtype=TYPES.get(form.activations, kind))
    plane = words.shape[-1] * form.planes[0] // form.bits
    for four in range(plane // pack):
        inputs = [words[..., pack * four + i] for i in range(pack)]
        inputs += [words[..., i] for i in range(plane, words.shape[-1]) for _ in range(pack)]
        for m in range(statements.metas):
            assert metas is not None
            inputs += [_meta(form, metas, m, inputs[0].shape)] * pack
        registers = emulator.interpret(statements.text, statements.outputs, inputs)
        if form.byte_inputs:
            for i, register in enumerate(registers):
                j, k4 = (i >> 1, i & 1) if pack == 8 else (i, four)
                k3, k4 = (j >> 2, k4) if form.bits == 4 else (four & 1, four >> 1)
                parts = torch.from_numpy(
                    np.ascontiguousarray(register).view(np.uint8).reshape(*register.shape, 4).copy()
                )
                out[..., j & 1, (j >> 1) & 1, k3, k4, :] = parts.view(out.dtype)
            continue
        for i, register in enumerate(registers):
            bits = len(registers).bit_length() - 1
            n3, k3, k4, k5 = (i >> place & 1 for place in PLACES[pack, bits])
            k5 = k5 if bits == 4 else four
            halves = torch.from_numpy(np.ascontiguousarray(register).view(np.int16).reshape(*register.shape, 2).copy())
            out[..., n3, k3, k4, k5, :] = halves.view(out.dtype)
    return out


def _meta(form: WeightForm, metas: torch.Tensor, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Scale words as threads load them: two bytes per lane, or one word for the four lanes of a row."""
    if form.scale == f.E8M0_G32 and form.activations == f.E4M3:
        return np.ascontiguousarray(metas.numpy()).view(np.uint16).astype(np.uint32)
    return np.broadcast_to(metas[..., number : number + 1].numpy().view(np.uint32), shape)


@pytest.mark.parametrize("activations", SIXTEEN)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [2.0**-10, 2.0**8])
def test_packed_weights_unpack_to_the_weights(spec: str, activations: str, size: float) -> None:
    """Packed, unpacked by the PTX and multiplied by the row's factor: exact or rounded once, for scales of any size."""
    problem = layer_problem(spec, activations, hidden=K, intermediate=N, experts=1, top_k=1)
    layout, shape = FragmentLayout(problem), problem.w13
    weight = plausible_weight(shape, 1)
    outer = weight.scales[-1]
    if shape.spec.scales[-1].dtype.wide is not None:
        weight = replace(weight, scales=(*weight.scales[:-1], (outer.float() * size).to(outer.dtype)))
    held = {role: tensor[0] for role, tensor in layout.allocate(shape, 1).items()}
    layout.pack(shape, weight, held)
    form, numbers = layout.form(shape), torch.empty(layout.padded(shape))
    view = fragments._fragment_view(form, numbers)
    words = fragments._from_rows(form, held["codes"], numbers.shape[1]).numpy().view(np.uint32)
    view.copy_(_run_ptx(form, words, _per_slice(form, held["scales"], 2 * N) if form.scale_words else None, view.shape))
    factors = layout._take(shape, held["factors"].view(torch.float32).unsqueeze(1)).double()
    got, want = layout._take(shape, numbers).double(), dequantize(weight) / factors
    kind = torch.finfo(TYPES[activations])
    steps = kind.eps * torch.exp2(torch.frexp(want)[1].double() - 1) + kind.smallest_normal * kind.eps
    rounded = form.group and form.scale not in (f.E8M0_G32, f.E4M3_G16)
    assert ((got - want).abs() <= (most_steps(form) if rounded else 0.001) * steps).all()


def test_shifts_are_consistent() -> None:
    """The row's factor corrects at most the shift of the code."""
    for form in FORMS:
        assert code_shift(form) >= row_shift(form) >= 0
