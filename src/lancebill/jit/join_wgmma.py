"""A PTX pass that joins consecutive wgmma instructions into one with more columns.

The width (N) of a Gluon tensor is a power of two, but wgmma takes any multiple of 8. A kernel for 96 tokens multiplies
the same registers with 64 and then with 32 columns, which is up to an eighth slower than one instruction of 96. This
pass joins consecutive wgmma groups that have the same first operand. The kernel guarantees that the second tile
follows the first one in shared memory, and that it waits for the two groups as if they were one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

_WGMMA = re.compile(
    r"(?P<op>\s*wgmma\.mma_async\.sync\.aligned\.m64n)(?P<width>\d+)(?P<kind>k\S+) "
    r"\{(?P<accumulators>[^}]*)\}, \{(?P<a>[^}]*)\}, (?P<tile>%\w+), (?P<flags>.*;)$"
)
_COPY = re.compile(r"\s*mov\.b32\s+(%\w+), (%\w+);$")
_FENCE, _COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
_WIDEST = 256


@dataclass(frozen=True)
class _Group:
    """The wgmma instructions between a fence and a commit."""

    fence: int  # line numbers
    commit: int
    lines: tuple[int, ...]
    instructions: tuple[re.Match[str], ...]
    a: tuple[tuple[str, ...], ...]  # registers of the first operands; copies are replaced by their originals
    tiles: tuple[str, ...]  # descriptor of each instruction's second operand; when joined, the first group's
    accumulators: tuple[str, ...]  # one register list for each joined group
    width: int

    def can_join(self, first: _Group) -> bool:
        """Whether it multiplies the same registers as `first`, into other accumulators, within wgmma's width."""
        alike = self.a == first.a and all(
            (x["kind"], x["flags"]) == (y["kind"], y["flags"]) for x, y in zip(self.instructions, first.instructions)
        )
        return alike and self.width + first.width <= _WIDEST and not {*self.accumulators} & {*first.accumulators}


def join_wgmma(ptx: str) -> str:
    """The program with such groups joined. They move to the last one's place, where all operands are ready."""
    lines = ptx.split("\n")
    joined: list[_Group] = []
    for group in _groups(lines):
        first = joined[-1] if joined else None
        if first is not None and group.can_join(first) and _can_delay(lines, first, group):
            for i in (first.fence, first.commit, *first.lines):
                lines[i] = ""
            accumulators, width = first.accumulators + group.accumulators, first.width + group.width
            joined[-1] = replace(group, tiles=first.tiles, accumulators=accumulators, width=width)
        else:
            joined.append(group)
    for group in joined:
        registers = ",".join(group.accumulators)
        for i, tile, old in zip(group.lines, group.tiles, group.instructions):
            lines[i] = f"{old['op']}{group.width}{old['kind']} {{{registers}}}, {{{old['a']}}}, {tile}, {old['flags']}"
    return "\n".join(lines)


def _copies(lines: list[str]) -> dict[str, str]:
    """Registers that are written once, by a copy, and their sources. Newer compilers copy A for each wgmma."""
    copies = [copy for copy in map(_COPY.match, lines) if copy]
    writes = Counter(copy[1] for copy in copies)
    return {copy[1]: copy[2] for copy in copies if writes[copy[1]] == 1}


def _groups(lines: list[str]) -> list[_Group]:
    """All groups whose instructions share one accumulator list."""
    groups: list[_Group] = []
    copies = _copies(lines)
    fence, current = -1, list[tuple[int, re.Match[str]]]()
    for i, line in enumerate(lines):
        wgmma = _WGMMA.match(line)
        if line.strip() == _FENCE:
            fence, current = i, []
        elif wgmma:
            current.append((i, wgmma))
        elif line.strip() == _COMMIT and current and len({each["accumulators"] for _, each in current}) == 1:
            numbers, wgmmas = zip(*current)
            a = tuple(tuple(copies.get(r, r) for r in each["a"].split(",")) for each in wgmmas)
            tiles, accumulators = tuple(each["tile"] for each in wgmmas), (wgmmas[0]["accumulators"],)
            groups.append(_Group(fence, i, numbers, wgmmas, a, tiles, accumulators, int(wgmmas[0]["width"])))
    return groups


def _can_delay(lines: list[str], first: _Group, second: _Group) -> bool:
    """Whether `first` can move to `second`: no branch, wait or barrier in between, and no use of their accumulators."""
    own = {*first.lines, *second.lines}
    for i in range(first.lines[0], second.commit):
        line = lines[i]
        if i in own or line.strip().startswith("//"):
            continue
        in_use = first.accumulators if i < second.lines[0] else first.accumulators + second.accumulators
        touched = {*re.findall(r"%\w+", line)} & {register for registers in in_use for register in registers.split(",")}
        if touched or re.search(r"\bbra\b|^\S+:|wait|bar\.|mbarrier", line):
            return False
    return True
