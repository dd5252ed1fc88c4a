"""Names of specs: what the issue lists parses, everything printed parses back, nothing but SpecError escapes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancebill.errors import SpecError
from lancebill.numbers import dtypes as d
from lancebill.numbers.spec import (
    ALL,
    CHANNEL,
    DENSE_BF16,
    DENSE_F16,
    DIV,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MUL,
    MXFP4,
    MXFP8,
    NAMED,
    NF4_G64,
    NVFP4,
    TENSOR,
    ActivationSpec,
    QuantSpec,
    Scale,
    Zero,
    fp8_spec,
    group,
    int_spec,
    mx_spec,
)
from lancebill.numbers.spec_names import ACTIVATIONS, parse_activation, parse_spec

CODE_TYPES = [
    d.E2M1, d.E2M3, d.E3M2, d.E3M4, d.E4M3, d.E4M3FNUZ, d.E5M2, d.E8M0, d.UE5M3, d.NF4, d.BNB_FP4, d.IQ4, d.TERNARY,
    *(make(bits) for make in (d.int_type, d.uint_type, d.biased_type) for bits in range(1, 9)),
]  # fmt: skip
SCALE_TYPES = [*CODE_TYPES, d.INV127, d.F16, d.BF16, d.F32]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("bf16", DENSE_BF16),
        ("fp16", DENSE_F16),
        ("mxfp4", MXFP4),
        ("mxfp6-e2m3", mx_spec(d.E2M3)),
        ("mxfp8", MXFP8),
        ("nvfp4", NVFP4),
        ("nf4", NF4_G64),
        ("int4-g128", int_spec(4, group(128))),
        ("int4-g32-zp", int_spec(4, group(32), zero_point=True)),
        ("int3-g64", int_spec(3, group(64))),
        ("int8", int_spec(8)),
        ("fp8-tensor", FP8_TENSOR),
        ("fp8-channel", FP8_CHANNEL),
        ("fp8-block", FP8_BLOCK),
        ("int4-g128:fp16", int_spec(4, group(128), scale=d.F16)),
        ("nf4-channel", QuantSpec(d.NF4, (Scale(d.F32, CHANNEL),))),
        ("twos4-g32", QuantSpec(d.int_type(4), (Scale(d.BF16, group(32)),))),
        ("uint4b8-g32-zp", QuantSpec(d.biased_type(4), (Scale(d.BF16, group(32)),), Zero(d.ZERO16, group(32)))),
        ("int4-g64-zp.channel:fp16", QuantSpec(d.uint_type(4), (Scale(d.BF16, group(64)),), Zero(d.F16, CHANNEL))),
        ("e2m1-g16:e4m3fn-/b64xall", QuantSpec(d.E2M1, (Scale(d.E4M3, group(16)), Scale(d.F32, (64, ALL), DIV)))),
        ("fp8-unscaled", QuantSpec(d.E4M3)),
        ("uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256", QuantSpec(
            d.uint_type(4),
            (Scale(d.uint_type(6), group(32)), Scale(d.F16, group(256))),
            None,
            (Scale(d.uint_type(6), group(32)), Scale(d.F16, group(256))),
        )),
    ],
)  # fmt: skip
def test_names(name: str, spec: QuantSpec) -> None:
    assert parse_spec(name) == spec
    assert str(spec) == name


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("bf16", ActivationSpec(DENSE_BF16)),
        ("fp16", ActivationSpec(DENSE_F16)),
        ("fp8", ActivationSpec(FP8_CHANNEL)),
        ("fp8-static", ActivationSpec(FP8_TENSOR, static=True)),
        ("fp8-g128", ActivationSpec(fp8_spec(group(128)))),
        ("int8", ActivationSpec(int_spec(8, scale=d.F32))),
        ("int8-channel:bf16", ActivationSpec(int_spec(8))),
        ("int8-static", ActivationSpec(int_spec(8, TENSOR, scale=d.F32), static=True)),
        ("fp8-channel-static", ActivationSpec(FP8_CHANNEL, static=True)),
        ("mxfp8", ActivationSpec(MXFP8)),
        ("mxfp4", ActivationSpec(MXFP4)),
        ("nvfp4", ActivationSpec(NVFP4)),
        ("nvfp4-static", ActivationSpec(NVFP4, static=True)),
        ("nf4-channel", ActivationSpec(QuantSpec(d.NF4, (Scale(d.F32, CHANNEL),)))),
        ("e5m2", ActivationSpec(QuantSpec(d.E5M2, (Scale(d.F32, CHANNEL),)))),
    ],
)
def test_activation_names(name: str, spec: ActivationSpec) -> None:
    assert parse_activation(name) == spec
    assert str(spec) == name


def test_alternative_names() -> None:
    assert parse_spec("fp8") == FP8_CHANNEL
    assert parse_spec("e4m3fn-b128x128:fp32") == FP8_BLOCK
    assert parse_spec("int8-channel:bf16") == int_spec(8)
    assert parse_spec("uint4b8-g32") == parse_spec("int4-g32")
    assert parse_spec("nf4-g64") == NF4_G64
    assert parse_spec("e2m1-g32:e8m0") == MXFP4
    assert parse_spec("int4-zp-g32") == parse_spec("int4-g32-zp")


def test_named_specs_print_their_names() -> None:
    assert {name: str(spec) for name, spec in NAMED.items()} == {name: name for name in NAMED}
    assert {name: str(spec) for name, spec in ACTIVATIONS.items()} == {name: name for name in ACTIVATIONS}


SIDES = st.sampled_from([ALL, 1, 2, 16, 32, 128, 100000])
BLOCKS = st.tuples(SIDES, SIDES)
MUL_SCALES = st.builds(Scale, st.sampled_from(SCALE_TYPES), BLOCKS, st.just(MUL))
SCALES = st.builds(Scale, st.sampled_from(SCALE_TYPES), BLOCKS, st.sampled_from([MUL, DIV]))
ZEROS = st.none() | st.builds(Zero, st.sampled_from([d.ZERO16, *SCALE_TYPES]), BLOCKS)
SPECS = st.one_of(
    st.sampled_from([*NAMED.values()]),
    st.builds(
        QuantSpec,
        st.sampled_from(CODE_TYPES),
        st.lists(SCALES, max_size=3).map(tuple),
        ZEROS,
        st.lists(MUL_SCALES, max_size=2).map(tuple),
    ),
)


@settings(max_examples=400, deadline=None)
@given(SPECS, st.booleans())
def test_printed_names_parse_back(spec: QuantSpec, static: bool) -> None:
    assert parse_spec(str(spec)) == spec
    activations = ActivationSpec(spec, static=static and spec.quantized)
    assert parse_activation(str(activations)) == activations


@given(SPECS, SPECS)
@settings(max_examples=200, deadline=None)
def test_different_specs_have_different_names(one: QuantSpec, other: QuantSpec) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "unknown number type ''"),
        ("int9", "unknown number type 'int9'"),
        ("int4-128", "cannot read '128'"),
        ("int4-g0", "cannot read 'g0'"),
        ("int4-g128:fp99", "unknown number type 'fp99'"),
        ("int4--g128", "cannot read ''"),
        ("bf16-g128", "bf16 takes no scales"),
        ("bf16-zp", "bf16 takes no scales"),
        ("mxfp4-g64", "mxfp4 takes no such suffixes"),
        ("mxfp6", "mxfp6 takes no such suffixes"),
        ("int4-g32-zp-zp", "more than one zero point"),
        ("int4-g32-zp.", "cannot read ''"),
        ("int4-unscaled-g32", "cannot read 'unscaled'"),
        ("uint4b3-g32", "unknown number type 'uint4b3'"),
        ("INT4-G128", "unknown number type 'INT4'"),
        ("int4-g" + "9" * 5000, "cannot read"),
        ("codebook16#0123456789ab-g64", "an unnamed codebook cannot be parsed from its name"),
        ("uint4-g32-min./g32", "the levels of a minimum multiply"),
    ],
)
def test_errors_for_invalid_names(name: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(name)
    assert says in str(caught.value)
    with pytest.raises(SpecError):
        parse_activation(name)


def test_static_needs_a_scale() -> None:
    with pytest.raises(SpecError, match="static"):
        parse_activation("bf16-static")


WORDS = st.sampled_from(
    ["int4", "fp8", "e2m1", "mxfp4", "nf4", "g128", "g", "g-1", "g\u0661\u0662", "/tensor", "//tensor", "tensor",
     "channel", "block", "b2x", "bx2", "b1xall", "ballxall", "zp", "zp:", "zp:fp16", "zp.g32", "zp.:fp16", "min.",
     "min.g32", "min.min.g32", ":", "::", "g32:", "g32:e8m0", "g32:e8m0:e8m0", "/", ".", "unscaled", "static", "", "#",
     " int4"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(WORDS, max_size=6).map("-".join) | st.text(max_size=20) | st.text("intfpg0128-:/.bx", max_size=16))
def test_parsing_any_text_raises_only_spec_errors(name: str) -> None:
    for parse in (parse_spec, parse_activation):
        try:
            spec = parse(name)
        except SpecError as error:
            assert error.what
        else:
            assert parse(str(spec)) == spec
