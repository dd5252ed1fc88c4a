"""Launches are laid out and rebound without a GPU: the driver is replaced, everything above it is real."""

from __future__ import annotations

import ctypes

import pytest
import torch

from colibri.backends.hopper import program as bound
from colibri.backends.hopper.plan import make_plan
from colibri.jit import driver, load
from colibri.jit.compile import Binary, Desc, Source
from colibri.testing.layers import layer_problem, make_layer, routing


class FakeDriver:
    """Counts launches."""

    def __init__(self) -> None:
        self.launched = 0

    def cuLaunchKernelEx(self, *arguments: object) -> int:
        self.launched += 1
        return 0


class FakeProperties:
    multi_processor_count = 132


def fake_function(source: Source, device: int) -> tuple[int, Binary]:
    descs = [kind for _, kind in source.arguments if isinstance(kind, Desc)]
    facts = tuple({"block_size": list(d.box), "elem_size": 2, "swizzle": 3} for d in descs)
    return 1, Binary(b"", "kernel", 1024, 256, 64, facts)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(load, "function", fake_function)
    monkeypatch.setattr(load, "_tensor_map", lambda matrix, facts: bytes(driver.MAP_BYTES))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeProperties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


@pytest.mark.parametrize(("activations", "tokens", "launches"), [("bf16", 1, 2), ("bf16", 100, 10), ("fp8", 2000, 13)])
def test_a_call_stores_pointers_and_launches(gpu: FakeDriver, activations: str, tokens: int, launches: int) -> None:
    problem = layer_problem("mxfp4", activations, hidden=256, intermediate=128, experts=4, top_k=2)
    layer = make_layer(problem, "hopper", "cpu", distinct=1)
    program = bound.Program(make_plan(problem, tokens), layer.weights, torch.device("cpu"), 0)
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    for count in (tokens, max(1, tokens // 2)):
        rows, routed, out = x[:count].clone(), routing(problem, count, 0, "cpu"), torch.empty_like(x[:count])
        gpu.launched = 0
        program.run(rows, routed.ids, routed.weights, out, 0)
        assert gpu.launched == launches
        assert all(launch._config.gx > 0 for launch in program.launches)
        assert {slot.value for slot in program.pointers["out"]} == {out.data_ptr()}
        assert {slot.value for slot in program.pointers["ids"]} == {routed.ids.data_ptr()}


def test_arguments_keep_their_place(gpu: FakeDriver) -> None:
    values = [("map", bytes(range(128))), ("pointer", (7).to_bytes(8, "little")), ("count", (5).to_bytes(4, "little"))]
    launch = driver.Launch(1, 256, 0, values, False, {})
    launch.pointer_slot("pointer").value = 99
    assert launch.integer_slot("count").value == 5
    assert ctypes.string_at(launch.address["map"], 128) == bytes(range(128))
    assert launch.address["map"] % 64 == 0
    assert ctypes.c_uint64.from_address(launch.address["pointer"]).value == 99
