"""Which of a rank's experts are on its device and which in host memory.

A split is a placement: for each part, an expert of the other part is like one of another rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lancebill.errors import SpecError

_UNITS = {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", 1)}
_LEAST = 2**20  # a text without a unit that says less is hardly meant as bytes


@dataclass(frozen=True)
class Split:
    """The slots of a rank's experts on its device and in host memory, each in the order of that part's own slots."""

    device: tuple[int, ...]
    host: tuple[int, ...]

    def __post_init__(self) -> None:
        held = sorted(self.device + self.host)
        if held != list(range(len(held))):
            raise SpecError(
                "every slot must be in exactly one part",
                expected=f"slots 0 to {len(held) - 1}",
                got=f"{list(self.device)} on the device, {list(self.host)} in host memory",
            )

    @classmethod
    def by_number(cls, slots: int, on_device: int) -> Split:
        """The first `on_device` slots on the device. Routing has no lasting favourites, so any choice is as good."""
        count = min(slots, check_count(on_device))
        return cls(tuple(range(count)), tuple(range(count, slots)))

    @classmethod
    def by_bytes(cls, slots: int, expert_bytes: int, budget: int) -> Split:
        """As many experts on the device as `budget` bytes hold."""
        return cls.by_number(slots, share_budget(budget, [(slots, expert_bytes)])[0])


def part_map(expert_map: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
    """The map of a part: for every physical id its slot among `slots`, or -1 if it is in the other part or elsewhere.

    `expert_map` has the rank's slot of every physical id, or -1.
    """
    place = {slot: i for i, slot in enumerate(slots)}
    return tuple(place.get(slot, -1) for slot in expert_map)


def share_budget(budget: int, layers: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """How many experts of each layer `budget` bytes hold; `layers` are (experts, bytes of one).

    Every token visits all layers, so they get equal numbers; what is left gives the first layers one more.
    """
    counts = [0] * len(layers)
    open_layers = list(range(len(layers)))
    while open_layers:
        for layer in list(open_layers):
            experts, size = layers[layer]
            if counts[layer] == experts or size > budget:
                open_layers.remove(layer)
                continue
            counts[layer] += 1
            budget -= size
    return tuple(counts)


def check_count(experts: int) -> int:
    """The number of experts on the device; raises unless it is an integer of 0 or more."""
    if isinstance(experts, bool) or not isinstance(experts, int) or experts < 0:
        raise SpecError("not a number of experts", where="gpu_experts", expected="0 or more", got=repr(experts))
    return experts


def check_has_gpu(gpu_memory: int | str | None, gpu_experts: int | None, device: str, hint: str) -> None:
    """Raise if a command's options ask for a split where only a CPU, described by `device`, computes.

    `hint` says what to do about it. The library's functions do not ask: on a CPU, both parts compute there.
    """
    if gpu_memory is not None or gpu_experts is not None:
        where = "--gpu-experts" if gpu_memory is None else "--gpu-memory"
        raise SpecError("experts are split between a GPU and the CPU", where=where, got=device, hint=hint)


def parse_bytes(given: int | str, where: str | None = None) -> int:
    """A number of bytes, or a text such as "20GiB" or "20 GB". `where` is what an error names."""
    number, unit = -1.0, ""
    if isinstance(given, int) and not isinstance(given, bool):
        number = float(given)
    elif isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|[KMGT]I?B)?\s*", given.upper())
        number, unit = (float(found[1]), found[2] or "") if found else (-1.0, "")
    legal = "bytes, or a text such as 20GiB"
    if number < 0:
        raise SpecError("not an amount of memory", where=where, expected=legal, got=repr(given))
    if isinstance(given, str) and not unit and 0 < number < _LEAST:
        hint = f"{given.strip()}GiB, or {given.strip()}B for bytes"
        raise SpecError("so little memory needs a unit", where=where, expected=legal, got=repr(given), hint=hint)
    return int(number * _UNITS.get(unit, 1))
