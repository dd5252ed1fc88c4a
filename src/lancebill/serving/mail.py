"""Events on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Letter = TypeVar("Letter")


class Mail(Generic[Letter]):
    """Wakes a loop once for all that was posted meanwhile: a step of the model gives every answer a token, and each
    wake-up costs the engine a call of the system. What is posted is delivered in that order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[tuple[Callable[[Letter], object], Letter]] = deque()
        self._woken = False  # a wake-up is under way that will deliver what is posted now

    def post(self, deliver: Callable[[Letter], object], letter: Letter) -> None:
        """Have the loop call `deliver`. From any thread; a loop that is closed gets nothing."""
        if self.loop.is_closed():
            return
        self._posted.append((deliver, letter))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # it was closed just now
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from now on may come too late for this round
        while self._posted:
            deliver, letter = self._posted.popleft()
            deliver(letter)
