"""Hopper (sm_90): weights dequantised in registers, one pipeline for every form. See `colibri.kernels.gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from colibri.backends.base import Backend, Plan, Reason
from colibri.backends.hopper.forms import NoForm, kernel_form
from colibri.backends.hopper.layout import HopperLayout
from colibri.backends.hopper.plan import HopperPlan, make_plan
from colibri.backends.hopper.program import Program
from colibri.dispatch import Dispatch, Indexed
from colibri.dtypes import BF16, F16
from colibri.errors import LaunchError
from colibri.kernels import compat
from colibri.layout import Layout, MatrixShape, Packed
from colibri.problem import INDEXED, Device, Problem
from colibri.quant import DENSE_BF16, DENSE_F16, ActivationSpec
from colibri.tune.hopper import bucket

_MOST_EXPERTS = 1024


class Hopper(Backend):
    name = "hopper"

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], tuple[Problem, HopperPlan]] = {}
        self._programs: dict[tuple[int, int, int, int], Program] = {}

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        if device.kind != "cuda" or device.arch != 90:
            yield Reason("device", f"needs an sm_90 GPU, not {device}")
        missing = compat.problem()
        if missing:
            yield Reason("triton", missing, "pip install 'colibri-moe[gpu]'")
        yield from _unsupported(problem)

    def layout(self, problem: Problem) -> Layout:
        return HopperLayout(problem)

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        key = (id(problem), bucket(max(tokens, 1)))
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = (
                problem,
                make_plan(problem, tokens),
            )  # the problem is kept: its id stays its own
        return known[1]

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        assert isinstance(plan, HopperPlan)
        if not isinstance(dispatch, Indexed):
            raise LaunchError("this plan takes indexed dispatch")
        tokens = dispatch.ids.shape[0]
        if tokens > plan.tokens:
            raise LaunchError("more tokens than the plan is for", expected=f"<= {plan.tokens}", got=tokens)
        if tokens == 0:
            return out
        _require(x, dispatch, out)
        index = x.device.index or 0
        stream = torch._C._cuda_getCurrentRawStream(index)
        codes = weights["w13"]["codes"].data_ptr(), weights["w2"]["codes"].data_ptr()
        key = (id(plan), *codes, stream)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(plan, weights, x.device, stream)
        program.run(x, dispatch.ids, dispatch.weights, out, stream)
        return out


def _require(x: Tensor, dispatch: Indexed, out: Tensor) -> None:
    """What the kernels take for granted about the caller's tensors."""
    ids, weights = dispatch.ids, dispatch.weights
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise LaunchError("ids are int32 and weights fp32", got=f"{ids.dtype}, {weights.dtype}")
    if not (x.is_contiguous() and out.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()):
        raise LaunchError("the kernels take contiguous tensors")
    if x.data_ptr() % 16 or out.data_ptr() % 16:
        raise LaunchError("the kernels take tensors that start at a multiple of 16 bytes")


def _unsupported(problem: Problem) -> Iterator[Reason]:
    if problem.w2 is None:
        yield Reason("kind", "single linears have no Hopper kernel yet")
    if problem.dispatch != INDEXED:
        yield Reason("dispatch", f"{problem.dispatch} dispatch has no Hopper kernel yet", "indexed has one")
    if problem.input not in (BF16, F16):
        yield Reason("input", f"{problem.input} inputs", "bf16 and fp16 have kernels")
    if problem.pre_scale:
        yield Reason("pre-scale", "inputs with a stored scale vector have no Hopper kernel yet")
    if problem.experts > _MOST_EXPERTS:
        yield Reason("experts", f"{problem.experts} local experts", f"up to {_MOST_EXPERTS}")
    if problem.w13.act_order and problem.activations.spec not in (DENSE_BF16, DENSE_F16):
        yield Reason("act-order", "act-order with quantised activations has no Hopper kernel yet")
    for shape, activations in _matrices(problem):
        dense = {DENSE_BF16: BF16, DENSE_F16: F16}.get(activations.spec)
        if dense is not None and dense != problem.input:
            yield Reason("input", f"{activations} activations from {problem.input} inputs")
        try:
            kernel_form(shape, activations)
        except NoForm as why:
            yield why.reason


def _matrices(problem: Problem) -> Iterator[tuple[MatrixShape, ActivationSpec]]:
    yield problem.w13, problem.activations
    if problem.w2 is not None:
        yield problem.w2, problem.second_activations


BACKEND = Hopper()
