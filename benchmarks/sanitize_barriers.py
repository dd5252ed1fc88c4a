"""How often all threads have met before an instruction: what a proof of order takes, read off the assembler's code.

Warps with work of their own tell one another at barrier 1, where every thread of the block takes part, wherever in the
kernel it stands. So the n-th meeting of one thread is the n-th of all, and whatever runs after n meetings is ordered
with whatever runs after any other number of them. Every way through the code is followed. Meetings are counted modulo
ROUND, what the compiler needs to give its other warps one task; other numbers modulo ROUND are other numbers.

Inside a task warps tell one another at mbarriers. For that every state of a thread says what it has just waited for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

ROUND = 3  # the task is there; it begins; it is done
LINE = re.compile(r"\s*(?:(?P<label>[.$\w]+):|/\*(?P<place>[0-9a-f]{4,})\*/\s+(?P<text>[^/\s].*?)\s*;)")
PARTS = re.compile(r"(?:@(?P<no>!?)(?P<guard>U?P\w+) )?(?P<name>[A-Z]\w*)(?P<rest>.*)")
BARRIER = re.compile(r"(?P<kind>\S*) (?P<number>0x[0-9a-f]+)(?P<threads>, .*)?$")
TARGET = re.compile(r"`\((\S+)\)$")
TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
# A wait that may also give up: only the predicate says that it is over. No guard: whoever skips it has not waited.
TRIES = re.compile(r"SYNCS\.PHASECHK\S*\.TRYWAIT (?P<over>P\d), .*\+(?P<at>0x[0-9a-f]+)\]")
# What threads do to one another: they touch shared memory, or wait, or tell, or end; or a function does.
EVENT = re.compile(r"\b(LDSM?|STSM?|ATOMS?|LD|ST|LDGSTS|SYNCS|BAR|CALL|EXIT)\b")
NOT_FOLLOWED = {"JMP", "JMX", "JMXU", "BRXU", "RTT"}


class Unclear(Exception):
    """Code that goes where this cannot follow, or meets in a way that this does not count."""


@dataclass(frozen=True)
class Code:
    """Instructions in order, and where labels stand among them."""

    places: tuple[int, ...]
    texts: tuple[str, ...]
    labels: dict[str, int]

    def target(self, text: str) -> int:
        found = TARGET.search(text)
        if found is None or found[1] not in self.labels:
            raise Unclear(text)
        return self.labels[found[1]]


@dataclass(frozen=True)
class Wait:
    """At the mbarriers of a displacement; `tried`: what says whether it is over, until a branch has asked."""

    at: str = ""
    tried: str = ""


@dataclass(frozen=True)
class State:
    """A thread before an instruction.

    `known`: predicates that the guard of an earlier barrier or branch has settled; `joins`: where branches are to join
    again; `wait`: the wait that is the last thing it did to others.
    """

    at: int
    met: int = 0
    called: bool = False
    known: frozenset[tuple[str, bool]] = frozenset()
    joins: frozenset[tuple[str, int]] = frozenset()
    wait: Wait = Wait()


@cache
def meetings(disassembly: str) -> dict[int, frozenset[int]]:
    """Places to meetings before them, modulo ROUND; nothing at all where the code cannot be followed."""
    return {place: frozenset(state.met for state in found) for place, found in states(disassembly).items()}


@cache
def states(disassembly: str) -> dict[int, list[State]]:
    """Places to every state in which a thread comes there; nothing at all where the code cannot be followed."""
    code = read(disassembly)
    found = dict[int, list[State]]()
    try:
        for state in walk(code, [State(0)] if code.places else []):
            found.setdefault(code.places[state.at], []).append(state)
    except Unclear:
        return {}
    return found


def ahead(code: Code, starts: Iterable[State], ends: re.Pattern[str]) -> set[State]:
    """Every state after these, on every way as far as an instruction that `ends` finds, and before that one."""
    return walk(code, [after for state in starts for after in following(code, state)], ends)


def walk(code: Code, starts: Iterable[State], ends: re.Pattern[str] | None = None) -> set[State]:
    seen, open_states = set[State](), list(starts)
    while open_states:
        state = open_states.pop()
        if state not in seen:
            seen.add(state)
            if ends is None or not ends.search(code.texts[state.at]):
                open_states += following(code, state)
    return seen


@cache
def read(disassembly: str) -> Code:
    places, texts, labels = list[int](), list[str](), dict[str, int]()
    for line in disassembly.splitlines():
        found = LINE.match(line)
        if found and found["label"]:
            labels[found["label"]] = len(places)
        elif found:
            places.append(int(found["place"], 16))
            texts.append(" ".join(found["text"].split()))
    return Code(tuple(places), tuple(texts), labels)


def following(code: Code, state: State) -> Iterator[State]:
    """Where a thread may be next: an instruction that it skips, or one that it executes."""
    text = code.texts[state.at]
    parts = PARTS.match(text)
    if parts is None:
        raise Unclear(text)
    name, rest, guard = parts["name"], parts["rest"], parts["guard"]
    meets = name == "BAR" and is_meeting(rest)
    for execute in (True, False) if guard else (True,):
        now = state
        if guard:
            holds = execute != bool(parts["no"])
            if (guard, not holds) in state.known:
                continue
            if meets or name == "BRA":
                now = replace(state, known=state.known | {(guard, holds)})
        # What an instruction names may change.
        now = replace(now, known=frozenset(k for k in now.known if not names(rest, k[0])))
        now = replace(now, wait=waiting(now, text, rest))
        if not execute:
            yield replace(now, at=state.at + 1)
        elif meets:
            if state.called:
                raise Unclear("threads meet in a function, whose callers are not told apart")
            yield replace(now, at=state.at + 1, met=(state.met + 1) % ROUND)
        else:
            yield from executed(code, now, name, text)


def names(rest: str, predicate: str) -> bool:
    return re.search(rf"\b({predicate}|U?PR)\b", rest) is not None


def waiting(state: State, text: str, rest: str) -> Wait:
    """What a thread waits or has waited for after an instruction that settled what it knows."""
    tries, tried = TRIES.match(text), state.wait.tried
    if tries:
        return Wait(tries["at"], tries["over"])
    if EVENT.search(text) or (tried and names(rest, tried)):
        return Wait()
    return Wait(state.wait.at) if (tried, True) in state.known else state.wait


def is_meeting(rest: str) -> bool:
    """Whether a barrier is one for all threads: named, it is not barrier 0, which tools follow by themselves."""
    found = BARRIER.match(rest)
    if found is None or (found["number"] == "0x1" and (found["threads"] or not found["kind"].startswith(".SYNC"))):
        raise Unclear(f"BAR{rest}")
    return found["number"] == "0x1"


def executed(code: Code, state: State, name: str, text: str) -> Iterator[State]:
    """After an instruction that is no meeting: the next one, or wherever it goes."""
    after = replace(state, at=state.at + 1)
    if name in NOT_FOLLOWED:
        raise Unclear(text)
    if name == "EXIT" or (name == "RET" and state.called):
        return
    if name == "RET":
        raise Unclear(text)
    if name == "CALL":
        yield replace(state, at=code.target(text), called=True, known=frozenset())
        yield replace(after, known=frozenset())
    elif name == "BRX":
        found = TARGETS.search(text)
        if found is None:
            raise Unclear(text)
        yield from (replace(state, at=code.labels[label]) for label in found[1].split(","))
    elif name == "BRA":
        yield replace(state, at=code.target(text))
        if re.search(r"BRA\S* !?U?P", text):  # on a further condition
            yield after
    elif name == "BSSY":
        join = text.split()[-2].rstrip(","), code.target(text)
        yield replace(after, joins=frozenset(j for j in state.joins if j[0] != join[0]) | {join})
    else:
        yield after
        if name == "BSYNC":
            yield from (replace(after, at=target) for register, target in state.joins if register == text.split()[-1])
