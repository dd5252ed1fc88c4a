"""The fastest way to run a model that gives its own logits, found by trying it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lancebill.serving.context import longest_context
from lancebill.serving.far_probes import same_at_end
from lancebill.serving.probes import agree, independent, probe, probe_tokens, rounding_of
from lancebill.serving.ragged import ATTENTION, RaggedModel, SeparateModel
from lancebill.serving.runners import Runner, SmallSteps
from lancebill.serving.whole_prompts import pieces_differ, varying_angles

KEEP_KEYS_AND_VALUES = {DynamicLayer, DynamicSlidingWindowLayer}
LONG = 1 << 13  # tokens of sequences that `runner` proves if nobody says how long they get
FAILED = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)  # this model is called in another way


@dataclass(frozen=True)
class Tried:
    """The model's own logits for a few tokens."""

    probes: Sequence[Sequence[int]]
    expected: Tensor
    rounding: float
    layers: int  # of the model's cache


def runner(model: Any, small: SmallSteps | None = None, context: int | None = None) -> Runner:
    """How to run this model. `context` says how long sequences get; None: as long as the model allows, but the ends of
    longer sequences than `LONG` are not tried."""
    end = min(LONG, longest_context(model.config)) if context is None else context
    angles_vary = varying_angles(model.config, context)
    separate = SeparateModel(model, angles_vary or pieces_differ(model.config, end))
    if angles_vary:
        separate.why = "its rotary angles depend on the longest sequence"
        return separate
    probes = probe_tokens(model)
    expected, _ = probe(separate, probes)
    state = separate.new_sequence()
    separate.step([state], probes[:1])
    if type(state.cache) is not DynamicCache or any(type(e) not in KEEP_KEYS_AND_VALUES for e in state.cache.layers):
        separate.why = "it keeps more than keys and values"
        return separate
    tried = Tried(probes, expected, rounding_of(separate, probes, expected), len(state.cache.layers))
    before = model.config._attn_implementation
    why = _why_not_together(model, tried, end)
    if why is None:
        return RaggedModel(model, None if small is None else _proven(small, model, tried))
    model.set_attn_implementation(before)
    separate.why = why
    return separate


@contextmanager
def own_attention(model: Any, name: str) -> Iterator[None]:
    """The attention that the model had before a runner was chosen."""
    chosen = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def _why_not_together(model: Any, tried: Tried, end: int) -> str | None:
    """Why sequences cannot share a step; None: they can, and the model has the attention for it now."""
    try:
        model.set_attn_implementation(ATTENTION)
        found, _ = probe(RaggedModel(model), tried.probes)
        if not agree(found, tried.expected, model.dtype, tried.rounding):
            return "it computes otherwise beside others"
        if not independent(RaggedModel(model), tried.probes, model.dtype, tried.rounding):
            return "it computes otherwise beside others"
        if not same_at_end(model, tried.layers, end, tried.probes):
            return f"its attention changes within {end} tokens"
    except FAILED as error:
        return f"its attention is called in another way: {type(error).__name__}"
    return None


def _proven(small: SmallSteps, model: Any, tried: Tried) -> SmallSteps | None:
    """Small steps that give the model's logits; how long both took says up to how many tokens they are used."""
    _, own_seconds = probe(RaggedModel(model), tried.probes)
    found, seconds = probe(RaggedModel(model, small), tried.probes)
    if not agree(found, tried.expected, model.dtype, tried.rounding):
        return None
    small.settle(own_seconds, seconds)
    return small
