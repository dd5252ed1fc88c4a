"""A quantisation config for checkpoints whose dense layers are plain for vLLM, or lancebill's.

`OtherWeights` dequantises what the checkpoint stores for them. Used where vLLM has no config for the format
(bitsandbytes), on CPUs, where it has kernels for few formats, and where `linear` offers the layers to lancebill. The
class is at module level because vLLM pickles its config to the workers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from lancebill.checkpoint.resolve.naming import find_family
from lancebill.errors import UnsupportedFormat, UnsupportedProblem
from lancebill.integrations.vllm.hooks import STOCK_HOOKS, missing_hook
from lancebill.integrations.vllm.settings import OFF, SECTION

NAME = "lancebill"

_aside: ContextVar[bool] = ContextVar("lancebill_aside", default=False)  # vLLM chooses as if there were no plugin


class DequantizedConfig(QuantizationConfig):
    """Every dense layer unquantised, whatever the checkpoint stores, or packed where `linear` says how."""

    def __init__(self, section: dict[str, Any], linear: Callable[[str], Any] | None = None) -> None:
        """`linear` makes a method of a layer with a name; not set while the config is pickled."""
        super().__init__()
        self.section, self.linear = section, linear
        self.stock: Any = None  # vLLM's own config of the checkpoint, once a layer needs it
        self.mappers: list[Any] = []  # what models told about their names, for that config

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DequantizedConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Our name, where the model has experts that we know and vLLM cannot read the dense layers."""
        method = hf_quant_cfg.get("quant_method")
        if _aside.get() or user_quant not in (None, NAME, method) or hf_config is None:
            return None
        if method in QUANTIZATION_METHODS and not current_platform.is_cpu():
            return None
        try:
            row = find_family(hf_config.to_dict())
        except UnsupportedFormat:
            return None
        return None if row.beside else NAME  # layers with several mixtures are left to vLLM

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.mappers.append(hf_to_vllm_mapper)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """For routed experts only where lancebill did not take them: then vLLM must know the format."""
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if self.linear is None else self.linear(prefix)
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as VllmRoutedExperts

        return self._own_method(layer, prefix) if isinstance(layer, VllmRoutedExperts) else None

    def _own_method(self, layer: nn.Module, prefix: str) -> Any:
        method = self.section.get("quant_method")
        if self.stock is None and (method not in QUANTIZATION_METHODS or method == NAME):
            raise UnsupportedProblem("neither lancebill nor vLLM computes these experts", where=prefix, got=method)
        if self.stock is None:
            self.stock = stock_config(get_current_vllm_config(), self)[1]
        return self.stock.get_quant_method(layer, prefix)


def offering_config(before: Any, section: dict[str, Any], linear: Callable[[str], Any]) -> DequantizedConfig:
    """In place of the config `before`: dense layers are `linear`'s, experts that are not taken are still vLLM's."""
    if isinstance(before, DequantizedConfig):
        offering = copy.copy(before)
        offering.linear = linear
        return offering
    offering = DequantizedConfig(section, linear)
    offering.stock, offering.packed_modules_mapping = before, before.packed_modules_mapping
    return offering


def stock_config(vllm_config: Any, ours: DequantizedConfig) -> tuple[str | None, Any]:
    """What vLLM would use without us: the method's name and its config. Raises what vLLM would raise.

    vLLM itself chooses, because its formats may claim each other's checkpoints, as we claimed this one.
    """
    missing = missing_hook(STOCK_HOOKS)
    if missing is not None:
        raise UnsupportedProblem(
            f"the checkpoint cannot be left to vLLM: {missing}", hint="start with LANCEBILL_VLLM=off"
        )
    model = copy.copy(vllm_config.model_config)
    model.quantization = None
    with standing_aside():
        model._verify_quantization()
        stock = VllmConfig.get_quantization_config(model, vllm_config.load_config)
    if stock is not None:
        stock.packed_modules_mapping = ours.packed_modules_mapping
        for mapper in ours.mappers:
            stock.apply_vllm_mapper(mapper)
    return model.quantization, stock


def leave_to_vllm(vllm_config: Any) -> None:
    """Put vLLM's own config in the place of ours, where lancebill takes nothing of a model: nobody dequantises it."""
    name, stock = stock_config(vllm_config, vllm_config.quant_config)
    vllm_config.model_config.quantization, vllm_config.quant_config = name, stock


@contextmanager
def standing_aside(when: bool = True) -> Iterator[None]:
    """vLLM chooses a config inside as if there were no plugin."""
    token = _aside.set(when or _aside.get())
    try:
        yield
    finally:
        _aside.reset(token)


def register_dense_config() -> None:
    """Hook into the creation of vLLM's `ModelConfig`: it chooses the quantisation config without our settings."""
    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        with standing_aside(_is_off(self.additional_config)):
            return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(DequantizedConfig)


def _is_off(additional: object) -> bool:
    """Whether the settings disable lancebill. Other settings are read and checked when a model is built."""
    section = additional.get(SECTION) if isinstance(additional, Mapping) else None
    return isinstance(section, Mapping) and section.get("mode") == OFF
