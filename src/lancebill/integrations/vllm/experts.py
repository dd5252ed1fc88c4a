"""vLLM's `RoutedExperts` whose weights and computation are lancebill's, where lancebill takes the layer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as VllmRoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import _resolve_layer_name, get_layer_from_name
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, direct_register_custom_op

from lancebill.backends.base import Reason
from lancebill.errors import LaunchError
from lancebill.integrations.vllm.building import current_takeover
from lancebill.integrations.vllm.dispatched import LayerConfig, make_kernel
from lancebill.integrations.vllm.hooks import BALANCING_HOOKS, missing_hook
from lancebill.integrations.vllm.module_names import layer_index
from lancebill.integrations.vllm.placement import dispatch_reason, dispatched_form, placement_of
from lancebill.integrations.vllm.quantising import quantising_reason
from lancebill.integrations.vllm.takeover import Takeover
from lancebill.layer.recipe import LoadOptions
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.problem import BATCHED, INDEXED

# vLLM's second name for the same function of the same values: it is about the order of w13's rows.
SAME_ACTIVATION = {"swigluoai_uninterleave": "swigluoai"}


class ExpertsMethod(FusedMoEMethodBase):
    """vLLM's side of a taken layer. There are no parameters: the weights are the takeover's."""

    def __init__(self, moe: Any, takeover: Takeover, index: int) -> None:
        super().__init__(moe)
        self.takeover, self.index = takeover, index
        compilation = get_current_vllm_config().compilation_config
        self.largest_capture = int(compilation.max_cudagraph_capture_size or 0)  # larger batches run eagerly

    @property
    def experts(self) -> RoutedExperts:
        layer = self.takeover.layers.get(self.index)
        if layer is None:
            raise LaunchError("the experts are not loaded yet", where=f"layer {self.index}")
        return layer

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """None: the tensors are taken from the model's stream."""

    def maybe_roundup_sizes(self, hidden: int, intermediate: int, *more: Any) -> tuple[int, int]:
        """Our layouts pad inside. Some all-to-all backends send only rows of certain widths."""
        if dispatched_form(self.moe.moe_parallel_config) is None:
            return hidden, intermediate
        return super().maybe_roundup_sizes(hidden, intermediate, *more)[0], intermediate

    def process_weights_after_loading(self, layer: Any) -> None:
        self.takeover.finish(self.index)
        self._reserve()
        if dispatched_form(self.moe.moe_parallel_config) is not None and self.moe_kernel is None:
            self._make_kernel(layer)

    def _reserve(self) -> None:
        """Memory that captured graphs share. Calls with a batch for each expert take theirs from the capture."""
        parallel = self.moe.moe_parallel_config
        form = dispatched_form(parallel)
        if form != BATCHED:
            self.takeover.reserve(self.largest_capture * (parallel.dp_size if form is None else parallel.ep_size))

    def _make_kernel(self, layer: Any) -> None:
        """vLLM's dispatch around our experts. It reads the number of experts from these two tensors."""
        layer.w13_weight = layer.w2_weight = self.experts.expert_weights()[0]
        self.moe_quant_config = LayerConfig(self.experts)
        self.moe_kernel = make_kernel(self.moe, self.moe_quant_config, layer._expert_routing_tables())

    def resize(self, layer: Any) -> None:
        """The number of ranks changed: the slots stay, and their physical ids are others."""
        self.moe = layer.moe_config
        places = layer._expert_map
        self.takeover.place(self.index, range(self.moe.num_experts) if places is None else places.tolist())
        self._reserve()

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return self.moe_quant_config

    @property
    def skip_forward_padding(self) -> bool:
        return True  # vLLM would pad the router's input too

    @property
    def supports_eplb(self) -> bool:
        return True  # physical ids keep their slots, and moved weights are written into them in place

    @property
    def topk_indices_dtype(self) -> Any:
        return torch.int32 if self.moe_kernel is None else super().topk_indices_dtype

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """vLLM's CPU build traces through this; elsewhere it runs inside an operator of vLLM."""
        if self.moe_kernel is not None:
            dispatched: Tensor = self.moe_kernel.apply(
                pad(x, (0, self.moe.hidden_dim - x.shape[1])),
                layer.w13_weight,
                layer.w2_weight,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
            return dispatched[:, : x.shape[1]]
        if torch.compiler.is_compiling():
            made: Tensor = torch.ops.vllm.lancebill_experts(
                x, topk_ids, topk_weights, _encode_layer_name(layer.layer_name)
            )
            return made
        result: Tensor = self.experts(x, topk_ids=topk_ids, topk_weights=topk_weights)
        return result


# vLLM passes a layer's name as a graph input, so that equal layers share a compiled graph.
def _compute(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer_name: LayerNameType) -> Tensor:
    method = get_layer_from_name(_resolve_layer_name(layer_name)).routed_experts.taken
    result: Tensor = method.experts(x, topk_ids=topk_ids, topk_weights=topk_weights)
    return result


def _shape(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer_name: LayerNameType) -> Tensor:
    return torch.empty_like(x)


class Offered:
    """Mixed into vLLM's layer classes: each layer is offered to lancebill before vLLM chooses a method for it."""

    taken: ExpertsMethod | None = None  # vLLM may wrap the method that it got

    def _get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        takeover = current_takeover()
        index = layer_index(prefix)
        left = takeover is None or takeover.leaves(prefix, torch.device(moe_config.device).type)
        if takeover is not None and index is not None and not left:
            options = load_options(self, moe_config)
            form = dispatched_form(moe_config.moe_parallel_config) or INDEXED
            asked = None if takeover.quantises(index) else quantising_reason(quant_config, VllmRoutedExperts, prefix)
            reasons = [*refusals(moe_config), *([] if asked is None else [asked])]
            if takeover.decide(index, options, reasons, form).taken:
                self.taken = ExpertsMethod(moe_config, takeover, index)
                return self.taken
        return super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]

    def get_expert_weights(self: Any) -> Any:
        """For vLLM's load balancing: the bytes of every local expert."""
        if self.taken is not None:
            return self.taken.takeover.movable(self.taken.index)
        return super().get_expert_weights()  # type: ignore[misc]

    def update_expert_map(self: Any) -> None:
        """vLLM calls this after the number of ranks changed (elastic expert parallelism)."""
        super().update_expert_map()  # type: ignore[misc]
        if self.taken is not None:
            self.taken.resize(self)


def load_options(layer: Any, moe: Any) -> LoadOptions:
    """How vLLM wants a layer."""
    placement = placement_of(
        moe.moe_parallel_config, layer.expert_placement_strategy, moe.num_experts - moe.num_logical_experts
    )
    kind = torch.device(moe.device).type
    activation = str(moe.activation.value)
    return LoadOptions(
        device=kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}",
        placement=placement,
        dtype=moe.in_dtype,
        top_k=moe.experts_per_token,
        activation=SAME_ACTIVATION.get(activation, activation),
    )


def refusals(moe: Any) -> list[Reason]:
    """Options of this engine that our layer does not support."""
    reasons = []
    if moe.is_lora_enabled:
        reasons.append(Reason("lora", "LoRA adapters of experts are not supported", "start without --enable-lora"))
    dispatched = dispatch_reason(moe.moe_parallel_config)
    if dispatched is not None:
        reasons.append(dispatched)
    missing = missing_hook(BALANCING_HOOKS) if moe.moe_parallel_config.enable_eplb else None
    if missing is not None:
        reasons.append(Reason("eplb", f"load balancing: {missing}", "start without --enable-eplb"))
    return reasons


def register_operator() -> None:
    direct_register_custom_op(op_name="lancebill_experts", op_func=_compute, fake_impl=_shape)


def adopt_layer_classes() -> None:
    """Let vLLM make our subclass wherever it makes a layer of routed experts.

    vLLM looks replacements up by class name. Some models have a class of their own, which needs a subclass of its own.
    """
    for base in (VllmRoutedExperts, *_subclasses(VllmRoutedExperts)):
        name = base.__name__
        if not issubclass(base, Offered) and name not in op_registry_oot:
            offered = type(name, (Offered, base), {"__module__": __name__})
            VllmRoutedExperts.register_oot(offered, name=name)


def _subclasses(base: type) -> list[type]:
    children: list[type] = base.__subclasses__()
    return [cls for child in children for cls in (child, *_subclasses(child))]
