"""Our launches by themselves: the products of a layer against what the card reaches on a dense one."""

from __future__ import annotations

import torch

from lancebill.backends.hopper import workspace
from lancebill.backends.hopper.plan import scratch
from lancebill.backends.hopper.program import Program
from lancebill.backends.hopper.steps import steps
from lancebill.bench.report import BenchCase
from lancebill.bench.sustained import PRODUCT, Windows
from lancebill.bench.timing import Call
from lancebill.bench.workload import Batch
from lancebill.jit.driver import Launch
from lancebill.moe.dispatch import Indexed
from lancebill.testing.layers import SampleLayer


def bound(layer: SampleLayer, b: Batch, out: torch.Tensor, windows: Windows) -> Program:
    """The program of a call that was made."""
    with torch.cuda.stream(windows.stream):
        layer(b.x, Indexed(b.ids, b.weights), out)
        torch.cuda.synchronize()
    mine = [p for key, p in layer.backend._programs.items() if windows.stream.cuda_stream in key]
    return next(p for p in mine if p.plan.problem is layer.problem and p.tokens == b.x.shape[0])


def bound_steps(program: Program) -> list[tuple[str, bool, Launch]]:
    """The launches of a call: what each is, whether it is a product, and the launch."""
    found = []
    for step, launch in zip(steps(program.plan), program.launches):
        constants = dict(step.source.constants)
        size = constants.get("TOKENS")
        label = f"{step.source.kernel}{size or ''} {constants.get('KIND', '')}".strip()
        found.append((label, "KIND" in constants, launch))
    return found


def untaken(program: Program) -> Call:
    """Gives all tiles back: the dispatch does in a call, and products that are launched alone find none left."""
    taken = workspace.views(program.memory, scratch(program.plan))["counts"].view(4, 4)[:, 1:]
    return lambda: taken.zero_()


def products_beside_dense(
    layer: SampleLayer, b: Batch, out: torch.Tensor, windows: Windows, dense: dict[str, Call]
) -> dict:
    """Our products alone, launched as the layer launches them, in turns with a dense product of such inputs."""
    program = bound(layer, b, out, windows)
    again, launches = untaken(program), [launch for _, product, launch in bound_steps(program) if product]
    kind = "fp8" if layer.problem.activations.spec.quantized else "bf16"

    def products() -> None:
        again()
        stream = torch.cuda.current_stream().cuda_stream
        for launch in launches:
            launch(stream)

    took = windows.measure({"ours": [products], "dense": [dense[kind]]})
    flops = {"ours": BenchCase.of(layer.problem, [b]).flops, "dense": 2.0 * PRODUCT**3}
    rates = {name: flops[name] / took[name].median / 1e6 for name in took}
    share = round(rates["ours"] / rates["dense"], 4)
    described = {name: took[name].describe() | {"tflops": round(rate, 1)} for name, rate in rates.items()}
    return {"of_dense": share, "inputs": kind, **described}


def launch_times(layer: SampleLayer, b: Batch, out: torch.Tensor, windows: Windows) -> list[tuple[str, float]]:
    """Each launch of the program alone, in windows of its own; those of products with a small one that gives the tiles
    back."""
    program, found = bound(layer, b, out, windows), []
    again = untaken(program)
    for label, product, launch in bound_steps(program):
        dependent, launch.config.count = launch.config.count, 0

        def alone(launch: Launch = launch, product: bool = product) -> None:
            if product and not program.plan.decode:
                again()
            launch(torch.cuda.current_stream().cuda_stream)

        took = windows.measure({label: [alone]})
        launch.config.count = dependent
        found.append((label, round(took[label].median, 2)))
    return found
