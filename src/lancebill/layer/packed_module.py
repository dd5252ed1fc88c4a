"""Parameters in a backend's layout, and the plans they are computed by: what layers and linears have in common.

Weights are registered parameters in integer storage, expert dimension first, laid out as the chosen backend wants
them. A plan is made once for a form of work and a number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.backends.base import Plan, Shortcut
from lancebill.errors import LaunchError, MissingTensor
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED, Device, Problem, parse_device

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORMS: dict[type[Dispatch], str] = {Indexed: INDEXED, Contiguous: CONTIGUOUS, Batched: BATCHED}
_MOST_PLANS = 1024  # kept at a time: a server meets batches of every size


class PackedModule(nn.Module):
    """Parameters of one problem in one backend's layout; moves between devices without harm."""

    def __init__(self) -> None:
        super().__init__()
        self._choice: oracle.Choice | None = None
        self._names: dict[str, tuple[str, ...]] = {}
        self._posed: dict[str, Problem] = {}  # by form; one object each, by which backends know their plans
        self._plans: dict[tuple[type[Dispatch], int], Plan] = {}  # by form and how many numbers come in
        self._shortcuts: dict[int, Shortcut] = {}  # of calls by ids, by how many numbers come in
        self._live: dict[str, Packed] = {}  # parameters by matrix and name
        self._flat: list[tuple[str, Tensor]] = []  # the same by their own names

    def adopt(self, choice: oracle.Choice, weights: Mapping[str, Packed]) -> None:
        """Take the packed weights of a problem; replaces what was there."""
        self._choice = choice
        self._forget_plans()
        for matrix in list(self._names):
            self._drop(matrix)
        for matrix, tensors in weights.items():
            self._register(matrix, tensors)

    def _forget_plans(self) -> None:
        self._posed.clear()
        self._plans.clear()
        self._shortcuts.clear()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Whoever sets one: shortcuts know those that were there."""
        self._shortcuts.clear()
        super().register_parameter(name, param)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights of its own, and finds its own shortcuts."""
        return {**self.__dict__, "_shortcuts": {}}

    @property
    def choice(self) -> oracle.Choice:
        """The backend and why; raises while nothing is loaded."""
        if self._choice is None:
            raise MissingTensor("the layer is not loaded yet", hint="call finish() after the last load_weights()")
        return self._choice

    @property
    def problem(self) -> Problem:
        return self.choice.problem

    @property
    def layout(self) -> Layout:
        return self.choice.backend.layout(self.problem)

    @property
    def packed(self) -> dict[str, Packed]:
        """The live tensors, by matrix and name."""
        held = dict(self.named_parameters(recurse=False))
        return {m: {name: held[f"{m}_{name}"].data for name in names} for m, names in self._names.items()}

    def _weights(self) -> dict[str, Packed]:
        """`packed` for every call: gathered once, and again when a parameter is another object."""
        held = self._parameters
        for name, tensor in self._flat:
            if held.get(name) is not tensor:
                self._flat.clear()
                break
        if not self._flat:
            known = dict(self.named_parameters(recurse=False))
            self._live = {m: {name: known[f"{m}_{name}"] for name in names} for m, names in self._names.items()}
            self._flat.extend(known.items())
        return self._live

    def _register(self, matrix: str, tensors: Packed) -> None:
        self._names[matrix] = tuple(tensors)
        self._flat.clear()
        for name, tensor in tensors.items():
            self.register_parameter(f"{matrix}_{name}", nn.Parameter(tensor, requires_grad=False))

    def _drop(self, matrix: str) -> None:
        self._flat.clear()
        for name in self._names.pop(matrix):
            self._parameters.pop(f"{matrix}_{name}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        """Move, then ask the oracle again: another device may want another layout."""
        before = self._choice
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        here = _device_of(self) if before is not None else None
        if before is None or here is None or here == before.device:
            return self
        self._choice = oracle.select(before.problem, here, before.requested)
        self._forget_plans()
        old = before.backend.layout(before.problem)
        if self.layout != old:
            self._repack(old)
        return self

    def _repack(self, old: Layout) -> None:
        """Through the canonical form, one expert at a time."""
        new, packed = self.layout, self.packed
        for matrix, shape in self.problem.matrices.items():
            source = packed[matrix]
            device = next(iter(source.values())).device
            fresh = new.allocate(shape, self.problem.experts, device)
            for expert in range(self.problem.experts):
                rows = {name: t[expert] for name, t in source.items()}
                new.pack(shape, old.unpack(shape, rows), {name: t[expert] for name, t in fresh.items()})
            fresh |= {name: t for name, t in source.items() if name not in old.storage(shape)}
            self._drop(matrix)
            self._register(matrix, fresh)

    def _check_input(self, x: Tensor) -> None:
        shape, hidden = x.shape, self.problem.hidden
        if len(shape) != 2 or shape[1] != hidden or x.dtype not in INPUT_DTYPES:
            raise LaunchError(
                "the input does not fit the layer",
                expected=f"[tokens, {hidden}] in bf16, fp16 or fp32",
                got=f"{list(shape)} in {x.dtype}",
            )
        held = next(iter(self._parameters.values()))
        here = x.device if held is None else held.device
        if x.device != here:
            raise LaunchError("the input is on another device than the layer", expected=here, got=x.device)

    def _run(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        key = (type(dispatch), x.numel())
        plan, choice = self._plans.get(key), self.choice
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._shortcuts.clear()
            form, tokens = _FORMS[type(dispatch)], x.shape[:-1].numel()  # of a batched input: all rows it has room for
            problem = self._posed.setdefault(form, replace(choice.problem, dispatch=form))
            plan = self._plans[key] = choice.backend.plan(problem, tokens, choice.device)
        return choice.backend.run(plan, x, dispatch, self._weights(), out)


def _device_of(module: nn.Module) -> Device | None:
    """The device parameters ended up on; None for meta tensors, which compute nothing."""
    where = next(module.parameters()).device
    return None if where.type == "meta" else parse_device(str(where))
