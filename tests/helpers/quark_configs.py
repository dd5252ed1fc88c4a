"""Quark configs for tests."""

from __future__ import annotations

from typing import Any

from lancebill.formats.stored import Config

G = 32  # columns per group


def section(dtype: str, scheme: str, **values: Any) -> dict[str, Any]:
    axis = {"per_channel": {"ch_axis": 0}, "per_group": {"ch_axis": -1, "group_size": G}}.get(scheme, {})
    return {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, **axis, **values}


def config(weight: Any, inputs: Any = None, pack: str = "reorder", **values: Any) -> Config:
    quant = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs},
        "export": {"pack_method": pack},
        **values,
    }
    return Config(quant=quant, method="quark")
