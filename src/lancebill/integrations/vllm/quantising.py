"""Whether vLLM was asked to quantise plain experts while it loads them (`--quantization`). Needs no vLLM."""

from __future__ import annotations

from typing import Any

from lancebill.backends.base import Reason

OURS = "lancebill"  # our own config, under which vLLM quantises nothing


def quantising_reason(config: Any, layer_class: type, module: str) -> Reason | None:
    """Why the experts in a module of a plain checkpoint are left to vLLM's quantisation config; None: they are not.

    We would compute them as they are stored, although somebody asked for less.
    """
    if config is None or config.get_name() == OURS:
        return None
    # vLLM's newer configs say which layers they are about: perhaps dense ones only.
    if "resolve_quant_method_cls" in dir(config) and config.resolve_quant_method_cls(layer_class, module) is None:
        return None
    what = f"vLLM was asked to quantise them ({config.get_name()})"
    return Reason("quantization", what, "without --quantization, `weights` says how lancebill quantises")
