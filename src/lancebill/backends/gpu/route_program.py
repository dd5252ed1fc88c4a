"""The routing kernel of a layer, bound once for each stream: a call stores addresses and launches.

It needs no scratch memory, so capture needs nothing special: ids and weights are then allocated in the graph's pool.
"""

from __future__ import annotations

import ctypes
from threading import Lock

import torch
from torch import Tensor

from lancebill.backends.gpu.route_step import RouteStep
from lancebill.backends.limited_dict import LimitedDict
from lancebill.backends.route_call import BoundRouting, FastRoute, RouteCall
from lancebill.errors import ContextError
from lancebill.jit.address import address_on
from lancebill.jit.driver import check_launch, launch_function, use_context
from lancebill.jit.load import prepare_launch
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed, Routing

_MOST_STREAMS = 64  # programs, before all are dropped
_CALLERS = ("logits", "input_ids", "ids", "weights", "identity")  # tensors that differ from call to call


class RouteProgram(BoundRouting):
    """The launch of one routing on one stream, bound to the router's own tensors."""

    def __init__(self, step: RouteStep, call: RouteCall, stream: int) -> None:
        super().__init__(call)
        index, self.stream = call.logits.device.index or 0, stream
        if call.logits.device.type == "cuda":
            use_context(index)
        own, device = call.router._asdict(), call.logits.device
        fixed = {name: 0 if tensor is None else address_on(tensor, device, name) for name, tensor in own.items()}
        values = {**step.values, **fixed, "stride": call.logits.stride(0), **dict.fromkeys(_CALLERS, 0)}
        self.launch = prepare_launch(step.source, index, stream, values, dependent=True)
        self.callers = (ctypes.c_uint64 * len(_CALLERS))()
        for place, name in enumerate(_CALLERS):
            self.launch.share(name, ctypes.c_uint64.from_buffer(self.callers, 8 * place))
        self.go = launch_function()
        self.lock = Lock()  # threads on one stream take turns: they share the arguments

    def fast_route(self, call: RouteCall) -> FastRoute:
        """Further calls like this one on the same stream. Not for hash routing."""
        repeats, run, device, stream = self.repeats(call), self.run, call.logits.device.index or 0, self.stream

        def fast_route(routing: Routing, logits: Tensor, router: RouterTensors, hidden: Tensor) -> Routed | None:
            here = torch._C._cuda_getDevice() == device and torch._C._cuda_getCurrentRawStream(device) == stream
            return run(logits, None) if here and repeats(routing, logits, router, hidden) else None

        return fast_route

    def run(self, logits: Tensor, input_ids: Tensor | None) -> Routed:
        """Launch for these logits; ids and weights are new tensors."""
        shape, device = (logits.shape[0], self.routing.top_k), logits.device
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        identity = torch.empty(shape[:1], dtype=torch.float32, device=device) if self.routing.zero_experts else None
        at = (
            logits.data_ptr(),
            0 if input_ids is None else input_ids.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            0 if identity is None else identity.data_ptr(),
        )
        with self.lock:
            self.callers[:] = at  # type: ignore[call-overload]  # any sequence will do
            self.launch.grid(shape[0])
            try:
                check_launch(self.go(*self.launch.arguments))
            except ContextError:  # a thread that has not used the GPU yet
                use_context(device.index or 0)
                check_launch(self.go(*self.launch.arguments))
        return Routed(ids, weights, identity)


class RoutePrograms:
    """The programs of a layer, by stream. `arch`: the compute capability that kernels are compiled for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self._programs = LimitedDict[int, RouteProgram](_MOST_STREAMS)

    def find(self, call: RouteCall) -> RouteProgram | None:
        """The program for this call on the current stream; None if the kernel does not support the call."""
        stream = torch._C._cuda_getCurrentRawStream(call.logits.device.index or 0)
        program = self._programs.get(stream)
        if program is not None and program.serves(call):
            return program
        step = RouteStep.of(call) if call.supported() else None
        if step is None:
            return None
        program = self._programs[stream] = RouteProgram(step.compiled_for(self.arch), call, stream)
        return program
