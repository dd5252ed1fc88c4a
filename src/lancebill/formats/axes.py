"""A short string describes how the axes of a stored tensor map to the matrix.

Each word is one axis of the stored tensor:

    n  k          one entry per row or column of the matrix
    k/32          one entry per 32 columns (the last block may be partial)
    k^            codes packed densely into the storage word
    k/32*17       17 entries per 32 columns
    n*k^  n*k/64  the matrix flattened row by row: cannot be sliced, so it is read whole and cut after decoding
    16            a literal size; the empty string is a scalar
    ?             any size (an embedded document)

The expected shape, unknown N and K, the slice of a shard and error texts all follow from the string;
formats do no shape arithmetic.
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
    """One axis: `times` entries per `per` elements of `symbol`, or a literal size."""

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
        """The smallest number of elements that can be sliced: a group, or the codes up to a word boundary."""
        if not self.symbol:
            return 1
        return self.per * (ratio[1] // math.gcd(ratio[0], ratio[1]) if self.packed else 1)

    def entry(self, element: int, ratio: tuple[int, int]) -> int:
        """The index of the first entry of `element` (a multiple of `unit`) along this axis."""
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
    """The shape of a tensor with these axes for an [n, k] matrix."""
    return tuple(axis.size({"n": n, "k": k}, ratio) for axis in parse(axes))


def fits(declared: tuple[int, ...], stored: tuple[int, ...]) -> bool:
    """Whether a stored shape equals the declared one."""
    return len(declared) == len(stored) and all(d in (ANY, s) for d, s in zip(declared, stored))


def units(axes: str, ratio: tuple[int, int] = (1, 1)) -> dict[str, int]:
    """The smallest steps in n and k at which this tensor can be sliced."""
    steps = {"n": 1, "k": 1}
    for axis in parse(axes):
        if axis.symbol in steps:
            steps[axis.symbol] = math.lcm(steps[axis.symbol], axis.unit(ratio))
    return steps


def cuttable(axes: str) -> bool:
    return not any(axis.flat for axis in parse(axes))


@lru_cache(maxsize=4096)
def slices(
    axes: str,
    rows: tuple[int, int],
    columns: tuple[int, int],
    n: int,
    k: int,
    ratio: tuple[int, int] = (1, 1),
) -> tuple[slice, ...]:
    """The slice of the stored tensor that covers [rows, columns), whose starts are multiples of the units."""
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
    """N and K if this tensor determines them: from axes with one entry per element, assuming full words."""
    sizes: dict[str, int] = {}
    for axis, size in zip(parse(axes), stored):
        if axis.symbol in ("n", "k") and axis.per == 1 and axis.times == 1:
            sizes[axis.symbol] = size * ratio[1] // ratio[0] if axis.packed else size
    return sizes
