"""Helpers of the decode kernel in Triton's interpreter: row quantisation and epilogues.

Not collected by pytest: `test_hopper_dispatch.py` runs it in a separate process, where TRITON_INTERPRET is set before
Triton is imported.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from interpreted import ROUTING, interpreter, routing_argument, scalars

from lancebill.backends.gpu import row_steps as rowwise
from lancebill.backends.gpu.kernels import convert_row, decode_chunks, decode_finish, epilogue, slots
from lancebill.backends.gpu.kernels import dispatch_combine as rows
from lancebill.backends.hopper.kernels import decode_row
from lancebill.testing.layers import worst_row

__all__ = ["interpreter"]  # an autouse fixture


class Gluon:
    """Gluon's language on Triton's interpreter: the same functions without layouts."""

    def __getattr__(self, name: str) -> object:
        return vars(tl)[name]

    def arange(self, start: int, end: int, layout: object) -> tl.tensor:
        return tl.arange(start, end)

    def BlockedLayout(self, *sizes: object) -> None:
        return None

    def SliceLayout(self, *parts: object) -> None:
        return None


def count_bits(mask: tl.tensor) -> tl.tensor:
    """`popc`, which the interpreter does not have."""
    pairs = mask - ((mask >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((nibbles + (nibbles >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 0xFF


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the helpers of the decode kernel run in the interpreter."""
    for module in (decode_finish, decode_row, decode_chunks):
        for name, stand_in in (
            ("gl", Gluon()),
            ("tl", tl),
            ("range", scalars),
            ("column_at", convert_row.column_at.fn),
            ("divide", convert_row.divide.fn),
        ):
            monkeypatch.setattr(module, name, stand_in, raising=False)
    monkeypatch.setattr(decode_finish, "sum_pieces", decode_finish.sum_pieces.fn)
    for name in ("pieces_of", "number_of", "find_local_slots", "segment_at", "chunk_length", "pieces_of_token"):
        plain = vars(decode_chunks)[name].fn
        for module in (decode_finish, decode_chunks):
            monkeypatch.setattr(module, name, plain, raising=False)
    for module in (decode_finish, decode_chunks):
        monkeypatch.setattr(module, "count_bits", count_bits)
    for name in ("load_slices", "row_scale", "quantise_slices", "slices_layout"):
        monkeypatch.setattr(decode_row, name, vars(decode_row)[name].fn)
    monkeypatch.setattr(slots, "tl", tl)
    for name in ("load_experts", "load_weights"):
        for module in (decode_finish, decode_chunks):
            monkeypatch.setattr(module, name, vars(slots)[name].fn, raising=False)


def keep_part(
    x: tl.tensor, out: tl.tensor, scales: tl.tensor, row: int, first: int, width: int, SLICES: tl.constexpr
) -> None:
    """Quantise part of a row into memory that the test can read."""
    scale = decode_row.row_scale(x + row * width, width)
    part = decode_row.quantise_slices(decode_row.load_slices(x + row * width, first, width, SLICES), scale)
    place = tl.arange(0, SLICES).expand_dims(1) * 128 + tl.arange(0, 128).expand_dims(0)
    tl.store(out + place, part)
    tl.store(scales + row, scale)


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize("slices", [8, 16])
@pytest.mark.parametrize("columns", [96, 288, 2048, 2080, 4128])
def test_decode_quantises_like_prepare_rows(columns: int, slices: int) -> None:
    """Decode blocks quantise each part of a row to the same numbers as `prepare_rows`."""
    length, held = -(-columns // 128) * 128, slices * 128
    x = (torch.randn(3, columns) * torch.tensor([[1.0], [1e-3], [0.0]])).bfloat16()
    expected = torch.zeros(3, -(-length // held) * held, dtype=torch.float8_e4m3fn)  # zeros beyond the row's end
    codes = torch.full((3, length), float("nan")).to(torch.float8_e4m3fn)
    scales, expected_scales = torch.full((3,), float("nan")), torch.full((3,), float("nan"))
    prepare, w = rows.prepare_rows[(3,)], rowwise.power_of_two(length)
    none = (scales,) * 5
    prepare(x, *none, codes, expected_scales, 3, columns, 1, w, True, False, False, False, 0, False, False)
    expected[:, :length] = codes
    keep = triton.jit(keep_part)
    for row, start in itertools.product(range(3), range(0, length, held)):
        ours = torch.full((held,), float("nan")).to(torch.float8_e4m3fn)
        keep[(1,)](x, ours, scales, row, start // 128, columns, slices)
        assert torch.equal(ours.float(), expected[row, start : start + held].float())  # ignores the sign of zeros
    assert torch.equal(scales, expected_scales)


def test_static_scales_saturate_to_the_largest_number() -> None:
    x = torch.tensor([[float("inf"), -float("inf"), 3e38, -3e38, 1.0, 0.0] + 122 * [0.5]])
    codes, scales = torch.zeros(1, 128).to(torch.float8_e4m3fn), torch.zeros(1)
    owners, given = torch.zeros(1, dtype=torch.int32), torch.tensor([0.01])
    rows.prepare_rows[(1,)](
        x, owners, owners, scales, scales, given, codes, scales, 1, 128, 1, 128, True, False, False, True, 0, False,
        True,
    )  # fmt: skip
    found = codes.float().view(-1, 8, 4, 4).transpose(1, 2).reshape(-1)
    assert found[:6].tolist() == [448, -448, 448, -448, 96, 0] and scales.item() == given.item()


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_rows_that_no_slot_has_are_not_read(static: bool, together: int) -> None:
    """Two of four slots have an expert. What follows their rows was never written: other experts, NaN."""
    x, wild = torch.full((4, 128), float("nan")), 1 << 30
    x[:2] = torch.randn(2, 128)
    places, owners = torch.tensor([1, -1, 0, -1]).int(), torch.tensor([0, 0, wild, wild]).int()
    codes, scales = torch.full((4, 128), 7, dtype=torch.int8), torch.full((4,), -1.0)
    given = torch.tensor([0.5])
    rows.prepare_rows[(-(-4 // together),)](
        x, places, owners, scales, scales, given, codes, scales, 4, 128, together, 128, True, False, False, static, 0,
        True, static,
    )  # fmt: skip
    assert (scales[:2] > 0).all() and (scales[2:] == -1).all() and (codes[2:] == 7).all() and (codes[:2] != 7).any()


def finish(
    out: tl.tensor, parts: tl.tensor, factors: tl.tensor, bias: tl.tensor, slot: int, e: int, unit: int, units: int,
    columns: int, KIND: tl.constexpr, ACTIVATION: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """The epilogue of one unit, from sums in registers (seven of eight columns are padding) or from partial sums."""
    limits = float("inf"), 1.0, 1.0
    if WHOLE:
        n, only = unit * 128 + tl.arange(0, 64), tl.arange(0, 8).expand_dims(0) == 0
        halves = []
        for first in (0, 64):
            sums = tl.load(parts + slot * units * 128 + n + first).expand_dims(1)
            halves.append(tl.where(only, sums, float("nan")))
            halves[-1].type.layout = None
        top, bottom = tl.load(factors + n), tl.load(factors + n + 64)
        decode_finish.finish_sums(out, *halves, top, bottom, bias, 0.7, slot, e, unit, units, columns, *limits, KIND,
                                  ACTIVATION, True)  # fmt: skip
    else:
        decode_finish.finish_tile(out, parts, bias, 0.7, slot * units + unit, slot, e, units, 1, columns, *limits, 1,
                                  KIND, ACTIVATION, True)  # fmt: skip


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize(
    ("kind", "activation", "columns"),
    [("gated", "gelu", 120), ("ungated", "relu2_no_mul", 240), ("ungated", "gelu_no_mul", 160)],
)
def test_epilogues_of_registers_and_partial_sums_agree(
    monkeypatch: pytest.MonkeyPatch, kind: str, activation: str, columns: int
) -> None:
    monkeypatch.setattr(epilogue, "gl", Gluon())
    for name in ("gated_activation", "ungated_activation", "_gelu"):
        monkeypatch.setattr(epilogue, name, vars(epilogue)[name].fn)
    for name in ("gated_activation", "ungated_activation", "finish_sums", "finish_tile"):
        monkeypatch.setattr(decode_finish, name, vars(decode_finish)[name].fn)
    units, slots = 2, 3
    parts, factors, bias = torch.randn(slots, 256), torch.rand(256) + 0.5, torch.randn(5, 256)
    found = []
    for whole, given in ((True, parts), (False, parts * factors)):
        out = torch.full((slots + 1, columns), float("nan"), dtype=torch.bfloat16)
        for slot, unit in itertools.product(range(slots), range(units)):
            triton.jit(finish)[(1,)](
                out, given, factors, bias, slot, 2 * slot % 5, unit, units, columns, kind, activation, whole
            )
        assert out[slots].isnan().all() and not out[:slots].isnan().any()
        found.append(out[:slots])
    assert torch.equal(*found)


def finish_routed(
    out: tl.tensor, parts: tl.tensor, bias: tl.tensor, scales: tl.tensor, ids: tl.tensor, id_words: int, id_row: int,
    id_column: int, expert_map: tl.tensor, mapped: int, experts: int, weights: tl.tensor, weight_kind: int,
    weight_row: int, weight_column: int, mask: int, token: int, unit: int, units: int, blocks: int, each: int,
    columns: int, PIECES: tl.constexpr, SLOTS: tl.constexpr, FP8: tl.constexpr,
) -> None:  # fmt: skip
    """The weighted sum of a token's slots."""
    ids = (ids, id_words, id_row, id_column, expert_map, mapped, experts)
    weights = (weights, weight_kind, weight_row, weight_column)
    decode_finish.finish_token(out, parts, bias, scales, ids, weights, mask, token, unit, units, blocks, each, columns,
                               PIECES, SLOTS, True, FP8, True)  # fmt: skip


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize(("blocks", "each", "pieces", "fp8"), [(4, 4, 1, False), (4, 2, 2, True), (5, 3, 3, False)])
def test_decode_sums_a_tokens_slots(
    blocks: int, each: int, pieces: int, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slot order. Ignores slots without a local expert and pieces that do not exist, even if they hold NaN."""
    monkeypatch.setattr(decode_finish, "finish_token", decode_finish.finish_token.fn)
    tokens, top_k, units, columns = 3, 3, 2, 240
    ids = torch.tensor([[4, 0, 2], [-1, 5, 1 << 20], [3, -9, 1]], dtype=torch.int32)
    mine = ((ids >= 0) & (ids < 5)).unsqueeze(-1)
    local = int(mine.sum())
    parts, bias = torch.randn(local, units, pieces, 128), torch.randn(5, units * 128)
    first = torch.arange(local * units).view(local, units, 1, 1) * blocks
    real = torch.arange(pieces).view(pieces, 1) < (first + blocks - 1) // each - first // each + 1
    whole = torch.zeros(tokens, top_k, units * 128)
    whole[mine[..., 0]] = torch.where(real, parts, 0.0).sum(2).flatten(1)
    scales, weights = torch.rand(tokens, top_k, 1), torch.rand(tokens, top_k, 1).bfloat16().float()
    rows_ = (whole * (scales if fp8 else 1) + bias[ids.clamp(0, 4).long()]) * weights
    want = torch.where(mine, rows_, 0.0).sum(1)[:, :columns]
    parts.masked_fill_(~real, float("nan"))
    for tensor in (scales, weights):
        tensor.masked_fill_(~mine, float("nan"))
    mask = sum(1 << slot for slot, held in enumerate(mine.flatten().tolist()) if held)
    call = {"ids": ids, "weights": weights[..., 0]}
    if fp8:
        call = {"ids": torch.where(ids == -9, (1 << 32) + 2, ids.long()), "weights": weights[..., 0].bfloat16()}
    out = torch.full((tokens, columns), float("nan"), dtype=torch.bfloat16)
    arguments = {name: routing_argument(name, call) for name in ROUTING}
    finish = triton.jit(finish_routed)
    for token, unit in itertools.product(range(tokens), range(units)):
        finish[(1,)](out, parts, bias, scales, experts=5, mask=mask, token=token, unit=unit, units=units, blocks=blocks,
                     each=each, columns=columns, PIECES=pieces, SLOTS=top_k, FP8=fp8, **arguments)  # fmt: skip
    assert worst_row(out, want) < 8e-3 and not out[1].any()


def keep_segments(
    out: tl.tensor, ids: tl.tensor, id_words: int, id_row: int, id_column: int, expert_map: tl.tensor, mapped: int,
    experts: int, top_k: int, total_slots: int, units: int, blocks: int, least: int, shares: int,
) -> None:  # fmt: skip
    """The segments of one block's chunk: tile, slot, expert, first stage, stages. Then the length of a chunk."""
    local = decode_chunks.find_local_slots(
        (ids, id_words, id_row, id_column, expert_map, mapped, experts), top_k, total_slots, 1
    )
    total = decode_chunks.count_bits(local[0]) * units * blocks
    each = decode_chunks.chunk_length(decode_chunks.count_bits(local[0]), units, blocks, least, shares)
    at, end, row = 0, total, 0
    while at < end:
        stop = tl.minimum((at // each + 1) * each, end)
        for i, value in enumerate(decode_chunks.segment_at(local, at, stop, units, blocks)):
            tl.store(out + row * 6 + i, value)
        tl.store(out + row * 6 + 5, at // each)
        at += tl.load(out + row * 6 + 4)
        row += 1


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize(("least", "shares"), [(3, 1 << 30), (2, 5), (8, 1 << 30)])
def test_chunks_cover_the_tiles_of_local_slots(least: int, shares: int) -> None:
    """Every stage of every local slot's tiles is in one chunk; other ranks' slots and padding have none."""
    ids = torch.tensor([[4, 0, 2, 2], [-1, 7, 1 << 20, 3], [9, -9, 8, 6]], dtype=torch.int32)
    expert_map = torch.tensor([-1, -1, 1, 0, 2, -1, -1, 4, -1, -1], dtype=torch.int32)
    units, blocks = 3, 4
    local = [(slot, int(expert_map[e])) for slot, e in enumerate(ids.flatten().tolist())
             if 0 <= e < 10 and expert_map[e] >= 0]  # fmt: skip
    total = len(local) * units * blocks
    each = max(least, -(-total // shares))
    found = torch.full((total, 6), -1, dtype=torch.int32)
    call = {"ids": ids, "weights": torch.ones(3, 4), "expert_map": expert_map}
    arguments = {name: routing_argument(name, call) for name in ROUTING if not name.startswith("weight")}
    triton.jit(keep_segments)[(1,)](found, experts=5, top_k=4, total_slots=12, units=units, blocks=blocks, least=least,
                                    shares=shares, **arguments)  # fmt: skip
    covered = []
    for tile, slot, e, first, stages, chunk in found[found[:, 0] >= 0].tolist():
        assert (slot, e) == local[tile // units]
        covered += [(tile, first + i) for i in range(stages)]
        assert {(tile * blocks + first + i) // each for i in range(stages)} == {chunk}
    assert covered == list(itertools.product(range(len(local) * units), range(blocks)))


def test_int8_rows_round_to_even_saturate_and_have_no_nan() -> None:
    """Static scales saturate; a row that is not finite gets a scale of NaN, since int8 has no NaN."""
    x, owners, given = torch.zeros(4, 128), torch.zeros(4, dtype=torch.int32), torch.tensor([0.5])
    x[0, :7] = torch.tensor([63.5, -64.0, 100.0, -100.0, 0.25, 0.75, -0.25])  # 127, -128, too large, ties
    x[1, 5], x[2, 9] = float("nan"), -float("inf")
    for static in (True, False):
        codes, scales = torch.zeros(4, 128, dtype=torch.int8), torch.zeros(4)
        rows.prepare_rows[(4,)](
            x,
            owners,
            owners,
            scales,
            scales,
            given,
            codes,
            scales,
            4,
            128,
            1,
            128,
            True,
            False,
            False,
            static,
            0,
            False,
            static,
        )
        found = codes[0].view(-1, 8, 4, 4).transpose(1, 2).reshape(-1)
        expected = [127, -128, 127, -128, 0, 2, 0] if static else [81, -81, 127, -127, 0, 1, 0]
        assert found[:7].tolist() == expected and not codes[3].any()
        assert scales[1:3].isnan().all() and scales[3] == (0.5 if static else 1.0)
