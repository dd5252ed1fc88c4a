"""Which calls of a Hopper layer use the fast call of an earlier one, on a fake driver."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_driver import (
    FakeDriver,
    fake_gpu,  # noqa: F401
    layer_and_call,
    small_problem,
)
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lancebill.backends.oracle import Choice, Verdict
from lancebill.backends.registry import registry
from lancebill.errors import LaunchError
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device


class RecordOperations(TorchDispatchMode):
    """Records the names of the torch operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, 100])
def test_a_repeated_call_runs_no_torch_operation(gpu: FakeDriver, tokens: int) -> None:
    """Only launches: every small operation would cost the host as much as a launch."""
    layer, x, call = layer_and_call(tokens)
    layer(x, **call)
    gpu.launched = 0
    with RecordOperations() as ran:
        layer(x, **call)
    assert gpu.launched > 0 and ran.seen == []


@pytest.mark.parametrize("mapped", [False, True])
def test_what_routers_give_is_read_by_the_kernels(gpu: FakeDriver, mapped: bool) -> None:
    """int64 ids, 16-bit weights, views, an expert map: no conversion, and the first such call makes the fast call."""
    layer, x, call = layer_and_call(100)
    if mapped:
        layer.expert_map = torch.arange(4, dtype=torch.int32)
    ids, weights = call["topk_ids"].long(), call["topk_weights"].bfloat16()
    both = torch.cat([ids, ids], 1)
    layer(x, topk_ids=ids, topk_weights=weights)
    gpu.launched = 0
    for given in (ids, both[:, :2], both[:, ::2], call["topk_ids"]):
        for routed in (weights, call["topk_weights"], weights.half().t().contiguous().t()):
            with RecordOperations() as ran:
                layer(x, topk_ids=given, topk_weights=routed, out=call["out"])
            assert ran.seen == []
    assert gpu.launched > 0


def full_calls(layer: RoutedExperts, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of the token counts of those calls that run `compute` instead of a fast call."""
    token_counts: list[int] = []
    original = layer.compute

    def compute(x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        token_counts.append(x.shape[0])
        return original(x, *arguments)

    monkeypatch.setattr(layer, "compute", compute)
    return token_counts


def test_a_repeated_call_uses_the_fast_call(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, call = layer_and_call(100)
    slow = full_calls(layer, monkeypatch)
    layer(x, **call)
    first, gpu.launched = gpu.launched, 0
    moved = {name: tensor.clone() for name, tensor in call.items()}
    assert layer(x.clone(), **moved) is moved["out"] and slow == [100] and gpu.launched == first
    fewer = {name: tensor[:90] for name, tensor in call.items()}
    for _ in range(2):
        layer(x[:90], **fewer)
    assert slow == [100, 90]


@contextmanager
def switch_device(current: list[int], index: int) -> Iterator[None]:
    before, current[0] = current[0], index
    yield
    current[0] = before


@pytest.mark.parametrize("what", ["stream", "device", "memory", "parameter", "copy", "misaligned", "expert_map"])
def test_a_changed_call_does_not_use_the_fast_call(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A fast call is valid only for the stream, device, weights and alignment that it was made for."""
    layer, x, call = layer_and_call(100)
    layer(x, **call)
    if what == "stream":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    elif what == "device":
        current = [1]
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
        monkeypatch.setattr(torch.cuda, "device", lambda index: switch_device(current, index))
    elif what == "memory":
        layer.w13_codes.data = layer.w13_codes.data.clone()
    elif what == "parameter":
        layer.w2_factors = torch.nn.Parameter(layer.w2_factors.clone(), requires_grad=False)
    elif what == "copy":
        layer = copy.deepcopy(layer)
    elif what == "misaligned":
        x = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    else:
        layer.expert_map = torch.arange(4)
    slow, gpu.launched = full_calls(layer, monkeypatch), 0
    layer(x, **call)
    assert slow == [100] and gpu.launched > 0


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "out"])
def test_wrong_shapes_are_refused_after_a_fast_call(gpu: FakeDriver, name: str) -> None:
    layer, x, call = layer_and_call(100)
    layer(x, **call)
    layer(x, **call)
    gpu.launched, given = 0, {"x": x, **call}
    given[name] = given[name].t().contiguous()
    with pytest.raises(LaunchError, match="fit"):
        layer(given.pop("x"), **given)
    assert gpu.launched == 0


def linear_layer() -> QuantizedLinear:
    layer = small_problem()
    w13 = replace(layer.matrices["w2"], name="w13")
    problem = replace(layer, w13=w13, w2=None, experts=1, global_experts=1, top_k=1)
    backend, device = registry()["hopper"], Device("cuda", 90)
    verdict = Verdict(backend, (), backend.plan(problem, 1, device))
    packed = {"w13": backend.layout(problem).allocate(w13, 1, torch.device("cpu"))}
    return QuantizedLinear(Choice(problem, device, "hopper", (verdict,), verdict), packed)


@pytest.mark.parametrize("shape", [(1, 128), (1, 1, 128)])
def test_a_repeated_linear_call_makes_its_result_and_launches_once(gpu: FakeDriver, shape: tuple[int, ...]) -> None:
    """No offsets. A graph of one launch takes the host less time than the launch, if nothing changed."""
    layer, x = linear_layer(), torch.zeros(shape, dtype=torch.bfloat16)
    assert layer(x).shape == (*shape[:-1], 256)
    gpu.launched = 0
    with RecordOperations() as ran:
        layer(x)
    assert gpu.launched == 1 and ran.seen == ["aten.empty.memory_format"]


@pytest.mark.parametrize("what", ["stream", "capture", "memory", "misaligned", "dtype", "shape", "gradient"])
def test_a_changed_linear_call_is_a_full_call(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    layer, x = linear_layer(), torch.zeros(1, 128, dtype=torch.bfloat16)
    layer(x)
    (call,) = layer.executor.fast_linears.values()
    assert call(x) is not None
    if what == "stream":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    elif what == "capture":
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    elif what == "memory":
        layer.w13_codes.data = layer.w13_codes.data.clone()
    elif what == "misaligned":
        x = torch.zeros(129, dtype=torch.bfloat16)[1:].view(1, 128)
    elif what == "gradient":
        x = x.clone().requires_grad_()
    else:
        x = x.half() if what == "dtype" else x.view(2, 64)
    assert call(x) is None


@pytest.mark.parametrize("how", ["hook", "hook of all modules", "own forward", "subclass"])
def test_who_watches_a_linear_sees_repeated_calls(gpu: FakeDriver, how: str) -> None:
    """A repeated call takes a shorter way than `nn.Module`'s, which calls hooks."""
    layer, x, seen = linear_layer(), torch.zeros(1, 128, dtype=torch.bfloat16), []
    layer(x)
    if how == "hook":
        stop = layer.register_forward_hook(lambda *call: seen.append(call)).remove
    elif how == "hook of all modules":
        stop = register_module_forward_pre_hook(lambda *call: seen.append(call)).remove
    elif how == "subclass":
        forward = lambda self, x: (seen.append(x), QuantizedLinear.forward(self, x))[1]  # noqa: E731
        layer.__class__ = type("Watching", (QuantizedLinear,), {"forward": forward})
        stop = partial(setattr, layer, "__class__", QuantizedLinear)
    else:
        forward = layer.forward
        layer.forward = lambda x: (seen.append(x), forward(x))[1]  # type: ignore[assignment, func-returns-value]
        stop = partial(layer.__dict__.pop, "forward")
    layer(x)
    assert len(seen) == 1
    stop()
    layer(x)
    assert len(seen) == 1


def test_only_an_unchanged_single_launch_is_a_graph(gpu: FakeDriver) -> None:
    """A graph takes the host less time than a launch, but not together with an update."""
    layer = linear_layer()
    layer(torch.zeros(1, 128, dtype=torch.bfloat16))
    ((_, program),) = layer.executor.made.values()
    graphs = []
    for out in (64, 64, 64, 128, 128):
        gpu.launched = gpu.graph_launches = 0
        program.run(1, (256, out, 0))
        graphs.append(gpu.graph_launches)
        assert gpu.launched == 1
    assert graphs == [0, 1, 1, 0, 1] and [len(params) for params in gpu.nodes] == [2]
