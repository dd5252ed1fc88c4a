"""Kernels compile for sm_90 without a GPU: no spills, no serialised wgmma, only trivial layout conversions.

A sample of the shipped kernels is compiled, and all of them by `make kernels`. The cache keeps them.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lancebill.backends.registry import registry
from lancebill.errors import CompileError
from lancebill.jit import compile as compiler
from lancebill.jit.build import build_all, get_binary
from lancebill.jit.cache import Cache
from lancebill.jit.compile import Binary
from lancebill.jit.ship import MOST_BYTES, MOST_KERNELS
from lancebill.moe.device import Device
from lancebill.moe.routing import SOFTMAX, SQRTSOFTPLUS, Routing
from lancebill.numbers.spec_names import parse_activation
from lancebill.testing.layers import layer_problem

pytest.importorskip("triton")

from lancebill.backends.gpu.route_step import RouteStep
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.shipped import shipped
from lancebill.backends.hopper.steps import Step, steps

REGISTERS = 65536  # per SM
SHARED = 227 * 1024  # most bytes per block


@pytest.mark.parametrize(
    ("spec", "activations", "tokens", "kernels"),
    [
        ("mxfp4", "bf16", 1, ("decode_gemm",)),
        ("mxfp4", "fp8", 4096, ("grouped_gemm", "prepare_rows")),
        ("int4-g128-zp", "fp16", 64, ("grouped_gemm", "dispatch_small", "combine_rows")),
        ("fp8-block", "bf16", 64, ("grouped_gemm",)),
        ("int4-g128-zp", "fp8", 4, ("decode_gemm",)),
        ("fp8-block", "fp8", 4096, ("grouped_gemm",)),
        ("nvfp4", "bf16", 5000, ("count_ids", "place_ids", "send_rows")),
    ],
)
def test_forms_outside_the_shipped_set_compile(
    spec: str, activations: str, tokens: int, kernels: tuple[str, ...]
) -> None:
    plan = make_plan(layer_problem(spec, activations, hidden=4096, intermediate=2048, experts=64, top_k=6), tokens)
    first: dict[str, Step] = {}
    for step in steps(plan):
        first.setdefault(step.source.kernel, step)
    assert set(kernels) <= set(first)
    for kernel in kernels:
        check(get_binary(first[kernel].source), first[kernel].persistent)


def test_the_largest_routing_kernels_compile() -> None:
    """Most registers: as many experts, groups and slots as the kernel supports, with every option."""
    plain = Routing(64, SOFTMAX, renormalize=True, zero_experts=9)
    grouped = replace(plain, scoring=SQRTSOFTPLUS, n_group=32, topk_group=8)
    largest = {
        2048: (plain, replace(grouped, top_k=4)),
        1024: (replace(grouped, top_k=8),),
        512: (replace(grouped, top_k=16, n_group=16),),  # most comparisons of a thread
    }
    for experts, routings in largest.items():
        for routing in routings:
            step = RouteStep.make(routing, experts, torch.bfloat16, biased=True, corrected=True)
            assert step is not None
            check(get_binary(step.source), 1)


def test_small_layers_of_every_form_fit_in_registers(all_kernels: bool) -> None:
    """Layers with few units use tiles of one unit with three or four blocks per SM, which leaves the fewest registers
    per thread. Few shipped shapes cover this."""
    specs = (
        "nvfp4", "mxfp4", "int4", "int4-g32", "int4-g32:fp16-zp", "int4-g64-zp", "int4-g128", "int4-g128:fp32",
        "int4-zp", "int8", "int8-g64", "fp8", "fp8-block", "int3-g32:fp16-zp", "nf4",
    )  # fmt: skip
    specs = specs if all_kernels else ("nvfp4", "int4-g32:fp16-zp", "int3-g32:fp16-zp", "nf4")  # the most registers
    sources: dict[compiler.KernelSource, None] = {}
    for spec in specs:
        layer = layer_problem(spec, "bf16", hidden=512, intermediate=256, experts=5, top_k=2)
        plan = make_plan(layer, 62)
        assert [tile.sizes[-1] for tile in plan.first_gemm.tiles] == [32, 24, 16]
        found = [step.source for step in steps(plan) if step.source.kernel == "grouped_gemm"]
        sources |= dict.fromkeys(source for source in found if dict(source.constants)["SIZES"] in (24, 16))
    assert len(sources) == 4 * len(specs)
    assert build_all(sources) == {}


@pytest.mark.parametrize(("columns", "pre_scale"), [(1 << 15, False), (1 << 14, True)])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_the_widest_rows_compile(columns: int, pre_scale: bool, tokens: int) -> None:
    """One program holds a whole row in registers: every width that `check` accepts compiles and fits on an SM."""
    layer = layer_problem("mxfp4", "fp8", hidden=columns, intermediate=columns, experts=8, top_k=2)
    layer = replace(layer, pre_scale=pre_scale)
    assert not list(registry()["hopper"].check(layer, Device("cuda", 90)))
    found = [step for step in steps(make_plan(layer, tokens)) if step.source.module.endswith("dispatch_combine")]
    assert {"prepare_rows", "send_rows" if tokens > 256 else "dispatch_small"} <= {step.source.kernel for step in found}
    for step in found:
        check(get_binary(step.source), 1)


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("activations", ["bf16", "fp8", "fp8-static"])
@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "pre_scale"), [(2048, 512, 10, False), (4096, 512, 22, False), (8192, 1024, 8, True)]
)
def test_many_experts_compile(
    hidden: int, experts: int, top_k: int, pre_scale: bool, activations: str, tokens: int, all_kernels: bool
) -> None:
    """Every program of a dispatch counts all ids, which takes registers too."""
    if not all_kernels and (activations == "fp8" or (top_k, tokens) not in ((22, 256), (8, 64))):
        pytest.skip("a sample is compiled")
    layer = layer_problem("mxfp4", "bf16", hidden=hidden, intermediate=512, experts=experts, top_k=top_k)
    layer = replace(layer, pre_scale=pre_scale, activations=parse_activation(activations))
    found = [
        step
        for step in steps(make_plan(layer, tokens, decode=False))
        if step.source.module.endswith("dispatch_combine")
    ]
    assert {step.source.kernel for step in found} & {"dispatch_small", "send_rows"}
    for step in found:
        check(get_binary(step.source), 1)


@pytest.mark.parametrize("spec", ["mxfp4", "fp8-block"])
def test_decode_kernels_hold_the_widest_rows(spec: str) -> None:
    layer = layer_problem(spec, "fp8", hidden=1 << 15, intermediate=128, experts=8, top_k=2)
    for step in steps(make_plan(layer, 1)):
        check(get_binary(step.source), step.persistent)


def test_shipped_kernels_compile(shipped_kernels: list[compiler.KernelSource]) -> None:
    """Spills, serialised wgmma and layout conversions that move data are compile errors."""
    assert build_all(shipped_kernels) == {}
    held = [Cache().find(source) for source in shipped_kernels]
    assert len(list(shipped())) <= MOST_KERNELS and sum(len(b.cubin) for b in held if b) <= MOST_BYTES
    for found in held:
        assert found is not None
        check(found, 1)


def check(found: Binary, blocks: int) -> None:
    """The kernel fits on an SM with `blocks` blocks at once."""
    assert found.cubin[:4] == b"\x7fELF" and found.name.encode() in found.cubin
    assert 0 < found.registers * found.threads * max(blocks, 1) <= REGISTERS
    assert 0 <= found.shared <= SHARED // max(blocks, 1)


def test_binaries_use_no_local_memory(tmp_path: Path, shipped_kernels: list[compiler.KernelSource]) -> None:
    """The cubin itself confirms the assembler's report: no spills, no stack."""
    from triton import knobs

    for source in shipped_kernels:
        found, path = get_binary(source), tmp_path / "kernel.cubin"
        path.write_bytes(found.cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        facts = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        assert facts == {"REG": str(found.registers), "STACK": "0", "LOCAL": "0"}, source.label


REPORT = (
    "ptxas info    : Used 80 registers\n    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n"
)


@pytest.mark.parametrize(
    ("report", "match"),
    [
        (REPORT.format(spills=8), "spills 8 bytes"),
        (REPORT.format(spills=0) + "(C7510) Potential Performance Loss: wgmma.mma_async", "C7510"),
        (REPORT.format(spills=0) + "(C7602) setmaxnreg is ignored", "C7602"),
        ("", "no report"),
    ],
)
def test_bad_assembler_reports_are_refused(report: str, match: str) -> None:
    source = next(iter(shipped()))
    assert compiler._check_report(source, REPORT.format(spills=0)) == (80, 0)
    with pytest.raises(CompileError, match=match):
        compiler._check_report(source, report)


def test_compile_errors_name_the_kernel() -> None:
    source = next(source for source in shipped() if source.kernel == "combine_rows")
    wrong = [(name, "*bf16" if name == "ids" else kind) for name, kind in source.arguments]
    broken = compiler.KernelSource(source.module, source.kernel, tuple(wrong), (("BLOCK", 3), *source.constants[1:]))
    with pytest.raises(CompileError, match="combine_rows"):
        compiler.compile_kernel(broken)
