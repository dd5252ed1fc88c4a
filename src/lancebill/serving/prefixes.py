"""Prompts that start equally share the keys and values of their start.

The running sequences and, within a limit, the most recently finished ones stay available, answers included: a
conversation's next request repeats all earlier messages. A new sequence copies the longest common start and reads the
rest of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from lancebill.serving.ragged import KeysValues, RaggedModel, room
from lancebill.serving.runners import Runner

LEAST_SHARED = 16  # tokens: fewer are soon read
MOST_KEPT = 32  # sequences: a new prompt is compared with all of them


class Prefixes:
    """Gives sequences their states. Only states of `RaggedModel` can be shared in part; with another runner, or with a
    limit of 0 tokens, nothing is shared."""

    def __init__(self, runner: Runner, most_tokens: int) -> None:
        self._runner, self._model = runner, runner if isinstance(runner, RaggedModel) and most_tokens else None
        self._most_tokens, self._version = most_tokens, (0, "")
        self._running: dict[KeysValues, Sequence[int]] = {}  # with their prompts
        self._kept: dict[KeysValues, Sequence[int]] = {}  # with all their tokens, the least recently used first
        self.tokens = 0  # that the kept ones have memory for

    def begin(self, prompt: Sequence[int], share: int) -> tuple[Any, int] | None:
        """The state of a new sequence, and how many tokens of its prompt that has already.

        None if it should wait: another one is about to read at least as many tokens of the same start as the `share`
        that it could read itself meanwhile.
        """
        if self._model is None:
            return self._runner.new_sequence(), 0
        if self._model.version() != self._version:
            self.forget()
            self._version = self._model.version()
        source, held, coming = self._nearest(prompt)
        if coming - held >= max(share, LEAST_SHARED):
            return None
        if source is None or held < LEAST_SHARED:
            state, held = self._model.new_sequence(), 0
        else:
            state = source.beginning(held, room(len(prompt)))
            if source in self._kept:
                self._kept[source] = self._kept.pop(source)
        self._running[state] = prompt
        return state, held

    def _nearest(self, prompt: Sequence[int]) -> tuple[KeysValues | None, int, int]:
        """The sequence with the longest start of `prompt`, its length, and the longest that any is going to have."""
        source, held, coming = None, 0, 0
        for state, tokens in chain(self._running.items(), self._kept.items()):
            equal = min(_equal(prompt, tokens), len(prompt) - 1)  # the last token is read: its logits are wanted
            coming = max(coming, equal)
            if min(equal, state.length) > held:
                source, held = state, min(equal, state.length)
        return source, held, coming

    def end(self, state: Any, tokens: Sequence[int]) -> None:
        """A sequence has ended, with these tokens; the model may not have seen the last of them."""
        if self._model is None or self._running.pop(state, None) is None:
            return
        tokens = tokens[: min(state.length, self._most_tokens)]
        if len(tokens) < LEAST_SHARED or any(kept[: len(tokens)] == tokens for kept in self._kept.values()):
            return
        for other, kept in list(self._kept.items()):
            if tokens[: len(kept)] == kept:
                self._drop(other)
        if state.capacity > self._most_tokens:
            try:
                state = state.beginning(len(tokens), len(tokens))
            except (RuntimeError, MemoryError):  # out of memory
                return
        self._kept[state] = tokens
        self.tokens += state.capacity
        self.shrink(self._most_tokens)

    def shrink(self, most_tokens: int) -> None:
        """Drop the least recently used ones until the others have memory for at most so many tokens."""
        while self._kept and (self.tokens > most_tokens or len(self._kept) > MOST_KEPT):
            self._drop(next(iter(self._kept)))

    def _drop(self, state: KeysValues) -> None:
        del self._kept[state]
        self.tokens -= state.capacity

    def forget(self) -> None:
        """All of them, also of the sequences that run: the model computes something else now, or has failed."""
        self._running, self._kept, self.tokens = {}, {}, 0


def _equal(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both start with; 0 if that is too few."""
    if first[:LEAST_SHARED] != second[:LEAST_SHARED]:
        return 0
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
