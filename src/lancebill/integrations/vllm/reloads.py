"""vLLM's reloads of models whose experts are lancebill's: where they end, and changes that experts cannot follow."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import layerwise

from lancebill.errors import UnsupportedProblem
from lancebill.integrations.vllm.hooks import PATCH_HOOKS, RELOAD_HOOKS, missing_hook
from lancebill.integrations.vllm.takeover import takeover_of

logger = init_logger("vllm.lancebill")


def is_reloading(model: Any) -> bool:
    """Whether vLLM reloads the model layer by layer now, in one or several calls of `load_weights`."""
    return missing_hook(RELOAD_HOOKS) is None and layerwise.get_layerwise_info(model).can_load()


def follow_reloads() -> None:
    """Let vLLM's reloads end the refits. Every kind of reload ends in this function of vLLM's."""
    missing = missing_hook(RELOAD_HOOKS)
    if missing is not None:
        logger.warning("incomplete reloads are found by the next request only: %s", missing)
        return
    finalize = layerwise.finalize_layerwise_processing

    @functools.wraps(finalize)
    def finalize_layerwise_processing(model: Any, *args: Any, **kwargs: Any) -> Any:
        takeover = takeover_of(model)
        try:
            done = finalize(model, *args, **kwargs)
        except BaseException:
            if takeover is not None:
                takeover.drop_refits()
            raise
        if takeover is not None:
            takeover.end_reload()
        return done

    layerwise.finalize_layerwise_processing = finalize_layerwise_processing


def refuse_sparse_patches() -> None:
    """vLLM marks the numbers that stay by NaN, and copies the others. Packed weights have no such places."""
    if missing_hook(PATCH_HOOKS) is not None:
        return  # this version of vLLM has no such patches
    from vllm.model_executor.model_loader import checkpoint_weight_patch as patches

    load = patches._load_nan_masked_weights

    @functools.wraps(load)
    def load_nan_masked_weights(model: Any, weights: list[tuple[str, Tensor]]) -> Any:
        takeover = takeover_of(model)
        names = [name for name, _ in weights if takeover is not None and takeover.takes(name)]
        if names:
            what = "sparse patches of weights that lancebill packs are not supported"
            raise UnsupportedProblem(what, where=names[0], got=f"{len(names)} such tensors", hint="send whole tensors")
        return load(model, weights)

    patches._load_nan_masked_weights = load_nan_masked_weights
