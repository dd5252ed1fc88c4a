"""Turns tokens into text as they arrive: whole characters only, and nothing from a stop string on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

INCOMPLETE = "\ufffd"  # decoding an incomplete character gives this
MOST_BYTES = 4  # of a character in UTF-8
MOST_UNREAD = 16  # tokens that end in an incomplete character; all are decoded again for each new token


class TextStream:
    """The text of one answer. The pieces it returns, joined, are the whole text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.stopped = False
        self.length = 0  # characters of all tokens so far, also of those that are held back
        self._tokens: list[int] = []
        self._context, self._read = 0, 0  # text of tokens before `_read` is known; those from `_context` are its last
        self._given = 0  # characters of the text from `_context` on that are known
        self._held = ""  # known text that may be the beginning of a stop string

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character or a stop string may go on."""
        self._tokens.append(token)
        return self._release(self._decode(final=False), final=False)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        return "" if self.stopped else self._release(self._decode(final=True), final=True)

    def _decode(self, final: bool) -> str:
        # A token's text may depend on the one before it (spaces between words), so known tokens are decoded again
        # before the new ones, but only the last few of them.
        text = self._text(self._tokens[self._context :])
        complete = final or not text.endswith(INCOMPLETE)
        many = len(self._tokens) - self._read >= MOST_UNREAD
        if not final and not many and (len(text) <= self._given or not complete):
            return ""
        # Only the last U+FFFD can still become a character; earlier ones are final.
        new = text[self._given : len(text) if complete else -1]
        self._context = len(self._tokens) - MOST_BYTES if many else self._read
        self._read = len(self._tokens)
        known = self._text(self._tokens[self._context :])
        self._given = len(known) - (not complete and known.endswith(INCOMPLETE))
        self.length += len(new)
        return new

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""

    def _release(self, new: str, final: bool) -> str:
        text, self._held = self._held + new, ""
        found = [place for place in (text.find(stop) for stop in self.stops) if place >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        if final:
            return text
        longest = max((_overlap(text, stop) for stop in self.stops), default=0)
        cut = len(text) - longest
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes | None:
    """The UTF-8 of a token, whose text is `text`; None if that is a part of a character, and not known."""
    if INCOMPLETE not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if one := re.fullmatch("<0x([0-9A-F]{2})>", name):  # sentencepiece
        return bytes.fromhex(one[1])
    known = _byte_names()
    return bytes(known[each] for each in name) if set(name) <= set(known) else None


@cache
def _byte_names() -> dict[str, int]:
    """The characters that stand for bytes in the tokens of byte-level BPE: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}
