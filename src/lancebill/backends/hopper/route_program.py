"""The routing kernel of a layer, bound once for each stream: a call stores addresses and launches.

It needs no scratch memory, so capture needs nothing special: ids and weights are then allocated in the graph's pool.
"""

from __future__ import annotations

import ctypes
from threading import Lock

import torch
from torch import Tensor

from lancebill.backends.hopper.route_step import RouteStep, rows_readable
from lancebill.errors import ContextError
from lancebill.jit.driver import check_launch, launch_function, use_context
from lancebill.jit.load import prepare_launch
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed, Routing, check_inputs, check_lookup

_MOST_STREAMS = 64  # programs, before all are dropped
_CALLERS = ("logits", "input_ids", "ids", "weights", "identity")  # tensors that differ from call to call


class RouteProgram:
    """The launch of one routing on one stream, bound to the router's own tensors."""

    def __init__(
        self, step: RouteStep, routing: Routing, logits: Tensor, router: RouterTensors, input_ids: Tensor | None
    ) -> None:
        index = logits.device.index or 0
        stream = torch._C._cuda_getCurrentRawStream(index)
        self.routing, self.router, self.addresses = routing, router, router.addresses()
        self.logits = logits.dtype, logits.device, logits.shape[1], logits.stride()
        self.input_ids = None if input_ids is None else (input_ids.dtype, input_ids.device)
        fixed = dict(zip(("bias", "correction", "table"), self.addresses))
        values = {**step.values, "stride": logits.stride(0), **fixed, **dict.fromkeys(_CALLERS, 0)}
        if logits.device.type == "cuda":
            use_context(index)
        self.launch = prepare_launch(step.source, index, stream, values, dependent=True)
        self.callers = (ctypes.c_uint64 * len(_CALLERS))()
        for place, name in enumerate(_CALLERS):
            self.launch.share(name, ctypes.c_uint64.from_buffer(self.callers, 8 * place))
        self.go = launch_function()
        self.lock = Lock()  # threads on one stream take turns: they share the arguments

    def serves(self, routing: Routing, logits: Tensor, router: RouterTensors, input_ids: Tensor | None) -> bool:
        """Whether everything that it is bound to is still right."""
        return (
            (routing is self.routing or routing == self.routing)
            and self.logits == (logits.dtype, logits.device, logits.shape[1], logits.stride())
            and router.same_as(self.router)
            and router.addresses() == self.addresses
            and self.input_ids == (None if input_ids is None else (input_ids.dtype, input_ids.device))
        )

    def run(self, logits: Tensor, input_ids: Tensor | None) -> Routed:
        shape, device = (logits.shape[0], self.routing.top_k), logits.device
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        identity = torch.empty(shape[0], dtype=torch.float32, device=device) if self.routing.zero_experts else None
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
    """The programs of a layer, by stream."""

    def __init__(self) -> None:
        self._programs: dict[int, RouteProgram] = {}

    def route(
        self, routing: Routing, logits: Tensor, router: RouterTensors, hidden: Tensor | None, input_ids: Tensor | None
    ) -> Routed | None:
        """None if the kernel does not support this call. The device of the logits must be current."""
        if logits.dim() != 2 or not logits.shape[0] or (hidden is not None and len(hidden) != len(logits)):
            return None
        if not rows_readable(logits):
            logits = logits.contiguous()
        if not routing.hashed:
            input_ids = None
        elif input_ids is not None:
            input_ids = input_ids.reshape(-1)
            if len(input_ids) != len(logits):
                return None
        stream = torch._C._cuda_getCurrentRawStream(logits.device.index or 0)
        program = self._programs.get(stream)
        if program is None or not program.serves(routing, logits, router, input_ids):
            program = _bind(routing, logits, router, input_ids)
            if program is None:
                return None
            if len(self._programs) >= _MOST_STREAMS:
                self._programs.clear()
            self._programs[stream] = program
        return program.run(logits, input_ids)


def _bind(routing: Routing, logits: Tensor, router: RouterTensors, input_ids: Tensor | None) -> RouteProgram | None:
    check_inputs(routing, logits, None, router.bias, router.correction)
    lookup, vocabulary = (torch.int32, torch.int32), 0
    tensors = [router.bias, router.correction, input_ids]
    if routing.hashed:
        table, tokens = check_lookup(routing, len(logits), router.table, input_ids)
        tensors.append(table)
        lookup, vocabulary = (table.dtype, tokens.dtype), len(table)
    if any(tensor is not None and not (tensor.is_contiguous() and tensor.device == logits.device) for tensor in tensors):
        return None
    floats = [tensor.dtype for tensor in (router.bias, router.correction) if tensor is not None]
    step = RouteStep.make(
        routing, logits.shape[1], logits.dtype, biased=router.bias is not None,
        corrected=router.correction is not None, lookup=lookup, vocabulary=vocabulary,
    )  # fmt: skip
    if step is None or any(dtype is not torch.float32 for dtype in floats):
        return None
    return RouteProgram(step, routing, logits, router, input_ids)
