"""Layers of realistic width for the CPU kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from lancebill.backends.base import Backend
from lancebill.backends.cpu import BACKEND, Cpu, native
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.bench.workload import Weights, batches
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.moe.problem import Problem
from lancebill.testing.layers import layer_problem

CPU = Device("cpu")
LIBRARY = native.library()
LEVELS = () if LIBRARY is None else LIBRARY.levels
# Largest relative error of a row against the reference, by input type (see docs/numerics.md).
BOUNDS = {"bf16": 4e-3, "fp32": 2e-6, "int8": 6e-3}  # a few quantised inputs may round the other way


class Work:
    """A layer of realistic width with a batch, and the reference results."""

    def __init__(self, spec: str, activations: str, tokens: int, experts: int, top_k: int) -> None:
        activation = Activation("swigluoai", limit=7.0) if tokens == 5 else Activation()
        self.problem = layer_problem(
            spec,
            activations,
            hidden=1024,
            intermediate=384,
            experts=experts,
            top_k=top_k,
            bias=tokens == 5,
            activation=activation,
        )
        self.packed = packed_weights(self.problem, BACKEND)
        self.batch = batches(self.problem, tokens, "uniform", 1, torch.device("cpu"))[0]

    def run(self, backend: Cpu) -> Tensor:
        plan = backend.plan(self.problem, self.batch.x.shape[0], CPU)
        dispatch = Indexed(self.batch.ids, self.batch.weights)
        return backend.run(plan, self.batch.x, dispatch, self.packed, torch.full_like(self.batch.x, torch.nan))

    def reference(self) -> Tensor:
        plan = REFERENCE.plan(self.problem, 1, CPU)
        packed = packed_weights(self.problem, REFERENCE)
        out = torch.empty(self.batch.x.shape, dtype=torch.float32)
        return REFERENCE.run(plan, self.batch.x, Indexed(self.batch.ids, self.batch.weights), packed, out)


@lru_cache(maxsize=4)
def layer_weights(problem: Problem) -> Weights:
    return Weights(problem, torch.device("cpu"))


@lru_cache(maxsize=4)
def packed_weights(problem: Problem, backend: Backend) -> dict[str, Packed]:
    return layer_weights(problem).packed(backend.layout(problem))


@cache
def work(spec: str, activations: str = "bf16", tokens: int = 3, experts: int = 6, top_k: int = 3) -> Work:
    return Work(spec, activations, tokens, experts, top_k)


def repeat_from_two_threads(call: Callable[[int], Tensor], alone: list[Tensor], times: int) -> None:
    """Calls from two threads at once: every result equals that of the call alone."""
    together: list[list[Tensor]] = [[], []]

    def repeat(which: int) -> None:
        for _ in range(times):
            together[which].append(call(which))

    threads = [threading.Thread(target=repeat, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in (0, 1):
        assert len(together[which]) == times
        assert all(torch.equal(result, alone[which]) for result in together[which])
