"""The thread that moves experts of all split layers; it ends with the last layer."""

from __future__ import annotations

import atexit
import threading
import weakref

from lancebill.errors import LaunchError
from lancebill.split.moves import Moves

_PAUSES_S = 5e-3, 5e-2  # when nothing is to be moved: at first, and at most


class Mover:
    """Gives every layer its turn."""

    def __init__(self) -> None:
        self._layers: weakref.WeakSet[Moves] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, moves: Moves) -> None:
        """Move experts of this layer as long as it exists."""
        with self._lock:
            self._layers.add(moves)
            if self._thread is None or not self._thread.is_alive():  # after a fork it is not
                self._stopping.clear()
                self._thread = threading.Thread(target=self._run, name="lancebill-mover", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """When this returns, nothing moves any more."""
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause, longest = _PAUSES_S
        while not self._stopping.is_set():
            moved = sum(self._turn(each) for each in self._all())
            pause = _PAUSES_S[0] if moved else min(2 * pause, longest)
            if not moved:
                self._stopping.wait(pause)
            with self._lock:
                if not self._layers:
                    self._thread = None
                    return

    def _all(self) -> list[weakref.ref[Moves]]:
        with self._lock:
            return [weakref.ref(moves) for moves in self._layers]

    def _turn(self, each: weakref.ref[Moves]) -> int:
        moves = None if self._stopping.is_set() else each()
        try:
            return 0 if moves is None else moves.step()
        except LaunchError:  # the layer's next call raises it
            return 0


MOVER = Mover()
atexit.register(MOVER.stop)
