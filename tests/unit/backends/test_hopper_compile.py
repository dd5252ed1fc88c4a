"""Kernels compile for sm_90 with no GPU: no spills, no serialised wgmma, every layout conversion trivial.

The shipped set is compiled whole, once: the cache keeps it (`make kernels` fills it before the tests run).
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lancebill.backends.registry import registry
from lancebill.errors import CompileError
from lancebill.jit import compile as compiler
from lancebill.jit.build import binary, build_all
from lancebill.jit.cache import Cache
from lancebill.jit.compile import Binary
from lancebill.moe.problem import Device
from lancebill.numbers.spec_names import parse_activation
from lancebill.testing.layers import layer_problem

pytest.importorskip("triton")

from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.shipped import shipped
from lancebill.backends.hopper.steps import Step, steps

REGISTERS = 65536  # of an SM
SHARED = 227 * 1024  # of a block
MOST_KERNELS, MOST_BYTES = 200, 20 << 20


@pytest.mark.parametrize(
    ("spec", "activations", "tokens", "kernels"),
    [
        ("mxfp4", "bf16", 1, ("slotwise",)),
        ("mxfp4", "fp8", 4096, ("grouped", "prepare_rows")),
        ("int4-g128-zp", "fp16", 64, ("grouped", "dispatch_small", "combine_rows")),
        ("fp8-block", "bf16", 64, ("grouped",)),
        ("int4-g128-zp", "fp8", 4, ("slotwise",)),
        ("fp8-block", "fp8", 4096, ("grouped",)),
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
        check(binary(first[kernel].source), first[kernel].persistent)


def test_small_layers_of_every_form_have_registers_enough() -> None:
    """Layers of few units take tiles of one unit, with four and three blocks on an SM: the fewest registers a thread,
    and few of the shipped shapes are such layers."""
    specs = (
        "nvfp4", "mxfp4", "int4", "int4-g32", "int4-g32:fp16-zp", "int4-g64-zp", "int4-g128", "int4-g128:fp32",
        "int4-zp", "int8", "int8-g64", "fp8", "fp8-block",
    )  # fmt: skip
    wanted: dict[compiler.KernelSource, None] = {}
    for spec in specs:
        layer = layer_problem(spec, "bf16", hidden=512, intermediate=256, experts=5, top_k=2)
        plan = make_plan(layer, 62)
        assert [tile.tokens for tile in plan.first.tiles] == [48, 32, 24, 16]
        found = [step.source for step in steps(plan) if step.source.kernel == "grouped"]
        wanted |= dict.fromkeys(source for source in found if dict(source.constants)["TOKENS"] in (24, 16))
    assert len(wanted) == 4 * len(specs)
    assert build_all(wanted) == {}


@pytest.mark.parametrize(("columns", "own"), [(1 << 15, False), (1 << 14, True)])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_the_widest_rows_have_kernels(columns: int, own: bool, tokens: int) -> None:
    """A row is a program's, all of it in registers: whatever `check` lets pass compiles, and an SM has room for it."""
    layer = layer_problem("mxfp4", "fp8", hidden=columns, intermediate=columns, experts=8, top_k=2)
    layer = replace(layer, pre_scale=own)
    assert not list(registry()["hopper"].check(layer, Device("cuda", 90)))
    found = [step for step in steps(make_plan(layer, tokens)) if step.source.module.endswith("rows")]
    assert {"prepare_rows", "send_rows" if tokens > 256 else "dispatch_small"} <= {step.source.kernel for step in found}
    for step in found:
        check(binary(step.source), 1)


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("activations", ["bf16", "fp8", "fp8-static"])
@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "own"), [(2048, 512, 10, False), (4096, 512, 22, False), (8192, 1024, 8, True)]
)
def test_many_experts_have_kernels(
    hidden: int, experts: int, top_k: int, own: bool, activations: str, tokens: int
) -> None:
    """Every program of a dispatch counts all ids: registers for those, too."""
    layer = layer_problem("mxfp4", "bf16", hidden=hidden, intermediate=512, experts=experts, top_k=top_k)
    layer = replace(layer, pre_scale=own, activations=parse_activation(activations))
    found = [step for step in steps(make_plan(layer, tokens, decode=False)) if step.source.module.endswith("rows")]
    assert {step.source.kernel for step in found} & {"dispatch_small", "send_rows"}
    for step in found:
        check(binary(step.source), 1)


@pytest.mark.parametrize("spec", ["mxfp4", "fp8-block"])
def test_few_tokens_keep_the_widest_rows(spec: str) -> None:
    layer = layer_problem(spec, "fp8", hidden=1 << 15, intermediate=128, experts=8, top_k=2)
    for step in steps(make_plan(layer, 1)):
        check(binary(step.source), step.persistent)


def test_the_shipped_set_compiles() -> None:
    """Whatever spills, serialises or needs a layout conversion that moves data does not compile."""
    sources = list(shipped())
    assert build_all(sources) == {}
    held = [Cache().find(source) for source in sources]
    assert len(held) <= MOST_KERNELS and sum(len(b.cubin) for b in held if b) <= MOST_BYTES
    for found in held:
        assert found is not None
        check(found, 1)


def check(found: Binary, blocks: int) -> None:
    """It runs on an SM, `blocks` times at once."""
    assert found.cubin[:4] == b"\x7fELF" and found.name.encode() in found.cubin
    assert 0 < found.registers * found.threads * max(blocks, 1) <= REGISTERS
    assert 0 <= found.shared <= SHARED // max(blocks, 1)


def test_binaries_use_no_local_memory(tmp_path: Path) -> None:
    """What the assembler said at the time, asked again of the code itself: nothing spilled, no stack."""
    from triton import knobs

    for source in shipped():
        found, path = binary(source), tmp_path / "kernel.cubin"
        path.write_bytes(found.cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        facts = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        assert facts == {"REG": str(found.registers), "STACK": "0", "LOCAL": "0"}, source.label


SAID = "ptxas info    : Used 80 registers\n    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n"


@pytest.mark.parametrize(
    ("report", "match"),
    [
        (SAID.format(spills=8), "spills 8 bytes"),
        (SAID.format(spills=0) + "(C7510) Potential Performance Loss: wgmma.mma_async", "C7510"),
        (SAID.format(spills=0) + "(C7602) setmaxnreg is ignored", "C7602"),
        ("", "said nothing"),
    ],
)
def test_a_report_that_must_not_ship_is_refused(report: str, match: str) -> None:
    source = next(iter(shipped()))
    assert compiler._check_report(source, SAID.format(spills=0)) == 80
    with pytest.raises(CompileError, match=match):
        compiler._check_report(source, report)


def test_a_kernel_that_does_not_compile_says_why() -> None:
    source = next(source for source in shipped() if source.kernel == "combine_rows")
    wrong = [(name, "*bf16" if name == "ids" else kind) for name, kind in source.arguments]
    broken = compiler.KernelSource(source.module, source.kernel, tuple(wrong), (("BLOCK", 3), *source.constants[1:]))
    with pytest.raises(CompileError, match="combine_rows"):
        compiler.build(broken)
