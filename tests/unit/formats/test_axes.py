"""Shapes, units and slices of axes; the slice of a stored tensor is the stored form of the slice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lancebill.formats import axes as ax
from lancebill.numbers.bit_packing import pack_bits, unpack_bits

ASSERTS = pytest.mark.skipif(not __debug__, reason="asserts are for our own bugs, and -O takes them out")
NIBBLES, BYTES, WORD4, WORD3 = (4, 8), (8, 8), (4, 32), (3, 32)


@pytest.mark.parametrize(
    ("name", "axes", "ratio", "shape", "units"),
    [
        ("GPTQ qweight", "k^ n", WORD4, (64, 256), (1, 8)),
        ("GPTQ qweight, 3 bits", "k^ n", WORD3, (48, 256), (1, 32)),
        ("GPTQ scales", "k/128 n", (1, 16), (4, 256), (1, 128)),
        ("GPTQ qzeros", "k/128 n^", WORD4, (4, 32), (8, 128)),
        ("GPTQ g_idx", "k", (1, 32), (512,), (1, 1)),
        ("AWQ qweight", "k n^", WORD4, (512, 32), (8, 1)),
        ("AWQ qzeros", "k/64 n^", WORD4, (8, 32), (8, 64)),
        ("compressed-tensors weight_packed", "n k^", WORD4, (256, 64), (1, 8)),
        ("compressed-tensors weight_scale", "n k/32", (1, 16), (256, 16), (1, 32)),
        ("compressed-tensors weight_zero_point", "n^ k/32", WORD4, (32, 16), (8, 32)),
        ("NVFP4 weight", "n k^", NIBBLES, (256, 256), (1, 2)),
        ("NVFP4 weight_scale", "n k/16", BYTES, (256, 32), (1, 16)),
        ("NVFP4 weight_scale_2", "", (1, 32), (), (1, 1)),
        ("FP8 weight_scale_inv", "n/128 k/128", (1, 32), (2, 4), (128, 128)),
        ("gpt-oss blocks", "n k/32 16", BYTES, (256, 16, 16), (1, 32)),
        ("gpt-oss scales", "n k/32", BYTES, (256, 16), (1, 32)),
        ("GGUF MXFP4 rows", "n k/32*17", BYTES, (256, 272), (1, 32)),
        ("ModelOpt block scales", "n/128 1 k/128 1", (1, 32), (2, 1, 4, 1), (128, 128)),
        ("bitsandbytes weight", "n*k^ 1", NIBBLES, (65536, 1), (1, 1)),
        ("bitsandbytes absmax", "n*k/64", (1, 32), (2048,), (1, 1)),
        ("a document", "?", BYTES, (ax.ANY,), (1, 1)),
    ],
)
def test_shapes_units_and_slices(
    name: str, axes: str, ratio: tuple[int, int], shape: tuple[int, ...], units: tuple[int, int]
) -> None:
    assert ax.shape(axes, 256, 512, ratio) == shape, name
    assert ax.units(axes, ratio) == {"n": units[0], "k": units[1]}, name
    assert ax.cuttable(axes) == ("n*k" not in axes)
    assert ax.fits(shape, tuple(7 if s == ax.ANY else s for s in shape))
    assert not ax.fits(shape, (*shape, 1))


@pytest.mark.parametrize(
    ("axes", "n", "k", "ratio", "shape"),
    [
        ("n/128 k/128", 300, 130, (1, 32), (3, 2)),  # partial last blocks
        ("n k/32", 3, 33, (1, 16), (3, 2)),
        ("n k^", 3, 33, WORD4, (3, 5)),
        ("n k^", 3, 33, WORD3, (3, 4)),
        ("n^ k", 9, 2, WORD4, (2, 2)),
        ("n*k^", 3, 33, NIBBLES, (50,)),
        ("n*k/64", 3, 33, (1, 32), (2,)),
        ("n k", 0, 0, (1, 16), (0, 0)),
        ("5 n", 2, 2, (1, 16), (5, 2)),
    ],
)
def test_partial_blocks_and_words_are_rounded_up(
    axes: str, n: int, k: int, ratio: tuple[int, int], shape: tuple[int, ...]
) -> None:
    assert ax.shape(axes, n, k, ratio) == shape


@pytest.mark.parametrize(
    ("axes", "ratio", "sizes"),
    [
        ("n k^", WORD4, {"n": 256, "k": 512}),
        ("k^ n", WORD3, {"n": 256, "k": 512}),
        ("n k/32", (1, 16), {"n": 256}),
        ("n/128 k/128", (1, 32), {}),
        ("n k/32 16", BYTES, {"n": 256}),
        ("n k/32*17", BYTES, {"n": 256}),
        ("n*k^ 1", NIBBLES, {}),
        ("", (1, 32), {}),
    ],
)
def test_sizes_are_inferred_from_element_axes(axes: str, ratio: tuple[int, int], sizes: dict[str, int]) -> None:
    assert ax.infer(axes, ax.shape(axes, 256, 512, ratio), ratio) == sizes


@ASSERTS
@pytest.mark.parametrize("bad", ["m", "k/", "k//2", "n k,", "k*n", "^k", "k^^", "-1", "K"])
def test_invalid_axes_fail_an_assertion(bad: str) -> None:
    with pytest.raises(AssertionError):
        ax.parse(bad)


AXES = st.sampled_from(
    ["n k", "k n", "n k/4", "n/2 k/3", "k/4 n", "n^ k/4", "n k^", "k^ n", "k n^", "n k/4 3", "n k/4*5"]
)


def spans(size: int, unit: int) -> st.SearchStrategy[tuple[int, int]]:
    """Cuts that start at a multiple of the unit and end at one or at the end of the axis."""
    starts = [*range(0, size, unit)]
    return st.sampled_from(starts).flatmap(
        lambda low: st.tuples(st.just(low), st.sampled_from([s for s in (*starts, size) if s > low]))
    )


@settings(max_examples=300, deadline=None)
@given(st.data(), AXES, st.integers(1, 20), st.integers(1, 40), st.sampled_from([WORD4, NIBBLES, (3, 8), (2, 32)]))
def test_slices_tile_the_tensor(data: st.DataObject, axes: str, n: int, k: int, ratio: tuple[int, int]) -> None:
    """A slice has the shape of a smaller matrix, and the slices of all shards tile the tensor."""
    units = ax.units(axes, ratio)
    rows, columns = data.draw(spans(n, units["n"])), data.draw(spans(k, units["k"]))
    cut = ax.slices(axes, rows, columns, n, k, ratio)
    whole = ax.shape(axes, n, k, ratio)
    got = tuple(len(range(*s.indices(size))) for s, size in zip(cut, whole))
    assert got == ax.shape(axes, rows[1] - rows[0], columns[1] - columns[0], ratio)
    before = ax.slices(axes, (0, rows[0]), (0, columns[0]), n, k, ratio)
    literal = [axis.symbol == "" for axis in ax.parse(axes)]
    assert all(fixed or a.stop == b.start for a, b, fixed in zip(before, cut, literal))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 80), st.integers(1, 8), st.sampled_from([torch.int32, torch.uint8]))
def test_a_slice_has_the_codes_of_its_columns(
    data: st.DataObject, n: int, k: int, bits: int, word: torch.dtype
) -> None:
    ratio = (bits, 8 * word.itemsize)
    codes = torch.arange(n * k).view(n, k).remainder(1 << bits).to(torch.uint8)
    columns = data.draw(spans(k, ax.units("n k^", ratio)["k"]))
    stored = pack_bits(codes, bits, word)
    part = stored[ax.slices("n k^", (0, n), columns, n, k, ratio)]
    assert torch.equal(unpack_bits(part, bits, columns[1] - columns[0]), codes[:, columns[0] : columns[1]])
    across = pack_bits(codes, bits, word).t()
    part = across[ax.slices("k^ n", (0, n), columns, n, k, ratio)]
    assert torch.equal(unpack_bits(part.t(), bits, columns[1] - columns[0]), codes[:, columns[0] : columns[1]])


def test_two_axes_of_one_symbol_need_a_common_unit() -> None:
    assert ax.units("k/4 k/6") == {"n": 1, "k": 12}
    assert ax.units("n^ k^ n/3", WORD4) == {"n": 24, "k": 8}


@ASSERTS
def test_cuts_inside_a_unit_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="inside a unit"):
        ax.slices("n k^", (0, 4), (4, 8), 4, 16, WORD4)
    with pytest.raises(AssertionError, match="cannot be cut"):
        ax.slices("n*k^", (0, 4), (0, 8), 4, 16, WORD4)


def test_an_axis_of_any_size_is_never_sliced() -> None:
    assert ax.slices("?", (0, 4), (0, 8), 4, 16, BYTES) == (slice(None),)
