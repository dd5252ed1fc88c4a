"""Move the most recently used experts of a split layer to its device while it computes.

Host memory has all experts, so evicting one costs nothing, and calls never wait: the CPU computes an expert until it
has arrived. A move has three steps: map the evicted expert to the host; after the last call that saw it on the device,
overwrite its place; map the new expert to the device.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.errors import LaunchError, SpecError
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import FAST
from lancebill.split.call_views import CallViews
from lancebill.split.copy_lane import pin_in_place
from lancebill.split.quiet_stream import done_at_once
from lancebill.split.repack import repack, rows_of
from lancebill.split.residency import ExpertSwap, Residency
from lancebill.split.reuse import RecentReuse, break_even
from lancebill.split.ways import ASSUMED, Rates

OFF, RECENCY = MOVES = ("off", "recency")
MOST = 4  # moves of a layer, before other layers have their turn
LIMIT_S = 60.0  # that a move waits for calls to end
_PAUSE_S = 2e-4


class Whole(Protocol):
    """The part in host memory, which has all experts."""

    expert_map: Tensor | None

    @property
    def executor(self) -> Executor: ...


class Layer(Protocol):
    """The layer whose experts move."""

    @property
    def settled(self) -> bool:
        """Whether its weights are complete."""


@dataclass(frozen=True, eq=False)
class Maps:
    """The maps of the two parts in one call."""

    own: Tensor
    host: Tensor


@dataclass(frozen=True, eq=False)
class _Parts:
    """What moves work on: the parts as they are now, and the ids of the experts by their slot in the host's part."""

    own: Executor
    host: Whole
    views: CallViews
    ids: tuple[int, ...]

    @property
    def places(self) -> int:
        return self.own.problem.experts


class Moves:
    """Where the experts of one layer are, and the moves between both parts."""

    def __init__(self, layer: Layer) -> None:
        self._layer = weakref.ref(layer)
        self.held = Residency(())
        self.rates: Callable[[], Rates] = lambda: ASSUMED
        self.moved = 0
        self._parts: _Parts | None = None
        self._reuse = RecentReuse()
        self._seen: tuple[Sequence[int], int] = (
            (),
            0,
        )  # at the last look: the last use of each expert, and the number of calls
        self._lock = threading.Lock()  # held by whoever needs all experts to stay in place
        self._halted = self._stopped = False
        self._error: LaunchError | None = None

    def attach(self, own: Executor, host: Whole, live: Tensor) -> None:
        """Work on these parts from now on; `live` is the layer's map."""
        everywhere = host.expert_map
        assert everywhere is not None and host.executor is not None
        with self._lock:
            known = self._parts
            if known is not None and known.views.live.data_ptr() == live.data_ptr():
                self._parts = replace(known, own=own, host=host)
                return
            ids = {slot: expert for expert, slot in enumerate(everywhere.tolist()) if slot >= 0}
            self._parts = _Parts(own, host, CallViews(live, everywhere), tuple(ids[slot] for slot in range(len(ids))))
            with done_at_once(live.device):
                places = live.tolist()
            here = {place: int(everywhere[expert]) for expert, place in enumerate(places) if place >= 0}
            self.held = Residency(tuple(here.get(place, -1) for place in range(own.problem.experts)))
            self._seen = (), 0

    @contextmanager
    def call(self, dispatch: Indexed) -> Iterator[Maps]:
        """The maps of a call, which may read both parts until this ends."""
        self.check()
        assert self._parts is not None
        self._halted = False
        view = self._parts.views.current()
        view.begin(dispatch.ids)
        try:
            yield Maps(view.own, view.host)
        finally:
            view.end()

    @contextmanager
    def still(self) -> Iterator[Residency]:
        """Nothing moves inside, nor before a GPU has done what is queued inside."""
        with self._lock:
            yield self.held
            self._finish_caller()

    def halt(self) -> None:
        """Nothing moves until the next call that is not a replay."""
        with self._lock:
            self._halted = True

    def refill(self) -> None:
        """Copy all experts that are on the device again. No call may be under way."""
        with self._lock:
            assert self._parts is not None
            self._finish_caller()
            for place, slot in enumerate(self.held.experts):
                if slot >= 0:
                    self._fill(self._parts, place, slot)

    def restore(self) -> bool:
        """Rewrite the layer's map after its memory was lost; False if no expert can have moved yet."""
        with self._lock:
            if self._parts is None:
                return False
            for slot in range(len(self._parts.ids)):
                place = self.held.experts.index(slot) if slot in self.held.experts else -1
                self._announce(self._parts, slot, place)
            return True

    def check(self) -> None:
        """Raise if a move has failed since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def step(self) -> int:
        """Make the moves that are proposed now; how many were made. If one fails, the next call raises, too."""
        parts = self._parts
        if parts is None or not parts.places or parts.views.uses.calls == self._seen[1]:
            return 0
        with self._lock:
            parts, layer = self._parts, self._layer()
            if parts is None or layer is None or self._halted or self._stopped or not layer.settled:
                return 0
            made, swap = 0, None
            try:
                for swap in self._propose(parts):
                    self._move(parts, swap)
                    made += 1
                    self.moved += 1
            except Exception as error:  # whatever it is, it must reach the caller of the layer
                self._stopped, self._error = True, _failed(swap, error)
                raise self._error from error
            return made

    def _finish_caller(self) -> None:
        """What the caller has queued writes to the same places as moves, which have a stream of their own."""
        if self._parts is not None and self._parts.views.live.device.type == "cuda":
            torch.cuda.current_stream(self._parts.views.live.device).synchronize()

    def _propose(self, parts: _Parts) -> tuple[ExpertSwap, ...]:
        uses = parts.views.uses
        before, _ = self._seen
        calls, last = uses.calls, uses.last()
        scores = [last[expert] for expert in parts.ids]
        if before:
            self._reuse = self._reuse.after(before, scores, parts.places)
        self._seen = scores, calls
        if self._reuse.hit_rate < break_even(parts.places / len(parts.ids), self.rates()):
            return ()
        swaps = self.held.swaps([*scores, -1], range(len(scores)), MOST)  # an empty place has expert -1
        if len(swaps) == MOST:
            self._seen = scores, -1  # there may be more: look again
        return swaps

    def _move(self, parts: _Parts, swap: ExpertSwap) -> None:
        if swap.leaves >= 0:
            self._announce(parts, swap.leaves, -1)
        try:
            self._wait(parts)
        except LaunchError:
            if swap.leaves >= 0:
                self._announce(parts, swap.leaves, swap.place)
            raise
        self.held = self.held.after([ExpertSwap(swap.place, swap.leaves, -1)])
        self._fill(parts, swap.place, swap.comes)
        self._announce(parts, swap.comes, swap.place)
        self.held = self.held.after([swap])

    def _announce(self, parts: _Parts, slot: int, place: int) -> None:
        """Change one word of the map: calls that begin later see it."""
        live = parts.views.live
        with torch.inference_mode(), done_at_once(live.device):
            live[parts.ids[slot] : parts.ids[slot] + 1].fill_(place)

    def _wait(self, parts: _Parts) -> None:
        """Until the calls that have begun so far have ended."""
        end = time.monotonic() + LIMIT_S
        for view, begun in parts.views.under_way():
            while view.ended < begun:
                if time.monotonic() > end:
                    raise LaunchError(
                        f"a call of this layer has not ended for {LIMIT_S:g} seconds",
                        hint="an earlier error of the GPU may have stopped it",
                    )
                time.sleep(_PAUSE_S)

    def _fill(self, parts: _Parts, place: int, slot: int) -> None:
        """Copy an expert from host memory, and pack it for the device there."""
        own, host = parts.own, parts.host.executor
        device, held = parts.views.live.device, host.tensors.packed()
        layouts = host.backend.layout(host.problem), own.backend.layout(own.problem)
        with torch.inference_mode(), done_at_once(device):
            if device.type == "cuda":  # here, because a capture in another thread forbids it elsewhere
                for tensors in held.values():
                    for tensor in tensors.values():
                        pin_in_place(tensor)
            given = {
                matrix: {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
                for matrix, tensors in rows_of(held, slot).items()
            }
            into = rows_of(own.tensors.packed(), place)
            repack(own.problem.matrices, (layouts[0], given), (layouts[1], into))


def check_moves(moves: str, order: str) -> None:
    """Raise if there is no such way to move experts, or not in this order."""
    if moves not in MOVES:
        raise SpecError("unknown way to move experts", where="moves", expected=" or ".join(MOVES), got=moves)
    if moves != OFF and order != FAST:
        raise SpecError(
            "where an expert is changes the last bits of a result, so experts that move are not batch-invariant",
            where="moves",
            expected=f"order {FAST}, or moves {OFF}",
            got=f"order {order}",
        )


def _failed(swap: ExpertSwap | None, error: Exception) -> LaunchError:
    return LaunchError(
        "an expert could not be moved to the device; from now on experts stay where they are",
        where=None if swap is None else f"slot {swap.comes}",
        got=f"{type(error).__name__}: {error}",
        hint="the layer computes as before; moves='off' loads it without moves",
    )
