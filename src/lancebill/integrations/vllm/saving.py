"""vLLM's files of its own parameters: refused for models of which lancebill holds weights, which they would lack."""

from __future__ import annotations

import functools
from typing import Any

from lancebill.errors import UnsupportedProblem
from lancebill.integrations.vllm.hooks import SAVE_HOOKS, missing_hook
from lancebill.integrations.vllm.takeover import takeover_of


def refuse_incomplete_saves() -> None:
    """Refuse `save_sharded_state` and tensorizer's files, which would silently lack the experts."""
    sharded, tensorized = SAVE_HOOKS
    if missing_hook((sharded,)) is None:
        from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

        ShardedStateLoader.save_model = staticmethod(_refusing(ShardedStateLoader.save_model))
    if missing_hook((tensorized,)) is None:
        from vllm.model_executor.model_loader.tensorizer_loader import TensorizerLoader

        TensorizerLoader.save_model = staticmethod(_refusing(TensorizerLoader.save_model))


def _refusing(save: Any) -> Any:
    @functools.wraps(save)
    def save_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        takeover = takeover_of(model)
        if takeover is not None and takeover.holds_weights:
            raise UnsupportedProblem(
                "vLLM saves its own parameters, and lancebill holds weights of this model",
                where=takeover.source.path,
                hint="start with LANCEBILL_VLLM=off to save it",
            )
        return save(model, *args, **kwargs)

    return save_model
