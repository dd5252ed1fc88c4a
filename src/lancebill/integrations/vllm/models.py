"""vLLM's model classes with one thing added: expert tensors leave the stream before vLLM's loader sees it.

There the names are the checkpoint's own and the tensors are whole, for every model, loader and refit. Further inside,
models rename, slice and drop tensors, each in its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.registry import _BaseRegisteredModel

from lancebill.backends.cpu import native
from lancebill.integrations.vllm.balancing import follow_moves
from lancebill.integrations.vllm.building import building, is_building
from lancebill.integrations.vllm.dense_config import DequantizedConfig
from lancebill.integrations.vllm.experts import adopt_layer_classes
from lancebill.integrations.vllm.hooks import NARROW_HOOKS, missing_hook
from lancebill.integrations.vllm.reloads import is_reloading
from lancebill.integrations.vllm.takeover import Diverted

logger = init_logger("vllm.lancebill")


@dataclass(frozen=True)
class DivertedModel(_BaseRegisteredModel):
    """An entry of vLLM's registry: inspected as it is, loaded as a subclass that diverts tensors.

    `ModelRegistry.register_model` with a name is the public way, but for classes outside vLLM's own modules vLLM then
    imports itself in a subprocess at every start to inspect them.
    """

    inner: _BaseRegisteredModel

    def inspect_model_cls(self) -> Any:
        return self.inner.inspect_model_cls()

    def load_model_cls(self) -> type[nn.Module]:
        base = self.inner.load_model_cls()
        adopt_layer_classes()  # importing the model may have defined layer classes
        return diverting_class(base)


@functools.cache
def diverting_class(base: Any) -> type[nn.Module]:
    """A subclass of a model class that hands expert tensors to lancebill, where it takes any layer."""

    class Diverting(base, Diverted):
        lancebill_narrow: Any = None  # what `narrow` kept

        @functools.wraps(base.__init__)  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if is_building():  # inside another model, which diverts for both
                super().__init__(*args, **kwargs)
                return
            with building() as model:
                _use_current_config(self)
                super().__init__(*args, **kwargs)
            self.lancebill_takeover = model.takeover
            if model.keeps_narrow:
                self.lancebill_narrow = _kept(self)
            if model.takeover is not None or self.lancebill_narrow is not None:
                _share_threads()

        def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
            takeover = self.lancebill_takeover
            if takeover is None:
                return super().load_weights(weights, *args, **kwargs)
            follow_moves(self, takeover)
            try:
                loaded = super().load_weights(takeover.divert(weights), *args, **kwargs)
            except BaseException:
                takeover.drop_refits()
                raise
            takeover.end_stream(more=is_reloading(self))
            return loaded

        def process_weights_after_loading(self) -> None:
            """vLLM calls this of any model that has it, after all layers."""
            if "process_weights_after_loading" in dir(base):
                super().process_weights_after_loading()
            if self.lancebill_narrow is not None and self.lancebill_narrow.dtypes:
                logger.info("dense layers: %s", self.lancebill_narrow)

    Diverting.__name__, Diverting.__qualname__, Diverting.__module__ = base.__name__, base.__qualname__, base.__module__
    return Diverting


def _use_current_config(model: Any) -> None:
    """`SupportsQuant` gave the model our quantisation config before it was known that lancebill takes nothing."""
    current = get_current_vllm_config().quant_config
    if isinstance(model, SupportsQuant) and isinstance(model.quant_config, DequantizedConfig):
        model.quant_config = current


def _share_threads() -> None:
    """On a CPU vLLM's operators run between ours, on OpenMP's threads: ours would find the cores taken by these."""
    library = native.library()
    if library is not None and torch.get_default_device().type == "cpu":
        library.use_openmp()


def _kept(model: nn.Module) -> Any:
    missing = missing_hook(NARROW_HOOKS)
    if missing is not None:
        logger.info("dense layers: vLLM (%s)", missing)
        return None
    from lancebill.integrations.vllm.narrow import keep_narrow

    return keep_narrow(model)


def divert_models() -> None:
    """Wrap every model that vLLM knows."""
    for name, entry in list(ModelRegistry.models.items()):
        if not isinstance(entry, DivertedModel):
            ModelRegistry.models[name] = DivertedModel(entry)
