"""A Hopper layer routes with one launch, bound once, on a fake driver."""

from __future__ import annotations

import pytest
import torch
from fake_driver import (
    FakeDriver,
    fake_gpu,  # noqa: F401
    layer_and_call,
    read_argument,
)

from lancebill.backends.gpu.executor import GpuExecutor
from lancebill.backends.gpu.route_program import RouteProgram
from lancebill.backends.gpu.route_step import RouteStep
from lancebill.errors import LaunchError
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.routing import SIGMOID, Routed, Routing, SparseMixer, route

ROUTING = Routing(2, SIGMOID, renormalize=True)


def routed_layer(routing: Routing) -> tuple[RoutedExperts, torch.Tensor, torch.Tensor]:
    layer, x, _ = layer_and_call(5)
    layer.routing = routing
    layer.take_router("correction", torch.tensor([0.0, 1.0, 2.0, 3.0]))
    return layer, x, torch.randn(5, 4, dtype=torch.bfloat16)


def program_of(layer: RoutedExperts) -> RouteProgram:
    assert isinstance(layer.executor, GpuExecutor)
    (program,) = layer.executor.route_programs._programs.values()
    return program


def test_a_call_is_one_launch_that_reads_the_callers_tensors(gpu: FakeDriver) -> None:
    layer, x, logits = routed_layer(ROUTING)
    for tokens in (5, 3):
        gpu.launched = 0
        routed = layer.route(x[:tokens], logits[:tokens])
        assert gpu.launched == 1
        launch = program_of(layer).launch
        assert launch.config.gx == tokens and launch.config.count == 1  # a dependent launch
        given = {"logits": logits, "ids": routed.ids, "weights": routed.weights, "correction": layer.router_correction}
        for name, tensor in given.items():
            assert tensor is not None and read_argument(launch, name) == tensor.data_ptr()
        assert routed.ids.shape == (tokens, 2) and routed.ids.dtype == torch.int32
        assert launch.integer_slot("stride").value == 4


def test_a_program_is_kept_until_something_it_is_bound_to_changes(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, logits = routed_layer(ROUTING)
    bound: list[RouteProgram] = []

    def changed() -> bool:
        layer.route(x, logits)
        bound.append(program_of(layer))
        return len(bound) == 1 or bound[-1] is not bound[-2]

    assert changed() and not changed()
    logits = logits.clone()
    assert not changed()
    layer.take_router("correction", torch.zeros(4))
    assert not changed()  # a refit writes to it in place
    layer.router_correction = torch.zeros(4)
    assert changed() and not changed()
    assert layer.router_correction is not None
    layer.router_correction.data = torch.ones(4)
    assert changed() and not changed()
    logits = torch.zeros(5, 9, dtype=torch.bfloat16)[:, :4]
    assert changed() and not changed()
    logits = logits.float()
    assert changed() and not changed()
    layer.routing = Routing(2, SIGMOID)
    assert changed() and not changed()


def test_a_repeated_call_takes_the_fast_way(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any difference to the earlier call is noticed, and the call takes the full way."""
    layer, x, logits = routed_layer(ROUTING)
    layer.route(x, logits)
    full: list[torch.dtype] = []
    original = layer.executor.route

    def route_in_full(routing: Routing, logits: torch.Tensor, *rest: object) -> Routed:
        full.append(logits.dtype)
        return original(routing, logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(layer.executor, "route", route_in_full)
    gpu.launched = 0
    routed = layer.route(x, logits.clone())
    assert gpu.launched == 1 and not full and routed.ids.shape == (5, 2)
    changes = (
        lambda: layer.route(x, logits.float()),
        lambda: layer.route(x, logits.expand(5, 4).t().contiguous().t()),
        lambda: setattr(layer, "router_correction", torch.zeros(4)) or layer.route(x, logits),
    )
    for number, change in enumerate(changes, 1):
        change()
        assert len(full) == number
    with pytest.raises(LaunchError, match="hidden states do not match"):
        layer.route(x[:3], logits)


def test_what_the_kernel_does_not_support_is_computed_by_the_definition(gpu: FakeDriver) -> None:
    layer, x, logits = routed_layer(Routing(2, custom=SparseMixer()))
    layer.router_correction = None
    expected = route(layer.routing or ROUTING, logits, hidden=x)
    assert torch.equal(layer.route(x, logits).ids, expected.ids) and gpu.launched == 0
    layer.routing = ROUTING
    assert layer.route(x[:0], logits[:0]).ids.shape == (0, 2) and gpu.launched == 0
    with pytest.raises(LaunchError, match="hidden states do not match"):
        layer.route(x[:3], logits)
    with pytest.raises(LaunchError, match="correction bias"):
        layer.take_router("correction", torch.zeros(3))
        layer.route(x, logits)


def test_limits_of_the_kernel() -> None:
    assert RouteStep.make(Routing(64), 2048, torch.bfloat16) is not None
    many_groups, long_lists = Routing(2, n_group=33, topk_group=4), Routing(16, n_group=32, topk_group=4)
    for routing, experts in ((Routing(65), 128), (Routing(2), 2049), (many_groups, 66), (long_lists, 1024)):
        assert RouteStep.make(routing, experts, torch.float32) is None


def test_a_group_has_a_warp_and_a_thread_one_expert() -> None:
    """A group of 32 experts: reductions of a group then need no barrier."""
    routing = Routing(8, SIGMOID, n_group=8, topk_group=4)
    for experts, warps in ((256, 8), (160, 8), (64, 2), (16, 1)):
        step = RouteStep.make(routing, experts, torch.bfloat16, corrected=True)
        assert step is not None and dict(step.source.options)["num_warps"] == warps
