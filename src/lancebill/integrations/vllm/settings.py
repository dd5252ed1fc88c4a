"""What `--additional-config '{"lancebill": {...}}'` says, checked and as one frozen value."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache

from lancebill.backends import oracle
from lancebill.backends.registry import registry
from lancebill.errors import SpecError
from lancebill.layer.check_split import check_split
from lancebill.layer.rules import ActivationRules, WeightRules, activation_specs, has_rule, weight_targets
from lancebill.moe.problem import BATCH_INVARIANT, FAST, ORDERS
from lancebill.split import moves as moving

SECTION = "lancebill"
OFFER, REQUIRE, OFF = MODES = ("offer", "require", "off")
AUTO, *_ = LINEAR = ("auto", OFFER, OFF)


@dataclass(frozen=True)
class Settings:
    """How far lancebill takes over.

    `offer` takes each layer for which there is a fast backend and leaves the rest to vLLM. `require` raises if it
    cannot take a layer. `off` takes nothing. Rules by layer in `weights` and `activations` leave layers that no rule
    names to vLLM. `linear` "auto" keeps dense matrices in 16 bits on a CPU that computes in fp32, where lancebill takes
    experts; "offer" does so in every model, and offers quantised dense layers too. `gpu_memory` (of all layers on this
    rank) or `gpu_experts` (of each layer) limit the experts on a GPU: the others stay in host memory, for the CPU.
    `moves` "recency" keeps those on the GPU that were used last, `cpu_threads` is the number of the CPU's threads.
    """

    mode: str = OFFER
    weights: WeightRules = None
    activations: ActivationRules = None
    backend: str = oracle.AUTO
    order: str = FAST
    linear: str = AUTO
    gpu_memory: int | str | None = None
    gpu_experts: int | None = None
    moves: str = moving.OFF
    cpu_threads: int | None = None

    @property
    def takes_any(self) -> bool:
        return self.mode != OFF

    def must_take(self, device: str) -> str | None:
        """Why no layer on a device of this kind ("cpu", "cuda") may be left to vLLM; None: any may."""
        if self.mode == REQUIRE:
            return "mode: require"
        if not self.takes_any or device == "cpu" or self.gpu_limit is None:
            return None
        return "vLLM would put every expert on the GPU; leave out gpu_memory and gpu_experts if that is right"

    @property
    def gpu_limit(self) -> str | None:
        """The setting that limits the experts on a GPU; None: none does."""
        if self.gpu_memory is not None:
            return "gpu_memory"
        return None if self.gpu_experts is None else "gpu_experts"

    def requantises(self, layer: int) -> bool:
        """Whether `weights` is about this layer."""
        return self.weights is not None and has_rule(self.weights, layer)

    def names(self, layer: int) -> bool:
        """Whether the rules are about this layer; without rules by layer they are about all."""
        rules = [rule for rule in (self.weights, self.activations) if rule is not None]
        return not rules or any(has_rule(rule, layer) for rule in rules)


def parse_settings(additional: object, *, batch_invariant: bool = False) -> Settings:
    """The settings in vLLM's `additional_config`. `batch_invariant` is what vLLM itself was asked for."""
    section = additional.get(SECTION) if isinstance(additional, Mapping) else None
    if section is None:
        for key in _similar(additional):
            _warn_of(key)
        section = {}
    if not isinstance(section, Mapping):
        raise SpecError("not an object", where=SECTION, expected='{"mode": "offer", ...}', got=repr(section))
    _check_keys(section)
    order = BATCH_INVARIANT if batch_invariant else FAST
    settings = Settings(
        mode=_choice(section, "mode", MODES, OFFER),
        weights=_rules(section, "weights"),  # type: ignore[arg-type]
        activations=_rules(section, "activations"),  # type: ignore[arg-type]
        backend=_choice(section, "backend", (oracle.AUTO, *registry()), oracle.AUTO),
        order=_choice(section, "order", ORDERS, order),
        linear=_choice(section, "linear", LINEAR, AUTO),
        gpu_memory=section.get("gpu_memory"),
        gpu_experts=section.get("gpu_experts"),
        moves=_choice(section, "moves", moving.MOVES, moving.OFF),
        cpu_threads=section.get("cpu_threads"),
    )
    if batch_invariant and settings.order != BATCH_INVARIANT:
        raise SpecError(
            "vLLM was asked for batch invariance, and lancebill for another order",
            where=f"{SECTION}.order",
            expected=BATCH_INVARIANT,
            got=settings.order,
        )
    _check_rules(settings)
    split = settings.gpu_memory, settings.gpu_experts, settings.moves, settings.cpu_threads
    try:
        check_split(*split, order=settings.order)
    except SpecError as error:
        raise error.within(SECTION) from None
    return settings


def _similar(additional: object) -> list[str]:
    """Keys beside which ours is missing, and which may be meant to be ours."""
    keys = {str(key).lower(): str(key) for key in additional} if isinstance(additional, Mapping) else {}
    return [keys[key] for key in get_close_matches(SECTION, keys, cutoff=0.75)]


@cache  # settings are parsed for each model and more than once
def _warn_of(key: str) -> None:
    logging.getLogger("vllm.lancebill").warning("--additional-config: %r is ignored; is %r meant?", key, SECTION)


def _check_keys(section: Mapping[object, object]) -> None:
    known = [field.name for field in fields(Settings)]
    for key in section:
        if key not in known:
            raise SpecError(f"no setting is called {key!r}", where=SECTION, expected=" or ".join(known))


def _choice(section: Mapping[object, object], key: str, legal: Sequence[str], default: str) -> str:
    value = section.get(key, default)
    if value not in legal or not isinstance(value, str):
        raise SpecError("unknown value", where=f"{SECTION}.{key}", expected=" or ".join(legal), got=repr(value))
    return value


def _rules(section: Mapping[object, object], key: str) -> object:
    """A spec, a spec by matrix, or rules by layer, as JSON has them."""
    value = section.get(key)
    if value is None or isinstance(value, (str, Mapping)):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(rule, Sequence) and len(rule) == 2 for rule in value):
        return tuple((str(pattern), spec) for pattern, spec in value)
    expected = 'a spec, {"w13": spec, "w2": spec} or [["0-3", spec], ["*", null]]'
    raise SpecError("cannot read these rules", where=f"{SECTION}.{key}", expected=expected, got=repr(value))


def _check_rules(settings: Settings) -> None:
    """Parse every spec now, so that a typing error is found before a model is built."""
    with _within("weights"):
        for rules in _each(settings.weights):
            weight_targets(rules, 0)  # type: ignore[arg-type]
    with _within("activations"):
        for rules in _each(settings.activations):
            activation_specs(rules, 0)  # type: ignore[arg-type]


def _each(rules: object) -> Iterator[object]:
    """Rules by layer one by one, each as if it were about every layer."""
    if not isinstance(rules, tuple):
        yield rules
        return
    for pattern, spec in rules:
        has_rule([(pattern, spec)], 0)  # reads the pattern
        yield [("*", spec)]


@contextmanager
def _within(key: str) -> Iterator[None]:
    try:
        yield
    except SpecError as error:
        raise error.within(f"{SECTION}.{key}") from None
