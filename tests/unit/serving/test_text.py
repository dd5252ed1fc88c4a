"""Text from tokens, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancebill.serving.text import TextStream


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab€😀 ", max_size=30), st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3))
def test_pieces_are_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    stream, pieces = TextStream(Bytes(), stops), list[str]()
    for token in text.encode():
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    else:
        pieces.append(stream.finish())
    places = [text.find(stop) for stop in stops if stop in text]
    # The first stop string that is complete ends the text, and it is cut where the earliest one begins.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    seen = text[: min(ends)] if ends else text
    expected = text[: min(seen.find(stop) for stop in stops if stop in seen)] if places else text
    assert "".join(pieces) == expected
    assert stream.stopped == bool(places)
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_not_held_back_longer_than_needed() -> None:
    stream = TextStream(Bytes(), ["END"])
    assert [stream.add(byte) for byte in b"aENxE"] == ["a", "", "", "ENx", ""]
    assert stream.finish() == "E"


def test_a_character_that_never_ends_is_shown_at_the_end() -> None:
    stream = TextStream(Bytes())
    assert stream.add("€".encode()[0]) == ""
    assert stream.finish() == "\ufffd"


def test_the_length_counts_text_that_is_held_back() -> None:
    stream, lengths = TextStream(Bytes(), ["END"]), []
    for byte in "a€EN".encode():
        stream.add(byte)
        lengths.append(stream.length)
    assert lengths == [1, 1, 1, 2, 3, 4]


class Counted(Bytes):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(tokens)
        return super().decode([token for token in tokens if token < 256])


@pytest.mark.parametrize("token", [0x80, 0xE2, 300])
def test_tokens_that_never_become_characters_cost_no_more_than_others(token: int) -> None:
    """Parts of characters, and tokens without text."""
    tokenizer = Counted()
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for _ in range(2000)]
    assert tokenizer.decoded < 2000 * 40
    text = "".join(pieces) + "".join(stream.add(byte) for byte in "€ab".encode()) + stream.finish()
    assert text == "\ufffd" * (2000 if token < 256 else 0) + "€ab" and stream.length == len(text)
    assert token > 255 or any(pieces)


class Overlapping(Bytes):
    """Each token ends one character of three bytes and begins the next."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return b"".join(
            ["€".encode()[1:] + b"\xe2", "€".encode(), b"\xe2", b"\x82\xac"][token] for token in tokens
        ).decode(errors="replace")


def test_characters_that_overlap_tokens_for_long_are_kept() -> None:
    stream = TextStream(Overlapping())
    pieces = [stream.add(token) for token in [1, 2, *[0] * 500, 3, 1]]
    assert "".join(pieces) + stream.finish() == "€" * 503 and not any("\ufffd" in piece for piece in pieces)
