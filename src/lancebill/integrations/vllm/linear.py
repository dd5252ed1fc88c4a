"""vLLM's dense layers whose weights stay packed: `QuantizedLinear` computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.utils import set_weight_attrs

from lancebill.backends.slow_choice import is_new
from lancebill.errors import LancebillError, UnsupportedProblem
from lancebill.integrations.vllm.other_weights import DequantizedTensor
from lancebill.integrations.vllm.settings import Settings
from lancebill.integrations.vllm.shards import Load, RankPart, cut, dequantized, find_shard, joined
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.numbers.torch_defaults import torch_defaults
from lancebill.numbers.weight import LogicalWeight

logger = init_logger("vllm.lancebill")

DIMENSIONS = {"output_dim": 0, "input_dim": 1}  # vLLM's loaders find rows and columns by these


class LinearMethod(LinearMethodBase):
    """Collects the stored modules of one layer, and computes with them.

    The layer's `weight` is on the meta device: vLLM's loaders and reloads see a parameter of the right shape, and
    nothing is allocated. If the modules cannot be joined, the layer becomes a plain layer of vLLM.
    """

    def __init__(self, settings: Settings, prefix: str) -> None:
        self.settings, self.prefix = settings, prefix
        self.linear: QuantizedLinear | None = None
        self.parts: dict[RankPart, LogicalWeight | Tensor] = {}
        self._places: dict[tuple[object, ...], RankPart | None] = {}  # None: in several pieces, as vLLM loads it
        self._pieces: dict[tuple[object, ...], Callable[[nn.Parameter], None]] = {}

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        self.shape, self.dtype = (sum(output_partition_sizes), input_size_per_partition), params_dtype
        self.device = torch.get_default_device()
        weight = nn.Parameter(torch.empty(self.shape, dtype=params_dtype, device="meta"), requires_grad=False)
        vllm_loader = attributes.pop("weight_loader")

        def load(param: nn.Parameter, loaded_weight: Tensor, *shard: Any) -> None:
            vllm_loader(param, loaded_weight, *shard)  # checks the sizes; a reload counts what it copies

            def ask(target: Tensor, numbers: Tensor) -> None:
                probe = nn.Parameter(target, requires_grad=False)
                set_weight_attrs(probe, DIMENSIONS)
                vllm_loader(probe, numbers, *shard)

            key = (*shard, *loaded_weight.shape)
            if key not in self._places:
                self._places[key] = self._place(ask, loaded_weight)
            place = self._places[key]
            if place is None:
                self._pieces[key] = lambda weight: vllm_loader(weight, loaded_weight, *shard)
            else:
                self._take(loaded_weight, place)

        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, {**DIMENSIONS, "weight_loader": load, **attributes})

    def _place(self, ask: Load, loaded: Tensor) -> RankPart | None:
        """Where vLLM puts this module; found once, and the same in a reload."""
        try:
            with torch_defaults():
                return find_shard(ask, self.shape, (loaded.shape[0], loaded.shape[1]))
        except UnsupportedProblem:
            return None

    def _take(self, loaded: Tensor, shard: RankPart) -> None:
        if isinstance(loaded, DequantizedTensor):
            try:
                with torch_defaults():
                    self.parts[shard] = cut(loaded.stored, shard)
                return
            except LancebillError as error:
                logger.debug("%s: %s", self.prefix, error)
        self.parts[shard] = loaded[slice(*shard.rows), slice(*shard.columns)].clone()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        parts, self.parts = self.parts, {}
        with torch_defaults():
            try:
                weight = joined(parts, self.shape[0])
                if self.linear is None:
                    self.linear = self._made(weight)
                else:
                    self.linear.refit(weight)
            except LancebillError as error:
                if self.linear is not None:
                    raise
                if any(isinstance(part, LogicalWeight) for part in parts.values()):
                    say = logger.warning if is_new(("dense layers of vLLM", error.what)) else logger.debug
                    say("%s is dequantised, and layers like it: %s", self.prefix, error)
        if self.linear is None:
            self._give_back(layer, parts)

    def _made(self, weight: LogicalWeight) -> QuantizedLinear:
        index = torch.accelerator.current_device_index() if self.device.type != "cpu" else 0
        return QuantizedLinear.from_weight(
            weight,
            device="cpu" if self.device.type == "cpu" else f"{self.device.type}:{index}",
            backend=self.settings.backend,
            dtype=self.dtype,
            order=self.settings.order,
            where=self.prefix,
            refuse_slow=True,
        )

    def _give_back(self, layer: Any, parts: dict[RankPart, LogicalWeight | Tensor]) -> None:
        """A plain layer of vLLM. Its loader stays, so that a reload loads it as vLLM does."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        dequantized(parts, values)
        before = layer.weight
        layer.weight = nn.Parameter(values, requires_grad=False)
        set_weight_attrs(layer.weight, {**DIMENSIONS, "weight_loader": before.weight_loader})
        for load in self._pieces.values():
            load(layer.weight)
        self._pieces.clear()
        layer.quant_method = UnquantizedLinearMethod()
        layer.quant_method.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert self.linear is not None
        out: Tensor = self.linear(x)
        return out if bias is None else out + bias
