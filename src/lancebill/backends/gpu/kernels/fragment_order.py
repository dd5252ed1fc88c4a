"""The memory layout of codes and scales: canonical codes to packed words and back, in plain torch.

Codes: per unit (128 features) and slice, `slice_rows` rows of 128 bytes, ordered so that each thread of the warpgroup
loads its own words in 16-byte reads without bank conflicts. Scales: per unit and block of columns, `scale_words` words
for each pair of rows (r, r + 8). Packing and unpacking share one table of bit positions (`unpack_codes.places`,
`unpack_ptx_fp8.places_e4m3`, `unpack_ptx_int8.places_s8`), so they cannot disagree. The planes of 3-bit codes are
apart: first two bits of all slices of a unit, then the third bit.

Sizes are padded to whole units, so the rows of several experts follow each other like the units of one: all functions
take a leading expert dimension, and words keep it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import EllipsisType

import torch
from torch import Tensor

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_codes import places
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import Bits, places_e4m3
from lancebill.backends.gpu.kernels.unpack_ptx_int8 import places_s8
from lancebill.backends.gpu.kernels.unpack_scales import scale_rotation
from lancebill.backends.gpu.kernels.weight_form import HALF, ROWS, WeightForm

Index = tuple[EllipsisType, int, int, int, int, int]


def code_words(form: WeightForm, n: int, k: int) -> int:
    """32-bit words of n x k codes (padded sizes)."""
    return n * k * form.bits // 32


def scale_count(form: WeightForm, n: int, k: int) -> int:
    """32-bit words of the scales of n x k codes (padded sizes)."""
    blocks = k // form.block_columns if form.block_columns else 1
    return n // 2 * form.scale_words * blocks


def pack_codes(form: WeightForm, codes: Tensor) -> Tensor:
    """uint8 codes [..., n, k] (padded sizes) to int32 words [..., words]."""
    view = _fragment_view(form, codes.flatten(0, -2).to(torch.int32))
    words = torch.zeros(*view.shape[:7], words_of_thread(form), dtype=torch.int32, device=codes.device)
    for index, bits in _fields(form):
        code = view[index]
        for bit, word, position in bits:
            words[..., word] |= (code >> bit & 1) << position
    return _to_rows(form, words).reshape(*codes.shape[:-2], -1)


def unpack_codes(form: WeightForm, words: Tensor, n: int, k: int) -> Tensor:
    """The inverse of `pack_codes`."""
    codes = torch.zeros(*words.shape[:-1], n, k, dtype=torch.int32, device=words.device)
    view = _fragment_view(form, codes.flatten(0, -2))
    thread_words = _from_rows(form, words, k)
    for index, bits in _fields(form):
        for bit, word, position in bits:
            view[index] |= (thread_words[..., word] >> position & 1) << bit
    return codes.to(torch.uint8)


def thread_fields(form: WeightForm) -> Iterator[tuple[int, int, Bits]]:
    """Each code of a thread: n3, its column in the slice (of lane 0), and the positions of its bits."""
    for (_, n3, *rest), bits in _fields(form):
        if form.byte_inputs:
            k2, k3, k4, k10 = rest
            yield n3, 16 * k4 + 8 * k3 + 4 * k2 + k10, bits
        else:
            k3, k4, k5, k0 = rest
            yield n3, 32 * k5 + 16 * k4 + 8 * k3 + k0, bits


def words_of_thread(form: WeightForm) -> int:
    """Words of one slice of a half that belong to one thread."""
    return form.slice_columns * HALF * form.bits // 32 // 128


def _fragment_view(form: WeightForm, codes: Tensor) -> Tensor:
    """View codes as [unit, slice, half, n5n4, n2n1, n0, lane % 4, bits that vary inside a thread ...]."""
    n, k = codes.shape
    units, slices = n // ROWS, k // form.slice_columns
    if form.byte_inputs:
        # u, half, n5n4, n3, n2n1, n0, slice, k6k5, k4, k3, k2, k1k0
        view = codes.view(units, 2, 4, 2, 4, 2, slices, 4, 2, 2, 2, 4)
        return view.permute(0, 6, 1, 2, 4, 5, 7, 3, 10, 9, 8, 11)  # ... n3, k2, k3, k4, k1k0
    view = codes.view(units, 2, 4, 2, 4, 2, slices, 2, 2, 2, 4, 2)
    return view.permute(0, 6, 1, 2, 4, 5, 10, 3, 9, 8, 7, 11)  # ... n3, k3, k4, k5, k0


def _fields(form: WeightForm) -> Iterator[tuple[Index, Bits]]:
    """The index of each code of a thread, and the positions of its bits."""
    if form.byte_inputs:
        place = places_s8 if form.activations == f.S8 else places_e4m3
        for n3, k2, k3, k4, k10 in itertools.product(range(2), range(2), range(2), range(2), range(4)):
            yield (Ellipsis, n3, k2, k3, k4, k10), place(form, n3, k2, k3, k4, k10)
        return
    for n3, k3, k4, k5, k0 in itertools.product(range(2), repeat=5):
        yield (Ellipsis, n3, k3, k4, k5, k0), places(form, n3, k3, k4, k5, k0)


def _to_rows(form: WeightForm, words: Tensor) -> Tensor:
    """Thread order to memory order, [unit, words]: plane after plane."""
    counts = [words_of_thread(form) * bits // form.bits for bits in form.planes]
    return torch.cat([_plane_rows(plane).flatten(1) for plane in words.split(counts, -1)], 1)


def _from_rows(form: WeightForm, words: Tensor, k: int) -> Tensor:
    """The inverse of `_to_rows`."""
    slices, each = k // form.slice_columns, words_of_thread(form)
    units = words.reshape(-1, slices * 256 * each)
    planes, start = [], 0
    for bits in form.planes:
        count = each * bits // form.bits
        plane = units[:, start : start + slices * 256 * count]
        planes.append(_plane_threads(plane.reshape(-1, slices, 256 * count), count))
        start += slices * 256 * count
    return torch.cat(planes, -1)


def _plane_rows(words: Tensor) -> Tensor:
    """Up to four neighbouring words per thread, the next four 16 rows below. With a single word, those of both halves
    are neighbours."""
    if words.shape[-1] == 1:
        # u, slice, half, n5n4, n2n1, n0, lane, 1  ->  u, slice, n5n4, n2n1, n0, lane, half, 1
        return words.permute(0, 1, 3, 4, 5, 6, 2, 7)
    four = min(words.shape[-1], 4)
    # u, slice, half, n5n4, n2n1, n0, lane, fours, 4  ->  u, slice, half, fours, n5n4, n2n1, n0, lane, 4
    split: Tensor = words.unflatten(-1, (-1, four))
    return split.permute(0, 1, 2, 7, 3, 4, 5, 6, 8)


def _plane_threads(words: Tensor, count: int) -> Tensor:
    """The inverse of `_plane_rows` for `count` words per thread, from [unit, slice, words]."""
    rows: Tensor
    if count == 1:
        rows = words.unflatten(-1, (4, 4, 2, 4, 2, 1))
        return rows.permute(0, 1, 6, 2, 3, 4, 5, 7)
    four = min(count, 4)
    rows = words.unflatten(-1, (2, count // four, 4, 4, 2, 4, four))
    return rows.permute(0, 1, 2, 4, 5, 6, 7, 3, 8).flatten(-2)


# ---------------------------------------------------------------- scales


def pack_bytes(form: WeightForm, values: Tensor) -> Tensor:
    """One byte for each (row, group of 16 or 32 columns), uint8 [..., n, groups], to words [..., words].

    A word holds rows r and r + 8 of two neighbouring groups. With 16-bit activations a thread uses the whole word,
    rotated so that the kernel can mask exponents in place. With fp8 a lane uses one group and reads half a word.
    """
    words = _byte_view(form, values.flatten(0, -2)).flatten().view(torch.int32)
    return _rotate_left(words, scale_rotation(form)).view(*values.shape[:-2], -1)


def unpack_bytes(form: WeightForm, words: Tensor, n: int, groups: int) -> Tensor:
    """The inverse of `pack_bytes`: int32 [n, groups], each 0 .. 255."""
    values = torch.zeros(*words.shape[:-1], n, groups, dtype=torch.int32, device=words.device)
    view = _byte_view(form, values.flatten(0, -2))
    rotated = _rotate_left(words.reshape(view.shape[:-2]), -scale_rotation(form))
    for i in range(4):
        view[..., i >> 1, i & 1] = rotated >> (8 * i) & 255
    return values


def _rotate_left(words: Tensor, left: int) -> Tensor:
    left %= 32
    return words << left | words >> (32 - left) & (1 << left) - 1 if left else words


def _byte_view(form: WeightForm, values: Tensor) -> Tensor:
    """[unit, block, half, n5n4, n2n1, n0, word, group of the word, n3]."""
    n, groups = values.shape
    per_block = 2 * form.scale_words
    view = values.view(n // ROWS, 2, 4, 2, 4, 2, groups // per_block, form.scale_words, 2)
    return view.permute(0, 6, 1, 2, 4, 5, 7, 8, 3)


def pack_halves(form: WeightForm, values: Tensor) -> Tensor:
    """One 16-bit number for each (row, group), int16 [..., n, groups], to [..., pairs of rows, words of a pair]."""
    view = _half_view(form, values.flatten(0, -2).to(torch.int32))
    words = (view[..., 0] & 0xFFFF) | (view[..., 1] << 16)
    return words.reshape(*values.shape[:-2], -1, words.shape[-1])


def unpack_halves(form: WeightForm, words: Tensor, n: int, groups: int) -> Tensor:
    """The inverse of `pack_halves`: int16 [..., n, groups]."""
    values = torch.zeros(*words.shape[:-2], n, groups, dtype=torch.int32, device=words.device)
    view = _half_view(form, values.flatten(0, -2))
    pairs = words.reshape(view.shape[:-1])
    view[..., 0] = pairs << 16 >> 16
    view[..., 1] = pairs >> 16
    return values.to(torch.int16)


def pack_floats(form: WeightForm, values: Tensor) -> Tensor:
    """One 32-bit number for each (row, group), int32 [..., n, groups]: the words of a pair of rows are (part, n3)."""
    words = _half_view(form, values.flatten(0, -2)).flatten(-2)
    return words.reshape(*values.shape[:-2], -1, words.shape[-1])


def unpack_floats(form: WeightForm, words: Tensor, n: int, groups: int) -> Tensor:
    """The inverse of `pack_floats`: int32 [..., n, groups]."""
    values = torch.zeros(*words.shape[:-2], n, groups, dtype=torch.int32, device=words.device)
    view = _half_view(form, values.flatten(0, -2))
    view.copy_(words.reshape(view.shape))
    return values


def scale_pairs(form: WeightForm, words: Tensor) -> Tensor:
    """Words [..., words] as [..., pairs of rows, words of a pair]: scales, then zero points."""
    pairs: Tensor = words.unflatten(-1, (-1, form.scale_words))
    return pairs


def _half_view(form: WeightForm, values: Tensor) -> Tensor:
    """[unit, block, half, n5n4, n2n1n0, part of the block, n3]."""
    n, groups = values.shape
    parts = 2 if form.fine else 1
    view = values.view(n // ROWS, 2, 4, 2, 8, groups // parts, parts)
    return view.permute(0, 5, 1, 2, 4, 6, 3)
