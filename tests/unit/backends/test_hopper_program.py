"""Launches of a Hopper program on a fake driver: their arguments, and which calls are refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from threading import Thread, get_ident
from time import sleep

import pytest
import torch
from fake_driver import (
    ROUTED,
    FakeDriver,
    bind_program,
    call_values,
    fake_gpu,  # noqa: F401
    read_argument,
    small_problem,
    stored_addresses,
)

from lancebill.backends.gpu import program as bound
from lancebill.backends.gpu.executor import run_program
from lancebill.backends.hopper.steps import steps
from lancebill.errors import LaunchError
from lancebill.jit import driver, load
from lancebill.moe.dispatch import Contiguous, Indexed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, Problem
from lancebill.testing.layers import make_layer, routing


def run_once(problem: Problem, tokens: int, call: dict[str, torch.Tensor]) -> bound.Program:
    layer = make_layer(problem, "hopper", "cpu", distinct=1)
    program = bind_program(problem, tokens, layer)
    program.run(tokens, call_values(call))
    assert all(launch.config.gx > 0 for launch in program.bindings.launches)
    for number, pointer in enumerate(call_values(call)[: len(call)]):
        assert stored_addresses(program, number) <= {pointer}
    return program


@pytest.mark.parametrize(("activations", "tokens", "launches"), [("bf16", 1, 2), ("bf16", 100, 6), ("fp8", 2000, 13)])
def test_a_call_stores_its_addresses_and_launches(
    gpu: FakeDriver, activations: str, tokens: int, launches: int
) -> None:
    x, routed = torch.zeros(tokens, 256, dtype=torch.bfloat16), routing(small_problem(), tokens, 0, "cpu")
    call = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    program = run_once(small_problem(activations), tokens, call)
    assert gpu.launched == launches and stored_addresses(program, 1) and stored_addresses(program, 2)
    moved = {name: tensor.clone() for name, tensor in call.items()}
    program.run(max(1, tokens // 2), call_values(moved))
    assert gpu.launched == 2 * launches
    assert stored_addresses(program, 1) == {moved["out"].data_ptr()}


@pytest.mark.parametrize(("activations", "launches"), [("bf16", 9), ("fp8", 11)])
@pytest.mark.parametrize("dispatch", [CONTIGUOUS, BATCHED])
def test_contiguous_and_batched_dispatch(gpu: FakeDriver, dispatch: str, activations: str, launches: int) -> None:
    """A single launch builds the lists; no launch combines outputs."""
    x = torch.zeros(400, 256, dtype=torch.bfloat16)
    call = {"x": x, "out": torch.empty_like(x), "edges": torch.zeros(5, dtype=torch.int64)}
    program = run_once(small_problem(activations, dispatch), 400, call)
    assert gpu.launched == launches
    assert bool(program.bindings.mapped) == (activations == "bf16")


@pytest.mark.parametrize(("tokens", "launches"), [(1, 1), (400, 5)])
def test_single_linear_layers(gpu: FakeDriver, tokens: int, launches: int) -> None:
    problem = replace(
        small_problem(),
        w13=replace(small_problem().matrices["w2"], name="w13"),
        w2=None,
        experts=1,
        global_experts=1,
        top_k=1,
    )
    x, out = torch.zeros(tokens, 128, dtype=torch.bfloat16), torch.zeros(tokens, 256, dtype=torch.bfloat16)
    run_once(problem, tokens, {"x": x, "out": out, "edges": torch.tensor([0, tokens])})
    assert gpu.launched == launches


def test_pre_scales_are_not_decoded_slot_by_slot(gpu: FakeDriver) -> None:
    """Such a layer prepares its rows first."""
    x, routed = torch.zeros(4, 256, dtype=torch.bfloat16), routing(small_problem(), 4, 0, "cpu")
    call = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    program = run_once(replace(small_problem(), pre_scale=True), 4, call)
    assert any(step.source.kernel == "prepare_rows" for step in steps(program.bindings.plan))


@pytest.mark.parametrize("name", ["codes", "scales", "factors"])
def test_weights_on_another_device_are_not_bound(gpu: FakeDriver, name: str) -> None:
    made = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    made.weights["w2"][name] = made.weights["w2"][name].to("meta")
    with pytest.raises(LaunchError, match=f"w2.{name} is not where the kernel reads; expected cpu; got meta"):
        bind_program(small_problem(), 1, made)


def test_argument_slots_and_shared_arguments(gpu: FakeDriver) -> None:
    values = [("map", bytes(range(128))), ("pointer", (7).to_bytes(8, "little")), ("count", (5).to_bytes(4, "little"))]
    launch = driver.Launch(1, 256, 0, 0, values, False, {})
    assert launch.integer_slot("count").value == 5 and read_argument(launch, "pointer") == 7
    assert ctypes.string_at(launch.address("map"), 128) == bytes(range(128))
    assert launch.address("map") % 64 == 0
    shared = ctypes.c_uint64(99)
    launch.share("pointer", shared)
    assert read_argument(launch, "pointer") == 99 and launch.integer_slot("count").value == 5
    shared.value = 100
    assert read_argument(launch, "pointer") == 100


def test_by_value_passes_all_64_bits_every_time() -> None:
    """Handles have 64 bits; strlen reads the string at the address that it gets."""
    text = ctypes.create_string_buffer(b"whole")
    handle = driver.by_value(ctypes.addressof(text))
    assert [ctypes.CDLL(None).strlen(handle) for _ in range(3)] == [5, 5, 5]


def test_tensor_maps_are_cached_by_address(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding a map costs as much as a launch, and allocators return the same addresses over and over."""
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), 1, layer)
    made: list[int] = []
    monkeypatch.setattr(load, "_encode", lambda matrix, facts: made.append(matrix.pointer) or bytes([9]) * 128)
    for x in (16, 160, 16, 160, 16):
        program.run(1, (x, 32, 48, 64, *ROUTED))
    launch, name = program.bindings.mapped[0]
    assert made == [16, 160] and ctypes.string_at(launch.address(name), 128) == bytes([9]) * 128


@pytest.mark.parametrize("name", ["x", "out"])
@pytest.mark.parametrize("gaps", [True, False])
def test_views_are_copied_to_aligned_memory(gpu: FakeDriver, name: str, gaps: bool) -> None:
    """Rows of a larger batch, with gaps between them or with a misaligned start."""
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), 100, layer)
    x, routed = torch.zeros(100, 256, dtype=torch.bfloat16), routing(small_problem(), 100, 0, "cpu")
    call = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    given = call[name]
    if gaps:
        call[name] = torch.zeros(200, given.shape[1], dtype=given.dtype)[::2]
    else:
        call[name] = torch.zeros(given.numel() + 1, dtype=given.dtype)[1:].view(given.shape)
    for _ in range(2):
        run_program(program, call["x"], Indexed(call["ids"], call["weights"]), call["out"])
    at = stored_addresses(program, list(call).index(name))
    assert gpu.launched == 2 * len(program.bindings.launches) and at != {call[name].data_ptr()}
    assert all(pointer % bound.ALIGNMENT == 0 for pointer in at)


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(
    ("ids", "layout"),
    [
        (torch.zeros(101, 2, dtype=torch.int64)[1:], (2, 4, 2)),
        (torch.zeros(202, 5, dtype=torch.int32)[2::2, 1:5:3], (1, 10, 3)),
        (torch.zeros(2, 100, dtype=torch.int64).t(), (2, 2, 200)),
        (torch.zeros(1, 2, dtype=torch.int32).expand(100, 2), (1, 0, 1)),
    ],
)
def test_ids_and_weights_are_read_where_they_are(
    gpu: FakeDriver, tokens: int, ids: torch.Tensor, layout: tuple[int, ...]
) -> None:
    """Any dtype, strides and alignment, with an expert map: launches get addresses and runtime integers."""
    program = bind_program(small_problem(), tokens, make_layer(small_problem(), "hopper", "cpu", distinct=1))
    x, expert_map = torch.zeros(tokens, 256, dtype=torch.bfloat16), torch.arange(9, dtype=torch.int32)[1:]
    weights = torch.zeros(tokens, 7, dtype=torch.float16)[:, 1:7:4]
    run_program(program, x, Indexed(ids[:tokens], weights, expert_map), torch.empty_like(x))
    assert gpu.launched == len(program.bindings.launches)
    assert stored_addresses(program, 2) == {ids.data_ptr()} and stored_addresses(program, 3) == {weights.data_ptr()}
    names = ("id_words", "id_row", "id_column", "mapped", "weight_kind", "weight_row", "weight_column")
    expected = dict(zip(names, (*layout, 8, 1, 7, 4)))
    seen = set()
    for step, launch in zip(steps(program.bindings.plan), program.bindings.launches):
        for name in expected.keys() & step.values.keys():
            assert launch.integer_slot(name).value == expected[name], name
            seen.add(name)
    assert seen == expected.keys()


def test_contiguous_plans_refuse_indexed_calls(gpu: FakeDriver) -> None:
    """A contiguous plan does not read ids as edges, even if the tensors fit."""
    problem = small_problem(dispatch=CONTIGUOUS)
    layer = make_layer(problem, "hopper", "cpu", distinct=1)
    program = bind_program(problem, 100, layer)
    x, routed = torch.zeros(100, 256, dtype=torch.bfloat16), routing(small_problem(), 100, 0, "cpu")
    run_program(program, x, Contiguous(torch.tensor([0, 100, 100, 100, 100])), torch.empty_like(x))
    gpu.launched = 0
    with pytest.raises(LaunchError, match="contiguous work"):
        run_program(program, x, Indexed(routed.ids, routed.weights), torch.empty_like(x))
    assert gpu.launched == 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ids": torch.zeros(100, 2, dtype=torch.int16)}, "another dtype"),
        ({"ids": torch.zeros(99, 2, dtype=torch.int32)}, "do not fit"),
        ({"weights": torch.zeros(100, 3)}, "do not fit"),
        ({"x": torch.zeros(120, 256, dtype=torch.bfloat16), "out": torch.zeros(120, 256, dtype=torch.bfloat16),
          "ids": torch.zeros(120, 2, dtype=torch.int32), "weights": torch.zeros(120, 2)}, "more tokens"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(gpu: FakeDriver, changed: dict[str, torch.Tensor], why: str) -> None:
    """Also if earlier calls have already bound the program."""
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), 100, layer)
    x, routed = torch.zeros(100, 256, dtype=torch.bfloat16), routing(small_problem(), 100, 0, "cpu")
    good = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    for call in (good, good):
        run_program(program, call["x"], Indexed(call["ids"], call["weights"]), call["out"])
    gpu.launched, call = 0, {**good, **changed}
    with pytest.raises(LaunchError, match=why):
        run_program(program, call["x"], Indexed(call["ids"], call["weights"]), call["out"])
    assert gpu.launched == 0


def test_an_interrupted_call_does_not_change_the_next(gpu: FakeDriver) -> None:
    """The next call writes its own sizes and addresses again."""
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), 100, layer)
    call = (16, 32, 48, 64, *ROUTED)
    program.run(100, call)
    grids = [(launch.config.gx, launch.config.gy) for launch in program.bindings.launches]

    def interrupt(tokens: int) -> None:
        raise KeyboardInterrupt

    whole = program.bindings
    for place in range(len(whole.resizers) + 1):
        program.bindings = replace(whole, resizers=(*whole.resizers[:place], interrupt, *whole.resizers[place:]))
        with pytest.raises(KeyboardInterrupt):
            program.run(90, call)
        program.bindings = whole
        program.run(100, call)
        assert [(launch.config.gx, launch.config.gy) for launch in program.bindings.launches] == grids


class SlowDriver(FakeDriver):
    """Sleeps in each launch, so that other threads can run; records the thread of each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.launching_threads: list[int] = []

    def _launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        self.launching_threads.append(get_ident())
        sleep(0.001)
        return 0


def test_launches_of_threads_do_not_interleave(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share a stream's scratch memory and a program's arguments."""
    slow = SlowDriver()
    monkeypatch.setattr(driver, "library", lambda: slow)
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    x, routed = torch.zeros(300, 256, dtype=torch.bfloat16), routing(small_problem(), 300, 0, "cpu")
    outs = [torch.empty_like(x) for _ in range(2)]
    layer(x, routed, outs[0])
    launches, slow.launching_threads = len(slow.launching_threads), []
    threads = [Thread(target=layer, args=(x, routed, out)) for out in outs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns = [set(slow.launching_threads[i : i + launches]) for i in range(0, len(slow.launching_threads), launches)]
    assert len(turns) == 4 and all(len(turn) == 1 for turn in turns)
