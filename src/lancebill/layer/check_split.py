"""Whether the options of a split layer are possible and go together: asked before anything is loaded."""

from __future__ import annotations

from lancebill.backends import oracle
from lancebill.errors import SpecError, UnsupportedProblem
from lancebill.moe.device import Device
from lancebill.moe.problem import FAST, Problem
from lancebill.split.host_threads import check_threads
from lancebill.split.moves import OFF, check_moves
from lancebill.split.split import check_count, parse_bytes

CPU_KERNELS = "cpu"  # the backend that computes experts in host memory beside a GPU: it calls no Python
SPLIT_BY = "split by gpu_memory or gpu_experts; bench: by --split"
QUANTISE = "--weights or weights= quantises them while they load, to int8 for example"


def check_split(
    gpu_memory: int | str | None, gpu_experts: int | None, moves: str, cpu_threads: int | None, *, order: str = FAST
) -> None:
    """Raise what is wrong with them."""
    check_moves(moves, order)
    if gpu_memory is not None:
        parse_bytes(gpu_memory, "gpu_memory")
    if gpu_experts is not None:
        check_count(gpu_experts)
    if cpu_threads is not None:
        check_threads(cpu_threads)
    if gpu_memory is not None and gpu_experts is not None:
        raise SpecError("give a number of experts or an amount of memory", got="gpu_experts and gpu_memory")
    if gpu_memory is None and gpu_experts is None:
        if moves != OFF:
            raise SpecError("experts move only where layers are split", where="moves", got=moves, hint=SPLIT_BY)
        if cpu_threads is not None:
            what = "these threads compute the experts in host memory, and no layer is split"
            raise SpecError(what, where="cpu_threads", got=cpu_threads, hint=SPLIT_BY)


def check_layer(
    problem: Problem, device: Device, experts: int | None, moves: str, cpu_threads: int | None = None, *, where: str
) -> None:
    """Raise if this one layer cannot have so many experts on its device; `where` names the option that says so."""
    check_split(None, experts, moves, cpu_threads, order=problem.order)
    if experts is None:
        return
    least, most = (0, problem.experts) if moves == OFF else (1, problem.experts - 1)
    if not least <= experts <= most:
        what = "the layer does not have so many experts" if moves == OFF else "experts move only between two parts"
        raise SpecError(what, where=where, expected=f"{least} to {most}", got=experts)
    if experts < problem.experts and device.kind != "cpu":
        check_host(problem)


def check_host(problem: Problem, where: str | None = None) -> None:
    """Raise if the CPU cannot compute experts of this problem beside a GPU."""
    choice = oracle.explain(problem, "cpu", CPU_KERNELS)
    if choice.chosen is not None:
        return
    reasons = next(verdict.reasons for verdict in choice.verdicts if verdict.backend.name == CPU_KERNELS)
    raise UnsupportedProblem(
        "beside a GPU, experts in host memory need the CPU kernels",
        where=where,
        got="; ".join(reason.text for reason in reasons),
        hint=reasons[0].hint if problem.w13.spec.quantized else QUANTISE,
    )
