"""Launches are laid out and rebound without a GPU: the driver is replaced, everything above it is real."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread, get_ident
from time import sleep
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lancebill.backends.hopper import program as bound
from lancebill.backends.hopper.bindings import Bindings
from lancebill.backends.hopper.executor import HopperExecutor, run_program
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.step import CALL, Ref
from lancebill.backends.hopper.steps import steps
from lancebill.backends.hopper.tuning import policy as tune
from lancebill.backends.oracle import Choice, Verdict
from lancebill.backends.registry import registry
from lancebill.errors import ContextError, DriverError, LaunchError, MissingTensor
from lancebill.jit import driver, load
from lancebill.jit.compile import Binary, Desc, KernelSource
from lancebill.jit.load import MappedMatrix
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Contiguous, Indexed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED, Device, Problem
from lancebill.testing.layers import SampleLayer, layer_problem, make_layer, routing

FUNCTION, READY, NODE = 1 << 33, 1 << 34, 1 << 35  # handles, all of whose bits must arrive


class FakeDriver:
    """Counts launches, alone or in graphs; notes what each node of a graph was told of.

    What a call hands over arrives as C has it; an entry that gets another's handle answers with an error.
    """

    def __init__(self) -> None:
        address = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[address] * 4)(self._launch)
        self.cuGraphExecKernelNodeSetParams_v2 = ctypes.CFUNCTYPE(ctypes.c_int, *[address] * 3)(self._renew)
        self.cuGraphLaunch = ctypes.CFUNCTYPE(ctypes.c_int, *[address] * 2)(self._repeat)
        self.launched, self.repeated, self.dropped, self.capturing = 0, 0, 0, False
        self.nodes: list[list[tuple[int, int]]] = []  # grid and address of arguments, each time they were told
        self.order: list[tuple[int, int]] = []
        self.described: list[Any] = []  # what nodes are told by

    def _launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        self.launched += 1
        return int(function != FUNCTION)

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 0

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        self.nodes, self.order, self.described = [], [], []
        return 0

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, before: None, count: Any, told: Any) -> int:
        self.nodes.append([(told._obj.gx, told._obj.parameters)])
        self.described.append(told._obj)
        node._obj.value = NODE + len(self.nodes)
        return 0

    def cuGraphAddDependencies_v2(self, graph: Any, first: Any, then: Any, edge: Any, count: Any) -> int:
        self.order.append((first._obj.value - NODE, then._obj.value - NODE))
        return 0

    def cuGraphInstantiateWithFlags(self, ready: Any, graph: Any, flags: Any) -> int:
        ready._obj.value = READY
        return 0

    def cuGraphExecDestroy(self, ready: Any) -> int:
        self.dropped += 1
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        self.dropped += 1
        return 0

    def _renew(self, ready: int, node: int, told: int) -> int:
        known = self.described[node - NODE - 1]
        self.nodes[node - NODE - 1].append((known.gx, known.parameters))
        return int((ready, told) != (READY, ctypes.addressof(known)))

    def _repeat(self, ready: int, stream: int | None) -> int:
        self.launched += len(self.nodes)
        self.repeated += 1
        return int((ready, stream) != (READY, None))


class FakeProperties:
    multi_processor_count = 132


def fake_function(source: KernelSource, device: int) -> tuple[int, Binary]:
    descs = [kind for _, kind in source.arguments if isinstance(kind, Desc)]
    facts = tuple({"block_size": list(d.box), "elem_size": 2, "swizzle": 3} for d in descs)
    return FUNCTION, Binary(b"", "kernel", 1024, 256, 64, facts)


def _fake_map(matrix: MappedMatrix, facts: object) -> bytes:
    MAPPED.append(matrix.pointer)
    return bytes(driver.MAP_BYTES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(load, "load_kernel", fake_function)
    monkeypatch.setattr(load, "_encode", _fake_map)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeProperties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: fake.capturing, raising=False)
    monkeypatch.setitem(tune.data(), "graph_tokens", 256)
    return fake


def addresses(call: dict[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in call.values())


def stored(program: bound.Program, number: int) -> set[int]:
    """Where launches find the caller's tensor of this number: x, out, ids or edges, weights."""
    names = ({"x"}, {"out"}, {"ids", "edges"}, {"weights"})[number]
    found = set()
    for step, launch in zip(steps(program.bindings.plan), program.bindings.launches):
        for argument, value in step.values.items():
            if isinstance(value, Ref) and value.owner == CALL and value.mapped is None and value.name in names:
                found.add(read(launch, argument))
    return found


def read(launch: driver.Launch, argument: str) -> int:
    """What the driver reads, from where it is told to."""
    _, _, told, _ = launch.arguments
    assert launch.address(argument) in told._obj
    return ctypes.c_uint64.from_address(launch.address(argument)).value


def bind(problem: Problem, tokens: int, layer: SampleLayer) -> bound.Program:
    return bound.Program(Bindings.bind(make_plan(problem, tokens), layer.weights, torch.device("cpu"), 0))


def run(problem: Problem, tokens: int, call: dict[str, torch.Tensor]) -> bound.Program:
    layer = make_layer(problem, "hopper", "cpu", distinct=1)
    program = bind(problem, tokens, layer)
    program.run(tokens, addresses(call))
    assert all(launch.config.gx > 0 for launch in program.bindings.launches)
    for number, pointer in enumerate(addresses(call)):
        assert stored(program, number) <= {pointer}
    return program


def small(activations: str = "bf16", dispatch: str = INDEXED) -> Problem:
    layer = layer_problem("mxfp4", activations, hidden=256, intermediate=128, experts=4, top_k=2)
    return replace(layer, dispatch=dispatch)


@pytest.mark.parametrize(("activations", "tokens", "launches"), [("bf16", 1, 2), ("bf16", 100, 10), ("fp8", 2000, 13)])
def test_a_call_stores_pointers_and_launches(gpu: FakeDriver, activations: str, tokens: int, launches: int) -> None:
    x, routed = torch.zeros(tokens, 256, dtype=torch.bfloat16), routing(small(), tokens, 0, "cpu")
    call = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    program = run(small(activations), tokens, call)
    assert gpu.launched == launches and stored(program, 1) and stored(program, 2)
    moved = {name: tensor.clone() for name, tensor in call.items()}
    program.run(max(1, tokens // 2), addresses(moved))
    assert gpu.launched == 2 * launches
    assert stored(program, 1) == {moved["out"].data_ptr()}


@pytest.mark.parametrize(("activations", "launches"), [("bf16", 9), ("fp8", 11)])
@pytest.mark.parametrize("dispatch", [CONTIGUOUS, BATCHED])
def test_finished_dispatches(gpu: FakeDriver, dispatch: str, activations: str, launches: int) -> None:
    """One launch makes the lists; there is nothing to combine."""
    x = torch.zeros(400, 256, dtype=torch.bfloat16)
    call = {"x": x, "out": torch.empty_like(x), "edges": torch.zeros(5, dtype=torch.int64)}
    program = run(small(activations, dispatch), 400, call)
    assert gpu.launched == launches
    assert bool(program.bindings.mapped) == (activations == "bf16")


@pytest.mark.parametrize(("tokens", "launches"), [(1, 1), (400, 5)])
def test_single_linears(gpu: FakeDriver, tokens: int, launches: int) -> None:
    problem = replace(
        small(), w13=replace(small().matrices["w2"], name="w13"), w2=None, experts=1, global_experts=1, top_k=1
    )
    x, out = torch.zeros(tokens, 128, dtype=torch.bfloat16), torch.zeros(tokens, 256, dtype=torch.bfloat16)
    run(problem, tokens, {"x": x, "out": out, "edges": torch.tensor([0, tokens])})
    assert gpu.launched == launches


def test_inputs_with_facts_of_their_experts(gpu: FakeDriver) -> None:
    """Stored factors and static scales: neither decodes slot by slot; factors a matrix lacks are ones."""
    x, routed = torch.zeros(4, 256, dtype=torch.bfloat16), routing(small(), 4, 0, "cpu")
    call = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    program = run(replace(small(), pre_scale=True), 4, call)
    assert [tensor.unique().tolist() for tensor in program.bindings.unit_pre_scales] == [[1.0], [1.0]]
    assert any(step.source.kernel == "prepare_rows" for step in steps(program.bindings.plan))


def test_arguments_keep_their_place(gpu: FakeDriver) -> None:
    values = [("map", bytes(range(128))), ("pointer", (7).to_bytes(8, "little")), ("count", (5).to_bytes(4, "little"))]
    launch = driver.Launch(1, 256, 0, 0, values, False, {})
    assert launch.integer_slot("count").value == 5 and read(launch, "pointer") == 7
    assert ctypes.string_at(launch.address("map"), 128) == bytes(range(128))
    assert launch.address("map") % 64 == 0
    shared = ctypes.c_uint64(99)
    launch.share("pointer", shared)
    assert read(launch, "pointer") == 99 and launch.integer_slot("count").value == 5
    shared.value = 100
    assert read(launch, "pointer") == 100


def test_an_argument_made_once_is_handed_over_whole_every_time() -> None:
    """Handles have 64 bits; the C library reads what lies where one points."""
    text = ctypes.create_string_buffer(b"whole")
    handle = driver.by_value(ctypes.addressof(text))
    assert [ctypes.CDLL(None).strlen(handle) for _ in range(3)] == [5, 5, 5]


class Operations(TorchDispatchMode):
    """Names of torch's own operations that were run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def held(tokens: int, made: SampleLayer | None = None) -> tuple[RoutedExperts, torch.Tensor, dict[str, torch.Tensor]]:
    """A layer as users hold it, and a call."""
    made = made or make_layer(small(), "hopper", "cpu", distinct=1)
    device = Device("cuda", 90)
    verdict = Verdict(made.backend, (), made.backend.plan(small(), tokens, device))
    layer = RoutedExperts(LayerParts(Choice(small(), device, "hopper", (verdict,), verdict), made.weights))
    x, routed = torch.zeros(tokens, 256, dtype=torch.bfloat16), routing(small(), tokens, 0, "cpu")
    return layer, x, {"topk_ids": routed.ids, "topk_weights": routed.weights, "out": torch.empty_like(x)}


@pytest.mark.parametrize("tokens", [1, 100])
def test_a_layer_adds_no_operation_of_its_own(gpu: FakeDriver, tokens: int) -> None:
    """Only launches: every small operation would cost the host as much as one."""
    layer, x, call = held(tokens)
    layer(x, **call)
    gpu.launched = 0
    with Operations() as ran:
        layer(x, **call)
    assert gpu.launched > 0 and ran.seen == []
    with Operations() as ran:
        layer(x, **{**call, "topk_ids": call["topk_ids"].long()})
    assert ran.seen  # other ids are made local first


def long_ways(layer: RoutedExperts, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever a call of this layer goes the long way."""
    found: list[int] = []
    whole = layer.compute

    def compute(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        found.append(x.shape[0])
        return whole(x, *rest)

    monkeypatch.setattr(layer, "compute", compute)
    return found


def test_a_second_call_takes_the_shortcut(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, call = held(100)
    slow = long_ways(layer, monkeypatch)
    layer(x, **call)
    first, gpu.launched = gpu.launched, 0
    moved = {name: tensor.clone() for name, tensor in call.items()}
    assert layer(x.clone(), **moved) is moved["out"] and slow == [100] and gpu.launched == first
    fewer = {name: tensor[:90] for name, tensor in call.items()}
    for _ in range(2):
        layer(x[:90], **fewer)
    assert slow == [100, 90]


@contextmanager
def made_current(current: list[int], index: int) -> Iterator[None]:
    before, current[0] = current[0], index
    yield
    current[0] = before


@pytest.mark.parametrize("what", ["stream", "device", "memory", "parameter", "copy", "place", "map"])
def test_what_changed_goes_the_long_way(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A shortcut computes with what it was made for, and with nothing else."""
    layer, x, call = held(100)
    layer(x, **call)
    if what == "stream":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    elif what == "device":
        current = [1]
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
        monkeypatch.setattr(torch.cuda, "device", lambda index: made_current(current, index))
    elif what == "memory":
        layer.w13_codes.data = layer.w13_codes.data.clone()
    elif what == "parameter":
        layer.w2_factors = torch.nn.Parameter(layer.w2_factors.clone(), requires_grad=False)
    elif what == "copy":
        layer = copy.deepcopy(layer)
    elif what == "place":
        x = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)  # just like the first, but for where it starts
    else:
        layer.expert_map = torch.arange(4)
    slow, gpu.launched = long_ways(layer, monkeypatch), 0
    layer(x, **call)
    assert slow == [100] and gpu.launched > 0


def held_names() -> list[str]:
    problem = small()
    layout = registry()["hopper"].layout(problem)
    return [f"{matrix}_{name}" for matrix, shape in problem.matrices.items() for name in layout.storage(shape)]


@pytest.mark.parametrize("name", held_names())
@pytest.mark.parametrize("way", ["data", "parameter", "dictionary", "adopt", "deletion"])
def test_no_launch_reads_a_weight_that_was_replaced(gpu: FakeDriver, name: str, way: str) -> None:
    """Every tensor a layer holds, every way to replace it: the launches point to the new memory."""
    layer, x, call = held(100)
    for _ in range(2):
        layer(x, **call)
    value = layer.get_parameter(name).data.clone()
    if way == "data":
        layer.get_parameter(name).data = value
    elif way == "parameter":
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    elif way == "dictionary":
        layer._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    elif way == "adopt":
        matrix, _, own = name.partition("_")
        layer.adopt(
            layer.choice, {m: ({**held, own: value} if m == matrix else held) for m, held in layer.packed.items()}
        )
    else:
        del layer._parameters[name]
        gpu.launched = 0
        with pytest.raises(MissingTensor, match=name):
            layer(x, **call)
        assert gpu.launched == 0
        return
    gpu.launched = 0
    layer(x, **call)
    layer(x, **call)
    assert gpu.launched > 0
    executor = layer.executor
    assert isinstance(executor, HopperExecutor)
    for addresses, program in executor.programs.values():
        assert addresses == layer.executor.tensors.addresses()
        assert value.data_ptr() in addresses
        assert value.data_ptr() in bound_addresses(program)


def bound_addresses(program: bound.Program) -> set[int]:
    """Every 8 bytes of every argument of every launch, and what tensor maps were made of."""
    found = set(MAPPED)
    for step, launch in zip(steps(program.bindings.plan), program.bindings.launches):
        for argument, value in step.values.items():
            if isinstance(value, Ref) and value.mapped is None:
                found.add(read(launch, argument) - value.offset)
    return found


MAPPED: list[int] = []  # addresses of matrices behind tensor maps


def test_dropped_layers_leave_nothing_behind(gpu: FakeDriver) -> None:
    """200 layers, called and dropped: neither the backend nor anything else of ours keeps them."""
    made = make_layer(small(), "hopper", "cpu", distinct=1)
    gone = []
    for _ in range(200):
        layer, x, call = held(4, made)
        layer(x, **call)
        layer(x, **call)
        gone.append(weakref.ref(layer.executor))
    del layer
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]
    assert not vars(made.backend)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "out"])
def test_misfits_are_named_after_a_shortcut_too(gpu: FakeDriver, name: str) -> None:
    layer, x, call = held(100)
    layer(x, **call)
    layer(x, **call)
    gpu.launched, given = 0, {"x": x, **call}
    given[name] = given[name].t().contiguous()
    with pytest.raises(LaunchError, match="fit"):
        layer(given.pop("x"), **given)
    assert gpu.launched == 0


class Slow(FakeDriver):
    """Gives every other thread its chance in the middle of a call; notes whose launch each one was."""

    def __init__(self) -> None:
        super().__init__()
        self.whose: list[int] = []

    def _launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        self.whose.append(get_ident())
        sleep(0.001)
        return 0


def test_calls_of_two_threads_do_not_mix(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a stream's scratch memory and a program's arguments."""
    slow = Slow()
    monkeypatch.setattr(driver, "library", lambda: slow)
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    x, routed = torch.zeros(300, 256, dtype=torch.bfloat16), routing(small(), 300, 0, "cpu")
    outs = [torch.empty_like(x) for _ in range(2)]
    layer(x, routed, outs[0])
    launches, slow.whose = len(slow.whose), []
    threads = [Thread(target=layer, args=(x, routed, out)) for out in outs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns = [set(slow.whose[i : i + launches]) for i in range(0, len(slow.whose), launches)]
    assert len(turns) == 4 and all(len(turn) == 1 for turn in turns)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ids": torch.zeros(100, 2, dtype=torch.int64)}, "another dtype"),
        ({"ids": torch.zeros(99, 2, dtype=torch.int32)}, "do not fit"),
        ({"weights": torch.zeros(100, 3)}, "do not fit"),
        ({"x": torch.zeros(120, 256, dtype=torch.bfloat16), "out": torch.zeros(120, 256, dtype=torch.bfloat16),
          "ids": torch.zeros(120, 2, dtype=torch.int32), "weights": torch.zeros(120, 2)}, "more tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_not_launched(
    gpu: FakeDriver, changed: dict[str, torch.Tensor], why: str
) -> None:
    """Also once a call has bound the program, from when on calls take the short way."""
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), 100, layer)
    x, routed = torch.zeros(100, 256, dtype=torch.bfloat16), routing(small(), 100, 0, "cpu")
    good = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    for call in (good, good):
        run_program(program, call["x"], Indexed(call["ids"], call["weights"]), call["out"])
    gpu.launched, call = 0, {**good, **changed}
    with pytest.raises(LaunchError, match=why):
        run_program(program, call["x"], Indexed(call["ids"], call["weights"]), call["out"])
    assert gpu.launched == 0


def test_an_interrupted_call_leaves_nothing_behind(gpu: FakeDriver) -> None:
    """Neither its sizes nor its addresses are taken for those of the call before."""
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), 100, layer)
    call = (16, 32, 48, 64)
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


@pytest.mark.parametrize("what", ["stale", "graph"])
def test_an_interrupted_call_leaves_no_other_grids_in_the_graph(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), 100, layer)
    program.run(100, (16, 32, 48, 64))
    program.run(100, (16, 80, 48, 64))
    assert program.graph is not None

    class Interrupted(set[int]):
        def update(self, *others: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        if what == "stale":
            during.setattr(program, "outdated", Interrupted())
        else:
            during.setattr(program.graph, "copy_grids", Interrupted().update)
        program.run(90, (16, 32, 48, 64))
    program.run(90, (16, 32, 48, 64))
    program.run(90, (16, 80, 48, 64))
    assert [told[-1][0] for told in gpu.nodes] == [launch.config.gx for launch in program.bindings.launches]


def test_a_graph_of_work_that_lies_by_expert_follows_its_input(gpu: FakeDriver) -> None:
    """The first product may have x through a tensor map alone: its launch is renewed all the same."""
    problem = small(dispatch=CONTIGUOUS)
    layer = make_layer(problem, "hopper", "cpu", distinct=1)
    program = bind(problem, 100, layer)
    for _ in range(2):
        program.run(100, (16, 32, 48))
    assert program.graph is not None and program.bindings.mapped
    for _ in range(2):
        program.run(100, (1 << 20, 32, 48))
    reading = {program.bindings.launches.index(launch) for launch, _ in program.bindings.mapped}
    assert gpu.repeated > 1 and all(len(gpu.nodes[number]) == 2 for number in reading)


def test_ids_are_no_edges(gpu: FakeDriver) -> None:
    """A plan of work that lies by expert does not take another's tensors for its own, however well they fit."""
    problem = small(dispatch=CONTIGUOUS)
    layer = make_layer(problem, "hopper", "cpu", distinct=1)
    program = bind(problem, 100, layer)
    x, routed = torch.zeros(100, 256, dtype=torch.bfloat16), routing(small(), 100, 0, "cpu")
    run_program(program, x, Contiguous(torch.tensor([0, 100, 100, 100, 100])), torch.empty_like(x))
    gpu.launched = 0
    with pytest.raises(LaunchError, match="contiguous work"):
        run_program(program, x, Indexed(routed.ids, routed.weights), torch.empty_like(x))
    assert gpu.launched == 0


@pytest.mark.parametrize("name", ["x", "out", "ids", "weights"])
@pytest.mark.parametrize("gaps", [True, False])
def test_views_are_copied_to_where_kernels_can_read_them(gpu: FakeDriver, name: str, gaps: bool) -> None:
    """Rows of a larger batch: with gaps between them, or starting anywhere."""
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), 100, layer)
    x, routed = torch.zeros(100, 256, dtype=torch.bfloat16), routing(small(), 100, 0, "cpu")
    call = {"x": x, "out": torch.empty_like(x), "ids": routed.ids, "weights": routed.weights}
    given = call[name]
    if gaps:
        call[name] = torch.zeros(200, given.shape[1], dtype=given.dtype)[::2]
    else:
        call[name] = torch.zeros(given.numel() + 1, dtype=given.dtype)[1:].view(given.shape)
    for _ in range(2):
        run_program(program, call["x"], Indexed(call["ids"], call["weights"]), call["out"])
    at = stored(program, list(call).index(name))
    assert gpu.launched == 2 * len(program.bindings.launches) and at != {call[name].data_ptr()}
    assert all(pointer % bound.ALIGNMENT == 0 for pointer in at)


def test_tensor_maps_of_known_inputs_are_not_made_again(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's call costs as much as a launch; allocators give the same addresses again and again."""
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), 1, layer)
    made: list[int] = []
    monkeypatch.setattr(load, "_encode", lambda matrix, facts: made.append(matrix.pointer) or bytes([9]) * 128)
    for x in (16, 160, 16, 160, 16):
        program.run(1, (x, 32, 48, 64))
    launch, name = program.bindings.mapped[0]
    assert made == [16, 160] and ctypes.string_at(launch.address(name), 128) == bytes([9]) * 128


def test_few_tokens_are_launched_as_one(gpu: FakeDriver) -> None:
    """In order; told again only of what changed; one by one where all did, and while the caller captures a graph."""
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), 100, layer)
    call, count = (16, 32, 48, 64), len(program.bindings.launches)
    program.run(100, call)
    assert gpu.repeated == 0 and gpu.launched == count
    program.run(100, (16, 80, 48, 64))
    assert gpu.repeated == 1 and gpu.order == [(i, i + 1) for i in range(1, count)]
    assert all(
        told == [(launch.config.gx, launch.parameters)] for told, launch in zip(gpu.nodes, program.bindings.launches)
    )
    program.run(100, (16, 160, 48, 64))
    assert [len(told) for told in gpu.nodes] == [1 + (i in program.bindings.with_caller) for i in range(count)]
    assert (
        0 in program.bindings.with_caller
        and count - 1 in program.bindings.with_caller
        and len(program.bindings.with_caller) < count
    )
    program.run(90, call)
    assert gpu.repeated == 2
    program.run(90, call)
    assert gpu.repeated == 3
    assert all(told[-1][0] == launch.config.gx for told, launch in zip(gpu.nodes, program.bindings.launches))
    assert gpu.nodes[0][-1][0] == 91  # a block for each token, and one that makes the lists
    gpu.capturing, gpu.launched = True, 0
    program.run(80, call)
    program.run(80, call)
    assert gpu.repeated == 3 and gpu.launched == 2 * count
    gpu.capturing = False
    program.run(80, call)
    assert gpu.nodes[0][-1][0] == 81 and gpu.dropped == 0
    del program
    gc.collect()
    assert gpu.dropped == 2


@pytest.mark.parametrize("tokens", [1, 100, 300])
def test_a_thread_that_has_not_used_the_gpu_gets_its_context(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Whichever way launches go; nothing is launched twice, and what else fails is said."""
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), tokens, layer)
    call, count, used = (16, 32, 48, 64), len(program.bindings.launches), list[int]()
    monkeypatch.setattr(bound, "use_context", used.append)
    for name, whole in (("cuLaunchKernelEx", gpu.cuLaunchKernelEx), ("cuGraphLaunch", gpu.cuGraphLaunch)):

        def refuse(*arguments: object, whole: Any = whole) -> int:
            return int(whole(*arguments)) if used else 201

        monkeypatch.setattr(gpu, name, refuse)
    program.go = gpu.cuLaunchKernelEx
    program.run(tokens, call)
    assert used == [0] and gpu.launched == count
    used.clear()
    program.run(tokens, call)
    assert used == [0] and gpu.launched == 2 * count
    monkeypatch.setattr(program, "go", lambda *arguments: 700)
    with pytest.raises(DriverError, match="700"):
        program.run(tokens - 1 or 2, call)
    program.graph = None
    with pytest.raises(ContextError, match="201"):
        driver.check(201, "computing")


@pytest.mark.parametrize(("tokens", "old"), [(300, False), (100, True)])
def test_other_calls_are_launched_one_by_one(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, tokens: int, old: bool
) -> None:
    """Many tokens, or a driver that is too old."""
    if old:
        monkeypatch.delattr(FakeDriver, "cuGraphAddDependencies_v2")
    layer = make_layer(small(), "hopper", "cpu", distinct=1)
    program = bind(small(), tokens, layer)
    program.run(tokens, (16, 32, 48, 64))
    assert gpu.repeated == 0 and gpu.launched == len(program.bindings.launches)
