"""Memory of captured calls, on a fake driver: whose it is, and what is kept after the capture."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_driver import (
    FakeDriver,
    fake_gpu,  # noqa: F401
    layer_and_call,
    read_argument,
    small_problem,
)
from torch import Tensor

import lancebill
from lancebill.backends.base import TensorTable
from lancebill.backends.gpu import bindings
from lancebill.backends.gpu import executor as executing
from lancebill.backends.gpu import program as bound
from lancebill.backends.gpu import workspace as memory
from lancebill.backends.gpu.executor import GpuExecutor
from lancebill.backends.gpu.program import Program
from lancebill.backends.gpu.step import Ref
from lancebill.backends.gpu.tiles import buckets
from lancebill.jit import driver
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed
from lancebill.testing.layers import make_layer, routing


class Launched:
    """Records, for each program that runs, its scratch address, its counters, and whether it used a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs: list[Program] = []
        original = Program.run

        def run(program: Program, tokens: int, caller: tuple[int, ...]) -> None:
            self.programs.append(program)
            original(program, tokens, caller)

        monkeypatch.setattr(Program, "run", run)

    def counters(self) -> list[int]:
        """The address of the counters that each decode launch got."""
        launches = [program.bindings.launches[0] for program in self.programs]
        return [read_argument(launch, "counters") for launch in launches]


@pytest.fixture
def launched(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Launched:
    return Launched(monkeypatch)


@pytest.fixture
def allocated(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Tensors of captured calls: on a GPU they come from the capture's pool."""
    made: list[weakref.ref[Tensor]] = []
    original = memory.Workspaces.of_capture

    def of_capture(self: memory.Workspaces, *given: object, **options: bool) -> memory.Workspace:
        found = original(self, *given, **options)  # type: ignore[arg-type]
        made.append(weakref.ref(found.memory))
        return found

    monkeypatch.setattr(memory.Workspaces, "of_capture", of_capture)
    return made


@pytest.mark.parametrize("tokens", [1, 100])
def test_a_capture_at_a_size_that_never_ran(gpu: FakeDriver, allocated: list[weakref.ref[Tensor]], tokens: int) -> None:
    """It needs no eager workspace, keeps no memory of the pool, and makes no fast call."""
    layer, x, call = layer_and_call(tokens)
    gpu.capture = 5
    for _ in range(3):
        layer(x, **call)
    assert gpu.launched > 0 and gpu.graph_launches == 0 and not executing.WORKSPACES.eager
    assert len(allocated) == 3 and not layer.executor.fast_calls
    gc.collect()
    assert all(tensor() is None for tensor in allocated)


@pytest.mark.parametrize("tokens", [1, 100])
def test_eager_calls_around_a_capture(gpu: FakeDriver, launched: Launched, tokens: int) -> None:
    """On the same stream: each kind has its own programs, and only eager calls are launched as graphs."""
    layer, x, call = layer_and_call(tokens)
    for capture in (0, 0, 0, 8, 8, 0, 0):
        gpu.capture = capture
        layer(x, **call)
    kept = [program.bindings.workspace is not None for program in launched.programs]
    assert kept == [True, True, True, False, False, True, True]
    assert launched.programs[0] is launched.programs[2] is launched.programs[5]
    with_graph = [program.graph is not None for program in launched.programs]
    assert with_graph[3:5] == [False, False]


def test_counters_belong_to_a_capture_and_a_stream(
    gpu: FakeDriver, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs may be replayed at the same time, and so may branches of one graph. Layers of one branch share."""
    first, x, call = layer_and_call(1)
    second, _, _ = layer_and_call(1)
    stream = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    for capture, on, layer in ((0, 0, first), (1, 0, first), (1, 0, second), (1, 7, first), (2, 0, first)):
        gpu.capture, stream[0] = capture, on
        layer(x, **call)
    eager, one, shared, branch, two = launched.counters()
    assert one == shared and len({eager, one, branch, two}) == 4


def test_counters_live_as_long_as_a_captured_layer(gpu: FakeDriver) -> None:
    first, x, call = layer_and_call(1)
    second, _, _ = layer_and_call(1)
    gpu.capture = 3
    for layer in (first, second):
        layer(x, **call)
    assert len(executing.WORKSPACES.counters) == 1
    del first, layer
    gc.collect()
    assert len(executing.WORKSPACES.counters) == 1
    del second
    gc.collect()
    assert len(executing.WORKSPACES.counters) == 0


def test_many_tokens_need_no_counters(gpu: FakeDriver) -> None:
    layer, x, call = layer_and_call(100)
    gpu.capture = 3
    layer(x, **call)
    assert not executing.WORKSPACES.counters


def test_reserved_memory_is_used_in_captures(gpu: FakeDriver, launched: Launched) -> None:
    """By all layers given, at every size that was reserved; larger ones use the capture's pool."""
    layers = [layer_and_call(1)[0] for _ in range(2)]
    executors = [layer.executor for layer in layers]
    for executor in executors:
        assert isinstance(executor, GpuExecutor)
    model = torch.nn.ModuleList(layers)
    size = lancebill.reserve(model, max_tokens=100)
    assert size == max(layers[0].executor.plan_for("indexed", tokens).workspace_bytes for tokens in buckets(100))
    gpu.capture = 6
    for tokens in (1, 100, 300):
        _, x, call = layer_and_call(tokens)
        for layer in layers:
            layer(x, **call)
    reserved = {id(program.bindings.workspace) for program in launched.programs[:4]}
    assert len(reserved) == 1 and all(program.graph is None for program in launched.programs)
    assert [program.bindings.workspace is None for program in launched.programs] == [False] * 4 + [True] * 2


def test_branches_of_a_graph_do_not_share_reserved_memory(
    gpu: FakeDriver, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run at the same time. The next capture may have another stream."""
    layers, (_, x, call) = [layer_and_call(1)[0] for _ in range(2)], layer_and_call(1)
    lancebill.reserve(torch.nn.ModuleList(layers), max_tokens=1)
    stream = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    for gpu.capture, on, layer in ((1, 0, 0), (1, 7, 1), (1, 0, 1), (2, 7, 0), (2, 0, 1)):
        stream[0] = on
        layers[layer](x, **call)
    assert [program.bindings.workspace is not None for program in launched.programs] == [True, False, True, True, False]
    first, branch, *_ = launched.counters()
    assert first != branch


def test_equal_layers_are_planned_once(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """To reserve: a model has dozens, and dozens of sizes."""
    asked: list[int] = []
    original = GpuExecutor.most_bytes
    monkeypatch.setattr(GpuExecutor, "most_bytes", lambda self, most: asked.append(most) or original(self, most))
    lancebill.reserve(torch.nn.ModuleList(layer_and_call(1)[0] for _ in range(4)), 64)
    assert asked == [64]


def reserved(layer: RoutedExperts) -> weakref.ref[Tensor]:
    assert isinstance(layer.executor, GpuExecutor) and layer.executor.reserved is not None
    return weakref.ref(layer.executor.reserved.memory)


def test_graphs_keep_memory_that_was_reserved_before(gpu: FakeDriver) -> None:
    """Reserving more, or the same again, leaves what captured graphs use; so does a new executor."""
    layer, x, call = layer_and_call(1)

    lancebill.reserve(layer, 8)
    first = reserved(layer)
    gpu.capture = 5
    layer(x, **call)
    lancebill.reserve(layer, 8)
    assert reserved(layer)() is first()
    lancebill.reserve(layer, 64)
    second = reserved(layer)
    layer(x, **call)
    assert second() is not first() and first() is not None
    layer.executor.forget()
    layer.register_parameter("noted", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    gc.collect()
    assert first() is not None and second() is not None
    del layer.noted
    del layer
    gc.collect()
    assert first() is None and second() is None


def test_counters_of_graphs_outlive_an_executor(gpu: FakeDriver) -> None:
    layer, x, call = layer_and_call(1)
    gpu.capture = 3
    layer(x, **call)
    layer.register_parameter("noted", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    gc.collect()
    assert len(executing.WORKSPACES.counters) == 1


def test_outgrown_workspaces_are_freed(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ascending sizes: at most one workspace is alive, however many programs were bound to smaller ones."""
    made: list[weakref.ref[Tensor]] = []

    def outside_pools(device: torch.device, stream: int | None, make: Callable[[], Tensor]) -> Tensor:
        made.append(weakref.ref(tensor := make()))
        return tensor

    monkeypatch.setattr(memory, "outside_pools", outside_pools)
    monkeypatch.setattr(bound, "graphs_available", lambda: False)
    layer, _, _ = layer_and_call(1)
    for tokens in buckets(4096):
        x = torch.zeros(tokens, layer.problem.hidden, dtype=torch.bfloat16)
        routed = routing(layer.problem, tokens, 0, "cpu")
        for _ in range(2):
            layer(x, topk_ids=routed.ids, topk_weights=routed.weights)
    gc.collect()
    alive = [tensor for tensor in (known() for known in made) if tensor is not None and tensor.dtype == torch.uint8]
    assert len(alive) == 1 and len(made) < 20
    assert alive[0].numel() < 1.6 * layer.executor.plan_for("indexed", 4096).workspace_bytes
    again = layer.executor.fast_calls.get(4096 * layer.problem.hidden)
    assert again is not None and again(x, routed.ids, routed.weights, torch.empty_like(x))


def test_programs_of_a_stream_outlive_the_growth_of_anothers_workspace(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines warm up new batch sizes on a stream of their own, and then go on where they were."""
    stream, bound_for = [0], list[int]()
    monkeypatch.setattr(bound, "graphs_available", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    bind = bindings.Bindings.bind
    monkeypatch.setattr(bindings.Bindings, "bind", lambda *given: bound_for.append(given[4]) or bind(*given))
    layer, *few = layer_and_call(1)
    _, *many = layer_and_call(64)
    for stream[0], (x, call) in ((0, few), (7, few), (7, many), (0, few), (7, many)):
        for _ in range(2):
            layer(x, **call)
    assert bound_for == [0, 7, 7]
    assert executing.WORKSPACES.eager[0, 0].memory.numel() < executing.WORKSPACES.eager[0, 7].memory.numel()
    stream[0] = 0
    for x, call in (many, few):
        layer(x, **call)
    assert bound_for == [0, 7, 7, 0, 0]  # its own has grown


def test_a_capture_after_growth_destroys_nothing(gpu: FakeDriver) -> None:
    """Ascending sizes, then a capture: graphs that are bound to the smaller workspace go with the next eager call."""
    layer, x, call = layer_and_call(1)
    layer(x, **call)
    layer(x, **call)
    size = executing.WORKSPACES.eager[0, 0].memory.numel()
    executing.WORKSPACES.of_stream(layer.executor.tensors.device, 0, 2 * size)
    assert gpu.graph_launches and not gpu.destroyed
    gpu.capture = 8
    layer(x, **call)
    assert not gpu.destroyed
    gpu.capture = 0
    layer(x, **call)
    assert gpu.destroyed


def test_graphs_that_are_dropped_in_a_capture_leave_it_valid(gpu: FakeDriver) -> None:
    layer, x, call = layer_and_call(1)
    layer(x, **call)
    layer(x, **call)
    gpu.capture = 9
    layer.executor.drop_bound()
    gc.collect()
    assert gpu.destroyed and not gpu.invalidated


def test_graphs_are_made_while_another_stream_captures(gpu: FakeDriver) -> None:
    """An eager call of another thread, or on another stream of the capturing one."""
    layer, x, call = layer_and_call(1)
    gpu.elsewhere = True
    layer(x, **call)
    layer(x, **call)
    assert gpu.graph_launches and not gpu.invalidated and gpu.capture_mode == 0


def test_graphs_keep_the_pre_scales_of_a_matrix_without(
    gpu: FakeDriver, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are ones, which all programs share: the program of a graph is dropped when the next graph is captured."""
    made: list[weakref.ref[Tensor]] = []

    def outside_pools(device: torch.device, stream: int | None, make: Callable[[], Tensor]) -> Tensor:
        made.append(weakref.ref(tensor := make()))
        return tensor

    monkeypatch.setattr(bindings, "outside_pools", outside_pools)
    monkeypatch.setattr(bindings, "_ONES", {}, raising=False)
    sample, problem = make_layer(small_problem(), "hopper", "cpu", distinct=1), replace(small_problem(), pre_scale=True)
    executor = sample.backend.executor(problem, Device("cuda", 90), TensorTable.of(sample.weights))
    x, routed = torch.zeros(4, 256, dtype=torch.bfloat16), routing(problem, 4, 0, "cpu")
    for gpu.capture in (1, 2, 0):
        executor.run(x, Indexed(routed.ids, routed.weights), torch.empty_like(x))
    read = {
        read_argument(launch, name)
        for program in launched.programs
        for step, launch in zip(program.bindings.steps, program.bindings.launches)
        for name, value in step.values.items()
        if isinstance(value, Ref) and value.name == "pre_scale"
    }
    launched.programs.clear()
    executor.forget()
    gc.collect()
    alive = [tensor for tensor in (known() for known in made) if tensor is not None]
    assert read and {tensor.data_ptr() for tensor in alive} == read
    assert all(bool((tensor == 1).all()) for tensor in alive) and len(made) == len(read) == 2


def test_no_fast_call_is_made_from_another_gpu(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a stream is captured is known of the current GPU only, and the input's own stream may be."""
    layer, x, call = layer_and_call(1)
    current = [1]  # the caller's; the layer is on GPU 0, whose stream is captured
    gpu.capture = 7

    class device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: current[0] == 0, raising=False)
    layer(x, **call)
    assert not layer.executor.fast_calls and not executing.WORKSPACES.eager


@pytest.mark.parametrize("handle", [0, 1 << 40])
def test_memory_of_a_stream_is_allocated_on_it(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, handle: int) -> None:
    """Also of the default stream, whose handle is 0: torch's `ExternalStream` takes that for no handle."""
    used: list[int] = []

    @contextmanager
    def stream(side: SimpleNamespace) -> Iterator[None]:
        used.append(side.cuda_stream)
        yield

    monkeypatch.setattr(driver, "use_context", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    made = {
        "ExternalStream": lambda handle, device: SimpleNamespace(cuda_stream=handle or 0xF001),
        "get_stream_from_external": lambda handle, device: SimpleNamespace(cuda_stream=handle),
    }
    for name, make in made.items():
        monkeypatch.setattr(torch.cuda, name, make)
    memory.outside_pools(torch.device("cuda", 0), handle, lambda: torch.zeros(1))
    assert used == [handle]


def test_a_layer_reserves_for_itself(gpu: FakeDriver) -> None:
    layer, x, call = layer_and_call(1)
    assert isinstance(layer, RoutedExperts) and layer.reserve(8) > 0
    gpu.capture = 6
    layer(x, **call)
    assert not executing.WORKSPACES.counters


def test_kernels_are_loaded_with_the_capture_mode_relaxed(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading allocates, which captures forbid otherwise. The mode is restored, also after an error."""
    with driver.uncaptured():
        assert gpu.capture_mode == 2
    with pytest.raises(KeyError), driver.uncaptured():
        raise KeyError
    assert gpu.capture_mode == 0
