"""The backend to test on this machine's GPU, and calls of it with poisoned scratch memory and guarded outputs.

`LANCEBILL_GPU=sm_80` (or sm_86) tests `ampere` on a Hopper GPU; its driver compiles the PTX of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor

from lancebill.backends.base import Backend
from lancebill.backends.gpu.backend import GpuBackend
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.gpu.shipped import pack_kernels
from lancebill.backends.gpu.target import compile_target
from lancebill.backends.gpu.workspace import WORKSPACES
from lancebill.backends.registry import registry
from lancebill.jit.compile import KernelSource
from lancebill.jit.load import loadable
from lancebill.moe.device import Device, parse_device
from lancebill.moe.dispatch import Dispatch
from lancebill.moe.layout import W2, W13, Packed, as_integer
from lancebill.moe.problem import Problem
from lancebill.testing.layers import plausible_weight, row_errors, worst_row

GPU = parse_device("cuda") if torch.cuda.is_available() else Device("cuda", 90)
OURS = "hopper" if GPU.arch == 90 else "ampere"
_LARGEST_INPUTS = {W13: 4.5, W2: 40.0}  # of normal numbers, and of most hidden rows that they give
FEW_ROWS = 8  # they have no median
_GUARD, _MARK = 4096, 0x5A  # guard bytes on each side of an output, and their value


def skip_unless_ours() -> None:
    """Skip a test module where none of our GPU backends runs."""
    if not torch.cuda.is_available() or list(gpu_backend().check_device(GPU)):
        pytest.skip("needs a GPU of ours", allow_module_level=True)
    pytest.importorskip("triton")


def gpu_backend() -> GpuBackend:
    backend = registry()[OURS]
    assert isinstance(backend, GpuBackend)
    return backend


def skip_unsupported(problem: Problem) -> None:
    """Skip a test of what this GPU cannot do: fp8 before sm_89. Sizes that no GPU can are a mistake of the test."""
    reasons = [*gpu_backend().reasons(problem, GPU)]
    assert "sizes" not in {reason.code for reason in reasons}, reasons
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def plan_of(problem: Problem, tokens: int) -> GpuPlan:
    plan = gpu_backend().plan(problem, tokens, GPU)
    assert isinstance(plan, GpuPlan)
    return plan


def sources_of(planned: Iterable[tuple[Problem, int]]) -> list[KernelSource]:
    """Every kernel that these (problem, tokens) pairs launch or are packed by, as the GPU loads it."""
    backend = gpu_backend()
    supported = [(problem, tokens) for problem, tokens in planned if not list(backend.reasons(problem, GPU))]
    sources = [step.source for problem, tokens in supported for step in backend.steps(plan_of(problem, tokens))]
    sources += [source for problem, _ in supported for source in pack_kernels(problem, compile_target(GPU.arch))]
    return list(dict.fromkeys(loadable(source, GPU.index) for source in sources))


def packed(problem: Problem, backend: str, *, exact: bool = False) -> dict[str, Packed]:
    """The same weights for every backend, and the experts' input scales if the problem has them."""
    layout = registry()[backend].layout(problem)
    matrices: dict[str, Packed] = {}
    for number, (name, shape) in enumerate(problem.matrices.items()):
        held = layout.allocate(shape, problem.experts, "cuda")
        for expert in range(problem.experts):
            weight = plausible_weight(shape, 100 * number + expert, "cuda", exact=exact)
            layout.pack(shape, weight, {role: tensor[expert] for role, tensor in held.items()})
        generator = torch.Generator().manual_seed(number)
        if problem.pre_scale:
            factors = torch.rand(problem.experts, shape.k, generator=generator) + 0.5
            held["pre_scale"] = as_integer(factors).cuda()
        if problem.activations.static:
            step = _LARGEST_INPUTS[name] / problem.activations.spec.dtype.max
            scales = step * (1 + torch.rand(problem.experts, generator=generator) / 4)
            held["input_scale"] = as_integer(scales).cuda()
        matrices[name] = held
    return matrices


def check_error(got: Tensor, want: Tensor, unquantised: Tensor, rows: Tensor) -> None:
    """Check `got` against rows `rows` of `want`: within four times the rounding error of the reference itself.

    Weights that are exact in the activations' type reach about 1.5 times it, weights that group scales round 3 to 3.7.
    `unquantised` is the reference with unquantised inputs. If it differs from `want`, inputs are quantised, and a
    hidden number may round to the neighbouring one, which is as accurate and at twice the distance: where one number
    decides a row, that is the distance of the row. So the worst row may be twice as far from the reference as that is
    from `unquantised`, the median row must be nearer, and both hardly further from `unquantised`.
    """
    quantised = worst_row(want, unquantised)
    if quantised == 0:
        usual = torch.finfo(got.dtype).eps / 4.3  # typical worst of 64 rows; fewer rows may have less
        own = max(worst_row(want.to(got.dtype), want), usual)
        assert worst_row(got, want[rows]) < 4 * own, (worst_row(got, want[rows]), own)
    else:
        assert worst_row(got, want[rows]) < 2 * quantised, (worst_row(got, want[rows]), quantised)
        median, usual = (float(row_errors(*pair).median()) for pair in ((got, want[rows]), (want, unquantised)))
        assert len(rows) < FEW_ROWS or median < usual, (median, usual)
        assert worst_row(got, unquantised[rows]) < 1.5 * quantised, (worst_row(got, unquantised[rows]), quantised)


class Guarded:
    """An output full of NaN between two guard regions."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        self._memory = torch.full((size + 2 * _GUARD,), _MARK, dtype=torch.uint8, device="cuda")
        self.tensor = self._memory[_GUARD : _GUARD + size].view(dtype).view(shape)
        self.tensor.fill_(float("nan"))

    def check(self) -> None:
        for side in (self._memory[:_GUARD], self._memory[-_GUARD:]):
            assert bool((side == _MARK).all()), "a kernel wrote outside its output"


def poison_scratch(byte: int = 0xFF) -> None:
    """Fill all scratch memory with NaN (or another byte), so that reads of unwritten scratch show up."""
    for held in WORKSPACES.eager.values():
        held.memory.fill_(byte)


def call(
    backend: Backend, problem: Problem, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], columns: int
) -> Tensor:
    """One guarded call; rows that the kernels do not write are NaN."""
    out = Guarded((*x.shape[:-1], columns), x.dtype)
    plan = backend.plan(problem, x.shape[:-1].numel(), GPU)
    backend.run(plan, x, dispatch, weights, out.tensor)
    out.check()
    return out.tensor
