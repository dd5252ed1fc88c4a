"""Neighbouring products become one instruction: a pass over the assembler's input.

Gluon's tensors have powers of two of columns, the tensor cores any multiple of 8. A kernel that wants 96 tokens
multiplies the same registers with 64 and then with 32, which takes up to an eighth longer than 96 at once. So groups of
products that follow each other with the same first operand are joined here. The kernel promises that the second's tile
lies right behind the first's in shared memory, and that it waits for groups as if the two were one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

_PRODUCT = re.compile(
    r"(?P<op>\s*wgmma\.mma_async\.sync\.aligned\.m64n)(?P<width>\d+)(?P<kind>k\S+) "
    r"\{(?P<sums>[^}]*)\}, \{(?P<held>[^}]*)\}, (?P<tile>%\w+), (?P<rest>.*;)$"
)
_COPY = re.compile(r"\s*mov\.b32\s+(%\w+), (%\w+);$")
_FENCE, _COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
_WIDEST = 256


@dataclass(frozen=True)
class _Group:
    """Products between a fence and a commit: their lines, and what they say."""

    fence: int
    commit: int
    lines: tuple[int, ...]
    said: tuple[re.Match[str], ...]
    held: tuple[tuple[str, ...], ...]  # first operands, by the registers they were copied from
    tiles: tuple[str, ...]  # the first tile of each product
    sums: tuple[str, ...]  # lists of accumulators, joined so far
    width: int

    def follows(self, first: _Group) -> bool:
        """Whether it multiplies what `first` does, each register in turn, into sums of its own."""
        alike = self.held == first.held and all(
            (a["kind"], a["rest"]) == (b["kind"], b["rest"]) for a, b in zip(self.said, first.said)
        )
        return alike and self.width + first.width <= _WIDEST and not {*self.sums} & {*first.sums}


def join(ptx: str) -> str:
    """The same program with such groups joined, where the last of them was: what it needs is ready there."""
    lines = ptx.split("\n")
    done: list[_Group] = []
    for group in _groups(lines):
        first = done[-1] if done else None
        if first is not None and group.follows(first) and _straight(lines, first, group):
            for i in (first.fence, first.commit, *first.lines):
                lines[i] = ""
            tiles, sums, width = first.tiles, first.sums + group.sums, first.width + group.width
            done[-1] = replace(group, tiles=tiles, sums=sums, width=width)
        else:
            done.append(group)
    for group in done:
        every = ",".join(group.sums)
        for i, tile, said in zip(group.lines, group.tiles, group.said):
            lines[i] = (
                f"{said['op']}{group.width}{said['kind']} {{{every}}}, {{{said['held']}}}, {tile}, {said['rest']}"
            )
    return "\n".join(lines)


def _copies(lines: list[str]) -> dict[str, str]:
    """Registers that are set once, to another; newer compilers copy a first operand for each product."""
    found = [copy for copy in map(_COPY.match, lines) if copy]
    times = Counter(copy[1] for copy in found)
    return {copy[1]: copy[2] for copy in found if times[copy[1]] == 1}


def _groups(lines: list[str]) -> list[_Group]:
    found: list[_Group] = []
    copies = _copies(lines)
    fence, held = -1, list[tuple[int, re.Match[str]]]()
    for i, line in enumerate(lines):
        product = _PRODUCT.match(line)
        if line.strip() == _FENCE:
            fence, held = i, []
        elif product:
            held.append((i, product))
        elif line.strip() == _COMMIT and held and len({product["sums"] for _, product in held}) == 1:
            numbers, said = zip(*held)
            operands = tuple(tuple(copies.get(r, r) for r in product["held"].split(",")) for product in said)
            tiles, sums = tuple(product["tile"] for product in said), (said[0]["sums"],)
            found.append(_Group(fence, i, numbers, said, operands, tiles, sums, int(said[0]["width"])))
    return found


def _straight(lines: list[str], first: _Group, second: _Group) -> bool:
    """Whether nothing from the first product on branches, waits, or touches a sum that is being added to."""
    own = {*first.lines, *second.lines}
    for i in range(first.lines[0], second.commit):
        line = lines[i]
        if i in own or line.strip().startswith("//"):
            continue
        busy = first.sums if i < second.lines[0] else first.sums + second.sums
        touched = {*re.findall(r"%\w+", line)} & {register for held in busy for register in held.split(",")}
        if touched or re.search(r"\bbra\b|^\S+:|wait|bar\.|mbarrier", line):
            return False
    return True
