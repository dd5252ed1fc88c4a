"""How many block-wide barriers every thread has passed before an instruction, from the disassembled kernel (SASS).

Warp-specialised kernels synchronise all threads of the block at named barrier 1, from different places in the code. The
n-th such barrier of one thread is the n-th of every thread, so two instructions that run after different numbers of
barriers are ordered. Every path through the code is followed. Barriers are counted modulo TASK_BARRIERS, the number
that the compiler uses to give one task to the other warps; counts that differ modulo TASK_BARRIERS differ.

Inside a task, warps synchronise at mbarriers. For that, each state of a thread records the mbarrier it has just waited
for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

TASK_BARRIERS = 3  # task posted, task started, task done
LINE = re.compile(r"\s*(?:(?P<label>[.$\w]+):|/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?P<text>[^/\s].*?)\s*;)")
PARTS = re.compile(r"(?:@(?P<no>!?)(?P<guard>U?P\w+) )?(?P<opcode>[A-Z]\w*)(?P<operands>.*)")
BARRIER = re.compile(r"(?P<kind>\S*) (?P<number>0x[0-9a-f]+)(?P<threads>, .*)?$")
TARGET = re.compile(r"`\((\S+)\)$")
TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
# A wait that may time out: only its predicate says that it succeeded. A guarded one does not match: it may be skipped.
TRY_WAIT = re.compile(r"SYNCS\.PHASECHK\S*\.TRYWAIT (?P<done>P\d), .*\+(?P<at>0x[0-9a-f]+)\]")
# Everything that other threads can observe: shared memory accesses, synchronisation, calls and exit.
EVENT = re.compile(r"\b(LDSM?|STSM?|ATOMS?|LD|ST|LDGSTS|SYNCS|BAR|CALL|EXIT)\b")
NOT_FOLLOWED = {"JMP", "JMX", "JMXU", "BRXU", "RTT"}


class CannotFollow(Exception):
    """A branch or a barrier that this analysis does not model."""


@dataclass(frozen=True)
class Code:
    """Instructions in order, and the index of the instruction at each label."""

    offsets: tuple[int, ...]
    texts: tuple[str, ...]
    labels: dict[str, int]

    def target(self, text: str) -> int:
        label = TARGET.search(text)
        if label is None or label[1] not in self.labels:
            raise CannotFollow(text)
        return self.labels[label[1]]


@dataclass(frozen=True)
class Wait:
    """A wait at the mbarriers of a displacement; `pending` is its predicate until a branch has tested it."""

    at: str = ""
    pending: str = ""


@dataclass(frozen=True)
class State:
    """A thread before an instruction.

    `predicates`: values known from the guard of an earlier barrier or branch; `joins`: convergence points set by BSSY;
    `wait`: the mbarrier wait, if it was the thread's last event.
    """

    index: int
    barriers: int = 0
    in_call: bool = False
    predicates: frozenset[tuple[str, bool]] = frozenset()
    joins: frozenset[tuple[str, int]] = frozenset()
    wait: Wait = Wait()


@cache
def barriers_before(disassembly: str) -> dict[int, frozenset[int]]:
    """Offset -> possible numbers of barriers before it, modulo TASK_BARRIERS; empty if the code cannot be followed."""
    return {offset: frozenset(s.barriers for s in reached) for offset, reached in states(disassembly).items()}


@cache
def states(disassembly: str) -> dict[int, list[State]]:
    """Offset -> every state in which a thread can reach it; empty if the code cannot be followed."""
    code = parse_sass(disassembly)
    by_offset = dict[int, list[State]]()
    try:
        for state in walk(code, [State(0)] if code.offsets else []):
            by_offset.setdefault(code.offsets[state.index], []).append(state)
    except CannotFollow:
        return {}
    return by_offset


def states_until(code: Code, starts: Iterable[State], end: re.Pattern[str]) -> set[State]:
    """Every state after `starts`, on every path, up to and including the one before an instruction that matches."""
    return walk(code, [after for state in starts for after in successors(code, state)], end)


def walk(code: Code, starts: Iterable[State], end: re.Pattern[str] | None = None) -> set[State]:
    seen, queue = set[State](), list(starts)
    while queue:
        state = queue.pop()
        if state not in seen:
            seen.add(state)
            if end is None or not end.search(code.texts[state.index]):
                queue += successors(code, state)
    return seen


@cache
def parse_sass(disassembly: str) -> Code:
    offsets, texts, labels = list[int](), list[str](), dict[str, int]()
    for line in disassembly.splitlines():
        match = LINE.match(line)
        if match and match["label"]:
            labels[match["label"]] = len(offsets)
        elif match:
            offsets.append(int(match["offset"], 16))
            texts.append(" ".join(match["text"].split()))
    return Code(tuple(offsets), tuple(texts), labels)


def successors(code: Code, state: State) -> Iterator[State]:
    """The states after an instruction: executed, or skipped by its guard."""
    text = code.texts[state.index]
    parts = PARTS.match(text)
    if parts is None:
        raise CannotFollow(text)
    opcode, operands, guard = parts["opcode"], parts["operands"], parts["guard"]
    full_barrier = opcode == "BAR" and is_full_barrier(operands)
    for executes in (True, False) if guard else (True,):
        now = state
        if guard:
            value = executes != bool(parts["no"])
            if (guard, not value) in state.predicates:
                continue
            if full_barrier or opcode == "BRA":
                now = replace(state, predicates=state.predicates | {(guard, value)})
        # The instruction may change any predicate that it names.
        now = replace(now, predicates=frozenset(p for p in now.predicates if not mentions(operands, p[0])))
        now = replace(now, wait=wait_after(now, text, operands))
        if not executes:
            yield replace(now, index=state.index + 1)
        elif full_barrier:
            if state.in_call:
                raise CannotFollow("a barrier in a function: its callers are not distinguished")
            yield replace(now, index=state.index + 1, barriers=(state.barriers + 1) % TASK_BARRIERS)
        else:
            yield from branch_targets(code, now, opcode, text)


def mentions(operands: str, predicate: str) -> bool:
    return re.search(rf"\b({predicate}|U?PR)\b", operands) is not None


def wait_after(state: State, text: str, operands: str) -> Wait:
    """The thread's wait after an instruction; `state` already has the predicates that the instruction settles."""
    try_wait, pending = TRY_WAIT.match(text), state.wait.pending
    if try_wait:
        return Wait(try_wait["at"], try_wait["done"])
    if EVENT.search(text) or (pending and mentions(operands, pending)):
        return Wait()
    return Wait(state.wait.at) if (pending, True) in state.predicates else state.wait


def is_full_barrier(operands: str) -> bool:
    """Whether a BAR synchronises all threads at barrier 1. The tools track barrier 0 themselves."""
    match = BARRIER.match(operands)
    if match is None or (match["number"] == "0x1" and (match["threads"] or not match["kind"].startswith(".SYNC"))):
        raise CannotFollow(f"BAR{operands}")
    return match["number"] == "0x1"


def branch_targets(code: Code, state: State, opcode: str, text: str) -> Iterator[State]:
    """The states after an executed instruction that is no full barrier: the next one, or its branch targets."""
    after = replace(state, index=state.index + 1)
    if opcode in NOT_FOLLOWED:
        raise CannotFollow(text)
    if opcode == "EXIT" or (opcode == "RET" and state.in_call):
        return
    if opcode == "RET":
        raise CannotFollow(text)
    if opcode == "CALL":
        yield replace(state, index=code.target(text), in_call=True, predicates=frozenset())
        yield replace(after, predicates=frozenset())
    elif opcode == "BRX":
        targets = TARGETS.search(text)
        if targets is None:
            raise CannotFollow(text)
        yield from (replace(state, index=code.labels[label]) for label in targets[1].split(","))
    elif opcode == "BRA":
        yield replace(state, index=code.target(text))
        if re.search(r"BRA\S* !?U?P", text):  # has a second condition
            yield after
    elif opcode == "BSSY":
        join = text.split()[-2].rstrip(","), code.target(text)
        yield replace(after, joins=frozenset(j for j in state.joins if j[0] != join[0]) | {join})
    else:
        yield after
        if opcode == "BSYNC":
            yield from (
                replace(after, index=target) for register, target in state.joins if register == text.split()[-1]
            )
