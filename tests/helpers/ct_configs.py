"""compressed-tensors configs for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lancebill.formats._ct_config import PACK, write_config
from lancebill.formats.stored import Config
from lancebill.numbers.spec import QuantSpec

N, K = 32, 64
EXPERT = "model.layers.0.mlp.experts.3.gate_proj"


def ct_config(fmt: str | None, spec: QuantSpec, inputs: Mapping[str, Any] | None = None, **top: Any) -> Config:
    quant = {**write_config(fmt or PACK, spec, inputs), "format": fmt}
    quant["config_groups"]["group_0"]["format"] = None
    quant |= top
    return Config(quant=quant, method="compressed-tensors")


def with_args(config: Config, side: str = "weights", **args: Any) -> Config:
    quant = {**config.quant, "config_groups": {"group_0": dict(config.quant["config_groups"]["group_0"])}}
    section = quant["config_groups"]["group_0"]
    section[side] = {**(section[side] or {}), **args}
    return Config(quant=quant, method=config.method)
