"""Matching module names against patterns from configs, in bounded time.

Python's `re` backtracks: a short pattern like `(\\w+\\.?)*!` can take exponential time on a name. `re` is used only
for patterns with few choices. Other patterns are simulated with sets of positions: a set is an integer with one bit
per position in the name, each element of the pattern maps the set before it to the set after it, and the result of a
group from one position is computed once. Backreferences, lookbehind and flags cannot be matched this way and are
refused.
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
_FEW_CHOICES = 3  # repeats and groups: backtracking takes about (length of the name) ** this many steps
_MOST_GROUPS = 32  # nested groups are nested calls
_Token = tuple[str, str]
_Step = Callable[["_Text", int], int]  # set of positions before an element of a pattern -> set of positions after it


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: matches from the start of a name, or anywhere in it, with the results of `re`."""

    match: Callable[[str], object]
    search: Callable[[str], object]


@lru_cache(maxsize=1 << 14)
def compile_pattern(pattern: str, key: str, source: str) -> Pattern:
    """A regular expression from a config; the error for an invalid one names the config key and file."""
    try:
        regex, tokens = re.compile(pattern), _tokens(pattern)
        if _choices(tokens) <= _FEW_CHOICES:
            return Pattern(regex.match, regex.search)
        step = _alternatives(tokens)
    except (re.error, OverflowError, RecursionError) as error:
        what = f"'{key}' is not a supported regular expression"
        raise UnsupportedFormat(what, where=source, got=f"'{pattern[:200]}': {error}") from None
    return Pattern(lambda name: step(_text(name), 1), lambda name: step(_text(name), (2 << len(name)) - 1))


def component_runs(name: str) -> Iterator[str]:
    """Every run of consecutive components of a name: `a.b` has `a.b`, `a` and `b`."""
    parts = name.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(len(parts), i, -1))


def _tokens(pattern: str) -> list[_Token]:
    """The elements of a pattern, in reverse order."""
    found: list[_Token] = []
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or token.lastgroup is None:
            raise re.error("only groups, alternatives, repeats, classes and lookahead are supported", pattern, at)
        found.append((token.lastgroup, token[token.lastgroup]))
        at = token.end()
    if sum(kind == "open" for kind, _ in found) > _MOST_GROUPS:
        raise re.error(f"more than {_MOST_GROUPS} groups", pattern)
    return found[::-1]


def _choices(tokens: list[_Token]) -> float:
    """How many parts of a pattern can match in several ways; infinite if a group repeats."""
    kinds = [kind for kind, _ in tokens]
    repeated = [element for (kind, text), element in zip(tokens, kinds[1:]) if kind == "repeat" and text != "?"]
    if "close" in repeated:
        return math.inf
    return kinds.count("repeat") + kinds.count("open")


@dataclass(frozen=True)
class _Text:
    """A name, the set of positions of each of its characters, and a cache of the results of steps."""

    name: str
    positions: dict[str, int]
    cache: dict[tuple[_Step, int], int] = field(default_factory=dict)


@lru_cache(maxsize=64)
def _text(name: str) -> _Text:
    positions: dict[str, int] = {}
    for i, character in enumerate(name):
        positions[character] = positions.get(character, 0) | 1 << i
    return _Text(name, positions)


def _alternatives(tokens: list[_Token]) -> _Step:
    """The alternatives up to the end of the group or pattern. Consumes tokens from the end of the list."""
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
        kind, text = tokens.pop()
        if kind == "repeat":
            steps.append(_repeated(steps.pop(), *_bounds(text)))
        elif kind == "open":
            inside = _cached(_alternatives(tokens))
            tokens.pop()  # the closing parenthesis
            steps.append(_lookahead(inside, text[-1] == "=") if text[-1] in "=!" else inside)
        else:
            steps.append(_KINDS[kind](text))

    def sequence(text: _Text, at: int) -> int:
        for step in steps:
            at = step(text, at)
            if not at:
                break
        return at

    return steps[0] if len(steps) == 1 else sequence


def _cached(inside: _Step) -> _Step:
    """A group, computed once per name and start position, so that nesting does not multiply the cost."""

    def step(text: _Text, at: int) -> int:
        reached = 0
        while at:
            lowest = at & -at
            at ^= lowest
            if (step, lowest) not in text.cache:
                text.cache[step, lowest] = inside(text, lowest)
            reached |= text.cache[step, lowest]
        return reached

    return step


def _plain(literal: str) -> _Step:
    """Literal characters."""

    def step(text: _Text, at: int) -> int:
        if not at & (at - 1):  # a single start position, the common case
            return at << len(literal) if text.name.startswith(literal, at.bit_length() - 1) else 0
        for character in literal:
            at = (at & text.positions.get(character, 0)) << 1
        return at

    return step


@lru_cache(maxsize=1 << 10)  # all patterns share the step, and so its cached positions in a name
def _one(element: str) -> _Step:
    """One character: any, of a class, or escaped."""
    fits = re.compile(element).fullmatch

    def step(text: _Text, at: int) -> int:
        if (step, 0) not in text.cache:
            text.cache[step, 0] = sum(positions for character, positions in text.positions.items() if fits(character))
        return (at & text.cache[step, 0]) << 1

    return step


def _edge(anchor: str) -> _Step:
    return lambda text, at: at & (1 if anchor == "^" else 1 << len(text.name))


_KINDS: dict[str, Callable[[str], _Step]] = {"plain": _plain, "one": _one, "edge": _edge}


def _lookahead(inside: _Step, positive: bool) -> _Step:
    def step(text: _Text, at: int) -> int:
        return sum(1 << i for i in range(len(text.name) + 1) if at >> i & 1 and bool(inside(text, 1 << i)) == positive)

    return step


def _bounds(repeat: str) -> tuple[int, int | None]:
    """The smallest and largest count of a repeat; None: no limit."""
    if repeat in "*+?":
        return int(repeat == "+"), 1 if repeat == "?" else None
    low, comma, high = repeat[1:-1].partition(",")
    return int(low or 0), int(high) if high else None if comma else int(low)


def _repeated(inside: _Step, low: int, high: int | None) -> _Step:
    """Each round keeps only positions not reached before, so loops end after at most one round per position."""

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
