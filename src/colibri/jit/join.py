"""Neighbouring products become one instruction: a pass over the assembler's input.

Gluon's tensors have powers of two of columns, the tensor cores any multiple of 8. A kernel that wants 96 tokens
multiplies the same registers with 64 and then with 32, which takes up to an eighth longer than 96 at once. So groups of
products that follow each other with the same first operand are joined here. The kernel promises that the second's tile
lies right behind the first's in shared memory, and that it waits for groups as if the two were one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_PRODUCT = re.compile(
    r"(?P<op>\s*wgmma\.mma_async\.sync\.aligned\.m64n)(?P<width>\d+)(?P<kind>k\S+) "
    r"\{(?P<sums>[^}]*)\}, \{(?P<held>[^}]*)\}, (?P<tile>%\w+), (?P<rest>.*;)$"
)
_FENCE, _COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
_WIDEST = 256


@dataclass(frozen=True)
class _Group:
    """Products between a fence and a commit: their lines, and what they say."""

    fence: int
    commit: int
    lines: tuple[int, ...]
    said: tuple[re.Match[str], ...]
    sums: tuple[str, ...]  # lists of accumulators, joined so far
    width: int

    def follows(self, first: _Group) -> bool:
        """Whether it multiplies what `first` does, each register in turn, into sums of its own."""
        alike = len(self.said) == len(first.said) and all(
            (a["kind"], a["held"], a["rest"]) == (b["kind"], b["held"], b["rest"])
            for a, b in zip(self.said, first.said)
        )
        return alike and self.width + first.width <= _WIDEST and not {*self.sums} & {*first.sums}


def join(ptx: str) -> str:
    """The same program with such groups joined."""
    lines = ptx.split("\n")
    groups = _groups(lines)
    done: list[_Group] = []
    for group in groups:
        before = done[-1] if done else None
        if before is not None and group.follows(before) and _straight(lines, before, group):
            done[-1] = replace(before, sums=before.sums + group.sums, width=before.width + group.width)
            for i in (group.fence, group.commit, *group.lines):
                lines[i] = ""
        else:
            done.append(group)
    for group in done:
        for i, product in zip(group.lines, group.said):
            sums = ",".join(group.sums)
            lines[i] = (
                f"{product['op']}{group.width}{product['kind']} {{{sums}}}, {{{product['held']}}}, {product['tile']}, "
                f"{product['rest']}"
            )
    return "\n".join(lines)


def _groups(lines: list[str]) -> list[_Group]:
    found: list[_Group] = []
    fence, held = -1, list[tuple[int, re.Match[str]]]()
    for i, line in enumerate(lines):
        product = _PRODUCT.match(line)
        if line.strip() == _FENCE:
            fence, held = i, []
        elif product:
            held.append((i, product))
        elif line.strip() == _COMMIT and held and len({product["sums"] for _, product in held}) == 1:
            numbers, said = zip(*held)
            found.append(_Group(fence, i, numbers, said, (said[0]["sums"],), int(said[0]["width"])))
    return found


def _straight(lines: list[str], first: _Group, second: _Group) -> bool:
    """Whether nothing between them branches, waits, or touches a sum."""
    sums = {register for held in (*first.sums, *second.sums) for register in held.split(",")}
    own = {*first.lines, *second.lines}
    for i in range(first.fence, second.commit):
        line = lines[i]
        if i in own or not line.strip() or line.strip().startswith("//"):
            continue
        words = set(re.findall(r"%\w+", line))
        if words & sums or re.search(r"\bbra\b|^\S+:|wait|bar\.|mbarrier", line):
            return False
    return True
