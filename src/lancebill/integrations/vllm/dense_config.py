"""A quantisation config for checkpoints whose dense layers are plain for vLLM, or lancebill's.

`OtherWeights` dequantises what the checkpoint stores for them. Used where vLLM has no config for the format
(bitsandbytes), on CPUs, where it has kernels for few formats, and where `linear` offers the layers to lancebill. The
class is at module level because vLLM pickles its config to the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from lancebill.checkpoint.resolve.naming import find_family
from lancebill.errors import UnsupportedFormat, UnsupportedProblem

NAME = "lancebill"


class DequantizedConfig(QuantizationConfig):
    """Every dense layer unquantised, whatever the checkpoint stores, or packed where `linear` says how."""

    def __init__(self, section: dict[str, Any], linear: Callable[[str], Any] | None = None) -> None:
        """`linear` makes a method of a layer with a name; not set while the config is pickled."""
        super().__init__()
        self.section, self.linear = section, linear

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
        if user_quant not in (None, NAME, method) or hf_config is None:
            return None
        if method in QUANTIZATION_METHODS and not current_platform.is_cpu():
            return None
        try:
            row = find_family(hf_config.to_dict())
        except UnsupportedFormat:
            return None
        return None if row.beside else NAME  # layers with several mixtures are left to vLLM

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """For routed experts only where lancebill did not take them: then vLLM must know the format."""
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if self.linear is None else self.linear(prefix)
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as VllmRoutedExperts

        return self._own_method(layer, prefix) if isinstance(layer, VllmRoutedExperts) else None

    def _own_method(self, layer: nn.Module, prefix: str) -> Any:
        method = self.section.get("quant_method")
        if method not in QUANTIZATION_METHODS or method == NAME:
            raise UnsupportedProblem("neither lancebill nor vLLM computes these experts", where=prefix, got=method)
        return get_quantization_config(method).from_config(self.section).get_quant_method(layer, prefix)


def register_dense_config() -> None:
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(DequantizedConfig)
