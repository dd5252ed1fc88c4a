"""What a sanitizer's report says of our kernels: instructions and barriers instead of offsets.

Reports name places as kernel and offset. A case may launch a kernel in more than one form under one name; whoever asks
brings `forms`, which gives the disassembled forms by case and kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

# A place in a kernel, as reports of different versions write it: name+0xOFFSET, or access at 0xOFFSET in name.
PLACES = (
    re.compile(r"(?:\b(?P<role>Write|Read)\b.*? at )?\b(?P<kernel>\w+)(?:\(.*?\))?\+0x(?P<offset>[0-9a-f]+)"),
    re.compile(r"\b(?P<role>Write|Read) access at 0x(?P<offset>[0-9a-f]+) in (?:\S+:)?(?P<kernel>\w+)"),
)
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^/\s].*?)\s*;")
WATCHED = re.compile(r"\b(LD|ST|ATOM|RED|SUST|UTMA|UBLK|SYNCS|BAR|WARPSYNC|HGMMA|QGMMA|IGMMA)")  # what tools watch
BARRIER = re.compile(r"\b(BAR|SYNCS|WARPSYNC|DEPBAR|WARPGROUP|ACQBULK|MEMBAR|FENCE)\b")
HAND_OVER = re.compile(r"\bBAR\.SYNC\S* 0x1$")

Forms = Callable[[str, str], dict[str, str]]  # case, kernel -> disassembly by what distinguishes the form


@dataclass(frozen=True)
class Place:
    role: str  # Write, Read or nothing
    kernel: str
    offset: int


def findings(said: list[str]) -> Iterator[tuple[str, list[Place]]]:
    """One finding after another: the case it is of, and the places it names."""
    label, places = "", list[Place]()
    for line in said:
        started = re.match(r"case \d+: (.*)", line)
        if (started or "Error:" in line or "Warning:" in line) and places:
            yield label, places
            places = []
        label = started[1] if started else label
        matches = [match for pattern in PLACES for match in pattern.finditer(line)]
        places += [Place(match["role"] or "", match["kernel"], int(match["offset"], 16)) for match in matches]
    if places:
        yield label, places


def explain(said: list[str], forms: Forms) -> list[str]:
    """Every instruction that a report names, each between the barriers around it."""
    named = dict.fromkeys((label, p.kernel, p.offset) for label, places in findings(said) for p in places)
    found = dict[str, None]()
    for label, kernel, offset in named:
        for form, disassembly in forms(label, kernel).items():
            text = surroundings(disassembly, offset)
            if text:
                found[f"{kernel}+0x{offset:x} ({form}; {label}): {text}"] = None
    return list(found)


def count(said: list[str], forms: Forms) -> tuple[int, int]:
    """How many findings are the compiler's own way to tell its other warps what to do, and how many are not.

    Those warps wait at barrier 1, read from shared memory and jump; the first warps write there, then arrive at barrier
    1. That orders them; the tool does not see it where warps reach a barrier in different places of a kernel.
    """
    known = other = 0
    for label, places in findings(said):
        roles = {place.role: place for place in places}
        write, read = roles.get("Write"), roles.get("Read")
        pair = write is not None and read is not None and write.kernel == read.kernel and len(places) == 2
        texts = forms(label, write.kernel).values() if pair and write is not None else ()
        if read is not None and write is not None and any(handed_over(t, write.offset, read.offset) for t in texts):
            known += 1
        else:
            other += 1
    return known, other


def handed_over(disassembly: str, write: int, read: int) -> bool:
    """Whether barrier 1, and no other, stands between a write and a read of shared memory, in either order."""
    code, _ = instructions(disassembly)
    if "STS" not in code.get(write, "") or "LDS" not in code.get(read, ""):
        return False
    (before_write, after_write), (before_read, after_read) = around(disassembly, write), around(disassembly, read)
    orders = (after_write, before_read), (after_read, before_write)
    return any(all(place is not None and HAND_OVER.search(code[place]) for place in order) for order in orders)


def surroundings(disassembly: str, offset: int) -> str | None:
    """An instruction that tools watch, the last barrier before it and the first one after; None where there is none."""
    code, _ = instructions(disassembly)
    if not WATCHED.search(code.get(offset, "")):
        return None
    before, after = (f"{code[p]} at 0x{p:x}" if p is not None else "nothing" for p in around(disassembly, offset))
    return f"{code[offset]} [before it {before}; after it {after}]"


def around(disassembly: str, offset: int) -> tuple[int | None, int | None]:
    _, barriers = instructions(disassembly)
    before = max((place for place in barriers if place < offset), default=None)
    return before, min((place for place in barriers if place > offset), default=None)


@cache
def instructions(disassembly: str) -> tuple[dict[int, str], list[int]]:
    """Code by address, and the addresses of barriers."""
    code = {int(place, 16): " ".join(text.split()) for place, text in INSTRUCTION.findall(disassembly)}
    return code, [place for place, text in code.items() if BARRIER.search(text)]
