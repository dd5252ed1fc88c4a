"""The places in vLLM that the plugin uses: each must exist and take the arguments that we pass or are given."""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from operator import attrgetter

from lancebill.errors import UnsupportedProblem

TESTED = ((0, 26), (0, 32))  # the first and the last version that were tested

_LAYERS = "vllm.model_executor.layers"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_LOADER = "vllm.model_executor.model_loader"


@dataclass(frozen=True)
class Hook:
    """A name in a module of vLLM. `arguments`: its required parameter names, in any order."""

    module: str
    name: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


HOOKS = (
    Hook(f"{_MOE}.routed_experts", "RoutedExperts.register_oot", ("name",)),
    Hook(f"{_MOE}.routed_experts", "RoutedExperts._get_quant_method", ("prefix", "quant_config", "moe_config")),
    Hook(f"{_MOE}.routed_experts", "RoutedExperts.get_expert_weights"),
    Hook(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.create_weights", ("layer",)),
    Hook(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.process_weights_after_loading", ("layer",)),
    Hook(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.maybe_roundup_sizes", ("hidden_size",)),
    Hook(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.skip_forward_padding"),
    Hook(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.supports_eplb"),
    Hook(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.topk_indices_dtype"),
    Hook(
        f"{_MOE}.fused_moe_method_base",
        "FusedMoEMethodBase.apply",
        ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
    ),
    Hook(
        f"{_MOE}.config",
        "FusedMoEParallelConfig",
        ("tp_rank", "tp_size", "ep_rank", "ep_size", "dp_size", "use_ep", "all2all_backend", "enable_eplb"),
    ),
    Hook(
        f"{_MOE}.config",
        "FusedMoEConfig",
        (
            "num_experts",
            "num_logical_experts",
            "experts_per_token",
            "activation",
            "device",
            "in_dtype",
            "is_lora_enabled",
            "moe_parallel_config",
        ),
    ),
    Hook(f"{_MOE}.runner.moe_runner", "get_layer_from_name", ("layer_name",)),
    Hook(f"{_MOE}.routed_experts", "RoutedExperts._expert_routing_tables"),
    Hook(
        f"{_MOE}.all2all_utils",
        "maybe_make_prepare_finalize",
        ("moe", "quant_config", "routing_tables", "allow_new_interface"),
    ),
    Hook(
        f"{_MOE}.modular_kernel",
        "FusedMoEExpertsModular.__init__",
        ("moe_config", "quant_config", "max_num_tokens", "num_dispatchers"),
    ),
    Hook(
        f"{_MOE}.modular_kernel",
        "FusedMoEExpertsModular.apply",
        (
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "a1q_scale",
            "a2_scale",
            "workspace13",
            "workspace2",
            "expert_tokens_meta",
            "apply_router_weight_on_input",
        ),
    ),
    Hook(f"{_MOE}.modular_kernel", "FusedMoEExpertsModular.workspace_shapes", ("M", "N", "K")),
    Hook(f"{_MOE}.modular_kernel", "FusedMoEExpertsModular.moe_problem_size", ("a1", "w1", "w2", "topk_ids")),
    Hook(f"{_MOE}.modular_kernel", "FusedMoEKernel.__init__", ("prepare_finalize", "fused_experts")),
    Hook(
        f"{_MOE}.modular_kernel",
        "FusedMoEKernel.apply",
        (
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "apply_router_weight_on_input",
            "shared_experts",
            "shared_experts_input",
        ),
    ),
    Hook(f"{_MOE}.modular_kernel", "ExpertTokensMetadata", ("expert_num_tokens",)),
    Hook("vllm.model_executor.models.registry", "_BaseRegisteredModel.load_model_cls"),
    Hook("vllm.model_executor.models.registry", "_BaseRegisteredModel.inspect_model_cls"),
    Hook(
        f"{_QUANT}.base_config",
        "QuantizationConfig.override_quantization_method",
        ("hf_quant_cfg", "user_quant", "hf_config"),
    ),
    Hook(_QUANT, "register_quantization_config", ("quantization",)),
    Hook(
        "vllm.model_executor.layers.linear",
        "LinearMethodBase.create_weights",
        ("layer", "input_size_per_partition", "output_partition_sizes", "params_dtype"),
    ),
    Hook("vllm.model_executor.layers.linear", "LinearMethodBase.apply", ("layer", "x", "bias")),
    Hook("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    Hook("vllm.model_executor.model_loader", "register_model_loader", ("load_format",)),
    Hook("vllm.model_executor.model_loader.base_loader", "BaseModelLoader.load_weights", ("model", "model_config")),
    Hook("vllm.utils.torch_utils", "direct_register_custom_op", ("op_name", "op_func", "fake_impl")),
)


# What load balancing and elastic expert parallelism need besides. Without one of these only they are refused.
BALANCING_HOOKS = (
    Hook(f"{_MOE}.runner.moe_runner", "MoERunner.eplb_state"),
    Hook(f"{_MOE}.routed_experts", "RoutedExperts.update_expert_map"),
    Hook(
        "vllm.distributed.eplb.eplb_state",
        "EplbLayerState",
        ("logical_to_physical_map", "logical_replica_count"),
    ),
)


# What dense matrices in 16 bits need besides. Without one of these they are vLLM's, in fp32.
NARROW_HOOKS = (
    Hook(f"{_LAYERS}.linear", "UnquantizedLinearMethod.process_weights_after_loading", ("layer",)),
    Hook(f"{_LAYERS}.linear", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Hook(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding"),
    Hook(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.apply", ("layer", "x", "bias")),
    Hook(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.embedding", ("layer", "input_")),
    Hook(
        f"{_LAYERS}.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        ("layer",),
    ),
)


# vLLM's own choice of a quantisation config, for checkpoints that we claimed and then take nothing of.
STOCK_HOOKS = (
    Hook("vllm.config.model", "ModelConfig._verify_quantization"),
    Hook("vllm.config.vllm", "VllmConfig.get_quantization_config", ("model_config", "load_config")),
)


# Where vLLM's reloads end. Without these an incomplete reload is found by the next request only.
RELOAD_HOOKS = (
    Hook(f"{_LOADER}.reload.layerwise", "finalize_layerwise_processing", ("model",)),
    Hook(f"{_LOADER}.reload.layerwise", "get_layerwise_info", ("layer",)),
)


# What refuses, besides: parts of a tensor, and files of vLLM's own parameters, which have no experts.
PATCH_HOOKS = (Hook(f"{_LOADER}.checkpoint_weight_patch", "_load_nan_masked_weights", ("model", "weights")),)
SAVE_HOOKS = (
    Hook(f"{_LOADER}.sharded_state_loader", "ShardedStateLoader.save_model", ("model",)),
    Hook(f"{_LOADER}.tensorizer_loader", "TensorizerLoader.save_model", ("model",)),
)


def missing_hook(hooks: tuple[Hook, ...]) -> str | None:
    """What is wrong with the first hook that is missing or takes other arguments; None if all are there."""
    try:
        check_hooks(hooks)
    except UnsupportedProblem as error:
        return error.render()
    return None


def check_hooks(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Raise naming the first hook that is missing or takes other arguments."""
    for hook in hooks:
        try:
            found = attrgetter(hook.name)(importlib.import_module(hook.module))
        except (ImportError, AttributeError):
            raise UnsupportedProblem("this version of vLLM has no such hook", where=str(hook)) from None
        missing = set(hook.arguments) - set(inspect.signature(found).parameters) if hook.arguments else ()
        if missing:
            expected = ", ".join(hook.arguments)
            raise UnsupportedProblem(
                "this hook of vLLM takes other arguments", where=str(hook), expected=expected, got=f"no {min(missing)}"
            )


def check_version() -> None:
    """One warning outside the tested range."""
    import vllm

    warning = version_warning(vllm.__version__)
    if warning is not None:
        logging.getLogger("vllm.lancebill").warning(warning)


def version_warning(version: str) -> str | None:
    """What to say about a version of vLLM; None if it is in the tested range."""
    words = version.split(".")[:2]
    number = tuple(int(word) for word in words if word.isdecimal())
    if TESTED[0] <= number <= TESTED[1]:
        return None
    first, last = (".".join(map(str, each)) for each in TESTED)
    return f"lancebill is tested with vLLM {first} to {last}; this is {version}"
