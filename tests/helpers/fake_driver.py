"""A fake CUDA driver, and Hopper programs and layers that launch on it: everything above the driver is real."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from lancebill.backends.call_signature import RoutingLayout
from lancebill.backends.gpu import executor
from lancebill.backends.gpu import program as bound
from lancebill.backends.gpu.bindings import Bindings
from lancebill.backends.gpu.step import CALL, Ref
from lancebill.backends.gpu.workspace import Workspaces
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import steps
from lancebill.backends.hopper.tuning import policy as tune
from lancebill.backends.oracle import Choice, Verdict
from lancebill.jit import driver, load
from lancebill.jit.compile import Binary, Desc, KernelSource
from lancebill.jit.load import MappedMatrix
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device
from lancebill.moe.problem import INDEXED, Problem
from lancebill.testing.layers import SampleLayer, layer_problem, make_layer, routing

FUNCTION, READY, NODE = 1 << 33, 1 << 34, 1 << 35  # handles above 32 bits: a truncated one does not match
MAPPED_ADDRESSES: list[int] = []  # of the matrices that tensor maps were encoded for


class FakeDriver:
    """Counts single launches and graph launches; records the parameters of each graph node.

    Arguments arrive as C values. A function that gets a wrong handle returns an error code.
    """

    def __init__(self) -> None:
        address = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[address] * 4)(self._launch)
        self.cuGraphExecKernelNodeSetParams_v2 = ctypes.CFUNCTYPE(ctypes.c_int, *[address] * 3)(self._set_params)
        self.cuGraphLaunch = ctypes.CFUNCTYPE(ctypes.c_int, *[address] * 2)(self._launch_graph)
        self.launched, self.graph_launches, self.destroyed = 0, 0, 0
        self.invalidated = False  # a capture, by a call that its mode forbids
        self.capture, self.capture_mode = 0, 0  # the number of the capture in progress, 0: none
        self.elsewhere = False  # another stream or thread captures
        self.nodes: list[list[tuple[int, int]]] = []  # per node: grid and parameters, each time they were set
        self.edges: list[tuple[int, int]] = []
        self.node_params: list[Any] = []  # the parameter struct of each node

    def _launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        self.launched += 1
        return int(function != FUNCTION)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.capture_mode, mode._obj.value = mode._obj.value, self.capture_mode
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, *rest: None) -> int:
        number._obj.value = self.capture
        return int(not self.capture)

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 0

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        self.nodes, self.edges, self.node_params = [], [], []
        return 0

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, before: None, count: Any, params: Any) -> int:
        self.nodes.append([(params._obj.gx, params._obj.parameters)])
        self.node_params.append(params._obj)
        node._obj.value = NODE + len(self.nodes)
        return 0

    def cuGraphAddDependencies_v2(self, graph: Any, first: Any, then: Any, edge: Any, count: Any) -> int:
        self.edges.append((first._obj.value - NODE, then._obj.value - NODE))
        return 0

    def cuGraphInstantiateWithFlags(self, ready: Any, graph: Any, flags: Any) -> int:
        self._unsafe()
        ready._obj.value = READY
        return 0

    def cuGraphExecDestroy(self, ready: Any) -> int:
        return self._destroy()

    def cuGraphDestroy(self, graph: Any) -> int:
        return self._destroy()

    def _destroy(self) -> int:
        self.destroyed += 1
        self._unsafe()
        return 0

    def _unsafe(self) -> None:
        """A call that captures forbid, also those of other streams and threads."""
        self.invalidated |= (self.capture > 0 or self.elsewhere) and self.capture_mode != driver._RELAXED

    def _set_params(self, ready: int, node: int, params: int) -> int:
        node_params = self.node_params[node - NODE - 1]
        self.nodes[node - NODE - 1].append((node_params.gx, node_params.parameters))
        return int((ready, params) != (READY, ctypes.addressof(node_params)))

    def _launch_graph(self, ready: int, stream: int | None) -> int:
        self.launched += len(self.nodes)
        self.graph_launches += 1
        return int((ready, stream) != (READY, None))


class FakeProperties:
    multi_processor_count = 132


def fake_load_kernel(source: KernelSource, device: int) -> tuple[int, Binary]:
    descs = [kind for _, kind in source.arguments if isinstance(kind, Desc)]
    facts = tuple({"block_size": list(d.box), "elem_size": 2, "swizzle": 3} for d in descs)
    return FUNCTION, Binary(b"", "kernel", 1024, 256, 64, facts)


def _fake_encode(matrix: MappedMatrix, facts: object) -> bytes:
    MAPPED_ADDRESSES.append(matrix.pointer)
    return bytes(driver.MAP_BYTES)


@pytest.fixture(name="gpu")
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    MAPPED_ADDRESSES.clear()
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(load, "load_kernel", fake_load_kernel)
    monkeypatch.setattr(load, "_encode", _fake_encode)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeProperties)
    monkeypatch.setattr(executor, "WORKSPACES", Workspaces())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: fake.capture > 0, raising=False)
    monkeypatch.setitem(tune.data(), "graph_tokens", 256)
    return fake


ROUTED = (0, *RoutingLayout.of(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2), 0))  # no expert map


def call_values(call: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """What a program is given for these tensors: their addresses, and how to read ids and weights."""
    return *(tensor.data_ptr() for tensor in call.values()), *(ROUTED if "ids" in call else ())


def stored_addresses(program: bound.Program, number: int) -> set[int]:
    """The addresses that launches read for one of the caller's tensors: x, out, ids or edges, weights."""
    names = ({"x"}, {"out"}, {"ids", "edges"}, {"weights"})[number]
    stored = set()
    for step, launch in zip(program.bindings.steps, program.bindings.launches):
        for argument, value in step.values.items():
            if isinstance(value, Ref) and value.owner == CALL and value.mapped is None and value.name in names:
                stored.add(read_argument(launch, argument))
    return stored


def read_argument(launch: driver.Launch, argument: str) -> int:
    """The value the driver reads for this argument."""
    _, _, parameters, _ = launch.arguments
    assert launch.address(argument) in parameters._obj
    return ctypes.c_uint64.from_address(launch.address(argument)).value


def bind_program(problem: Problem, tokens: int, layer: SampleLayer) -> bound.Program:
    plan, device = make_plan(problem, tokens), torch.device("cpu")
    workspace = executor.WORKSPACES.of_stream(device, 0, plan.workspace_bytes)
    return bound.Program(Bindings.bind(plan, steps(plan), layer.weights, device, 0, workspace))


def small_problem(activations: str = "bf16", dispatch: str = INDEXED) -> Problem:
    layer = layer_problem("mxfp4", activations, hidden=256, intermediate=128, experts=4, top_k=2)
    return replace(layer, dispatch=dispatch)


def layer_and_call(
    tokens: int, made: SampleLayer | None = None
) -> tuple[RoutedExperts, torch.Tensor, dict[str, torch.Tensor]]:
    """A layer, an input, and the other arguments of a call."""
    made = made or make_layer(small_problem(), "hopper", "cpu", distinct=1)
    device = Device("cuda", 90)
    verdict = Verdict(made.backend, (), made.backend.plan(small_problem(), tokens, device))
    layer = RoutedExperts(LayerParts(Choice(small_problem(), device, "hopper", (verdict,), verdict), made.weights))
    x, routed = torch.zeros(tokens, 256, dtype=torch.bfloat16), routing(small_problem(), tokens, 0, "cpu")
    return layer, x, {"topk_ids": routed.ids, "topk_weights": routed.weights, "out": torch.empty_like(x)}
