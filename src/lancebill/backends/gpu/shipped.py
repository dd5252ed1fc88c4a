"""What the kernels in a wheel are for: a few specs and shapes at any batch size, packing and routing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lancebill.backends.cpu.unpack_on_gpu import nibble_source
from lancebill.backends.gpu import pack_on_gpu
from lancebill.backends.gpu.choose_form import kernel_form, outer_levels
from lancebill.backends.gpu.kernels.weight_form import INT4_CODE
from lancebill.backends.gpu.route_step import RouteStep
from lancebill.backends.gpu.tiles import buckets
from lancebill.jit.compile import KernelSource
from lancebill.moe.model_shapes import NAMED
from lancebill.moe.problem import Problem
from lancebill.moe.routing import SIGMOID, SQRTSOFTPLUS, Routing
from lancebill.numbers.spec_names import parse_activation, parse_spec

MXFP4 = (("mxfp4", "bf16"), ("mxfp4", "fp8"))  # weights, activations
SPECS = {  # by the name of a shape
    "deepseek-v4-flash": MXFP4,
    "gpt-oss-120b": MXFP4,
    "qwen3-30b-a3b": (*MXFP4, ("int4-g128", "bf16")),
}
TOKENS = buckets(16384)


def pack_kernels(problem: Problem, arch: int) -> Iterator[KernelSource]:
    """The kernels that pack a layer when it is loaded; of integers also those for transposed codes (GPTQ, AWQ).

    Of 4-bit codes also those that unpack what was copied from a split layer's part in host memory.
    """
    for shape in problem.matrices.values():
        form, gated = kernel_form(shape, problem.inputs_of(shape.name)), problem.is_gated(shape.name)
        outer = bool(outer_levels(shape.spec))
        turned = (pack_on_gpu.WORDS, pack_on_gpu.COLUMNS) if form.code == INT4_CODE else ()
        for read in (pack_on_gpu.VECTORS, *turned):
            yield pack_on_gpu.code_source(form, gated, read, arch)
        yield pack_on_gpu.scale_source(form, gated, outer, shape.bias, arch)
        if form.bits == 4:
            yield nibble_source(gated, arch)


def route_kernels(arch: int) -> tuple[KernelSource, ...]:
    """Routing of Qwen3, gpt-oss, DeepSeek-V3 and DeepSeek-V4.

    A kernel serves any scaling factor and any top-k up to 32; with groups, any top-k up to the same power of two.
    """
    softmax, after = Routing(8, renormalize=True), Routing(4, after_top_k=True)
    grouped = Routing(8, SIGMOID, renormalize=True, n_group=8, topk_group=4)
    sqrt, hashed = Routing(6, SQRTSOFTPLUS, renormalize=True), Routing(6, SQRTSOFTPLUS, renormalize=True, hashed=True)
    made = (
        RouteStep.make(softmax, 128, torch.bfloat16),
        RouteStep.make(softmax, 128, torch.float32),
        RouteStep.make(after, 128, torch.bfloat16, biased=True),
        RouteStep.make(grouped, 256, torch.bfloat16, corrected=True),
        RouteStep.make(grouped, 256, torch.float32, corrected=True),
        RouteStep.make(sqrt, 256, torch.float32, corrected=True),
        RouteStep.make(hashed, 256, torch.float32, lookup=(torch.int32, torch.int64)),
    )
    return tuple(step.compiled_for(arch).source for step in made if step is not None)


def problems() -> Iterator[Problem]:
    for name, specs in SPECS.items():
        for weights, activations in specs:
            yield NAMED[name].problem(parse_spec(weights), parse_activation(activations))
