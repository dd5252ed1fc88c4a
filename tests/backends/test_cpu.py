"""The CPU kernels at every level: accuracy, determinism across thread counts, two layers at once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from cpu_work import BOUNDS, CPU, LEVELS, LIBRARY, Work, repeat_from_two_threads, work
from torch import Tensor

from lancebill.backends import oracle
from lancebill.backends.cpu import BACKEND, Cpu, native
from lancebill.backends.cpu.form import matrix_form
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.bench.workload import Weights
from lancebill.errors import LaunchError
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Contiguous, Indexed
from lancebill.moe.layout import MatrixShape
from lancebill.moe.problem import BATCH_INVARIANT, CONTIGUOUS, Problem
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import CODEBOOK
from lancebill.numbers.spec_names import ACTIVATIONS, parse_activation, parse_spec
from lancebill.testing import judge
from lancebill.testing.layers import layer_problem, worst_row

CASES = {case.name: case for case in judge.cases()}
IQ4, BYTES = "iq4-g32:fp16", "int8-g128-zp"  # codes and tables of eight bits, with a center and with zero points
SIX_BITS = ("int6-g16:fp32", "int5-g32-zp")  # four columns of codes in three bytes
# GGUF's Q4_K and Q6_K: small scales under a factor.
K_QUANTS = ("uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256:fp16", "int6-g16:int8-g256:fp16")
FP4 = "bnbfp4-g64"  # a codebook of multiples of 1/192
SPECS = (
    "int4-g16", "int4-g32", "int4-g128-zp", "mxfp4", "nvfp4", "nf4", "int8", "fp8-block", IQ4, FP4, BYTES,
    *SIX_BITS, *K_QUANTS
)  # fmt: skip
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native.state().why)


@cache
def truth(name: str) -> Tensor:
    return judge.expected(CASES[name])


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_level_computes_every_case(name: str, level: IsaLevel) -> None:
    backend, case = Cpu(level), CASES[name]
    reasons = list(backend.reasons(case.problem, CPU))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    judge.compare(case, judge.compute(backend, case, judge.pack_weights(backend, case, CPU), CPU), truth(name))


def bound(layer_work: Work, level: IsaLevel, activations: str) -> float:
    """Larger for codebooks, which are rounded to 14 bits, and for tiles, which hold weights as bf16."""
    if layer_work.problem.w13.spec.dtype.kind == CODEBOOK and activations == "int8":
        return 1e-2
    return 6e-3 if level == IsaLevel.AMX and activations != "fp32" else BOUNDS[activations]


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("activations", BOUNDS)
@pytest.mark.parametrize("spec", SPECS)
def test_worst_row_against_the_reference(spec: str, activations: str, tokens: int) -> None:
    """On every level. With 40 tokens an expert has about 20 rows, enough for tiles."""
    layer_work = work(spec, activations, tokens)
    want = layer_work.reference()
    for level in LEVELS:
        error = worst_row(layer_work.run(Cpu(level)), want)
        assert error <= bound(layer_work, level, activations), f"{level}: {error:.1e}"


@pytest.mark.parametrize("tokens", [150, 1200])
@pytest.mark.parametrize("spec", ["mxfp4", "int8", BYTES])
def test_many_rows_of_an_expert(spec: str, tokens: int) -> None:
    """In tiles: several passes with the same weights, and then more rows than stay in the cache."""
    layer_work = work(spec, "bf16", tokens, experts=2, top_k=1)
    want = layer_work.reference()
    for level in LEVELS:
        error = worst_row(layer_work.run(Cpu(level)), want)
        assert error <= bound(layer_work, level, "bf16"), f"{level}: {error:.1e}"


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_threads_do_not_change_bits(level: IsaLevel) -> None:
    before = torch.get_num_threads()
    try:
        for activations in BOUNDS:
            for tokens in (1, 40):
                results = []
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    results.append(work("int4-g32", activations, tokens).run(Cpu(level)))
                assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize(
    "spec", ["mxfp4", "nvfp4", "nf4", "int4-g128-zp", "int8", "fp8-block", "int5-g32-zp", *K_QUANTS]
)
def test_batch_invariant_rows(spec: str, activations: str, level: IsaLevel) -> None:
    """In batch-invariant order a row has the same bits alone, in any batch and at any position.

    With 80 tokens an expert has about 40 rows, which other kernels multiply than a few. The portable level has kernels
    of one and of two rows, and no others.
    """
    layer_work, backend = work(spec, activations, tokens=80), Cpu(level)
    problem = replace(layer_work.problem, order=BATCH_INVARIANT)
    assert not list(backend.check(problem, CPU))

    def computed(rows: Tensor) -> Tensor:
        x, routed = (
            layer_work.batch.x[rows].contiguous(),
            Indexed(layer_work.batch.ids[rows], layer_work.batch.weights[rows]),
        )
        return backend.run(
            backend.plan(problem, len(rows), CPU), x, routed, layer_work.packed, torch.full_like(x, torch.nan)
        )

    everything = torch.arange(80)
    whole = computed(everything)
    assert bool(torch.isfinite(whole).all())
    sizes = (2, 3, 4, 5, 7, 8, 9, 12, 15, 19, 23, 31, 45, 63)
    some = [everything[:n] for n in (sizes[:5] if level == IsaLevel.PORTABLE else sizes)]
    for rows in (*everything[::13].split(1), *some, everything.flip(0)):
        assert torch.equal(computed(rows), whole[rows])


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("spec", ["int4-g32", "int4-g128-zp", K_QUANTS[0]])
def test_tiny_rows_have_the_same_bits_in_any_batch(spec: str, level: IsaLevel) -> None:
    """Where scales of groups are too small for numbers of full precision."""
    problem = Problem(MatrixShape("w13", 64, 512, parse_spec(spec)), None, 1, 1, 1, dispatch=CONTIGUOUS)
    problem, backend = replace(problem, order=BATCH_INVARIANT), Cpu(level)
    packed = Weights(problem, torch.device("cpu")).packed(backend.layout(problem))
    x = (torch.randn(40, 512, generator=torch.Generator().manual_seed(0)) * 1e-37).bfloat16()
    results = []
    for rows in (40, 3):
        plan, offsets = backend.plan(problem, rows, CPU), Contiguous(torch.tensor([0, rows]))
        results.append(backend.run(plan, x[:rows], offsets, packed, torch.empty(rows, 64)))
    assert results[0].isfinite().all() and torch.equal(results[0][:3], results[1])


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_two_layers_from_two_threads_at_once(level: IsaLevel) -> None:
    layers = [work("int4-g32", "bf16", 40), work("mxfp4", "int8", 40)]
    alone = [layer.run(Cpu(level)) for layer in layers]
    repeat_from_two_threads(lambda which: layers[which].run(Cpu(level)), alone, 8)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("activations", ["bf16", "int8", "fp8", "int8-static", "fp8-static", "int8-g64"])
@pytest.mark.parametrize("rows", [7, 33])
def test_linears(rows: int, level: IsaLevel, activations: str) -> None:
    problem = Problem(
        MatrixShape("w13", 200, 256, parse_spec("int4-g64-zp"), bias=True), None, 1, 1, 1,
        activations=parse_activation(activations), dispatch=CONTIGUOUS,
    )  # fmt: skip
    weights = Weights(problem, torch.device("cpu"))
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for backend in (Cpu(level), REFERENCE):
        packed = weights.packed(backend.layout(problem))
        plan = backend.plan(problem, rows, CPU)
        results.append(backend.run(plan, x, Contiguous(torch.tensor([0, rows])), packed, torch.empty(rows, 200)))
    tiles = level == IsaLevel.AMX and activations == "bf16"  # scaled weights rounded to bf16
    assert worst_row(results[0], results[1]) <= (2e-3 if tiles else 1e-4)


@pytest.mark.parametrize("activations", ["bf16", "int8", "fp8", "fp8-g128"])
@pytest.mark.parametrize("spec", ["int4-g64-zp", "nvfp4", "int8", "fp8-block"])
def test_non_finite_and_tiny_rows(spec: str, activations: str) -> None:
    """A row with NaN or infinity is not finite, and no other row changes; a tiny row is as exact as any."""
    shape = MatrixShape("w13", 128, 256, parse_spec(spec))
    activation = parse_activation(activations)
    problem = Problem(shape, None, 1, 1, 1, activations=activation, dispatch=CONTIGUOUS)
    weights = Weights(problem, torch.device("cpu"))
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 100], x[2, 255], x[3, 0] = torch.nan, torch.inf, -torch.inf
    x[4] *= 1e-30
    x[5] *= 1e-36
    x[6] = 0
    offsets = Contiguous(torch.tensor([0, 40]))
    for name, backend in (("reference", REFERENCE), *((str(level), Cpu(level)) for level in LEVELS)):
        packed = weights.packed(backend.layout(problem))
        got = backend.run(backend.plan(problem, 40, CPU), x, offsets, packed, torch.empty(40, 128))
        if backend is REFERENCE:
            want = got
            assert want[4].abs().max() > 1e-31 and want[5].abs().max() > 1e-37
        assert got.isfinite().all(1).tolist() == [True] + 3 * [False] + 36 * [True], name
        assert not got[1:4].isfinite().any() and torch.equal(got[6], want[6]), name
        for row, factor in ((0, 1.0), (4, 1e30), (5, 1e36), (7, 1.0)):
            assert worst_row(got[row : row + 1] * factor, want[row : row + 1] * factor) <= 6e-3, (name, row)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("activations", BOUNDS)
@pytest.mark.parametrize(
    "spec", ["int4-g16", "int4-g32", "int4-g128", "mxfp4", "nvfp4", "nf4", "int8", IQ4, FP4, BYTES]
)
def test_largest_sums_do_not_overflow(spec: str, activations: str, level: IsaLevel) -> None:
    """All weights and input bytes at an end of their range, where 16-bit sums are closest to overflow."""
    shape = MatrixShape("w13", 32, 256, parse_spec(spec))
    problem = Problem(shape, None, 1, 1, 1, activations=ACTIVATIONS[activations], dispatch=CONTIGUOUS)
    weight = quantize(torch.full((32, 256), 6.0), shape.spec)
    backend = Cpu(level)
    packed = backend.layout(problem).allocate(shape, 1, torch.device("cpu"))
    backend.layout(problem).pack(shape, weight, {name: tensor[0] for name, tensor in packed.items()})
    for rows in (1, 2, 3, 7, 33):
        x = torch.full((rows, 256), 127.0 * 256)
        if activations == "bf16":  # two bytes: 127 and -128
            x -= 128
            x[:, ::16] += 128
        x[1::2] *= -1
        out = torch.full((rows, 32), torch.nan)
        plan = backend.plan(problem, rows, CPU)
        got = backend.run(plan, x.bfloat16(), Contiguous(torch.tensor([0, rows])), {"w13": packed}, out)
        want = x @ dequantize(weight).T
        assert ((got - want).abs() / want.abs()).max() <= 4e-3


def test_tiles_need_weights_that_fit_bf16() -> None:
    """Exactly, or with rounding if inputs are bf16 and rows are long. Integer inputs require exact products."""

    def tiles(spec: str, activations: str, k: int) -> bool:
        return matrix_form(MatrixShape("w13", 64, k, parse_spec(spec)), ACTIVATIONS[activations]).tiles

    for spec in ("mxfp4", "nvfp4", "mxfp8", "int8", "fp8-channel", "int4-channel", "ternary-tensor"):
        assert all(tiles(spec, activations, 128) for activations in ("bf16", "int8", "fp8")), spec
    for spec in ("int4-g32", "int4-g128-zp", "fp8-block", "int3-g64"):
        assert tiles(spec, "bf16", 1024) and not tiles(spec, "bf16", 128) and not tiles(spec, "int8", 1024), spec
    assert not tiles("nf4", "bf16", 1024)


def test_oracle_choice_and_rejection_reasons() -> None:
    problem = layer_problem("mxfp4", hidden=2048, intermediate=768, experts=128, top_k=8)
    for tokens in (1, 16, 512) if max(LEVELS) > IsaLevel.PORTABLE else (1,):  # torch is faster with many rows
        assert oracle.select(problem, CPU, tokens=tokens).backend.name == "cpu"

    def reasons(changed: Problem, device: Device = CPU) -> str:
        return "; ".join(map(str, BACKEND.check(changed, device)))

    assert "CPUs only" in reasons(problem, Device("cuda", 90))
    assert oracle.select(replace(problem, order=BATCH_INVARIANT), CPU).backend.name == "cpu"
    assert "mxfp4 activations" in reasons(replace(problem, activations=ACTIVATIONS["mxfp4"]))
    dense = layer_problem("bf16", hidden=64, intermediate=64, experts=2, top_k=1)
    assert "not quantised" in reasons(dense)
    assert oracle.select(dense, CPU).backend.name == "torch-cpu"


def test_inputs_that_are_no_floats_are_refused() -> None:
    case = next(case for case in judge.cases() if not list(BACKEND.reasons(case.problem, CPU)))
    packed = judge.pack_weights(BACKEND, case, CPU)
    plan, routed = BACKEND.plan(case.problem, len(case.x), CPU), Indexed(case.routed.ids, case.routed.weights)
    with pytest.raises(LaunchError, match="take floats"):
        BACKEND.run(plan, case.x.double(), routed, packed, torch.empty_like(case.x))
