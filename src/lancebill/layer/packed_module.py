"""Weights in a backend's layout as parameters of a module, and the executor that runs calls on them.

Parameters are stored as integers with the expert dimension first. `RoutedExperts` and `QuantizedLinear` share this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.backends.base import Executor, TensorTable
from lancebill.backends.slow_choice import warn_if_slow
from lancebill.errors import LaunchError
from lancebill.layer.check_tensors import FLOATS
from lancebill.layer.compiled_op import add_layer
from lancebill.moe.device import parse_device, require_on
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import Problem

REPACK_BYTES = 16 << 20  # of codes that are converted at once; temporary memory is up to ten times that


class PackedModule(nn.Module):
    """Parameters of one problem in one backend's layout. Moving it to another device repacks them if needed."""

    tag: Tensor

    def __init__(self, choice: oracle.Choice, packed: Mapping[str, Packed]) -> None:
        super().__init__()
        self._names: dict[str, tuple[str, ...]] = {}
        self._executor: Executor | None = None  # made by the first call; holds all state between calls
        self._graph_memory: dict[int, object] = {}  # of every executor so far: graphs outlive them
        self.adopt(choice, packed)
        device = next(self.parameters()).device
        # By which a compiled graph finds this layer:
        self.register_buffer("tag", torch.zeros(1, dtype=torch.int8, device=device), persistent=False)
        add_layer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a tag of its own, and compiled graphs find it by that."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        add_layer(self)

    def adopt(self, choice: oracle.Choice, packed: Mapping[str, Packed]) -> None:
        """Replace the weights and the backend."""
        self._take(choice)
        for matrix in list(self._names):
            self._unregister(matrix)
        for matrix, tensors in packed.items():
            self._register(matrix, tensors)

    def _take(self, choice: oracle.Choice) -> None:
        """Compute with this backend from now on."""
        warn_if_slow(choice)
        self.choice, self._executor = choice, None  # `choice` also says why

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            self._executor = self._make_executor()
        return self._executor

    def _make_executor(self) -> Executor:
        table = TensorTable(self._parameters, self._names)
        executor = self.choice.backend.executor(self.problem, self.choice.device, table)
        executor.graph_memory = self._graph_memory
        return executor

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._executor = None
        super().register_parameter(name, param)

    def __getstate__(self) -> dict[str, Any]:
        """Without the executor, which holds addresses of this object's weights: copies have other addresses."""
        return {**self.__dict__, "_executor": None, "_graph_memory": {}}

    @property
    def problem(self) -> Problem:
        return self.choice.problem

    @property
    def layout(self) -> Layout:
        return self.choice.backend.layout(self.problem)

    @property
    def packed(self) -> dict[str, Packed]:
        """The current tensors, by matrix and name."""
        current = dict(self.named_parameters(recurse=False))
        return {m: {name: current[f"{m}_{name}"].data for name in names} for m, names in self._names.items()}

    def _register(self, matrix: str, tensors: Packed) -> None:
        self._names[matrix] = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(f"{matrix}_{name}", nn.Parameter(tensor, requires_grad=False))

    def _unregister(self, matrix: str) -> None:
        self._executor = None
        for name in self._names.pop(matrix):
            self._parameters.pop(f"{matrix}_{name}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        """Move. First select a backend for the new device, and repack into its memory if the layout differs."""
        to = fn(self.tag).device
        if to.type != "meta":  # meta tensors are never computed
            self._choose_for(to)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _choose_for(self, to: torch.device) -> None:
        before, device = self.choice, parse_device(str(to))
        if device == before.device:
            return
        choice, old = oracle.select(before.problem, device, before.requested), self.layout
        new = choice.backend.layout(before.problem)
        if new != old:
            self._repack(old, new, to)
        self._take(choice)

    def _repack(self, old: Layout, new: Layout, to: torch.device) -> None:
        """Convert to another layout through the canonical form, some experts at a time, and matrix by matrix: then no
        device holds more than its own form and one matrix of the other. A GPU unpacks much faster than a CPU. Input
        scales have no layout."""
        packed = self.packed
        for matrix, shape in self.problem.matrices.items():
            source = packed.pop(matrix)
            at = next(iter(source.values())).device
            fresh, work = new.allocate(shape, self.problem.experts, to), to if to.type == "cuda" else at
            step = max(1, REPACK_BYTES // (shape.n * shape.k))
            for first in range(0, 0 if at.type == "meta" else self.problem.experts, step):
                some = slice(first, first + step)
                weights = old.unpack(shape, {name: t[some].to(work) for name, t in source.items()})
                new.pack(shape, weights.to(to), {name: t[some] for name, t in fresh.items()})
            fresh |= {name: t for name, t in source.items() if name not in old.storage(shape)}
            self._unregister(matrix)
            self._register(matrix, fresh)

    def _check_input(self, x: Tensor) -> None:
        shape, hidden = x.shape, self.problem.hidden
        if len(shape) != 2 or shape[1] != hidden or x.dtype not in FLOATS:
            raise LaunchError(
                "the input does not fit the layer",
                expected=f"[tokens, {hidden}] in bf16, fp16 or fp32",
                got=f"{list(shape)} in {x.dtype}",
            )
        self._check_place(x=x)

    def _check_place(self, **inputs: Tensor | None) -> None:
        """Raise for an input that is not where the weights are."""
        weight = next(iter(self._parameters.values()))
        if weight is not None:
            require_on(weight.device, **inputs)
