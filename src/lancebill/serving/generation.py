"""Runs the answers of one request on the engine, and follows them as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from lancebill.errors import QueueFull
from lancebill.serving.engine import Answer, BatchEngine, Event
from lancebill.serving.mail import Mail
from lancebill.serving.parameters import ApiError
from lancebill.serving.requests import Served, Wanted
from lancebill.serving.sampling import Token
from lancebill.serving.text import TextStream

Arrived = tuple[int, Event]  # which answer of a request, and what came


@dataclass(frozen=True)
class Piece:
    """New text of one answer with the tokens it came from; the last piece says why the answer ended."""

    index: int
    text: str
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    starts: tuple[int, ...] = ()  # where in the answer each token's text begins, with the space before a word


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one answer as one."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    starts = tuple(start for piece in pieces for start in piece.starts)
    return Piece(pieces[0].index, "".join(piece.text for piece in pieces), tokens, pieces[-1].finish, starts)


class Generation:
    """The answers of one request, from `submit` until `close`."""

    def __init__(self, engine: BatchEngine, served: Served, wanted: Wanted, mail: Mail[Arrived]) -> None:
        self._engine, self.wanted, self._mail = engine, wanted, mail
        self._events: asyncio.Queue[Arrived] = asyncio.Queue()
        self._answers = [
            Answer(prompt, most, how, lambda event, index=index: self._receive(index, event))  # type: ignore[misc]
            for index, (prompt, most, how) in enumerate(wanted.answers)
        ]
        self._texts = [TextStream(served.tokenizer, wanted.stops) for _ in self._answers]
        self.prompt_tokens = sum(map(len, wanted.prompts))
        self.generated_tokens = 0

    def _receive(self, index: int, event: Event) -> None:
        """Called by the engine's thread."""
        self._mail.post(self._events.put_nowait, (index, event))

    def submit(self) -> None:
        most = self._engine.limits.waiting
        if len(self._answers) > most:  # would not fit into an empty queue either
            what = f"expected at most {most} answers (prompts, times n), got {len(self._answers)}"
            raise ApiError(400, what, None, "too_many_answers")
        try:
            self._engine.submit(self._answers)
        except QueueFull:
            raise ApiError(429, "too many requests are waiting; try again later", None, "queue_full", "overloaded") \
                from None  # fmt: skip

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were not read for this request; each prompt counts once, as in `prompt_tokens`."""
        return sum(answer.shared for answer in self._answers[:: self.wanted.choices])

    async def pieces(self) -> AsyncIterator[Piece]:
        """New text of all answers as it arrives, until all have ended."""
        # Tokens whose text is not complete yet, and where it begins:
        pending: list[list[tuple[Token, int]]] = [[] for _ in self._answers]
        open_answers = set(range(len(self._answers)))
        while open_answers:
            index, event = await self._events.get()
            if index not in open_answers:
                continue  # generated before the engine knew that the answer had stopped
            stream, finish = self._texts[index], None
            if isinstance(event, Token) and event.id in self.wanted.stop_tokens:
                self.generated_tokens += 1
                self._engine.cancel([self._answers[index]])
                text, finish = stream.finish(), "stop"
            elif isinstance(event, Token):
                self.generated_tokens += 1
                pending[index].append((event, stream.length))
                text = stream.add(event.id)
            else:
                text, finish = stream.finish(), event.reason
            if stream.stopped:
                finish = "stop"
                self._engine.cancel([self._answers[index]])
            if finish == "error":
                raise ApiError(500, "the model failed on this request", None, "server_error", "server_error")
            if finish:
                open_answers.discard(index)
            if text or finish:
                tokens, starts = zip(*pending[index]) if pending[index] else ((), ())
                yield Piece(index, text, tokens, finish, starts)
                pending[index] = []

    def close(self) -> None:
        """Stop what is still generating."""
        self._engine.cancel(self._answers)


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's counts of tokens."""
    prompt, generated = generation.prompt_tokens, generation.generated_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }
