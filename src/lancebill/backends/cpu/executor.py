"""What a layer on the CPU keeps between calls: the structs of its weights, and a prepared call for each batch size.

A decode step takes less than a millisecond, and between two layers of a model the weights evict the interpreter's own
data from the caches. So a repeated call touches few objects: it copies one struct, sets addresses, calls the library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Executor, FastCall, LinearCall, Plan, TensorTable
from lancebill.backends.call_signature import CallSignature, is_plain
from lancebill.backends.cpu import call
from lancebill.backends.cpu.call import FLOAT, LayerStructs
from lancebill.backends.cpu.host_call import Allocate, HostCall, HostShape
from lancebill.backends.cpu.native import Library, abi
from lancebill.backends.cpu.plan import CpuPlan
from lancebill.backends.cpu.route import CpuRouting
from lancebill.backends.route_call import RouteCall
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Dispatch
from lancebill.moe.problem import INDEXED, Problem


class CpuExecutor(Executor):
    """Keeps the structs of the weights as long as every address in them is still right."""

    def __init__(
        self, backend: Backend, problem: Problem, device: Device, tensors: TensorTable, native: Library
    ) -> None:
        super().__init__(backend, problem, device, tensors)
        self.native = native
        self._routing: CpuRouting | None = None

    def run(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        plan = self.plan(x, dispatch)
        assert isinstance(plan, CpuPlan)
        if x.numel() == 0:
            return out
        call.run(self.native, plan, self._structs(plan, self.tensors.addresses()), x, dispatch, out)
        return out

    def bind_route(self, call: RouteCall) -> CpuRouting | None:
        if self._routing is None or not self._routing.serves(call):
            self._routing = CpuRouting.bind(self.native, call)
        return self._routing

    def fast_call(self, x: Tensor, plan: Plan, mapped: bool) -> FastCall | None:
        assert isinstance(plan, CpuPlan)
        if x.numel() == 0 or x.dtype not in FLOAT:
            return None
        addresses = self.tensors.addresses()
        return _fast_call(self.native, plan, self._structs(plan, addresses), addresses, self.tensors, x, mapped)

    def host_call(self, shape: HostShape, expert_map: Tensor, allocate: Allocate) -> HostCall:
        """A call that CUDA makes, of the weights where they are now."""
        plan, addresses = self.plan_for(INDEXED, shape.tokens), self.tensors.addresses()
        assert isinstance(plan, CpuPlan)
        packed = self.tensors.packed()
        # Aliases keep the memory: that of a parameter is freed when other data replaces it.
        keep = tuple(tensor.detach() for held in packed.values() for tensor in held.values())
        return HostCall(self.native, plan, self._structs(plan, addresses), shape, expert_map, allocate, keep)

    def structs_for(self, form: str, tokens: int) -> tuple[CpuPlan, LayerStructs]:
        """The plan for a form of dispatch, and the structs of the weights where they are now."""
        plan = self.plan_for(form, tokens)
        assert isinstance(plan, CpuPlan)
        return plan, self._structs(plan, self.tensors.addresses())

    def linear_call(self, x: Tensor, plan: Plan) -> LinearCall | None:
        assert isinstance(plan, CpuPlan)
        if x.numel() == 0 or x.dtype not in FLOAT:
            return None
        addresses = self.tensors.addresses()
        return _linear_call(self.native, plan, self._structs(plan, addresses), addresses, self.tensors, x)

    def forget(self) -> None:
        super().forget()
        self._routing = None

    def _structs(self, plan: CpuPlan, addresses: list[int]) -> LayerStructs:
        return self.remade("structs", addresses, lambda: LayerStructs.make(plan, self.tensors.packed()))


def _fast_call(
    native: Library, plan: CpuPlan, structs: LayerStructs, addresses: list[int], tensors: TensorTable, x: Tensor,
    mapped: bool,
) -> FastCall:  # fmt: skip
    """Further calls with as many rows of the same dtype, as long as the weights have not moved."""
    problem, tokens = plan.problem, x.numel() // plan.problem.hidden
    fits = CallSignature((tokens, problem.hidden), (tokens, problem.top_k), x.dtype, torch.device("cpu"))
    count, layout = 5 if mapped else 4, fits.last.layout
    # The struct of calls with this layout; replaced, never changed.
    held = layout, call.with_layout(call.indexed_work(plan, tokens, x.dtype), layout)
    scratch: dict[int, int] = {}  # bytes, by number of threads

    def fast_call(*given: Tensor) -> bool:
        nonlocal held
        if len(given) != count or tensors.addresses() != addresses:
            return False
        last = fits.last
        found = last if last.same(*given) else fits.match(*given)
        if found is None:
            return False
        layout, template = held
        if layout is not found.layout:
            template = call.with_layout(template, found.layout)
            held = found.layout, template
        work = abi.WorkStruct.from_buffer_copy(template)
        x, ids, weights, out = given[:4]
        work.x, work.out, work.threads = x.data_ptr(), out.data_ptr(), torch.get_num_threads()
        work.ids, work.weights = ids.data_ptr(), weights.data_ptr()
        work.expert_map = given[4].data_ptr() if mapped else None
        _run(native, structs, work, scratch)
        return True

    return fast_call


def _run(native: Library, structs: LayerStructs, work: abi.WorkStruct, scratch: dict[int, int]) -> None:
    """Run a call; `scratch` keeps the bytes of scratch memory, which depend on the number of threads."""
    size = scratch.get(work.threads)
    if size is None:
        size = scratch[work.threads] = native.scratch_bytes(structs.layer, work)
    native.run(structs.layer, work, size)


def _linear_call(
    native: Library, plan: CpuPlan, structs: LayerStructs, addresses: list[int], tensors: TensorTable, x: Tensor
) -> LinearCall:
    """Further calls with an x of the same shape and dtype, as long as the weights have not moved."""
    shape, dtype, device = x.shape, x.dtype, x.device
    result = (*shape[:-1], plan.problem.w13.n)
    # Kept by the function below: the library reads it.
    offsets = torch.tensor([0, shape[:-1].numel()], dtype=torch.int64, device=device)
    template = call.linear_work(plan, dtype, offsets)
    scratch: dict[int, int] = {}  # bytes, by number of threads

    def linear_call(x: Tensor) -> Tensor | None:
        if not is_plain(x, shape, dtype, device) or tensors.addresses() != addresses:
            return None
        out = torch.empty(result, dtype=dtype, device=device)
        work = abi.WorkStruct.from_buffer_copy(template)
        work.x, work.out, work.threads = x.data_ptr(), out.data_ptr(), torch.get_num_threads()
        work.offsets = offsets.data_ptr()
        _run(native, structs, work, scratch)
        return out

    return linear_call
