"""Says so when torch's operators compute a layer because no backend has kernels for it: many times slower.

Layers say it when they take a choice, once for each kind of problem in a process. A backend that was asked for by name
is what the caller wants.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from lancebill.backends.oracle import AUTO, Choice, explain
from lancebill.errors import UnsupportedProblem
from lancebill.moe.problem import FAST, LINEAR, Problem
from lancebill.numbers.dtypes import BF16
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec

log = logging.getLogger("lancebill")

_OTHER_WEIGHTS = ("int8", "int4-g32")  # specs that all kernels know, to suggest
_SAID: set[Hashable] = set()
_LOCK = threading.Lock()


def warn_if_slow(choice: Choice) -> None:
    """One warning for each (specs, inputs, kind of device), if the automatic choice has no kernels."""
    if choice.requested == AUTO and choice.problem.experts and not choice.has_kernels and is_new(_kind(choice)):
        how = f"{choice.backend.name} computes this with torch's operators, slowly"
        log.warning("%s: %s\n%s", _without_kernels(choice), how, _reasons(choice))


def refuse_slow(choice: Choice) -> None:
    """Raise if the automatic choice is slower than plain tensors of the same numbers."""
    if choice.requested == AUTO and not choice.beats_plain:
        raise UnsupportedProblem(f"{_without_kernels(choice)}\n{_reasons(choice)}")


def is_new(kind: Hashable) -> bool:
    """Whether a warning of this kind was not given in this process before. It counts as given from now on."""
    with _LOCK:
        new = kind not in _SAID
        _SAID.add(kind)
        return new


def _kind(choice: Choice) -> Hashable:
    problem = choice.problem
    specs = tuple(shape.spec for shape in problem.matrices.values())
    return specs, problem.input, problem.activations, problem.second_activations, str(choice.device)


def _without_kernels(choice: Choice) -> str:
    problem = choice.problem
    specs = " / ".join(dict.fromkeys(str(shape.spec) for shape in problem.matrices.values()))
    inputs = " / ".join(dict.fromkeys((str(problem.activations), str(problem.second_activations))))
    return f"no kernels for {specs} x {inputs} on {choice.device}"


def _reasons(choice: Choice) -> str:
    """Those of every other backend, and what would help. If it cannot run on the device, the others do not matter."""
    lines = []
    for verdict in choice.verdicts:
        elsewhere = [str(reason) for reason in verdict.reasons if reason.code == "device"]
        if verdict.backend is not choice.backend:
            lines.append(f"  {verdict.backend.name}: {elsewhere[0] if elsewhere else choice.why(verdict)}")
    changes = " or ".join(helpful_changes(choice))
    return "\n".join([*lines, f"  what would help: {changes}"] if changes else lines)


def helpful_changes(choice: Choice) -> list[str]:
    """The fewest changes with which a backend has kernels, as options of whoever loads the weights."""
    changes = list(_changes(choice.problem))
    for count in range(1, len(changes) + 1):
        found = []
        for some in combinations(changes, count):
            other = explain(_changed(choice.problem, some), choice.device)
            if other.chosen is not None and other.has_kernels:
                found.append(f"{', '.join(words for words, _ in some)} ({other.backend.name})")
        if found:
            return found
    return []


def _changed(problem: Problem, changes: Iterable[tuple[str, dict[str, Any]]]) -> Problem:
    return replace(problem, **{name: value for _, change in changes for name, value in change.items()})


def _changes(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options, and what each changes."""

    def option(name: str, value: object) -> str:
        return f'{name}={{"rest": "{value}"}}' if problem.kind == LINEAR else f'{name}="{value}"'

    if problem.input != BF16 and not problem.activations.spec.quantized:
        wide = ACTIVATIONS["bf16"]
        yield "dtype=torch.bfloat16", {"input": BF16, "activations": wide, "activations_w2": None}
    if problem.activations.spec.quantized or problem.second_activations.spec.quantized:
        plain = next(spec for spec in ACTIVATIONS.values() if spec.spec.dtype == problem.input)
        yield option("activations", plain), {"activations": plain, "activations_w2": None}
    if problem.order != FAST:
        yield f'order="{FAST}"', {"order": FAST}
    for name in _OTHER_WEIGHTS:
        yield option("weights", name), _with_weights(problem, parse_spec(name))


def _with_weights(problem: Problem, spec: QuantSpec) -> dict[str, Any]:
    return {matrix: replace(shape, spec=spec) for matrix, shape in problem.matrices.items()}
