"""The steps of a decode program against torch in double precision, at every level of this machine."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lancebill.backends.cpu.decode_program import DecodeHeads, DecodeProgram, DecodeRows
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.native import Library, library
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.errors import UnsupportedProblem
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.moe.activation import Activation
from lancebill.moe.problem import BATCH_INVARIANT
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routing
from lancebill.numbers.random_weight import random_weight
from lancebill.numbers.spec_names import parse_spec

NATIVE = library()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the CPU kernels are not built")
LEVELS = () if NATIVE is None else NATIVE.levels
NOTHING = torch.zeros(1)


def program(level: object, rows: int) -> DecodeProgram:
    assert isinstance(NATIVE, Library)
    return DecodeProgram(replace(NATIVE, best=level), rows)  # type: ignore[arg-type]


def run(steps: DecodeProgram, rows: int, picks: tuple[int, ...] = ()) -> None:
    steps.run(DecodeRows(NOTHING, NOTHING, range(rows), [rows] * rows, [0] * rows, torch.float32, picks))


def batch_invariant() -> CpuExecutor:
    """A packed matrix of 32 rows and 64 columns."""
    weight = random_weight(parse_spec("int8"), 32, 64, torch.Generator().manual_seed(0))
    linear = QuantizedLinear.from_weight(weight, backend="cpu", order=BATCH_INVARIANT)
    assert isinstance(linear.executor, CpuExecutor)
    return linear.executor


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dense_matrices_of_every_type_and_size(level: object, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 64), (3, 37), (8, 96), (15, 5), (40, 160), (17, 33)):
        steps = program(level, rows)
        biases = {33: None, 6: torch.randn(6), 80: torch.randn(80)}
        matrices = [(torch.randn(n, columns).to(dtype), bias) for n, bias in biases.items()]
        x, out = steps.buffer("x", columns).normal_(), steps.buffer("out", sum(biases))
        steps.dense(x, matrices, out)
        run(steps, rows)
        wide = [F.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in matrices]
        sizes = torch.cat([x.double().abs() @ w.double().abs().t() for w, _ in matrices], -1)
        error = (out.double() - torch.cat(wide, -1)).abs() / (1 + sizes)
        assert error.max() <= (2**-17 if level == IsaLevel.AMX else 2**-20)  # tiles keep 16 bits of x


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("size", [1e-37, 1e30, float("inf"), float("nan")])
def test_dense_rows_of_any_size(level: object, size: float) -> None:
    steps, weights = program(level, 18), torch.rand(32, 64).bfloat16() + 1
    x, out = steps.buffer("x", 64).uniform_(1, 2), steps.buffer("out", 32)
    x[3] *= size
    steps.dense(x, [(weights, None)], out)
    run(steps, 18)
    torch.testing.assert_close(out.double(), x.double() @ weights.double().t(), rtol=2e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_beside_batch_invariant_layers_a_dense_row_does_not_depend_on_the_others(level: object) -> None:
    weights, inputs = torch.randn(48, 64).bfloat16(), torch.randn(40, 64)
    found = []
    for rows in (40, 1):
        steps = program(level, rows)
        x, out = steps.buffer("x", 64).copy_(inputs[:rows]), steps.buffer("out", 48)
        steps.packed(x, batch_invariant(), steps.buffer("packed", 32))
        steps.dense(x, [(weights, None)], out)
        run(steps, rows)
        found.append(out[0])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_row_does_not_depend_on_the_others(level: object, dtype: torch.dtype) -> None:
    weights, x = torch.randn(21, 70).to(dtype), torch.randn(13, 70)
    together = program(level, 13)
    out = together.buffer("out", 21)
    together.dense(together.buffer("x", 70).copy_(x), [(weights, None)], out)
    run(together, 13)
    for row in range(13):
        alone = program(level, 1)
        single = alone.buffer("out", 21)
        alone.dense(alone.buffer("x", 70).copy_(x[row : row + 1]), [(weights, None)], single)
        run(alone, 1)
        assert torch.equal(single[0], out[row])


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(32, 48), (33, 70), (29, 53), (43, 7), (49, 3000), (181, 6000), (25, 9000)],
    ids=["whole", "rest-of-pairs", "rest-of-columns", "few-columns", "two-vectors", "one-vector", "too-long"],
)
def test_dense_rows_in_panels_have_the_bits_of_single_ones(
    level: object, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """Sizes that end within panels, blocks and vectors, none of them for tiles. The first row is not finite."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    x[0] *= torch.inf
    biases = {85: torch.randn(85, generator=generator), 7: None, 64: None}
    matrices = [(torch.randn(n, columns, generator=generator).to(dtype), bias) for n, bias in biases.items()]
    together = dense_results(level, x, matrices)
    for row in (1, 8, 15, 16, rows - 5, rows - 1):
        assert torch.equal(dense_results(level, x[row : row + 1], matrices)[0], together[row])
    wide = torch.cat([F.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in matrices], -1)
    sizes = torch.cat([x.double().abs() @ w.double().abs().t() for w, _ in matrices], -1)
    assert ((together.double() - wide).abs() / (1 + sizes))[1:].max() <= 2**-20
    assert torch.equal(together[0].isnan(), wide[0].isnan()) and not together[0].isfinite().any()


def dense_results(
    level: object, x: torch.Tensor, matrices: list[tuple[torch.Tensor, torch.Tensor | None]]
) -> torch.Tensor:
    steps = program(level, len(x))
    out = steps.buffer("out", sum(len(weights) for weights, _ in matrices))
    steps.dense(steps.buffer("x", x.shape[1]).copy_(x), matrices, out)
    run(steps, len(x))
    return out


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_norms_gates_sums_and_picks(level: object) -> None:
    steps, weights = program(level, 4), torch.randn(50)
    x = steps.buffer("x", 50).normal_()
    picked, normed, gated = steps.buffer("picked", 50), steps.buffer("normed", 50).zero_(), steps.buffer("gated", 25)
    before = x.double()
    factor = steps.buffer("factor", 1).normal_()
    steps.add(x, x, gate=factor)
    steps.pick(x, picked)
    steps.norm(picked, weights, 1e-5, normed)
    steps.gate(normed, Activation("silu"), gated)
    run(steps, 4, picks=(1, 3))
    summed = (before * (1 + factor.double().sigmoid()))[[1, 3]]
    want = F.rms_norm(summed, (50,), weights.double(), 1e-5)
    torch.testing.assert_close(normed[:2].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gated[:2].double(), F.silu(want[:, :25]) * want[:, 25:], rtol=1e-4, atol=1e-5)
    assert not normed[2:].any()


def test_parts_are_the_steps_of_each_kind() -> None:
    steps = program(LEVELS[-1], 3)
    x, normed, out = steps.buffer("x", 8).fill_(2), steps.buffer("normed", 8).zero_(), steps.buffer("out", 4).zero_()
    steps.norm(x, torch.ones(8), 0.0, normed)
    steps.add(x, x)
    steps.pick(x, normed)
    steps.dense(normed, [(torch.ones(4, 8), None)], out)
    parts = steps.parts()
    assert list(parts) == ["norm", "add", "head"]
    run(parts["norm"], 3)
    assert normed.eq(1).all() and x.eq(2).all() and not out.any()
    run(parts["head"], 3, picks=(2,))
    assert out[0].eq(16).all() and not out[1:].any()


def test_a_matrix_that_cannot_be_read_raises() -> None:
    steps = program(LEVELS[-1], 1)
    with pytest.raises(UnsupportedProblem, match="cannot read"):
        steps.dense(steps.buffer("x", 8), [(torch.zeros(8, 4).t(), None)], steps.buffer("out", 4))


def attended(
    level: object,
    dtype: torch.dtype,
    heads: DecodeHeads,
    qkv: torch.Tensor,
    caches: list[torch.Tensor],
    rows: list[tuple[int, int]],
    beside: CpuExecutor | None = None,
) -> torch.Tensor:
    """Attention of rows of (sequence, position); `caches` of each sequence, `[keys and values, heads, tokens, dim]`."""
    steps = program(level, len(rows))
    if beside is not None:
        steps.packed(steps.buffer("x", 64).zero_(), beside, steps.buffer("packed", 32))
    out = steps.buffer("out", heads.queries * heads.dim)
    steps.attention(steps.buffer("qkv", qkv.shape[1]).copy_(qkv), heads, out)
    arrays = [(ctypes.c_void_p * 2)(*(part.data_ptr() for part in cache)) for cache in caches]
    cos, sin = torch.ones(len(rows), heads.angles), torch.zeros(len(rows), heads.angles)
    places = [position for _, position in rows]
    capacities = [caches[which].shape[2] for which, _ in rows]
    steps.run(DecodeRows(cos, sin, places, capacities, [ctypes.addressof(arrays[w]) for w, _ in rows], dtype, ()))
    return out.clone()


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "window"),
    [(4, 4, 64, None), (8, 2, 128, None), (6, 2, 20, 7), (14, 2, 36, 70)],
    ids=["own-keys", "four-share", "three-share-window", "seven-share-window"],
)
def test_attention(level: object, dtype: torch.dtype, queries: int, keys: int, dim: int, window: int | None) -> None:
    heads = DecodeHeads(0, queries, keys, dim, dim, dim**-0.5, window)
    caches = [torch.randn(2, keys, tokens, dim).to(dtype) for tokens in (150, 9)]
    rows = [(0, 139), (0, 140), (0, 141), (1, 4)]
    qkv = torch.randn(len(rows), (queries + 2 * keys) * dim)
    found = attended(level, dtype, heads, qkv, caches, rows)
    q, k, v = qkv.view(len(rows), -1, dim).split([queries, keys, keys], dim=1)
    for row, (which, position) in enumerate(rows):
        for part, new in enumerate((k, v)):
            assert torch.equal(caches[which][part][:, position], new[row].to(dtype))
        first = 0 if window is None else max(0, position + 1 - window)
        stored = caches[which][:, :, first : position + 1].double().repeat_interleave(queries // keys, dim=1)
        want = F.scaled_dot_product_attention(q[row].double().unsqueeze(1), stored[0], stored[1])
        torch.testing.assert_close(found[row].double(), want.flatten(), rtol=1e-5, atol=1e-5)
        alone = attended(level, dtype, heads, qkv[row : row + 1], caches, [(which, position)])
        assert torch.equal(alone[0], found[row])


ROUNDINGS = 2.0**-22  # four roundings of fp32


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One row in fp64, and the size of its terms: a rounding of a score changes its weight, and so all weights."""
    scale = q.shape[-1] ** -0.5
    weights = torch.softmax(q @ k.mT * scale, dim=-1)
    scores = q.abs() @ k.abs().mT * scale
    terms = (weights * (1 + scores)) @ v.abs() + (weights * scores).sum(-1, keepdim=True) * (weights @ v.abs())
    return (weights @ v).flatten(), terms.flatten()


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "window"),
    [(9, 3, 64, None), (4, 4, 20, 40), (14, 2, 36, 150), (2, 1, 256, 3), (2, 2, 264, None)],
    ids=["three-share", "own-keys-window", "seven-share-window", "large", "too-large-for-blocks"],
)
def test_attention_of_prompts(
    level: object, dtype: torch.dtype, queries: int, keys: int, dim: int, window: int | None
) -> None:
    """Tokens of one sequence are attended to in blocks; single ones stand before, between and after them."""
    heads = DecodeHeads(0, queries, keys, dim, dim, dim**-0.5, window)
    caches = [torch.randn(2, keys, tokens, dim).to(dtype) for tokens in (300, 9, 70)]
    rows = [(1, 4), *((0, 70 + i) for i in range(150)), (1, 5), *((2, i) for i in range(33)), (1, 6)]
    qkv = torch.randn(len(rows), (queries + 2 * keys) * dim)
    qkv[7] *= 30  # scores far apart
    found = attended(level, dtype, heads, qkv, caches, rows)
    q, k, v = qkv.view(len(rows), -1, dim).split([queries, keys, keys], dim=1)
    for row, (which, position) in enumerate(rows):
        for part, new in enumerate((k, v)):
            assert torch.equal(caches[which][part][:, position], new[row].to(dtype))
        first = 0 if window is None else max(0, position + 1 - window)
        stored = caches[which][:, :, first : position + 1].double().repeat_interleave(queries // keys, dim=1)
        want, terms = exact_attention(q[row].double().unsqueeze(1), stored[0], stored[1])
        assert bool(((found[row].double() - want).abs() <= ROUNDINGS * terms).all()), row


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_beside_batch_invariant_layers_a_token_of_a_prompt_does_not_depend_on_the_others(level: object) -> None:
    heads, beside = DecodeHeads(0, 4, 2, 32, 32, 0.2), batch_invariant()
    caches, rows, qkv = [torch.zeros(2, 2, 40, 32)], [(0, i) for i in range(40)], torch.randn(40, 8 * 32)
    together = attended(level, torch.float32, heads, qkv, caches, rows, beside)
    for row in (0, 17, 39):
        alone = attended(level, torch.float32, heads, qkv[row : row + 1], caches, rows[row : row + 1], beside)
        assert torch.equal(alone[0], together[row])


def test_routing_that_a_step_cannot_do_is_refused() -> None:
    steps = program(LEVELS[0], 1)
    x, logits = steps.buffer("x", 32), steps.buffer("logits", 4)
    routing = Routing(2, expert_scale=True)
    with pytest.raises(UnsupportedProblem, match="cannot route like this"):
        steps.experts(x, logits, routing, RouterTensors(), None, x)  # type: ignore[arg-type]
