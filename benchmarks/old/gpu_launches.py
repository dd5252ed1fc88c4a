"""Single launches of a layer on a GPU: its GEMMs against a dense GEMM, and each launch alone."""

from __future__ import annotations

import torch

from lancebill.backends.gpu import workspace
from lancebill.backends.gpu.executor import GpuExecutor
from lancebill.backends.gpu.plan import GpuPlan, scratch
from lancebill.backends.gpu.program import Program
from lancebill.bench.results import BenchCase
from lancebill.bench.sustained import GEMM_SIZE, Windows
from lancebill.bench.timing import Call
from lancebill.bench.workload import Batch
from lancebill.jit.driver import Launch
from lancebill.moe.dispatch import Indexed
from lancebill.testing.layers import SampleLayer


def program_of_call(layer: SampleLayer, b: Batch, out: torch.Tensor, windows: Windows) -> Program:
    """Call the layer once; return the program that its executor keeps for this plan and stream."""
    with torch.cuda.stream(windows.stream):
        layer(b.x, Indexed(b.ids, b.weights), out)
        torch.cuda.synchronize()
        executor, plan = layer.executor, layer.executor.plan(b.x, Indexed(b.ids, b.weights))
        assert isinstance(executor, GpuExecutor) and isinstance(plan, GpuPlan)
        return executor.program(plan, b.x.device, executor.workspace(plan, b.x.device))


def labelled_launches(program: Program) -> list[tuple[str, bool, Launch]]:
    """Label, whether it is a GEMM, and the launch itself."""
    launches = []
    for step, launch in zip(program.bindings.steps, program.bindings.launches):
        constants = dict(step.source.constants)
        size = constants.get("TOKENS")
        label = f"{step.source.kernel}{size or ''} {constants.get('KIND', '')}".strip()
        launches.append((label, "KIND" in constants, launch))
    return launches


def tile_counter_reset(program: Program) -> Call:
    """A call that resets the tile counters. In a layer the dispatch does it; a GEMM alone would find no tile left."""
    bindings = program.bindings
    assert bindings.workspace is not None, "only a captured call's workspace is not kept"
    views = workspace.views(bindings.workspace.memory, scratch(bindings.plan))
    counters = views["counts"].view(-1, 4)[:, 1:]  # of every launch, after the number of its tiles
    return lambda: counters.zero_()


def gemms_against_dense(
    layer: SampleLayer, b: Batch, out: torch.Tensor, windows: Windows, dense: dict[str, Call]
) -> dict:
    """Our GEMMs alone, launched as the layer launches them, in turns with a dense GEMM of the same input type."""
    program = program_of_call(layer, b, out, windows)
    reset_counters = tile_counter_reset(program)
    launches = [launch for _, is_gemm, launch in labelled_launches(program) if is_gemm]
    inputs = "fp8" if layer.problem.activations.spec.quantized else "bf16"

    def gemms() -> None:
        reset_counters()
        stream = torch.cuda.current_stream().cuda_stream
        for launch in launches:
            launch(stream)

    times = windows.measure({"ours": [gemms], "dense": [dense[inputs]]})
    flops = {"ours": BenchCase.of(layer.problem, [b]).flops, "dense": 2.0 * GEMM_SIZE**3}
    rates = {name: flops[name] / times[name].median / 1e6 for name in times}
    share = round(rates["ours"] / rates["dense"], 4)
    described = {name: times[name].describe() | {"tflops": round(rate, 1)} for name, rate in rates.items()}
    return {"of_dense": share, "inputs": inputs, **described}


def launch_times(layer: SampleLayer, b: Batch, out: torch.Tensor, windows: Windows) -> list[tuple[str, float]]:
    """Each launch of a call timed alone; a GEMM's time includes the small launch that resets the tile counters."""
    program, times = program_of_call(layer, b, out, windows), []
    reset_counters = tile_counter_reset(program)
    for label, is_gemm, launch in labelled_launches(program):
        dependencies, launch.config.count = launch.config.count, 0

        def alone(launch: Launch = launch, is_gemm: bool = is_gemm) -> None:
            if is_gemm and not program.bindings.plan.decode:
                reset_counters()
            launch(torch.cuda.current_stream().cuda_stream)

        measured = windows.measure({label: [alone]})
        launch.config.count = dependencies
        times.append((label, round(measured[label].median, 2)))
    return times
