"""The JSON of replies to chat and completion requests: whole, and as events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from lancebill.serving.generation import Generation, Piece, joined, usage
from lancebill.serving.requests import Served
from lancebill.serving.sampling import Token
from lancebill.serving.text import token_bytes


class Reply(Protocol):
    """How one kind of request is answered."""

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """One object."""
        ...

    def events(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream."""
        ...


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


class _Choices(ABC):
    """What chat and completion replies share: a list of choices, and chunks of them."""

    prefix, name, chunk_name = "", "", ""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._head = {"id": new_id(self.prefix), "created": int(time.time()), "model": served.name}

    async def whole(self, generation: Generation) -> dict[str, Any]:
        answers: dict[int, list[Piece]] = {}
        async for piece in generation.pieces():
            answers.setdefault(piece.index, []).append(piece)
        choices = [self._choice(joined(pieces), generation) for _, pieces in sorted(answers.items())]
        return {**self._head, "object": self.name, "choices": choices, "usage": usage(generation)}

    async def events(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        for index in range(len(generation.wanted.answers)):
            for choice in self._opening(index):
                yield self._chunk([choice])
        async for piece in generation.pieces():
            for choice in self._change(piece, generation):
                yield self._chunk([choice])
        if generation.wanted.usage_event:
            yield {**self._chunk([]), "usage": usage(generation)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_name, "choices": choices}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        return []

    @abstractmethod
    def _choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def _change(self, piece: Piece, generation: Generation) -> list[dict[str, Any]]:
        """The choices of a stream event for a new piece of an answer."""

    def _text(self, token: int) -> str:
        return str(self.served.tokenizer.decode([token]))


class ChatReply(_Choices):
    """`/v1/chat/completions`."""

    prefix, name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = self._logprobs(piece.tokens, generation)
        return {"index": piece.index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def _change(self, piece: Piece, generation: Generation) -> list[dict[str, Any]]:
        changes = []
        logprobs = self._logprobs(piece.tokens, generation)
        if piece.text or piece.tokens:
            changes.append(self._delta(piece.index, {"content": piece.text}, logprobs=logprobs))
        if piece.finish:
            changes.append(self._delta(piece.index, {}, piece.finish))
        return changes

    def _delta(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[Token], generation: Generation) -> dict[str, Any] | None:
        if generation.wanted.sampling.top_logprobs is None:
            return None
        content = []
        for token in tokens:
            best = [self._entry(other, logprob) for other, logprob in token.alternatives]
            content.append({**self._entry(token.id, token.logprob), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        known = token_bytes(self.served.tokenizer, token, text)
        return {"token": text, "logprob": logprob, "bytes": None if known is None else list(known)}


class CompletionReply(_Choices):
    """`/v1/completions`."""

    prefix, name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def _choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        logprobs = self._logprobs(piece, generation)
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _change(self, piece: Piece, generation: Generation) -> list[dict[str, Any]]:
        return [self._choice(piece, generation)]

    def _logprobs(self, piece: Piece, generation: Generation) -> dict[str, Any] | None:
        if generation.wanted.sampling.top_logprobs is None:
            return None
        texts = [self._text(token.id) for token in piece.tokens]
        best = [self._best(token) for token in piece.tokens]
        logprobs = [token.logprob for token in piece.tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": best, "text_offset": list(piece.starts)}

    def _best(self, token: Token) -> dict[str, float]:
        """By text; the less likely ones of tokens with the same text have the names `token_id:7`."""
        best: dict[str, float] = {}
        for other, logprob in token.alternatives:
            text = self._text(other)
            best[f"token_id:{other}" if text in best else text] = logprob
        return best
