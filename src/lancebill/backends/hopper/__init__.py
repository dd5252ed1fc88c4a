"""Hopper (sm_90): weights dequantised in registers, one pipeline for every form. See `lancebill.backends.hopper.kernels.gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lancebill.backends.base import Backend, NoForm, Plan, Reason, Shortcut
from lancebill.backends.hopper.choose_form import kernel_form
from lancebill.backends.hopper.kernels import triton_version as compat
from lancebill.backends.hopper.kernels.weight_form import E4M3
from lancebill.backends.hopper.layout import HopperLayout
from lancebill.backends.hopper.plan import SINGLE, HopperPlan, make_plan
from lancebill.backends.hopper.program import ALIGNMENT, Program, addresses, again
from lancebill.backends.hopper.tuning.policy import bucket
from lancebill.errors import LaunchError
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed
from lancebill.moe.layout import Layout, MatrixShape, Packed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED, Device, Problem
from lancebill.numbers.dtypes import BF16, F16
from lancebill.numbers.spec import DENSE_BF16, DENSE_F16, ActivationSpec

_MOST_EXPERTS = 1024
# Of rows that are prepared, by whether they are both treated as their expert says and made narrow: what registers hold.
_MOST_COLUMNS = {False: 1 << 15, True: 1 << 14}


class Hopper(Backend):
    name = "hopper"
    drops_wild_ids = True

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], tuple[Problem, HopperPlan]] = {}
        self._programs: dict[tuple[int, ...], Program] = {}

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        if device.kind != "cuda" or device.arch != 90:
            yield Reason("device", f"needs an sm_90 GPU, not {device}")
        missing = compat.problem()
        if missing:
            yield Reason("triton", missing, "pip install 'lancebill[gpu]'")
        yield from _unsupported(problem)

    def layout(self, problem: Problem) -> Layout:
        return HopperLayout(problem)

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        key = (id(problem), bucket(max(tokens, 1)))
        known = self._plans.get(key)
        if known is None:  # the problem is kept: its id stays its own
            known = self._plans[key] = (problem, make_plan(problem, tokens))
        return known[1]

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        index = x.device.index or 0
        if torch._C._cuda_getDevice() != index:  # kernels are loaded for a device and launched with it current
            with torch.cuda.device(index):
                return self.run(plan, x, dispatch, weights, out)
        assert isinstance(plan, HopperPlan)
        stream = torch._C._cuda_getCurrentRawStream(index)
        program = self._program(plan, stream, weights)
        if (
            program
            and isinstance(dispatch, Indexed)
            and program.run_indexed(x.shape[0], x, dispatch.ids, dispatch.weights, out)
        ):
            return out
        wide = plan.problem.input.storage
        x, written = _densely(x.to(wide)), out
        if isinstance(dispatch, Indexed):
            dispatch = Indexed(_densely(dispatch.ids), _densely(dispatch.weights))
        if out.dtype != wide or not _dense(out):
            written = torch.empty_like(out, dtype=wide, memory_format=torch.contiguous_format)
        call = _call(plan, x, dispatch, written)
        tokens = x.numel() // plan.problem.hidden
        if tokens > plan.tokens:
            raise LaunchError("more tokens than the plan is for", expected=f"<= {plan.tokens}", got=tokens)
        if tokens == 0:
            return out
        if program is None:
            program = Program(plan, weights, x.device, stream)
            self._programs[self._key(plan, stream, weights)] = program
        program.run(tokens, call)
        return out if written is out else _copy(written, dispatch, out)

    def shortcut(self, plan: Plan, x: Tensor, weights: Mapping[str, Packed]) -> Shortcut | None:
        program = self._program(plan, torch._C._cuda_getCurrentRawStream(x.device.index or 0), weights)
        return None if program is None else again(program, x.shape[0], weights)

    def _program(self, plan: Plan, stream: int, weights: Mapping[str, Packed]) -> Program | None:
        return self._programs.get(self._key(plan, stream, weights))

    def _key(self, plan: Plan, stream: int, weights: Mapping[str, Packed]) -> tuple[int, ...]:
        """All addresses a program holds: codes may come to lie where others lay, and their scales elsewhere."""
        return (id(plan), stream, *addresses(tensor for packed in weights.values() for tensor in packed.values()))


def _dense(tensor: Tensor) -> bool:
    """Whether kernels can take it as it is: no gaps, and a start that suits their widest reads."""
    return tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT


def _densely(tensor: Tensor) -> Tensor:
    """The tensor, or a copy: views come in all forms."""
    return tensor if _dense(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _copy(result: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
    """Rows that were computed elsewhere into an output of any dtype and form; nobody's rows stay as they are."""
    if isinstance(dispatch, Indexed):
        return out.copy_(result)
    places = torch.arange(out.shape[-2], device=out.device)
    if isinstance(dispatch, Contiguous):
        owned = (places >= dispatch.offsets[:1]) & (places < dispatch.offsets[-1:])
    else:
        owned = places < dispatch.counts.unsqueeze(1)
    return out.copy_(torch.where(owned.unsqueeze(-1), result.to(out.dtype), out))


def _call(plan: HopperPlan, x: Tensor, dispatch: Dispatch, out: Tensor) -> tuple[int, ...]:
    """Addresses of the caller's tensors: x, out, and ids and weights, or edges; raises where they are not what the
    kernels take for granted."""
    problem, wide = plan.problem, plan.problem.input.storage
    columns = problem.w13.n if problem.w2 is None else problem.w2.n
    for name, tensor, shape in (("x", x, (*x.shape[:-1], problem.hidden)), ("out", out, (*x.shape[:-1], columns))):
        if tensor.shape != shape:
            raise LaunchError(f"{name} does not fit", expected=list(shape), got=list(tensor.shape))
    at = []
    for name, tensor, dtype in (("x", x, wide), ("out", out, wide), *_dispatched(plan, x, dispatch)):
        at.append(tensor.data_ptr())
        if tensor.dtype != dtype:
            raise LaunchError(f"{name} has another dtype", expected=dtype, got=tensor.dtype)
        if tensor.device != x.device:
            raise LaunchError(f"{name} is on another device", expected=x.device, got=tensor.device)
        if not tensor.is_contiguous():
            raise LaunchError("the kernels take contiguous tensors", got=name)
    return tuple(at)


def _dispatched(plan: HopperPlan, x: Tensor, dispatch: Dispatch) -> tuple[tuple[str, Tensor, torch.dtype], ...]:
    """What says where rows go, and the dtype it must have."""
    experts = plan.problem.experts
    if isinstance(dispatch, Indexed) and plan.work == INDEXED:
        ids, weights = dispatch.ids, dispatch.weights
        if ids.shape != (x.shape[0], plan.problem.top_k) or weights.shape != ids.shape:
            raise LaunchError("ids and weights do not fit the rows", got=f"{list(ids.shape)}")
        return ("ids", ids, torch.int32), ("weights", weights, torch.float32)
    if isinstance(dispatch, Contiguous) and plan.work in (CONTIGUOUS, SINGLE):
        if dispatch.offsets.shape != (experts + 1,):
            raise LaunchError("offsets do not fit", expected=f"{experts + 1} of them", got=list(dispatch.offsets.shape))
        return (("edges", dispatch.offsets, torch.int64),)
    if isinstance(dispatch, Batched) and plan.work == BATCHED:
        if dispatch.counts.shape != (experts,) or x.shape[0] != experts:
            raise LaunchError("counts do not fit", expected=f"{experts} of them", got=list(dispatch.counts.shape))
        return (("edges", dispatch.counts, torch.int32),)
    raise LaunchError(f"this plan is for {plan.work} work", got=type(dispatch))


def _unsupported(problem: Problem) -> Iterator[Reason]:
    if problem.input not in (BF16, F16):
        yield Reason("input", f"{problem.input} inputs", "bf16 and fp16 have kernels")
    if problem.experts > _MOST_EXPERTS:
        yield Reason("experts", f"{problem.experts} local experts", f"up to {_MOST_EXPERTS}")
    if problem.w2 is not None and problem.w2.act_order:
        yield Reason("act-order", "an order of w2's columns", "it can be the order of w13's rows")
    for shape, activations in _matrices(problem):
        dense = {DENSE_BF16: BF16, DENSE_F16: F16}.get(activations.spec)
        if dense is not None and dense != problem.input:
            yield Reason("input", f"{activations} activations from {problem.input} inputs")
        try:
            form = kernel_form(shape, activations)
        except NoForm as why:
            yield why.reason
            continue
        own, narrow = problem.pre_scale or shape.act_order, form.activations == E4M3
        most = _MOST_COLUMNS[own and narrow]
        if shape.k > most and (own or narrow):
            yield Reason("sizes", f"rows of {shape.k} columns", f"up to {most} are prepared in one piece")


def _matrices(problem: Problem) -> Iterator[tuple[MatrixShape, ActivationSpec]]:
    yield problem.w13, problem.activations
    if problem.w2 is not None:
        yield problem.w2, problem.second_activations


BACKEND = Hopper()
