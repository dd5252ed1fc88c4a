"""Experts that vLLM was asked to quantise while it loads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from layer_checkpoints import make_checkpoint
from takeovers import OPTIONS, settings

from lancebill.errors import UnsupportedProblem
from lancebill.integrations.vllm.quantising import quantising_reason
from lancebill.integrations.vllm.takeover import Source, Takeover

MODULE = "model.layers.0.mlp.experts"


@dataclass
class OlderConfig:
    """As vLLM's `fp8` and `experts_int8`."""

    name: str

    def get_name(self) -> str:
        return self.name


@dataclass
class OnlineConfig(OlderConfig):
    """As vLLM's `online`, which may be about dense layers only."""

    experts: bool

    def resolve_quant_method_cls(self, layer_class: type, prefix: str) -> object:
        assert (layer_class, prefix) == (int, MODULE)
        return ("moe",) if self.experts else None


def test_which_configs_quantise_experts() -> None:
    for config in (None, OlderConfig("lancebill"), OnlineConfig("online", experts=False)):
        assert quantising_reason(config, int, MODULE) is None
    for config in (OlderConfig("experts_int8"), OnlineConfig("online", experts=True)):
        reason = quantising_reason(config, int, MODULE)
        assert reason is not None and config.name in str(reason) and "`weights`" in str(reason)


def test_whether_it_is_said_how_a_layer_is_quantised() -> None:
    made = make_checkpoint("dense")
    plain, packed = Source("model", made.config, made.headers), Source("model", make_checkpoint().config, None)

    def said(source: Source, **section: object) -> bool:
        return Takeover(settings(**section), source, random=False, copies=False).quantises(0)

    assert said(packed) and said(plain, weights="int4-g128") and said(plain, weights=[["0", None]])
    assert not said(plain) and not said(plain, activations="fp8") and not said(plain, weights=[["1", "int4-g128"]])


def test_they_are_left_or_refused() -> None:
    made = make_checkpoint("dense")
    reason = quantising_reason(OlderConfig("experts_int8"), int, MODULE)
    assert reason is not None
    source = Source("model", replace(made.config), made.headers)
    decision = Takeover(settings(backend="torch-cpu"), source, random=False, copies=False).decide(0, OPTIONS, [reason])
    assert not decision.taken and "asked to quantise them (experts_int8)" in decision.text
    with pytest.raises(UnsupportedProblem, match=r"asked to quantise.*mode: require"):
        Takeover(settings(mode="require"), source, random=False, copies=False).decide(0, OPTIONS, [reason])
