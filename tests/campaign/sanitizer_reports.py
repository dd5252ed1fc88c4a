"""Reads compute-sanitizer's reports: instructions and barriers instead of offsets, and races that are none.

Reports name places as kernel and offset. A case may launch several variants of a kernel under one name; the caller
passes `variants`, which returns the disassembled variants by case and kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from sass_barriers import EVENT, Code, State, Wait, barriers_before, parse_sass, states, states_until

# A place in a kernel, as different versions of the tool write it: name+0xOFFSET, or access at 0xOFFSET in name.
PLACES = (
    re.compile(r"(?:\b(?P<role>Write|Read)\b.*? at )?\b(?P<kernel>\w+)(?:\(.*?\))?\+0x(?P<offset>[0-9a-f]+)"),
    re.compile(r"\b(?P<role>Write|Read) access at 0x(?P<offset>[0-9a-f]+) in (?:\S+:)?(?P<kernel>\w+)"),
)
# Instructions that the tools instrument.
WATCHED = re.compile(r"\b(LD|ST|ATOM|RED|SUST|UTMA|UBLK|SYNCS|BAR|WARPSYNC|HGMMA|QGMMA|IGMMA)")
BARRIER = re.compile(r"\b(BAR|SYNCS|WARPSYNC|DEPBAR|WARPGROUP|ACQBULK|MEMBAR|FENCE)\b")
# Instructions that may access shared memory in a role. Waiting at an mbarrier only reads it.
SHARED = {
    "Write": re.compile(r"\b(STS|ATOMS|LDGSTS|UTMA|UBLK|SYNCS\.(?!PHASECHK)|(ST|ATOM)\b)"),
    "Read": re.compile(r"\b(LDS|ATOMS|UTMA|UBLK|SYNCS|[HQI]GMMA|(LD|ATOM)\b)"),
}
# Accesses by threads, which barriers order, not by the copy engine. SYNCS.EXCH initialises an mbarrier.
ACCESS = {"Write": re.compile(r"\b(STSM?|SYNCS\.EXCH)\b"), "Read": re.compile(r"\bLDSM?\b")}
# An arrival at an mbarrier, by displacement. One lane arrives for its warp, so lanes that skip it count as arrived.
ARRIVAL = re.compile(r"\bSYNCS\.ARRIVE\.TRANS64\.A1T0 .*\+(0x[0-9a-f]+)\]")
FILL = re.compile(r"\bSYNCS\.ARRIVE\.TRANS64 ")  # announces the bytes that the copy engine will write to a stage
# A barrier of the four consumer warps, or of all threads. Unguarded, because a thread that skips it does not take part.
CONSUMER_BARRIER = re.compile(r"^BAR\.SYNC\S* (0x0, 0x80|0x0|0x1)$")
FULL_BARRIER = re.compile(r"^BAR\.SYNC\S* 0x1$")

Variants = Callable[[str, str], dict[str, str]]  # case, kernel -> disassembly by the variant's description


@dataclass(frozen=True)
class Place:
    role: str  # Write, Read or empty
    kernel: str
    offset: int


def findings(lines: list[str]) -> Iterator[tuple[str, list[Place]]]:
    """For each finding of a report: its case and the places it names."""
    label, places = "", list[Place]()
    for line in lines:
        started = re.match(r"case \d+: (.*)", line)
        if (started or "Error:" in line or "Warning:" in line) and places:
            yield label, places
            places = []
        label = started[1] if started else label
        matches = [match for pattern in PLACES for match in pattern.finditer(line)]
        places += [Place(match["role"] or "", match["kernel"], int(match["offset"], 16)) for match in matches]
    if places:
        yield label, places


def explain(lines: list[str], variants: Variants) -> list[str]:
    """Every instruction that a report names, with the barriers before and after it."""
    named = dict.fromkeys((label, p.kernel, p.offset) for label, places in findings(lines) for p in places)
    texts = dict[str, None]()
    for label, kernel, offset in named:
        for variant, disassembly in variants(label, kernel).items():
            text = with_barriers(disassembly, offset)
            if text:
                texts[f"{kernel}+0x{offset:x} ({variant}; {label}): {text}"] = None
    return list(texts)


def count_ordered(lines: list[str], variants: Variants) -> tuple[int, int]:
    """How many findings are accesses that barriers do order, which the tool cannot see, and how many are not.

    Tasks: the first warps write a task for the others to shared memory and arrive at barrier 1; the others wait there,
    read it and jump. The tool misses this order because warps reach the barrier from different instructions.
    Tiles: the producer warp writes the number of the next tile and arrives at an mbarrier. The consumer warps wait
    there, read it, synchronise, and one of them releases a stage, for which the producer waits. The tool does not
    follow the order from many readers through a barrier to the one thread that arrives.
    `test_hopper_tile_order.py` proves that the ring is large enough: before the producer overwrites an entry, it waits
    for a release that comes after the entry was read.
    """
    found = [(label, places, variants(label, places[0].kernel)) for label, places in findings(lines)]
    possible = settle([(label, places, matching(places, texts)) for label, places, texts in found])
    ordered = [
        is_ordered(places, [texts[name] for name in names]) for (_, places, texts), names in zip(found, possible)
    ]
    return sum(ordered), len(ordered) - sum(ordered)


def matching(places: list[Place], texts: dict[str, str]) -> set[str]:
    """The variants of the kernel that have such an access at each of the places."""
    return {
        name
        for name, text in texts.items()
        if all(p.role in SHARED and SHARED[p.role].search(instructions(text)[0].get(p.offset, "")) for p in places)
    }


def settle(found: list[tuple[str, list[Place], set[str]]]) -> list[set[str]]:
    """The variants that each finding can be of. The tool reports a read of a launch once, with all its writes: a
    variant that is the only one for a finding is none for another finding with the same read."""
    possible = [set(names) for _, _, names in found]
    reads = [(label, *sorted(p.offset for p in places if p.role == "Read")) for label, places, _ in found]
    settled = set[int]()
    while alone := [i for i, names in enumerate(possible) if len(names) == 1 and i not in settled]:
        settled.update(alone)
        for i, j in product(alone, range(len(found))):
            if i != j and reads[i] == reads[j] and possible[i] != possible[j]:
                possible[j] -= possible[i]
    return possible


def is_ordered(places: list[Place], texts: Iterable[str]) -> bool:
    """Whether a finding's writes and reads are ordered, in every variant of the kernel that the finding can be of."""
    if {place.role for place in places} != {"Write", "Read"} or len({place.kernel for place in places}) > 1:
        return False
    texts = list(texts)
    stores, loads = ([place.offset for place in places if place.role == role] for role in ("Write", "Read"))
    pairs = list(product(stores, loads))
    return bool(texts) and all(
        ordered_by_barrier(t, *pair) or ordered_by_mbarriers(t, *pair) for t in texts for pair in pairs
    )


def ordered_by_barrier(disassembly: str, store: int, load: int) -> bool:
    """Whether threads store and load shared memory here, with a full barrier between any store and any load."""
    code, _ = instructions(disassembly)
    if not ACCESS["Write"].search(code[store]) or not ACCESS["Read"].search(code[load]):
        return False
    before_store, before_load = (barriers_before(disassembly).get(place, frozenset()) for place in (store, load))
    return bool(before_store and before_load) and not before_store & before_load


def ordered_by_mbarriers(disassembly: str, store: int, load: int) -> bool:
    """Whether the producer signals its store at an mbarrier, and waits for a release after the load.

    On every path, the next event of the storing thread is an arrival at an mbarrier where no other instruction arrives,
    and the loading thread has just waited for that mbarrier. Not checked here, but known from the kernel and its model:
    which entry of the ring and which phase an instruction uses, and that the guard of an arrival selects one lane.
    """
    code, by_offset = parse_sass(disassembly), states(disassembly)
    storing, loading = by_offset.get(store, []), by_offset.get(load, [])
    if any(state.in_call for state in (*storing, *loading)):  # callers are not distinguished
        return False
    accesses = {"STS": storing, "LDS": loading}
    if not all(re.search(rf"\b{opcode}\b", text) for opcode, of in accesses.items() for text in texts_at(code, of)):
        return False
    memory = {displacement(text) for text in texts_at(code, (*storing, *loading))}
    if len(memory) != 1 or "" in memory:
        return False
    signals = {state.index for state in states_until(code, storing, EVENT) if EVENT.search(code.texts[state.index])}
    mbarriers = {arrived_at(code.texts[index]) for index in signals}
    if len(mbarriers) != 1 or "" in mbarriers or {state.wait for state in loading} != {Wait(at) for at in mbarriers}:
        return False
    if signals != {index for index, text in enumerate(code.texts) if arrived_at(text) in mbarriers}:
        return False
    return waits_for_release(code, storing, loading)


def waits_for_release(code: Code, storing: list[State], loading: list[State]) -> bool:
    """Whether all consumers synchronise before one of them arrives anywhere, and the producer waits for that arrival.

    The producer waits before it fills a stage. Two paths reach the next store without a wait: a tile without stages,
    and stages that were filled ahead. The first needs a matrix without columns, which the model of the ring excludes as
    well; for the second the ring has room.
    """
    if any("SYNCS.ARRIVE" in text for text in texts_at(code, states_until(code, loading, CONSUMER_BARRIER))):
        return False
    producing, consuming = states_until(code, storing, FULL_BARRIER), states_until(code, loading, FULL_BARRIER)
    unguarded = {text for text in texts_at(code, consuming) if not text.startswith("@")}
    not_a_release = {arrived_at(text) for text in texts_at(code, producing) | unguarded}
    released = {arrived_at(text) for text in texts_at(code, consuming)} - not_a_release - {""}
    waits = {state.wait for state in producing if FILL.search(code.texts[state.index])}
    return bool(waits) and waits <= {Wait(at) for at in released}


def texts_at(code: Code, reached: Iterable[State]) -> set[str]:
    return {code.texts[state.index] for state in reached}


def displacement(text: str) -> str:
    """The displacement of a shared memory address; empty if it has none."""
    match = re.search(r"\+(0x[0-9a-f]+)\]", text)
    return match[1] if match else ""


def arrived_at(text: str) -> str:
    """The displacement of the mbarriers that an instruction arrives at; empty if it is no arrival."""
    match = ARRIVAL.search(text)
    return match[1] if match else ""


def with_barriers(disassembly: str, offset: int) -> str | None:
    """An instruction with the barrier before and after it; None if the tools do not watch it."""
    code, _ = instructions(disassembly)
    if not WATCHED.search(code.get(offset, "")):
        return None
    before, after = (
        f"{code[p]} at 0x{p:x}" if p is not None else "nothing" for p in neighbouring_barriers(disassembly, offset)
    )
    return f"{code[offset]} [before it {before}; after it {after}]"


def neighbouring_barriers(disassembly: str, offset: int) -> tuple[int | None, int | None]:
    _, barriers = instructions(disassembly)
    before = max((place for place in barriers if place < offset), default=None)
    return before, min((place for place in barriers if place > offset), default=None)


@cache
def instructions(disassembly: str) -> tuple[dict[int, str], list[int]]:
    """Instructions by offset, and the offsets of barriers."""
    parsed = parse_sass(disassembly)
    code = dict(zip(parsed.offsets, parsed.texts))
    return code, [place for place, text in code.items() if BARRIER.search(text)]
