"""What a layer on a GPU keeps between calls: one program for each plan and stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Executor, FastCall, LinearCall, Plan, TensorTable, call_tensors
from lancebill.backends.gpu.bindings import Bindings
from lancebill.backends.gpu.call import check_call, dense, is_dense, readable, write_back
from lancebill.backends.gpu.linear_call import linear_call
from lancebill.backends.gpu.plan import SINGLE, GpuPlan
from lancebill.backends.gpu.program import Program
from lancebill.backends.gpu.route_program import RouteProgram, RoutePrograms
from lancebill.backends.gpu.step import Step
from lancebill.backends.gpu.target import compile_target
from lancebill.backends.gpu.tiles import bucket, buckets
from lancebill.backends.gpu.workspace import WORKSPACES, Workspace, outside_pools, reserve_workspace
from lancebill.backends.route_call import RouteCall
from lancebill.errors import LaunchError
from lancebill.jit.address import address_on
from lancebill.moe.device import Device, require_on
from lancebill.moe.dispatch import Contiguous, Dispatch, Indexed
from lancebill.moe.problem import CONTIGUOUS, INDEXED, Problem
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed, Routing


class GpuExecutor(Executor):
    """Rebinds a program when any address of the weights or of the workspace differs from those it was bound to."""

    def __init__(
        self,
        backend: Backend,
        problem: Problem,
        device: Device,
        tensors: TensorTable,
        steps: Callable[[GpuPlan], tuple[Step, ...]],
    ) -> None:
        super().__init__(backend, problem, device, tensors)
        self.steps = steps
        self.reserved: Workspace | None = None  # for captured calls
        self._workspaces: dict[int, Workspace] = {}  # of eager calls, by stream: those that programs are bound to
        self._unread: Tensor | None = None  # see `run_linear`
        self.route_programs = RoutePrograms(compile_target(device.arch))

    def plan_key(self, tokens: int) -> int:
        return bucket(max(tokens, 1))

    def run(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        if x.numel() == 0:
            return out
        plan = self.plan(x, dispatch)
        assert isinstance(plan, GpuPlan)
        return self.run_plan(plan, x, dispatch, out)

    def run_plan(self, plan: GpuPlan, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        """One call on the current stream."""
        on = self.tensors.device  # the scratch memory must be there too, and no kernel reads another device's x
        if x.device != on or out.device != on:
            require_on(on, x=x, out=out)
        index = on.index or 0
        if torch._C._cuda_getDevice() != index:  # kernels are loaded for a device and launched with it current
            with torch.cuda.device(index):
                return self.run_plan(plan, x, dispatch, out)
        workspace = self.workspace(plan, x.device)  # alive until the launches are queued
        return run_program(self.program(plan, x.device, workspace), x, dispatch, out)

    def workspace(self, plan: GpuPlan, device: torch.device) -> Workspace:
        """The memory for a call on the current stream."""
        stream, size = torch._C._cuda_getCurrentRawStream(device.index or 0), plan.workspace_bytes
        if not _capturing():
            held = WORKSPACES.of_stream(device, stream, size)
            before = self._workspaces.get(stream, held)
            if before is not held:
                self._drop_programs(stream)
            self._workspaces[stream] = held
            return held
        reserved = self.reserved
        if reserved is not None and reserved.memory.numel() >= size and reserved.serves(stream):
            return reserved
        workspace = WORKSPACES.of_capture(device, stream, size, counting=plan.counts)
        if workspace.counters is not None:
            self.graph_memory[workspace.counters.data_ptr()] = workspace.counters
        return workspace

    def _drop_programs(self, stream: int) -> None:
        """Drop programs of eager calls on this stream: its workspace was outgrown, and they would keep it alive.

        With all fast calls, which are made again of the programs that stay.
        """
        for key in list(self.made):
            if isinstance(key, tuple) and key[2:] == (stream, False):
                self.made.pop(key, None)
        self.fast_calls.clear()
        self.fast_linears.clear()

    def route(
        self,
        routing: Routing,
        logits: Tensor,
        router: RouterTensors,
        hidden: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Routed:
        on = self.tensors.device
        if logits.device != on:
            require_on(on, router_logits=logits)
        index = on.index or 0
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.route(routing, logits, router, hidden, input_ids)
        return super().route(routing, logits, router, hidden, input_ids)

    def bind_route(self, call: RouteCall) -> RouteProgram | None:
        return self.route_programs.find(call)

    def program(self, plan: GpuPlan, device: torch.device, workspace: Workspace) -> Program:
        """The program of this plan on the current stream, bound to the weights where they are now."""
        stream, captured = torch._C._cuda_getCurrentRawStream(device.index or 0), _capturing()

        def bind() -> Program:
            bindings = Bindings.bind(plan, self.steps(plan), self.tensors.packed(), device, stream, workspace)
            return Program(bindings, captured=captured)

        addresses = [*self.tensors.addresses(), *workspace.addresses]
        return self.remade((plan.work, plan.tokens, stream, captured), addresses, bind)

    def fast_call(self, x: Tensor, plan: Plan, mapped: bool) -> FastCall | None:
        """Further calls with as many tokens on this stream, as long as the weights have not moved; none in a capture.

        Returns a function and not an object with `__call__`, which takes the host longer to call.
        """
        assert isinstance(plan, GpuPlan)
        if not _eager(x):
            return None
        workspace, tokens, tensors = self.workspace(plan, x.device), x.shape[0], self.tensors
        program = self.program(plan, x.device, workspace)
        signature, addresses = program.signature(tokens, mapped), tensors.addresses()
        if signature is None:
            return None
        run, device, stream = program.run_indexed, program.bindings.index, program.bindings.stream
        count, current, key = 5 if mapped else 4, WORKSPACES.eager, (device, stream)

        def fast_call(*given: Tensor) -> bool:
            return (
                len(given) == count
                and torch._C._cuda_getDevice() == device
                and torch._C._cuda_getCurrentRawStream(device) == stream
                and not torch._C._cuda_isCurrentStreamCapturing()
                and tensors.addresses() == addresses
                and current.get(key) is workspace
                and run(tokens, signature, given)
            )

        return fast_call

    def run_linear(self, x: Tensor, out: Tensor) -> Tensor:
        """Of a single matrix the kernels read no offsets, and making some would be a launch of its own."""
        on = self.tensors.device
        if self._unread is None or self._unread.device != on:
            self._unread = outside_pools(on, None, lambda: torch.zeros(2, dtype=torch.int64, device=on))
        return self.run(x, Contiguous(self._unread), out)

    def linear_call(self, x: Tensor, plan: Plan) -> LinearCall | None:
        """Further calls with an x like this one on this stream, as long as the weights have not moved; none in a
        capture, which has memory of its own."""
        assert isinstance(plan, GpuPlan)
        if not _eager(x) or plan.work != SINGLE or x.dtype != plan.problem.input.storage or not is_dense(x):
            return None
        workspace = self.workspace(plan, x.device)
        return linear_call(self.program(plan, x.device, workspace), self.tensors, x, workspace, WORKSPACES)

    @classmethod
    def reserve(cls, executors: Sequence[Executor], max_tokens: int) -> int:
        """One workspace for all layers given."""
        own = [executor for executor in executors if isinstance(executor, GpuExecutor)]
        different = {(executor.backend.name, executor.problem): executor for executor in own}  # most models' are alike
        size = max(executor.most_bytes(max_tokens) for executor in different.values())
        held = own[0].reserved
        if held is None or held.memory.numel() < size or any(executor.reserved is not held for executor in own):
            held = reserve_workspace(own[0].tensors.device, size)
        for executor in own:
            executor.reserved = executor.graph_memory[held.memory.data_ptr()] = held
        return size

    def most_bytes(self, max_tokens: int) -> int:
        """The largest workspace of a call with up to this many tokens. A larger batch may need less."""
        form = CONTIGUOUS if self.problem.w2 is None else INDEXED
        return max(self.plan_for(form, tokens).workspace_bytes for tokens in buckets(max_tokens))

    def forget(self) -> None:
        super().forget()
        self.route_programs = RoutePrograms(compile_target(self.device.arch))


def _capturing() -> bool:
    """Whether the stream of this thread's current GPU is being captured. Of another GPU nothing is known."""
    return bool(torch._C._cuda_isCurrentStreamCapturing())


def _eager(x: Tensor) -> bool:
    """Whether x is on the current GPU, and nothing is being captured there: fast calls are for such calls."""
    return bool(torch._C._cuda_getDevice() == (x.device.index or 0)) and not _capturing()


def run_program(program: Program, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
    """One call. Checks all tensors and copies those that the kernels cannot read as they are."""
    plan = program.bindings.plan
    if isinstance(dispatch, Indexed) and _run_indexed(program, x, dispatch, out):
        return out
    require_on(program.bindings.device, x=x)
    dtype = plan.problem.input.storage
    x, written = dense(x.to(dtype)), out
    if out.dtype != dtype or not is_dense(out):
        written = torch.empty_like(out, dtype=dtype, memory_format=torch.contiguous_format)
    check_call(plan, x, dispatch, written)
    tokens = x.numel() // plan.problem.hidden
    if tokens > plan.tokens:
        raise LaunchError("more tokens than the plan is for", expected=f"<= {plan.tokens}", got=tokens)
    if tokens == 0:
        return out
    dispatch = readable(dispatch)
    if isinstance(dispatch, Indexed):
        ran = _run_indexed(program, x, dispatch, written)
        assert ran, "checked and copied tensors can be read"
    else:
        edges = dispatch.offsets if isinstance(dispatch, Contiguous) else dispatch.counts
        given, on = (x, written, edges), program.bindings.device
        program.run(tokens, tuple([address_on(tensor, on) for tensor in given]))
    return out if written is out else write_back(written, dispatch, out)


def _run_indexed(program: Program, x: Tensor, dispatch: Indexed, out: Tensor) -> bool:
    """Whether the kernels could read the tensors as they are, and ran."""
    signature = program.signature(x.shape[0], dispatch.expert_map is not None)
    given = call_tensors(x, dispatch, out)
    return signature is not None and program.run_indexed(x.shape[0], signature, given)
