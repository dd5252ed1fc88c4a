"""What a backend is: `check` gives reasons, `layout` arranges weights, `plan` decides how, `run` computes.

Backends see local experts, dispatched rows and packed weights. They never learn which checkpoint the weights
came from. A backend object has no state: what a layer keeps between calls is in its `Executor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lancebill.backends.limited_dict import LimitedDict
from lancebill.backends.route_call import BoundRouting, FastRoute, RouteCall
from lancebill.errors import MissingTensor
from lancebill.moe.device import Device, require_on
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed, tensors_of
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED, Problem
from lancebill.moe.router_tensors import RouterTensors, route_as_defined
from lancebill.moe.routing import Routed, Routing


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot: a code for programs, a sentence for people, the nearest thing that works."""

    code: str
    text: str
    hint: str | None = None

    def __str__(self) -> str:
        return self.text if self.hint is None else f"{self.text} ({self.hint})"


class NoForm(Exception):
    """A backend's kernels cannot read a matrix. Raised deep inside, caught by the backend's `check`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Plan:
    """How a problem is computed for up to `tokens` tokens."""

    problem: Problem
    tokens: int
    estimate_us: float
    workspace_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __deepcopy__(self, memo: object) -> Plan:
        """A frozen value: copies of a layer share it."""
        return self


class Speed(IntEnum):
    """What a backend computes with, the slowest first."""

    DEFINITION = 0  # one expert after the other in fp32: defines the result of every problem
    TORCH = 1  # torch's operators, on a few dequantised experts at a time
    KERNELS = 2  # kernels that read packed weights


class Backend(ABC):
    """One way to compute. A module of this folder ends in `BACKEND = ...`; nothing else is edited."""

    name: ClassVar[str]
    on_request: ClassVar[bool] = False  # never chosen automatically
    # Reads ids and weights as routers give them, and the expert map: see `Indexed`.
    accepts_any_ids: ClassVar[bool] = False
    rotates: ClassVar[bool] = False  # rotates the inputs of specs with a rotation
    speed: ClassVar[Speed] = Speed.KERNELS

    def __deepcopy__(self, memo: object) -> Backend:
        """Copies of a model share the backend: it has no state."""
        return self

    def reasons(self, problem: Problem, device: Device) -> Iterator[Reason]:
        """Every reason why not; none = supported. A backend that knows nothing of rotations would ignore them."""
        if problem.rotated and not self.rotates:
            yield Reason("rotation", "does not rotate inputs")
        yield from self.check(problem, device)

    @abstractmethod
    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        """The backend's own reasons."""

    @abstractmethod
    def layout(self, problem: Problem) -> Layout:
        """How this backend wants the weights."""

    @abstractmethod
    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        """Pure: equal arguments give equal plans on any machine. `tokens` counts all rows x has room for."""

    @abstractmethod
    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        """Compute one call into `out`; keeps nothing for the next one.

        Indexed: x [M, H] to out [M, H], weighted and summed over slots. Contiguous: rows to rows. Batched:
        [E, T, H] to [E, T, H], rows past the counts untouched; weighting is then the caller's.
        """

    def executor(self, problem: Problem, device: Device, tensors: TensorTable) -> Executor:
        """The object that runs a layer's calls and keeps what they share."""
        return Executor(self, problem, device, tensors)


class TensorTable:
    """A layer's weights by matrix and name, looked up in the layer's live dictionary on every call.

    The dictionary may change under us: a parameter may be replaced, moved or deleted, and `p.data = ...` changes
    its address without changing any version counter. So code that keeps addresses compares all of them in every call.
    """

    def __init__(self, tensors: Mapping[str, Tensor | None], names: Mapping[str, tuple[str, ...]]) -> None:
        self.tensors = tensors
        self.names = {matrix: {name: f"{matrix}_{name}" for name in held} for matrix, held in names.items()}
        keys = [key for held in self.names.values() for key in held.values()]
        self._first = next(iter(keys), "")
        # With one key, itemgetter would return the tensor instead of a tuple.
        self._all = itemgetter(*keys) if len(keys) > 1 else lambda held: tuple(held[key] for key in keys)

    @classmethod
    def of(cls, packed: Mapping[str, Packed]) -> TensorTable:
        """The table of weights that belong to no module."""
        flat = {f"{matrix}_{name}": tensor for matrix, held in packed.items() for name, tensor in held.items()}
        return cls(flat, {matrix: tuple(held) for matrix, held in packed.items()})

    def packed(self) -> dict[str, Packed]:
        """The tensors as they are now."""
        return {matrix: {name: self._get(key) for name, key in held.items()} for matrix, held in self.names.items()}

    @property
    def device(self) -> torch.device:
        """Where the tensors are now."""
        return self._get(self._first).device

    def addresses(self) -> list[int]:
        """Where the tensors are now; empty when one is gone. Runs on every forward."""
        try:
            return list(map(Tensor.data_ptr, self._all(self.tensors)))
        except (KeyError, TypeError):  # a key is missing, or None
            return []

    def _get(self, key: str) -> Tensor:
        tensor = self.tensors.get(key)
        if tensor is None:
            raise MissingTensor("a weight of this layer was deleted", where=key)
        return tensor


# x [M, H], ids and weights [M, k], out [M, H], and the expert map if the layer has one; returns whether it computed.
FastCall = Callable[..., bool]


def call_tensors(x: Tensor, dispatch: Indexed, out: Tensor) -> tuple[Tensor, ...]:
    """The arguments of a `FastCall`."""
    given = x, dispatch.ids, dispatch.weights, out
    return given if dispatch.expert_map is None else (*given, dispatch.expert_map)


# x [..., K] times the one matrix of a layer: [..., N]; None if the function was not made for an x like this, or if x
# has a gradient.
LinearCall = Callable[[Tensor], Tensor | None]

Made = TypeVar("Made")
_DISPATCH: dict[type[Dispatch], str] = {Indexed: INDEXED, Contiguous: CONTIGUOUS, Batched: BATCHED}
MOST_PLANS = 1024  # plans or fast calls before all are dropped: a server sees batches of every size
MOST_MADE = 256  # likewise, things made for addresses


class Executor:
    """Runs the calls of one layer and holds everything that is kept between them.

    Plans are kept by dispatch form and tokens. What holds addresses (structs, bound launches) is kept by `remade`,
    which compares all addresses in every call.

    `fast_calls`, by the number of elements of x, holds functions for indexed calls that repeat an earlier one. Such a
    function compares all that it depends on (shapes, dtypes, stream, every address of the weights). If anything
    changed it does nothing and returns False, and the caller uses `run`.
    """

    def __init__(self, backend: Backend, problem: Problem, device: Device, tensors: TensorTable) -> None:
        self.backend, self.problem, self.device, self.tensors = backend, problem, device, tensors
        self.accepts_any_ids = backend.accepts_any_ids
        self.fast_calls = LimitedDict[int, FastCall](MOST_PLANS)
        self.fast_routes = LimitedDict[int, FastRoute](MOST_PLANS)  # likewise, by the number of logits
        self.fast_linears = LimitedDict[int, LinearCall](MOST_PLANS)  # likewise, of one matrix, by elements of x
        self._problems = {form: replace(problem, dispatch=form) for form in _DISPATCH.values()}
        self._plans: dict[tuple[str, int], Plan] = {}
        self.made = LimitedDict[Hashable, tuple[list[int], Any]](MOST_MADE)  # by `remade`, for which addresses
        # What graphs that this layer is part of use, by address. The layer hands it on to its next executor.
        self.graph_memory: dict[int, object] = {}

    def run(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        """One call, with every check."""
        require_on(self.tensors.device, x=x, out=out, **tensors_of(dispatch))
        return self.backend.run(self.plan(x, dispatch), x, dispatch, self.tensors.packed(), out)

    def route(
        self,
        routing: Routing,
        logits: Tensor,
        router: RouterTensors,
        hidden: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Routed:
        """Choose experts for each row of `logits`, with the backend's kernel if it has one for this routing."""
        call = RouteCall.make(routing, logits, router, hidden, input_ids)
        bound = None if call is None else self.bind_route(call)
        if call is None or bound is None:
            return route_as_defined(routing, logits, router, hidden, input_ids)
        if not routing.hashed and call.logits is logits:
            self.fast_routes[logits.numel()] = bound.fast_route(call)
        return bound.run(call.logits, call.input_ids)

    def bind_route(self, call: RouteCall) -> BoundRouting | None:
        """A kernel bound to this routing; None if the backend has none."""
        return None

    def plan(self, x: Tensor, dispatch: Dispatch) -> Plan:
        # A batched x counts all rows it has room for.
        return self.plan_for(_DISPATCH[type(dispatch)], x.shape[:-1].numel())

    def plan_for(self, form: str, tokens: int) -> Plan:
        key = form, self.plan_key(tokens)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= MOST_PLANS:
                self.forget()
            found = self._plans[key] = self.backend.plan(self._problems[form], tokens, self.device)
        return found

    @classmethod
    def reserve(cls, executors: Sequence[Executor], max_tokens: int) -> int:
        """Reserve memory that these layers share in captured calls of up to this many tokens. Returns its bytes."""
        return 0

    def remade(self, key: Hashable, addresses: list[int], make: Callable[[], Made]) -> Made:
        """What `make` made for these addresses; made again when one of them differs."""
        found = self.made.get(key)
        if found is None or found[0] != addresses:
            found = self.made[key] = addresses, make()
        made: Made = found[1]
        return made

    def fast_call(self, x: Tensor, plan: Plan, mapped: bool) -> FastCall | None:
        """A function for further indexed calls with an x like this one; None if the backend has none.

        `mapped`: for calls with an expert map; otherwise for calls without.
        """
        return None

    def prepare_fast_call(self, x: Tensor, mapped: bool = False) -> None:
        """After an indexed `run`: make the fast call for further calls like it."""
        plan = self._plans.get((INDEXED, self.plan_key(x.shape[0])))
        call = None if plan is None else self.fast_call(x, plan, mapped)
        if call is not None:
            self.fast_calls[x.numel()] = call

    def run_linear(self, x: Tensor, out: Tensor) -> Tensor:
        """`run` of a layer with one matrix and no experts: all rows are its own."""
        # [0, rows], made on the device without a copy from the host.
        return self.run(x, Contiguous(torch.arange(0, x.shape[0] + 1, x.shape[0], device=x.device)), out)

    def linear_call(self, x: Tensor, plan: Plan) -> LinearCall | None:
        """A function for further calls with an x like this one, of a layer with one matrix; None if there is none."""
        return None

    def prepare_linear_call(self, x: Tensor) -> None:
        """After a `run` of a layer with one matrix: make the fast call for further calls like it."""
        plan = self._plans.get((CONTIGUOUS, self.plan_key(x.shape[:-1].numel())))
        call = None if plan is None else self.linear_call(x, plan)
        if call is not None:
            self.fast_linears[x.numel()] = call

    def plan_key(self, tokens: int) -> int:
        """Numbers of tokens with the same key share a plan."""
        return tokens

    def forget(self) -> None:
        """Drop everything that the next call can build again."""
        self._plans.clear()
        self.drop_bound()
        self.fast_routes.clear()

    def drop_bound(self) -> None:
        """Drop what is bound to memory of calls."""
        self.made.clear()
        self.fast_calls.clear()
        self.fast_linears.clear()
