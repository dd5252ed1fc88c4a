"""Modules' names against what configs list: components, and regular expressions matched in bounded time.

Python's matcher tries one way after another, and a short pattern like `(\\w+\\.?)*!` has more ways through a name than
anyone can wait for. It is left with patterns of few choices. For others all ways are followed at once: what has been
reached is a set of positions, one bit of an integer each, every element of the pattern carries such sets forward, and
what a group reaches from a position is computed once. Only what looks back at text that was matched before cannot be
said like this; it is refused, as are flags.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from lancebill.errors import UnsupportedFormat

_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?:[:=!]|P<\w+>)|(?!\?)))|(?P<close>\))|(?P<either>\|)"
    r"|(?P<repeat>[*+?]|\{\d+(?:,\d*)?\}|\{,\d+\})(?:\?|(?!\+))|(?P<edge>[\^$])"
    r"|(?P<plain>[\w -]+(?![*+?{])|[\w -])|(?P<one>\\[dDwWsS]|\\[^a-zA-Z0-9]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\(*+?])",
    re.DOTALL,
)
_FEW_CHOICES = 3  # repeats and groups: trying all ways takes about as many steps as a name's length to this power
_MOST_GROUPS = 32  # one inside the other they are calls inside calls
_Token = tuple[str, str]
_Step = Callable[["_Text", int], int]  # positions before an element of a pattern -> positions after it


@dataclass(frozen=True)
class Pattern:
    """Whether a pattern matches from the start of a name, or anywhere in it, as `re` would have it."""

    match: Callable[[str], object]
    search: Callable[[str], object]


@lru_cache(maxsize=1 << 14)
def compiled(pattern: str, key: str, source: str) -> Pattern:
    """A regular expression from a config, or an error that names where it is."""
    try:
        known, tokens = re.compile(pattern), _tokens(pattern)
        if _choices(tokens) <= _FEW_CHOICES:
            return Pattern(known.match, known.search)
        step = _alternatives(tokens)
    except (re.error, OverflowError, RecursionError) as error:
        what = f"'{key}' holds no regular expression that can be read"
        raise UnsupportedFormat(what, where=source, got=f"'{pattern[:200]}': {error}") from None
    return Pattern(lambda name: step(_text(name), 1), lambda name: step(_text(name), (2 << len(name)) - 1))


def runs(name: str) -> Iterator[str]:
    """Every run of whole components of a name: `a.b` has `a.b`, `a` and `b`."""
    parts = name.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(len(parts), i, -1))


def _tokens(pattern: str) -> list[_Token]:
    """The elements of a pattern, last first."""
    found: list[_Token] = []
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or token.lastgroup is None:
            raise re.error("only groups, alternatives, repeats, classes and looking ahead are read", pattern, at)
        found.append((token.lastgroup, token[token.lastgroup]))
        at = token.end()
    if sum(kind == "open" for kind, _ in found) > _MOST_GROUPS:
        raise re.error(f"more than {_MOST_GROUPS} groups", pattern)
    return found[::-1]


def _choices(tokens: list[_Token]) -> float:
    """How many parts of a pattern can match in several ways; endless where groups repeat."""
    kinds = [kind for kind, _ in tokens]
    repeated = [of for (kind, said), of in zip(tokens, kinds[1:]) if kind == "repeat" and said != "?"]
    if "close" in repeated:
        return math.inf
    return kinds.count("repeat") + kinds.count("open")


@dataclass(frozen=True)
class _Text:
    """A name: where each of its characters stands, and what elements of patterns are known to make of it."""

    name: str
    places: dict[str, int]
    known: dict[tuple[_Step, int], int] = field(default_factory=dict)


@lru_cache(maxsize=64)
def _text(name: str) -> _Text:
    places: dict[str, int] = {}
    for i, character in enumerate(name):
        places[character] = places.get(character, 0) | 1 << i
    return _Text(name, places)


def _alternatives(tokens: list[_Token]) -> _Step:
    """Up to the end of the group, or of the pattern; tokens are taken from the end of the list."""
    options = [_sequence(tokens)]
    while tokens and tokens[-1][0] == "either":
        tokens.pop()
        options.append(_sequence(tokens))

    def either(text: _Text, at: int) -> int:
        reached = 0
        for option in options:
            reached |= option(text, at)
        return reached

    return options[0] if len(options) == 1 else either


def _sequence(tokens: list[_Token]) -> _Step:
    steps: list[_Step] = []
    while tokens and tokens[-1][0] not in ("either", "close"):
        kind, said = tokens.pop()
        if kind == "repeat":
            steps.append(_repeated(steps.pop(), *_bounds(said)))
        elif kind == "open":
            inside = _once(_alternatives(tokens))
            tokens.pop()  # the closing one
            steps.append(_ahead(inside, said[-1] == "=") if said[-1] in "=!" else inside)
        else:
            steps.append(_KINDS[kind](said))

    def sequence(text: _Text, at: int) -> int:
        for step in steps:
            at = step(text, at)
            if not at:
                break
        return at

    return steps[0] if len(steps) == 1 else sequence


def _once(inside: _Step) -> _Step:
    """Position by position, each only once for a name: what is nested costs no more than what is not."""

    def step(text: _Text, at: int) -> int:
        reached = 0
        while at:
            first = at & -at
            at ^= first
            if (step, first) not in text.known:
                text.known[step, first] = inside(text, first)
            reached |= text.known[step, first]
        return reached

    return step


def _plain(said: str) -> _Step:
    """Characters that mean themselves."""

    def step(text: _Text, at: int) -> int:
        if not at & (at - 1):  # from one position, as most are
            return at << len(said) if text.name.startswith(said, at.bit_length() - 1) else 0
        for character in said:
            at = (at & text.places.get(character, 0)) << 1
        return at

    return step


@lru_cache(maxsize=1 << 10)  # one for all patterns: what it makes of a name is known for all
def _one(said: str) -> _Step:
    """One character: any, of a class, or escaped."""
    fits = re.compile(said).fullmatch

    def step(text: _Text, at: int) -> int:
        if (step, 0) not in text.known:
            text.known[step, 0] = sum(places for character, places in text.places.items() if fits(character))
        return (at & text.known[step, 0]) << 1

    return step


def _edge(said: str) -> _Step:
    return lambda text, at: at & (1 if said == "^" else 1 << len(text.name))


_KINDS: dict[str, Callable[[str], _Step]] = {"plain": _plain, "one": _one, "edge": _edge}


def _ahead(inside: _Step, wanted: bool) -> _Step:
    def step(text: _Text, at: int) -> int:
        return sum(1 << i for i in range(len(text.name) + 1) if at >> i & 1 and bool(inside(text, 1 << i)) == wanted)

    return step


def _bounds(said: str) -> tuple[int, int | None]:
    if said in "*+?":
        return int(said == "+"), 1 if said == "?" else None
    low, comma, high = said[1:-1].partition(",")
    return int(low or 0), int(high) if high else None if comma else int(low)


def _repeated(inside: _Step, low: int, high: int | None) -> _Step:
    """No way is followed to where another has been: loops end after as many rounds as there are positions."""

    def step(text: _Text, at: int) -> int:
        for _ in range(low):
            before, at = at, inside(text, at)
            if at in (0, before):
                break
        reached = at
        for _ in count() if high is None else range(high - low):
            at = inside(text, at) & ~reached
            reached |= at
            if not at:
                break
        return reached

    return step
