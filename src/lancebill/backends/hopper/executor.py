"""What a layer on a Hopper GPU keeps between calls: one program for each plan and stream."""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Executor, FastCall, Plan, TensorTable
from lancebill.backends.hopper.bindings import Bindings
from lancebill.backends.hopper.call import caller_addresses, dense, is_dense, write_back
from lancebill.backends.hopper.plan import HopperPlan
from lancebill.backends.hopper.program import Program
from lancebill.backends.hopper.route_program import RoutePrograms
from lancebill.backends.hopper.tuning.policy import bucket
from lancebill.backends.route_call import RouteCall
from lancebill.errors import LaunchError
from lancebill.moe.dispatch import Dispatch, Indexed
from lancebill.moe.problem import Device, Problem
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routed, Routing

_MOST_PROGRAMS = 256  # a program that is dropped is bound again by the next call


class HopperExecutor(Executor):
    """Rebinds a program when any address of the weights differs from those it was bound to."""

    def __init__(self, backend: Backend, problem: Problem, device: Device, tensors: TensorTable) -> None:
        super().__init__(backend, problem, device, tensors)
        self.programs: dict[tuple[str, int, int], tuple[list[int], Program]] = {}
        self.route_programs = RoutePrograms()

    def plan_key(self, tokens: int) -> int:
        return bucket(max(tokens, 1))

    def run(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        index = x.device.index or 0
        if torch._C._cuda_getDevice() != index:  # kernels are loaded for a device and launched with it current
            with torch.cuda.device(index):
                return self.run(x, dispatch, out)
        if x.numel() == 0:
            return out
        plan = self.plan(x, dispatch)
        assert isinstance(plan, HopperPlan)
        return run_program(self.program(plan, x.device), x, dispatch, out)

    def route(
        self,
        routing: Routing,
        logits: Tensor,
        router: RouterTensors,
        hidden: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Routed:
        index = logits.device.index or 0
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.route(routing, logits, router, hidden, input_ids)
        call = RouteCall.make(routing, logits, router, hidden, input_ids)
        program = None if call is None else self.route_programs.find(call)
        if call is None or program is None:
            return super().route(routing, logits, router, hidden, input_ids)
        if not routing.hashed and call.logits is logits:
            self.keep_fast_route(logits, program.fast_route(call))
        return program.run(call.logits, call.input_ids)

    def program(self, plan: HopperPlan, device: torch.device) -> Program:
        """The program of this plan on the current stream, bound to the weights where they are now."""
        stream = torch._C._cuda_getCurrentRawStream(device.index or 0)
        key = plan.work, plan.tokens, stream
        addresses, found = self.tensors.addresses(), self.programs.get(key)
        if found is None or found[0] != addresses:
            if len(self.programs) >= _MOST_PROGRAMS:
                self.programs.clear()
            program = Program(Bindings.bind(plan, self.tensors.packed(), device, stream))
            found = self.programs[key] = addresses, program
        return found[1]

    def fast_call(self, x: Tensor, plan: Plan) -> FastCall | None:
        """Further calls with as many tokens on this stream, as long as the weights have not moved.

        Returns a function and not an object with `__call__`, which takes the host longer to call.
        """
        assert isinstance(plan, HopperPlan)
        program, tokens, tensors = self.program(plan, x.device), x.shape[0], self.tensors
        signature, addresses = program.signature(tokens, x.device), tensors.addresses()
        if signature is None:
            return None
        run, device, stream = program.run_indexed, program.bindings.device, program.bindings.stream

        def fast_call(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
            return (
                torch._C._cuda_getDevice() == device
                and torch._C._cuda_getCurrentRawStream(device) == stream
                and tensors.addresses() == addresses
                and run(tokens, signature, x, ids, weights, out)
            )

        return fast_call

    def forget(self) -> None:
        super().forget()
        self.programs.clear()
        self.route_programs = RoutePrograms()


def run_program(program: Program, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
    """One call. Checks all tensors and copies those that the kernels cannot read as they are."""
    plan = program.bindings.plan
    if isinstance(dispatch, Indexed):
        signature = program.signature(x.shape[0], x.device)
        if signature and program.run_indexed(x.shape[0], signature, x, dispatch.ids, dispatch.weights, out):
            return out
        dispatch = Indexed(dense(dispatch.ids), dense(dispatch.weights))
    dtype = plan.problem.input.storage
    x, written = dense(x.to(dtype)), out
    if out.dtype != dtype or not is_dense(out):
        written = torch.empty_like(out, dtype=dtype, memory_format=torch.contiguous_format)
    addresses = caller_addresses(plan, x, dispatch, written)
    tokens = x.numel() // plan.problem.hidden
    if tokens > plan.tokens:
        raise LaunchError("more tokens than the plan is for", expected=f"<= {plan.tokens}", got=tokens)
    if tokens == 0:
        return out
    program.run(tokens, addresses)
    return out if written is out else write_back(written, dispatch, out)
