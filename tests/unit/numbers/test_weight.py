"""Cutting, reordering, stacking and re-blocking a weight are bitwise exact for every kind of spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from codes_apart import codes_apart
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import SPECS, random_weight, scalar_dequantize

from lancebill.errors import BadValue, SpecError, WrongDtype, WrongShape
from lancebill.numbers.bit_packing import Nibbles, pack_bits
from lancebill.numbers.blocks import expand, finest, reduce_blocks, spread
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import E4M3, F32
from lancebill.numbers.spec import ALL, CHANNEL, DIV, MXFP4, NVFP4, TENSOR, QuantSpec, Scale, Zero, group
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight, same_bits, stack, stack_experts

EXAMPLES = settings(max_examples=120, deadline=None)
NAMES = st.sampled_from([*SPECS])
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 10**6)


def weight_of(name: str, n: int, k: int, seed: int, *, perm: bool = False) -> LogicalWeight:
    return random_weight(SPECS[name], n, k, seed, perm=perm)


def halves(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ab: (min(ab), max(ab)))


# --- exactness ---------------------------------------------------------------------------------------------


@EXAMPLES
@given(st.data(), NAMES, SIZES, SIZES, SEEDS)
def test_cuts_at_any_position(data: st.DataObject, name: str, n: int, k: int, seed: int) -> None:
    """After refining blocks to the edges, the sub-matrix has the values of the whole matrix."""
    weight = weight_of(name, n, k, seed)
    rows, columns = data.draw(halves(n)), data.draw(halves(k))
    fine = weight.reblock(weight.spec.map_blocks(0, rows[0]).map_blocks(1, columns[0]))
    part = fine.cut(rows, columns)
    assert (part.n, part.k) == (rows[1] - rows[0], columns[1] - columns[0])
    assert same_bits(dequantize(part), dequantize(weight)[rows[0] : rows[1], columns[0] : columns[1]])
    assert part.bias is not None
    assert weight.bias is not None
    assert same_bits(part.bias, weight.bias[rows[0] : rows[1]])


@EXAMPLES
@given(NAMES, SIZES, SIZES, st.integers(0, 9), st.integers(0, 9), SEEDS)
def test_finer_blocks(name: str, n: int, k: int, rows: int, columns: int, seed: int) -> None:
    weight = weight_of(name, n, k, seed, perm=bool(seed % 2))
    fine = weight.reblock(weight.spec.map_blocks(0, rows).map_blocks(1, columns))
    assert same_bits(dequantize(fine), dequantize(weight))
    assert fine.perm is weight.perm


@EXAMPLES
@given(st.data(), NAMES, SIZES, SIZES, SEEDS)
def test_rows_in_any_order(data: st.DataObject, name: str, n: int, k: int, seed: int) -> None:
    weight = weight_of(name, n, k, seed, perm=bool(seed % 2))
    index = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), max_size=50)), dtype=torch.int64)
    taken = weight.rows(index)
    assert same_bits(dequantize(taken), dequantize(weight)[index])
    assert taken.bias is not None
    assert weight.bias is not None
    assert same_bits(taken.bias, weight.bias[index])


@EXAMPLES
@given(NAMES, SIZES, SIZES, st.integers(1, 3), SEEDS)
def test_stacking_is_exact(name: str, n: int, k: int, count: int, seed: int) -> None:
    """Each matrix keeps its scales, including global ones, even if its blocks do not end at its edge."""
    for heights in ([n] * count, [n * (i + 1) for i in range(count)]):  # gate over up; queries over keys
        weights = [weight_of(name, height, k, seed + i) for i, height in enumerate(heights)]
        stacked = stack(weights)
        assert same_bits(dequantize(stacked), torch.cat([dequantize(w) for w in weights]))
        assert stacked.spec == weights[0].spec.stacked(n)
        for i, weight in enumerate(weights):
            part = stacked.cut((sum(heights[:i]), sum(heights[: i + 1])), (0, k))
            assert same_bits(dequantize(part), dequantize(weight))


@EXAMPLES
@given(NAMES, SIZES, SEEDS)
def test_column_shards_concatenate_to_the_whole(name: str, k: int, seed: int) -> None:
    """Every shard of a cut at multiples of four is a slice of the whole."""
    weight = weight_of(name, 3, 4 * k, seed)
    fine = weight.reblock(weight.spec.map_blocks(1, k))
    shards = [fine.cut((0, 3), (i * k, (i + 1) * k)) for i in range(4)]
    assert same_bits(torch.cat([dequantize(s) for s in shards], 1), dequantize(weight))


def test_unequal_global_scales_stack_exactly() -> None:
    gate, up = (quantize(torch.randn(48, 64) * size, NVFP4) for size in (1.0, 37.0))
    both = stack([gate, up])
    assert both.spec.scales[1] == Scale(F32, (48, ALL))
    assert both.scales[1].view(-1).tolist() == [gate.scales[1].item(), up.scales[1].item()]
    assert same_bits(dequantize(both), torch.cat([dequantize(gate), dequantize(up)]))
    assert both.spec.scales[0] == gate.spec.scales[0]


def test_operations_agree_with_scalar_arithmetic() -> None:
    """The same operations against the scalar dequantiser."""
    for name in SPECS:
        weight = weight_of(name, 6, 20, 1)
        part = weight.reblock(weight.spec.map_blocks(0, 2).map_blocks(1, 4)).cut((2, 5), (4, 19))
        assert same_bits(scalar_dequantize(part), scalar_dequantize(weight)[2:5, 4:19])
        assert same_bits(scalar_dequantize(stack([weight, weight])), scalar_dequantize(weight).repeat(2, 1))


# --- input tensors and act-order --------------------------------------------------------------------------


def with_inputs(weight: LogicalWeight, **inputs: torch.Tensor) -> LogicalWeight:
    return replace(weight, inputs=inputs)


def test_input_tensors_are_cut_where_they_have_columns() -> None:
    weight = with_inputs(
        weight_of("fp8-tensor", 4, 8, 2), input_scale=torch.tensor(0.5), pre_quant_scale=torch.arange(8.0)
    )
    part = weight.cut((0, 4), (2, 6))
    assert part.inputs["input_scale"].item() == 0.5
    assert part.inputs["pre_quant_scale"].tolist() == [2, 3, 4, 5]
    assert weight.rows(torch.tensor([1])).inputs["pre_quant_scale"].tolist() == [*range(8)]


def test_stacks_keep_equal_input_tensors() -> None:
    one = with_inputs(weight_of("nvfp4", 4, 16, 3), input_scale=torch.tensor(0.5), pre_quant_scale=torch.ones(16))
    other = with_inputs(weight_of("nvfp4", 4, 16, 4), input_scale=torch.tensor(0.25), pre_quant_scale=torch.ones(16))
    assert sorted(stack([one, other]).inputs) == ["pre_quant_scale"]
    assert sorted(stack([one, one]).inputs) == ["input_scale", "pre_quant_scale"]


def test_act_order_is_kept() -> None:
    gate = weight_of("int4-g32-zp", 4, 64, 5, perm=True)
    up = replace(weight_of("int4-g32-zp", 4, 64, 6), perm=gate.perm)
    assert same_bits(dequantize(stack([gate, up])), torch.cat([dequantize(gate), dequantize(up)]))
    with pytest.raises(BadValue, match="act-orders"):
        stack([gate, replace(up, perm=None)])
    with pytest.raises(BadValue, match="act-orders"):
        stack([gate, weight_of("int4-g32-zp", 4, 64, 6, perm=True)])
    assert gate.cut((1, 3), (0, 64)).perm is gate.perm


@pytest.mark.skipif(not __debug__, reason="-O removes assertions")
def test_cutting_columns_of_an_act_order_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="undo the act-order"):
        weight_of("int4-g32-zp", 4, 64, 5, perm=True).cut((0, 4), (0, 32))


def test_equality_is_by_bits() -> None:
    for name in SPECS:
        weight = weight_of(name, 4, 16, 7, perm=True)
        assert weight.equals(weight_of(name, 4, 16, 7, perm=True))
        assert not weight.equals(weight_of(name, 4, 16, 8, perm=True))
        assert not weight.equals(replace(weight, bias=None))
        assert not weight.equals(replace(weight, perm=None))
        assert not weight.equals(with_inputs(weight, input_scale=torch.tensor(1.0)))
    assert not weight.equals(replace(weight, bias=weight.bias.half()))  # the same numbers, if they are zeros
    zero, minus = (LogicalWeight(SPECS["fp32"], torch.full((1, 1), v)) for v in (0.0, -0.0))
    assert not zero.equals(minus)
    nan = LogicalWeight(SPECS["fp32"], torch.full((1, 1), torch.nan))
    assert nan.equals(replace(nan, stored=nan.codes.clone()))


# --- invalid arguments --------------------------------------------------------------------------------------


def test_tensors_must_match_the_spec() -> None:
    codes, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)
    LogicalWeight(MXFP4, codes, (scale,))
    with pytest.raises(WrongShape, match="one tensor for each level"):
        LogicalWeight(MXFP4, codes)
    with pytest.raises(WrongShape, match="one tensor for each level"):
        LogicalWeight(MXFP4, codes, (), None, (scale,))  # the right number of tensors, but a minimum instead of a scale
    with pytest.raises(WrongShape, match="one tensor for each level"):
        LogicalWeight(MXFP4, codes, (scale,), torch.zeros(4, 1, dtype=torch.int16))
    with pytest.raises(WrongShape, match=r"expected \[4, 1\]; got \[4, 2\]"):
        LogicalWeight(MXFP4, codes, (scale.repeat(1, 2),))
    with pytest.raises(WrongDtype, match="uint8"):
        LogicalWeight(MXFP4, codes, (scale.float(),))
    with pytest.raises(WrongDtype, match="uint8"):
        LogicalWeight(MXFP4, codes.int(), (scale,))
    with pytest.raises(WrongShape, match="bias"):
        LogicalWeight(MXFP4, codes, (scale,), bias=torch.zeros(5))
    with pytest.raises(WrongShape, match="perm"):
        LogicalWeight(MXFP4, codes, (scale,), perm=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(WrongDtype, match="perm"):
        LogicalWeight(MXFP4, codes, (scale,), perm=torch.zeros(32, dtype=torch.int64))


def test_invalid_cuts_are_refused() -> None:
    weight = weight_of("fp8-block", 256, 256, 9)
    with pytest.raises(BadValue, match="a multiple of 128; got 64"):
        weight.cut((64, 256), (0, 256))
    with pytest.raises(BadValue, match="a multiple of 128; got 32"):
        weight.cut((0, 256), (32, 256))
    for rows, columns in (((0, 257), (0, 256)), ((0, 1), (-1, 5)), ((5, 3), (0, 1))):
        with pytest.raises(BadValue, match="outside the matrix"):
            weight.cut(rows, columns)


def test_reblock_only_refines_blocks() -> None:
    weight = weight_of("fp8-b3x5", 12, 20, 10)
    for name in ("fp8-b6x5", "fp8-b2x5", "fp8-tensor"):
        with pytest.raises(WrongShape, match="blocks can only be refined"):
            weight.reblock(parse_spec(name))
    for name in ("e4m3fnuz-b3x5", "fp8-b3x5:bf16", "fp8-/b3x5", "fp8-b3x5-tensor", "fp8-b3x5-zp"):
        with pytest.raises(WrongShape, match="only blocks"):
            weight.reblock(parse_spec(name))


def test_invalid_stacks_are_refused() -> None:
    weight = weight_of("int4-g32-zp", 4, 64, 11)
    for other in (
        weight_of("int4-g32-zp", 4, 32, 11),
        weight_of("int4-g128", 4, 64, 11),
    ):
        with pytest.raises(WrongShape, match="stacked projections must agree"):
            stack([weight, other])
    with pytest.raises(BadValue, match="present for one"):
        stack([weight, replace(weight, bias=None)])


def test_invalid_specs_are_refused() -> None:
    with pytest.raises(SpecError, match="mul or div"):
        Scale(F32, TENSOR, "add")
    for make in (Scale, Zero):
        with pytest.raises(SpecError, match="positive"):
            make(F32, (1, -2))
    with pytest.raises(SpecError, match="take no scales"):
        QuantSpec(F32, (Scale(F32, TENSOR),))
    with pytest.raises(SpecError, match="multiply"):
        QuantSpec(E4M3, (Scale(F32, TENSOR),), None, (Scale(F32, TENSOR, DIV),))


# --- blocks ------------------------------------------------------------------------------------------------


def test_block_functions() -> None:
    numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert spread(numbers, (2, 3), (1, 3), 3, 5).tolist() == [[1, 2], [1, 2], [3, 4]]
    assert expand(numbers, (2, 3), 3, 5).tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
    assert expand(numbers[:1, :1], TENSOR, 3, 5).shape == (1, 1)
    assert spread(numbers[:1, :1], TENSOR, (2, ALL), 5, 7).tolist() == [[1], [1], [1]]
    assert finest([(1, 16), TENSOR]) == (1, 16)
    assert finest([(128, 128), (64, ALL), (96, 32)]) == (32, 32)
    assert finest([]) == finest([TENSOR]) == TENSOR
    row = torch.arange(10.0).view(1, 10)
    assert reduce_blocks(torch.amax, row, 1, 4).tolist() == [[3, 7, 9]]
    assert reduce_blocks(torch.amin, row, 1, 4).tolist() == [[0, 4, 8]]
    assert reduce_blocks(torch.amax, row, 1, ALL).tolist() == reduce_blocks(torch.amax, row, 1, 99).tolist() == [[9]]
    assert reduce_blocks(torch.amax, row.t(), 0, 5).tolist() == [[4], [9]]


def test_bits_per_weight() -> None:
    bits = {"bf16": 16, "mxfp4": 4.25, "nvfp4": 4.5 + 32 / 65536, "int4-g128": 4.125, "int4-g32-zp": 4.625,
            "int8": 8 + 16 / 256, "fp8-block": 8 + 32 / 16384, "nf4": 4.5}  # fmt: skip
    assert {name: parse_spec(name).bits_per_weight(256, 256) for name in bits} == bits


def test_spec_properties() -> None:
    assert (NVFP4.group, parse_spec("fp8-channel").group, parse_spec("bf16").group) == (16, ALL, ALL)
    assert parse_spec("fp8-block").map_blocks(0, 96).scales[0].block == (32, 128)
    assert parse_spec("fp8-block").map_blocks(0, 0).scales[0].block == (128, 128)  # no cut
    assert NVFP4.map_blocks(1, 24).scales == (Scale(E4M3, group(8)), Scale(F32, TENSOR))
    assert parse_spec("fp8-channel").scales[0].block == CHANNEL
    assert parse_spec("fp8-block").stacked(192).scales[0].block == (64, 128)


def test_a_weight_moves_with_everything_it_has() -> None:
    weight = weight_of("mxfp4", 4, 64, 1, perm=True)
    assert weight.to(torch.device("cpu")) is weight
    moved = with_inputs(weight, input_scale=torch.tensor(1.0)).to(torch.device("meta"))
    held = [moved.codes, *moved.scales, moved.bias, moved.perm, *moved.inputs.values()]
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in held)
    for name in ("bias", "perm", "scales", "inputs"):  # what was left behind, or came later, is moved too
        mixed = replace(moved, **{name: getattr(with_inputs(weight, input_scale=torch.tensor(1.0)), name)})
        held = [*mixed.to(torch.device("meta"))._tensors().values()]
        assert len(held) == 5 and all(tensor.device.type == "meta" for tensor in held), name


def test_codes_that_are_apart_are_moved_from_wherever_each_is() -> None:
    weight = stack_experts([weight_of("mxfp4", 4, 64, seed) for seed in range(2)])
    stored = next(iter(codes_apart(weight, gated=False)))
    assert stored.to(torch.device("cpu")) is stored  # and not copied
    assert same_bits(stored.data, pack_bits(weight.codes, 4, torch.uint8))
    for number in (0, 1):
        apart = [*stored.apart]
        apart[number] = apart[number].to("meta")
        source = apart[0].expand(2, *apart[0].shape)
        moved = replace(weight, stored=Nibbles(source, apart=tuple(apart))).to(torch.device("meta"))
        assert {tensor.device.type for tensor in moved._tensors().values()} == {"meta"} and not moved.stored.apart


def test_nibbles_are_cut_between_two_codes_of_a_byte() -> None:
    weight = quantize(torch.randn(4, 64), MXFP4)
    packed = replace(weight, stored=Nibbles(pack_bits(weight.codes, 4, torch.uint8)))
    for columns in ((0, 63), (32, 64), (32, 33)):
        assert packed.cut((1, 3), columns).equals(weight.cut((1, 3), columns))


def test_experts_of_different_sizes_are_not_stacked() -> None:
    with pytest.raises(WrongShape, match="experts of a layer must agree"):
        stack_experts([quantize(torch.zeros(n, 32), MXFP4) for n in (4, 8)])
