"""The CPU kernels at every level: accuracy, determinism across thread counts, calls from several threads."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lancebill.backends import oracle
from lancebill.backends.base import Backend
from lancebill.backends.cpu import BACKEND, Cpu, native
from lancebill.backends.cpu.form import matrix_form
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.bench.workload import Weights, batches
from lancebill.errors import LaunchError
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Contiguous, Indexed
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.moe.problem import BATCH_INVARIANT, CONTIGUOUS, Problem
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import CODEBOOK
from lancebill.numbers.spec_names import ACTIVATIONS, parse_activation, parse_spec
from lancebill.testing import judge
from lancebill.testing.layers import layer_problem, worst_row

CPU = Device("cpu")
LIBRARY = native.library()
LEVELS = () if LIBRARY is None else LIBRARY.levels


CASES = {case.name: case for case in judge.cases()}
# Largest relative error of a row against the reference, by input type (see docs/numerics.md).
BOUNDS = {"bf16": 4e-3, "fp32": 2e-6, "int8": 6e-3}  # a few quantised inputs may round the other way
IQ4, BYTES = "iq4-g32:fp16", "int8-g128-zp"  # codes and tables of eight bits, with a center and with zero points
SIX_BITS = ("int6-g16:fp32", "int5-g32-zp")  # four columns of codes in three bytes
# GGUF's Q4_K and Q6_K: small scales under a factor.
K_QUANTS = ("uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256:fp16", "int6-g16:int8-g256:fp16")
SPECS = (
    "int4-g16", "int4-g32", "int4-g128-zp", "mxfp4", "nvfp4", "nf4", "int8", "fp8-block", IQ4, BYTES, *SIX_BITS,
    *K_QUANTS
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


class Work:
    """A layer of realistic width with a batch, and the reference results."""

    def __init__(self, spec: str, activations: str, tokens: int, experts: int, top_k: int) -> None:
        activation = Activation("swigluoai", limit=7.0) if tokens == 5 else Activation()
        self.problem = layer_problem(
            spec,
            activations,
            hidden=1024,
            intermediate=384,
            experts=experts,
            top_k=top_k,
            bias=tokens == 5,
            activation=activation,
        )
        self.packed = packed_weights(self.problem, BACKEND)
        self.batch = batches(self.problem, tokens, "uniform", 1, torch.device("cpu"))[0]

    def run(self, backend: Cpu) -> Tensor:
        plan = backend.plan(self.problem, self.batch.x.shape[0], CPU)
        dispatch = Indexed(self.batch.ids, self.batch.weights)
        return backend.run(plan, self.batch.x, dispatch, self.packed, torch.full_like(self.batch.x, torch.nan))

    def reference(self) -> Tensor:
        plan = REFERENCE.plan(self.problem, 1, CPU)
        packed = packed_weights(self.problem, REFERENCE)
        out = torch.empty(self.batch.x.shape, dtype=torch.float32)
        return REFERENCE.run(plan, self.batch.x, Indexed(self.batch.ids, self.batch.weights), packed, out)


@lru_cache(maxsize=4)
def layer_weights(problem: Problem) -> Weights:
    return Weights(problem, torch.device("cpu"))


@lru_cache(maxsize=4)
def packed_weights(problem: Problem, backend: Backend) -> dict[str, Packed]:
    return layer_weights(problem).packed(backend.layout(problem))


@cache
def work(spec: str, activations: str = "bf16", tokens: int = 3, experts: int = 6, top_k: int = 3) -> Work:
    return Work(spec, activations, tokens, experts, top_k)


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
    if activations == "fp32" and parse_spec(spec).dtype.kind == CODEBOOK:
        pytest.skip("refused")
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
@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4", "nf4", "int4-g128-zp", "int8", "fp8-block", K_QUANTS[0]])
def test_batch_invariant_rows(spec: str, activations: str, level: IsaLevel) -> None:
    """In batch-invariant order a row has the same bits alone, in any batch and at any position."""
    layer_work, backend = work(spec, activations, tokens=40), Cpu(level)
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

    everything = torch.arange(40)
    whole = computed(everything)
    assert bool(torch.isfinite(whole).all())
    some = [everything[:n] for n in (2, 3, 4, 5, 9, 23)]
    for rows in (*everything[::7].split(1), *some, everything.flip(0)):
        assert torch.equal(computed(rows), whole[rows])


def repeat_from_two_threads(call: Callable[[int], Tensor], alone: list[Tensor], times: int) -> None:
    """Calls from two threads at once: every result equals that of the call alone."""
    together: list[list[Tensor]] = [[], []]

    def repeat(which: int) -> None:
        for _ in range(times):
            together[which].append(call(which))

    threads = [threading.Thread(target=repeat, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in (0, 1):
        assert len(together[which]) == times
        assert all(torch.equal(result, alone[which]) for result in together[which])


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_two_layers_from_two_threads_at_once(level: IsaLevel) -> None:
    layers = [work("int4-g32", "bf16", 40), work("mxfp4", "int8", 40)]
    alone = [layer.run(Cpu(level)) for layer in layers]
    repeat_from_two_threads(lambda which: layers[which].run(Cpu(level)), alone, 8)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("activations", ["bf16", "int8", "fp8", "int8-static", "fp8-static", "int8-g64"])
def test_linears(level: IsaLevel, activations: str) -> None:
    problem = Problem(
        MatrixShape("w13", 200, 256, parse_spec("int4-g64-zp"), bias=True), None, 1, 1, 1,
        activations=parse_activation(activations), dispatch=CONTIGUOUS,
    )  # fmt: skip
    weights = Weights(problem, torch.device("cpu"))
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for backend in (Cpu(level), REFERENCE):
        packed = weights.packed(backend.layout(problem))
        plan = backend.plan(problem, 7, CPU)
        results.append(backend.run(plan, x, Contiguous(torch.tensor([0, 7])), packed, torch.empty(7, 200)))
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
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 100], x[2, 255], x[3, 0] = torch.nan, torch.inf, -torch.inf
    x[4] *= 1e-30
    x[5] *= 1e-36
    x[6] = 0
    offsets = Contiguous(torch.tensor([0, 8]))
    for name, backend in (("reference", REFERENCE), *((str(level), Cpu(level)) for level in LEVELS)):
        packed = weights.packed(backend.layout(problem))
        got = backend.run(backend.plan(problem, 8, CPU), x, offsets, packed, torch.empty(8, 128))
        if backend is REFERENCE:
            want = got
            assert want[4].abs().max() > 1e-31 and want[5].abs().max() > 1e-37
        assert got.isfinite().all(1).tolist() == [True, False, False, False, True, True, True, True], name
        assert not got[1:4].isfinite().any() and torch.equal(got[6], want[6]), name
        for row, factor in ((0, 1.0), (4, 1e30), (5, 1e36), (7, 1.0)):
            assert worst_row(got[row : row + 1] * factor, want[row : row + 1] * factor) <= 6e-3, (name, row)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("activations", BOUNDS)
@pytest.mark.parametrize("spec", ["int4-g16", "int4-g32", "int4-g128", "mxfp4", "nvfp4", "nf4", "int8", IQ4, BYTES])
def test_largest_sums_do_not_overflow(spec: str, activations: str, level: IsaLevel) -> None:
    """All weights and input bytes at an end of their range, where 16-bit sums are closest to overflow."""
    if activations == "fp32" and parse_spec(spec).dtype.kind == CODEBOOK:
        pytest.skip("refused")
    shape = MatrixShape("w13", 32, 256, parse_spec(spec))
    problem = Problem(shape, None, 1, 1, 1, activations=ACTIVATIONS[activations], dispatch=CONTIGUOUS)
    weight = quantize(torch.full((32, 256), 6.0), shape.spec)
    backend = Cpu(level)
    packed = backend.layout(problem).allocate(shape, 1, torch.device("cpu"))
    backend.layout(problem).pack(shape, weight, {name: tensor[0] for name, tensor in packed.items()})
    for rows in (1, 2, 3, 7):
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


def module(layer_work: Work) -> RoutedExperts:
    return RoutedExperts(LayerParts(oracle.select(layer_work.problem, CPU, "cpu"), layer_work.packed))


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call that did not take the fast path."""
    tokens: list[int] = []
    compute = RoutedExperts.compute

    def recording_compute(layer: RoutedExperts, x: Tensor, *args: Tensor) -> Tensor:
        tokens.append(x.shape[0])
        return compute(layer, x, *args)

    monkeypatch.setattr(RoutedExperts, "compute", recording_compute)
    return tokens


@pytest.mark.parametrize("activations", BOUNDS)
def test_second_call_is_fast_and_bit_identical(slow_calls: list[int], activations: str) -> None:
    """Also with other tensors and other thread counts."""
    layer_work, before = work("int4-g32", activations, 5), torch.get_num_threads()
    layer, batch = module(layer_work), layer_work.batch
    results = [layer(batch.x, topk_ids=batch.ids, topk_weights=batch.weights)]
    try:
        for threads in (before, 1, 2):
            torch.set_num_threads(threads)
            out = torch.full_like(batch.x, torch.nan)
            layer(batch.x.clone(), topk_ids=batch.ids.clone(), topk_weights=batch.weights.clone(), out=out)
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert slow_calls == [5] and all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("what", ["int64 ids", "ids apart", "fp16 weights", "rows apart", "fp32 out", "memory", "copy"])
def test_calls_that_do_not_fit_the_fast_path(slow_calls: list[int], what: str) -> None:
    layer_work = work("int4-g32", "bf16", 5)
    layer, batch, out = module(layer_work), layer_work.batch, torch.empty_like(layer_work.batch.x)
    want = layer(batch.x, topk_ids=batch.ids, topk_weights=batch.weights)
    x, ids, weights = batch.x, batch.ids, batch.weights
    if what == "int64 ids":
        ids = ids.long()
    elif what == "ids apart":
        ids = ids.t().contiguous().t()
    elif what == "fp16 weights":
        want = layer(x, topk_ids=ids, topk_weights=weights.half().float())
        weights = weights.half()
    elif what == "rows apart":
        x = torch.cat([x, x], 1)[:, : x.shape[1]]
    elif what == "fp32 out":
        out = out.float()
    elif what == "memory":
        layer.w13_codes.data = layer.w13_codes.data.clone()
    else:
        layer = copy.deepcopy(layer)
    slow_calls.clear()
    got = layer(x, topk_ids=ids, topk_weights=weights, out=out)
    as_routers_give_them = what in ("int64 ids", "ids apart", "fp16 weights")
    assert slow_calls == ([] if as_routers_give_them else [5]) and torch.equal(got.to(want.dtype), want)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "out"])
def test_meta_tensors_are_rejected(name: str) -> None:
    layer_work = work("int4-g32", "bf16", 5)
    layer = module(layer_work)
    given = {"x": layer_work.batch.x, "topk_ids": layer_work.batch.ids, "topk_weights": layer_work.batch.weights}
    given["out"] = torch.zeros_like(layer_work.batch.x)
    for _ in range(2):
        layer(**given)
    given[name] = given[name].to("meta")
    with pytest.raises(LaunchError):
        layer(**given)


def test_one_layer_from_two_threads_at_once(slow_calls: list[int]) -> None:
    """The fast path is shared between threads, but each call has its own struct."""
    layer_work = work("int4-g32", "bf16", 5)
    layer, ids, weights = module(layer_work), layer_work.batch.ids, layer_work.batch.weights
    inputs = [layer_work.batch.x, layer_work.batch.x.flip(0).contiguous()]
    alone = [layer(x, topk_ids=ids, topk_weights=weights) for x in inputs]
    repeat_from_two_threads(lambda which: layer(inputs[which], topk_ids=ids, topk_weights=weights), alone, 40)
    assert slow_calls == [5]


def test_a_forked_child_starts_threads_of_its_own() -> None:
    """Threads do not survive a fork. (torch's own operations wait for theirs for ever; this batch is too small.)"""
    layer_work, threads = work("int4-g32", "bf16", 5), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = layer_work.run(BACKEND)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            before = len(list(Path("/proc/self/task").iterdir()))
            same = torch.equal(layer_work.run(BACKEND), want)
            os._exit(0 if same and len(list(Path("/proc/self/task").iterdir())) == before + 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(layer_work.run(BACKEND), want)
    finally:
        torch.set_num_threads(threads)


def test_idle_threads_sleep_and_an_interrupt_reaches_the_caller() -> None:
    """Threads spin for microseconds after a call, then use no CPU time; signals are not delivered to them."""
    layer_work, threads = work("int4-g32", "bf16", 5), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        want = layer_work.run(BACKEND)
        time.sleep(0.02)
        start = time.process_time()
        time.sleep(0.1)
        assert time.process_time() - start < 0.05
        assert torch.equal(layer_work.run(BACKEND), want), "they wake"
    finally:
        torch.set_num_threads(threads)
    tasks = [task.read_text() for task in Path("/proc/self/task").glob("*/status")]
    blocked = [int(mask, 16) for text in tasks for mask in re.findall(r"SigBlk:\s*(\w+)", text)]
    assert sum(bool(mask >> (signal.SIGINT - 1) & 1) for mask in blocked) >= 2


def test_ids_out_of_range_contribute_nothing() -> None:
    layer_work = work("mxfp4", "bf16", 5)
    layer, ids = module(layer_work), layer_work.batch.ids.clone()
    ids[:, 1] = -1
    want = layer(layer_work.batch.x, topk_ids=ids, topk_weights=layer_work.batch.weights)
    ids[:, 1] = torch.tensor([6, 7, -9, 1 << 20, -(1 << 31)], dtype=torch.int32)
    for _ in range(2):
        assert torch.equal(layer(layer_work.batch.x, topk_ids=ids, topk_weights=layer_work.batch.weights), want)
    ids[:] = 6
    assert not layer(layer_work.batch.x, topk_ids=ids, topk_weights=layer_work.batch.weights).any()


def test_strided_rows() -> None:
    layer_work = work("mxfp4", "bf16", 5)
    want = layer_work.run(BACKEND)
    wide, out = torch.zeros(5, 2048, dtype=torch.bfloat16), torch.full((5, 1030), torch.nan, dtype=torch.bfloat16)
    wide[:, 512:1536] = layer_work.batch.x
    plan = BACKEND.plan(layer_work.problem, 5, CPU)
    dispatch = Indexed(layer_work.batch.ids, layer_work.batch.weights)
    BACKEND.run(plan, wide[:, 512:1536], dispatch, layer_work.packed, out[:, 3:1027])
    assert torch.equal(out[:, 3:1027], want)
    assert out[:, :3].isnan().all() and out[:, 1027:].isnan().all()


def test_no_tokens() -> None:
    layer_work = work("mxfp4", "bf16", 5)
    none = Indexed(layer_work.batch.ids[:0], layer_work.batch.weights[:0])
    out = BACKEND.run(
        BACKEND.plan(layer_work.problem, 0, CPU),
        layer_work.batch.x[:0],
        none,
        layer_work.packed,
        layer_work.batch.x[:0].clone(),
    )
    assert out.shape == (0, 1024)


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
    codebook = layer_problem("nf4", "fp32", hidden=64, intermediate=64, experts=2, top_k=1)
    assert "rounded to 14 bits" in reasons(codebook)
    assert oracle.select(dense, CPU).backend.name == "torch-cpu"


def test_inputs_that_are_no_floats_are_refused() -> None:
    case = next(case for case in judge.cases() if not list(BACKEND.reasons(case.problem, CPU)))
    packed = judge.pack_weights(BACKEND, case, CPU)
    plan, routed = BACKEND.plan(case.problem, len(case.x), CPU), Indexed(case.routed.ids, case.routed.weights)
    with pytest.raises(LaunchError, match="take floats"):
        BACKEND.run(plan, case.x.double(), routed, packed, torch.empty_like(case.x))
