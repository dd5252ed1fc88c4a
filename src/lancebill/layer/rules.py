"""What `weights=` and `activations=` accept, resolved for one layer.

One spec for everything; `{"w13": ..., "w2": ...}`; or ordered (layer pattern, spec) pairs, of them the first match.
A pattern is a layer number, a range `3-17`, or `*`.

For whole models also `{"experts": ..., "rest": ...}`. `experts` is one of the above. `rest` is one spec for all other
matrices, or an ordered mapping of module patterns (`*.self_attn.*`) to specs; the first match applies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lancebill.errors import SpecError
from lancebill.moe.layout import W2, W13
from lancebill.numbers.spec import ActivationSpec, QuantSpec
from lancebill.numbers.spec_names import parse_activation, parse_spec

MATRICES = (W13, W2)
CHECKPOINT = "checkpoint"  # activations as the checkpoint declares them
EXPERTS, REST = "experts", "rest"

WeightRules = str | QuantSpec | Mapping[str, object] | Sequence[tuple[str, object]] | None
ActivationRules = str | ActivationSpec | Mapping[str, object] | Sequence[tuple[str, object]] | None


def split_rest(rules: Any) -> tuple[Any, Any]:
    """The rules of the experts and those of all other modules."""
    if not isinstance(rules, Mapping) or not {EXPERTS, REST} & set(rules):
        return rules, None
    unknown = sorted(set(rules) - {EXPERTS, REST})
    if unknown:
        raise SpecError(f"'{unknown[0]}' beside rules for whole models", expected=f"{EXPERTS} or {REST}")
    return rules.get(EXPERTS), rules.get(REST)


def rest_weight(rules: object, module: str) -> QuantSpec | None:
    """The spec that a module outside the experts is quantised to; None if it stays as stored."""
    value = _for_module(rules, module)
    return None if value is None else _weight(value)


def rest_activation(rules: object, module: str) -> ActivationSpec | None:
    """The inputs of a module outside the experts; None if they are not quantised."""
    value = _for_module(rules, module)
    return None if value is None else _activation(value)


def check_patterns(rules: object, modules: Sequence[str]) -> None:
    """Raise if a pattern matches no module: what it is about would silently stay as stored, unless that was asked."""
    for pattern, value in rules.items() if isinstance(rules, Mapping) else ():
        if value is not None and not any(fnmatchcase(module, str(pattern)) for module in modules):
            expected = f"a pattern of names such as {modules[0]}" if modules else None
            raise SpecError("no module matches this rule", where=REST, expected=expected, got=pattern)


def _for_module(rules: object, module: str) -> object:
    if not isinstance(rules, Mapping):
        return rules
    return next((value for pattern, value in rules.items() if fnmatchcase(module, str(pattern))), None)


def weight_targets(rules: WeightRules, layer: int) -> dict[str, QuantSpec]:
    """Target specs by matrix; empty where the weights keep their stored spec."""
    return {name: _weight(value) for name, value in _by_matrix(rules, layer).items()}


def activation_specs(rules: ActivationRules, layer: int) -> dict[str, ActivationSpec | None]:
    """A spec by matrix, or None for "as the checkpoint declares"; a missing matrix takes its inputs unquantised."""
    by_matrix = _by_matrix(rules, layer)
    return {name: None if value == CHECKPOINT else _activation(value) for name, value in by_matrix.items()}


def _by_matrix(rules: object, layer: int) -> dict[str, object]:
    """The rule for each matrix of this layer, where there is one."""
    rule = _for_layer(rules, layer)
    named = rule if isinstance(rule, Mapping) else dict.fromkeys(MATRICES, rule)
    unknown = sorted(set(named) - set(MATRICES))
    if unknown:
        raise SpecError(f"no matrix is called '{unknown[0]}'", expected=" or ".join(MATRICES))
    return {name: value for name, value in named.items() if value is not None}


def has_rule(rules: object, layer: int) -> bool:
    """Whether a rule matches this layer. A rule may be None, for "as stored"."""
    return _is_single(rules) or _first_match(rules, layer) is not None


def _for_layer(rules: object, layer: int) -> object:
    """The rule that applies to this layer."""
    if _is_single(rules):
        return rules
    match = _first_match(rules, layer)
    return None if match is None else match[1]


def _is_single(rules: object) -> bool:
    """Whether this is one rule for all layers."""
    return not isinstance(rules, Sequence) or isinstance(rules, str)


def _first_match(rules: object, layer: int) -> tuple[object, object] | None:
    """The first (layer pattern, spec) pair that is about this layer."""
    assert isinstance(rules, Sequence)
    for entry in rules:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise SpecError("rules are (layer pattern, spec) pairs", got=repr(entry))
        if _matches(str(entry[0]), layer):
            return entry[0], entry[1]
    return None


def _matches(pattern: str, layer: int) -> bool:
    span = re.fullmatch(r"(\d+)(?:-(\d+))?|\*", pattern)
    if span is None:
        raise SpecError(f"cannot read the layer pattern '{pattern}'", expected="a number, a range like 3-17, or *")
    if pattern == "*":
        return True
    first, last = int(span[1]), int(span[2] or span[1])
    if last < first:
        raise SpecError(f"the layer pattern '{pattern}' matches no layer", expected=f"{last}-{first}")
    return first <= layer <= last


def _weight(value: object) -> QuantSpec:
    if isinstance(value, QuantSpec):
        return value
    if isinstance(value, str):
        return parse_spec(value)
    raise SpecError("a weight spec is a name or a QuantSpec", got=repr(value))


def _activation(value: object) -> ActivationSpec:
    if isinstance(value, ActivationSpec):
        return value
    if isinstance(value, str):
        return parse_activation(value)
    raise SpecError("an activation spec is a name or an ActivationSpec", got=repr(value))
