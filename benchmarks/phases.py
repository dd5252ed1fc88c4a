"""How often all threads have met before an instruction: what a proof of order takes, read off the assembler's code.

Warps with work of their own tell one another at barrier 1, where every thread of the block takes part, wherever in the
kernel it stands. So the n-th meeting of one thread is the n-th of all, and whatever runs after n meetings is ordered
with whatever runs after any other number of them. Every way through the code is followed. Meetings are counted modulo
ROUND, what the compiler needs to give its other warps one task; other numbers modulo ROUND are other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

ROUND = 3  # the task is there; it begins; it is done
LINE = re.compile(r"\s*(?:(?P<label>[.$\w]+):|/\*(?P<place>[0-9a-f]{4,})\*/\s+(?P<text>[^/\s].*?)\s*;)")
PARTS = re.compile(r"(?:@(?P<no>!?)(?P<guard>U?P\w+) )?(?P<name>[A-Z]\w*)(?P<rest>.*)")
BARRIER = re.compile(r"(?P<kind>\S*) (?P<number>0x[0-9a-f]+)(?P<threads>, .*)?$")
TARGET = re.compile(r"`\((\S+)\)$")
TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
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
class State:
    """A thread before an instruction.

    `known`: predicates that an earlier barrier's guard has settled; `joins`: where branches are to join again.
    """

    at: int
    met: int = 0
    called: bool = False
    known: frozenset[tuple[str, bool]] = frozenset()
    joins: frozenset[tuple[str, int]] = frozenset()


@cache
def meetings(disassembly: str) -> dict[int, frozenset[int]]:
    """Places to meetings before them, modulo ROUND; nothing at all where the code cannot be followed."""
    code = read(disassembly)
    seen, open_states = set[State](), [State(0)] if code.places else []
    try:
        while open_states:
            state = open_states.pop()
            if state not in seen:
                seen.add(state)
                open_states += following(code, state)
    except Unclear:
        return {}
    found = dict[int, set[int]]()
    for state in seen:
        found.setdefault(code.places[state.at], set()).add(state.met)
    return {place: frozenset(met) for place, met in found.items()}


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
            if meets:
                now = replace(state, known=state.known | {(guard, holds)})
        # What an instruction names may change.
        now = replace(now, known=frozenset(k for k in now.known if not re.search(rf"\b({k[0]}|PR)\b", rest)))
        if not execute:
            yield replace(now, at=state.at + 1)
        elif meets:
            if state.called:
                raise Unclear("threads meet in a function, whose callers are not told apart")
            yield replace(now, at=state.at + 1, met=(state.met + 1) % ROUND)
        else:
            yield from executed(code, now, name, text)


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
