"""What a sanitizer's report says of our kernels: instructions and barriers instead of offsets.

Reports name places as kernel and offset. A case may launch a kernel in more than one form under one name; whoever asks
brings `forms`, which gives the disassembled forms by case and kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from sanitize_barriers import EVENT, Code, State, Wait, ahead, meetings, read, states

# A place in a kernel, as reports of different versions write it: name+0xOFFSET, or access at 0xOFFSET in name.
PLACES = (
    re.compile(r"(?:\b(?P<role>Write|Read)\b.*? at )?\b(?P<kernel>\w+)(?:\(.*?\))?\+0x(?P<offset>[0-9a-f]+)"),
    re.compile(r"\b(?P<role>Write|Read) access at 0x(?P<offset>[0-9a-f]+) in (?:\S+:)?(?P<kernel>\w+)"),
)
WATCHED = re.compile(r"\b(LD|ST|ATOM|RED|SUST|UTMA|UBLK|SYNCS|BAR|WARPSYNC|HGMMA|QGMMA|IGMMA)")  # what tools watch
BARRIER = re.compile(r"\b(BAR|SYNCS|WARPSYNC|DEPBAR|WARPGROUP|ACQBULK|MEMBAR|FENCE)\b")
# What may touch shared memory in a role; whoever waits at an mbarrier only looks at it.
SHARED = {
    "Write": re.compile(r"\b(STS|ATOMS|LDGSTS|UTMA|UBLK|SYNCS\.(?!PHASECHK)|(ST|ATOM)\b)"),
    "Read": re.compile(r"\b(LDS|ATOMS|UTMA|UBLK|SYNCS|[HQI]GMMA|(LD|ATOM)\b)"),
}
# By a thread, which barriers order, not by the copy engine; EXCH is how a thread makes an mbarrier.
ACCESS = {"Write": re.compile(r"\b(STSM?|SYNCS\.EXCH)\b"), "Read": re.compile(r"\bLDSM?\b")}
# Mbarriers, by displacement. One lane arrives for its warp, so whoever skips this by its guard has arrived as well.
ARRIVAL = re.compile(r"\bSYNCS\.ARRIVE\.TRANS64\.A1T0 .*\+(0x[0-9a-f]+)\]")
FILLING = re.compile(r"\bSYNCS\.ARRIVE\.TRANS64 ")  # with how many bytes the copy engine is to bring to a stage
# All who multiply (four warps) meet, or all threads; unguarded, because whoever skips it does not meet.
TOGETHER = re.compile(r"^BAR\.SYNC\S* (0x0, 0x80|0x0|0x1)$")
ALL_MEET = re.compile(r"^BAR\.SYNC\S* 0x1$")

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
    """How many findings are of accesses that barriers order as the tool does not see, and how many are not.

    Tasks: the first warps write them for the others to shared memory and arrive at barrier 1; those wait there, read
    and jump. The tool does not see that this orders them, because warps reach the barrier in different places.
    Turns: the warp that feeds writes which tile is next and arrives at an mbarrier; those that multiply wait there,
    read, meet, and one of them releases a stage, for which the feeder waits. The tool does not follow order from many
    that read through a barrier to the one that arrives. tests/unit/backends/test_hopper_tile_order.py proves that the ring has room: that
    the feeder waits for a release after the read of what it overwrites.
    """
    known = [handed_over(places, forms(label, places[0].kernel).values()) for label, places in findings(said)]
    return sum(known), len(known) - sum(known)


def handed_over(places: list[Place], texts: Iterable[str]) -> bool:
    """Whether a finding's writes and reads are in order, in every form of the kernel that it can be of."""
    if {place.role for place in places} != {"Write", "Read"} or len({place.kernel for place in places}) > 1:
        return False
    fitting = [t for t in texts if all(SHARED[p.role].search(instructions(t)[0].get(p.offset, "")) for p in places)]
    stores, loads = ([place.offset for place in places if place.role == role] for role in ("Write", "Read"))
    pairs = list(product(stores, loads))
    return bool(fitting) and all(in_order(t, *pair) or in_turn(t, *pair) for t in fitting for pair in pairs)


def in_order(disassembly: str, store: int, load: int) -> bool:
    """Whether threads store and load shared memory here, and all of them meet between any store and any load."""
    code, _ = instructions(disassembly)
    if not ACCESS["Write"].search(code[store]) or not ACCESS["Read"].search(code[load]):
        return False
    before, after = (meetings(disassembly).get(place, frozenset()) for place in (store, load))
    return bool(before and after) and not before & after


def in_turn(disassembly: str, store: int, load: int) -> bool:
    """Whether threads tell others at mbarriers what they store, and hear that it was loaded.

    On every way through the code, whoever stored arrives next, where nobody else arrives, and whoever loads from there
    has just waited for that. Not read off the code, but known of the kernel and its model: which place of a ring and
    which phase an instruction means, and that the guard of an arrival leaves one lane.
    """
    code, found = read(disassembly), states(disassembly)
    storing, loading = found.get(store, []), found.get(load, [])
    if any(state.called for state in (*storing, *loading)):  # callers are not told apart
        return False
    kinds = {"STS": storing, "LDS": loading}
    if not all(re.search(rf"\b{name}\b", text) for name, of in kinds.items() for text in texts(code, of)):
        return False
    memory = {displacement(text) for text in texts(code, (*storing, *loading))}
    if len(memory) != 1 or "" in memory:
        return False
    told = {state.at for state in ahead(code, storing, EVENT) if EVENT.search(code.texts[state.at])}
    barriers = {arrived_at(code.texts[at]) for at in told}
    if len(barriers) != 1 or "" in barriers or {state.wait for state in loading} != {Wait(at) for at in barriers}:
        return False
    if told != {at for at, text in enumerate(code.texts) if arrived_at(text) in barriers}:
        return False
    return given_back(code, storing, loading)


def given_back(code: Code, storing: list[State], loading: list[State]) -> bool:
    """Whether all who load meet before one of them arrives anywhere, and whoever stored waits for that one alone.

    It waits for every stage that it fills. There are ways to the next store without: over no stage at all, and over
    stages that were filled ahead. The former takes a matrix without columns, which the model of the ring leaves out
    as well; it has room for the latter.
    """
    if any("SYNCS.ARRIVE" in text for text in texts(code, ahead(code, loading, TOGETHER))):
        return False
    fed, done = ahead(code, storing, ALL_MEET), ahead(code, loading, ALL_MEET)
    all_of_them = {text for text in texts(code, done) if not text.startswith("@")}
    others = {arrived_at(text) for text in texts(code, fed) | all_of_them}
    released = {arrived_at(text) for text in texts(code, done)} - others - {""}
    waits = {state.wait for state in fed if FILLING.search(code.texts[state.at])}
    return bool(waits) and waits <= {Wait(at) for at in released}


def texts(code: Code, found: Iterable[State]) -> set[str]:
    return {code.texts[state.at] for state in found}


def displacement(text: str) -> str:
    """Of an address in shared memory; nothing where it has none."""
    found = re.search(r"\+(0x[0-9a-f]+)\]", text)
    return found[1] if found else ""


def arrived_at(text: str) -> str:
    """The mbarriers' displacement; nothing where an instruction is no arrival."""
    found = ARRIVAL.search(text)
    return found[1] if found else ""


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
    found = read(disassembly)
    code = dict(zip(found.places, found.texts))
    return code, [place for place, text in code.items() if BARRIER.search(text)]
