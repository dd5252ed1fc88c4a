"""How a stored tensor lies over a matrix, said in one short string.

Each word is an axis of the stored tensor:

    n  k          a row or a column of the matrix
    k/32          one for each 32 columns (the last may be partial)
    k^            codes packed densely into the storage word
    k/32*17       17 entries for each 32 columns
    n*k^  n*k/64  the matrix flattened row by row: cannot be cut, read whole and cut after decoding
    16            a literal size; the empty string is a scalar
    ?             any size (an embedded document)

From the string follow the expected shape, N and K where unknown, the slice of any shard and the
error text; formats never do shape arithmetic by hand.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

_WORD = re.compile(r"(?P<symbol>n\*k|n|k)(?:/(?P<per>\d+))?(?:\*(?P<times>\d+))?(?P<packed>\^)?|(?P<literal>\d+|\?)")

ANY = -1  # the size of a `?`


@dataclass(frozen=True)
class Axis:
    """One axis: `times` entries for every `per` elements of `symbol`, or a literal size."""

    symbol: str
    per: int = 1
    times: int = 1
    packed: bool = False

    @property
    def flat(self) -> bool:
        return self.symbol == "n*k"

    def size(self, sizes: dict[str, int], ratio: tuple[int, int]) -> int:
        """Entries along this axis; `ratio` = (code bits, word bits) of the storage."""
        if not self.symbol:
            return self.times
        elements = math.prod(sizes[s] for s in self.symbol.split("*"))
        count = -(-elements // self.per) * self.times
        return -(-count * ratio[0] // ratio[1]) if self.packed else count

    def unit(self, ratio: tuple[int, int]) -> int:
        """Elements that cannot be separated: a group, or the codes that end on a word edge."""
        if not self.symbol:
            return 1
        return self.per * (ratio[1] // math.gcd(ratio[0], ratio[1]) if self.packed else 1)

    def entry(self, element: int, ratio: tuple[int, int]) -> int:
        """Where `element` (a multiple of `unit`) starts along this axis."""
        count = element // self.per * self.times
        return count * ratio[0] // ratio[1] if self.packed else count


@lru_cache(maxsize=4096)
def parse(axes: str) -> tuple[Axis, ...]:
    parsed = []
    for word in axes.split():
        match = _WORD.fullmatch(word)
        assert match is not None, f"bad axes word {word!r} in {axes!r}"
        if match["literal"]:
            parsed.append(Axis("", times=ANY if word == "?" else int(word)))
        else:
            per, times = int(match["per"] or 1), int(match["times"] or 1)
            parsed.append(Axis(match["symbol"], per, times, packed=bool(match["packed"])))
    return tuple(parsed)


@lru_cache(maxsize=4096)
def shape(axes: str, n: int, k: int, ratio: tuple[int, int] = (1, 1)) -> tuple[int, ...]:
    """The shape a tensor declared by `axes` has for an [n, k] matrix."""
    return tuple(axis.size({"n": n, "k": k}, ratio) for axis in parse(axes))


def fits(declared: tuple[int, ...], stored: tuple[int, ...]) -> bool:
    """Whether a stored shape is the declared one."""
    return len(declared) == len(stored) and all(d in (ANY, s) for d, s in zip(declared, stored))


def units(axes: str, ratio: tuple[int, int] = (1, 1)) -> dict[str, int]:
    """The smallest steps in n and k at which this tensor can be cut."""
    steps = {"n": 1, "k": 1}
    for axis in parse(axes):
        if axis.symbol in steps:
            steps[axis.symbol] = math.lcm(steps[axis.symbol], axis.unit(ratio))
    return steps


def cuttable(axes: str) -> bool:
    return not any(axis.flat for axis in parse(axes))


def slices(
    axes: str,
    rows: tuple[int, int],
    columns: tuple[int, int],
    n: int,
    k: int,
    ratio: tuple[int, int] = (1, 1),
) -> tuple[slice, ...]:
    """The part of the stored tensor that covers [rows, columns), whose starts lie on units."""
    spans = {"n": rows, "k": columns}
    out = []
    for axis in parse(axes):
        if axis.symbol not in spans:
            assert not axis.flat, f"axes {axes!r} cannot be cut"
            out.append(slice(None) if axis.times == ANY else slice(0, axis.times))
            continue
        low, high = spans[axis.symbol]
        unit = axis.unit(ratio)
        assert low % unit == 0, f"cut at {low} inside a unit of {unit} of {axes!r}"
        stop = min(axis.size({"n": n, "k": k}, ratio), axis.entry(-(-high // unit) * unit, ratio))
        out.append(slice(axis.entry(low, ratio), stop))
    return tuple(out)


def infer(axes: str, stored: tuple[int, ...], ratio: tuple[int, int] = (1, 1)) -> dict[str, int]:
    """N and K as far as this tensor tells them: from axes that count them one by one, words taken as full."""
    known: dict[str, int] = {}
    for axis, size in zip(parse(axes), stored):
        if axis.symbol in ("n", "k") and axis.per == 1 and axis.times == 1:
            known[axis.symbol] = size * ratio[1] // ratio[0] if axis.packed else size
    return known
