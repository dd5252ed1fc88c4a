"""Compare the experts of a layer: find zero experts, equal experts and lost scales.

Each finding lists its experts. Findings are warnings, because a real checkpoint may contain such experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from lancebill.checkpoint.load.check_values import Profile
from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.naming import GATE, UP
from lancebill.errors import BadValue, ranges

OUTLIER = 64.0  # times the usual magnitude: training never gives this much, a lost scale gives more
FEW_SCALES = 4  # equal activation scales are suspicious only from this many on


def compare_layer(read: Reader, profiles: Sequence[Profile]) -> Iterator[BadValue]:
    """Everything suspicious about the experts of one layer."""
    by_name = defaultdict(list)
    for profile in profiles:
        by_name[profile.projection.name].append(profile)
    for name, members in by_name.items():
        where = f"{members[0].projection.where_layer}, {name}"
        yield from _zero(where, members)
        yield from _equal(read, where, [profile for profile in members if profile.peak])
        yield from _outliers(where, [profile for profile in members if profile.peak])
    if profiles:
        yield from _halves(f"{profiles[0].projection.where_layer}, gate and up", by_name[GATE], by_name[UP])


def compare_inputs(profiles: Iterable[Profile]) -> Iterator[BadValue]:
    """Activation scales that are the same everywhere were not measured."""
    values = defaultdict(list)
    for profile in profiles:
        for role, value in profile.inputs.items():
            values[role].append(value)
    for role, found in values.items():
        if len(found) >= FEW_SCALES and len(set(found)) == 1:
            yield BadValue(
                f"{role}: all layers and experts have the same",
                got=f"{len(found)} times {found[0]:g}",
                hint="the activations were never calibrated: calibrate, or quantise the weights only",
            )


def _zero(where: str, members: Sequence[Profile]) -> Iterator[BadValue]:
    dead = [profile.projection.expert for profile in members if not profile.peak]
    if dead:
        yield BadValue(
            "dead experts: all weights are zero",
            where=where,
            got=f"experts {ranges(dead)}",
            hint="tokens that are routed there get nothing from them: was the export complete?",
        )


def _equal(read: Reader, where: str, members: Sequence[Profile]) -> Iterator[BadValue]:
    groups = defaultdict(list)
    for profile in members:
        groups[profile.digest].append(profile)
    for group in groups.values():
        if len(group) > 1 and _same_weights(read, group[0], group[1]):
            experts = ranges(profile.projection.expert for profile in group)
            hint = "a copied expert adds nothing: was one expert written several times?"
            yield BadValue("experts with identical weights", where=where, got=f"experts {experts}", hint=hint)


def _same_weights(read: Reader, a: Profile, b: Profile) -> bool:
    first, second = (replace(load_projection(read, p.projection), inputs={}) for p in (a, b))
    return first.equals(second)


def _outliers(where: str, members: Sequence[Profile]) -> Iterator[BadValue]:
    if len(members) < 3:
        return
    usual = median(profile.peak for profile in members)
    odd = [p for p in members if not usual / OUTLIER <= p.peak <= usual * OUTLIER]
    if odd:
        yield BadValue(
            "experts whose weights have another magnitude than the others'",
            where=where,
            expected=f"weights of about {usual:.3g}, as most experts have",
            got=f"{odd[0].peak:.3g} in experts {ranges(p.projection.expert for p in odd)}",
            hint="a scale was lost or not updated: compare with the unquantised checkpoint",
        )


def _halves(where: str, gates: Sequence[Profile], ups: Sequence[Profile]) -> Iterator[BadValue]:
    """Gate and up have one input and about the same magnitude. Some runtimes store one scale for both."""
    up_of = {up.projection.expert: up for up in ups}  # an expert whose values are wrong has no profile
    pairs = [(gate, up_of[gate.projection.expert]) for gate in gates if gate.projection.expert in up_of]
    pairs = [(gate, up) for gate, up in pairs if gate.peak and up.peak]
    lost = [gate for gate, up in pairs if not 1 / OUTLIER <= gate.peak / up.peak <= OUTLIER]
    if lost:
        yield BadValue(
            "one half has another magnitude than the other",
            where=where,
            got=f"experts {ranges(p.projection.expert for p in lost)}",
            hint="the scale of one half was lost or written twice: compare with the unquantised checkpoint",
        )
    for what, differ in (
        ("scales of the whole matrix", [g for g, u in pairs if g.tensor_scale != u.tensor_scale]),
        ("activation scales", [g for g, u in pairs if g.inputs != u.inputs]),
    ):
        if differ:
            yield BadValue(
                f"gate and up have different {what}",
                where=where,
                got=f"experts {ranges(p.projection.expert for p in differ)}",
                hint="exact here, but runtimes that keep one for both (vLLM among them) compute with one of the two",
            )
