"""One vLLM engine in this process: how it is started for a backend, and what is measured of it."""

from __future__ import annotations

import os
import resource
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm_kernels import Kernel, time_of_experts
from vllm_models import CHECKPOINTS, experts_of, fill_parameter, stacked_experts

from lancebill.jit.cache import Cache

OFF = {"LANCEBILL_VLLM": "off"}
FILLED = "random weights are filled in"  # a line of an engine's log


@dataclass(frozen=True)
class Backend:
    """Who computes the experts, with which activations."""

    activations: str = "bf16"
    moe_backend: str = "auto"  # vLLM's own choice of kernels, where ours do not compute
    environment: dict[str, str] = field(default_factory=lambda: dict(OFF))
    ours: bool = False
    split: bool = False  # half of the experts of every layer are on the CPU
    kernels: tuple[str, ...] = ()  # words in the names of the kernels of the experts

    def settings(self, experts: int) -> dict[str, Any]:
        """vLLM's options for this backend, for layers of so many experts."""
        rules = {} if self.activations == "bf16" else {"activations": self.activations}
        split = {"gpu_experts": experts // 2} if self.split else {}
        return {"additional_config": {"lancebill": {"mode": "require", **rules, **split}}} if self.ours else {}


# What vLLM's own paths launch besides their GEMMs: sorting rows, the activation, quantising, the weighted sum.
SHARED_STEPS = (
    "moe_align",
    "moe_sum",
    "moe_permute",
    "permute",
    "act_and_mul",
    "silu_and_mul",
    "swigluoai",
    "swiglu",
    "fused_mul_sum",
    "count_and_sort",
    "quant",
)
OURS = (
    "grouped_gemm",
    "decode_gemm",
    "dispatch_small",
    "send_rows",
    "combine_rows",
    "place_ids",
    "count_ids",
    "prepare_rows",
)
# With the selection of experts, which vLLM's Triton path does itself.
TRITON = ("matmul_ogs", "routing", "topk", "expt_data", "bitmatrix", "compaction", "reduce_grouped")
HUMMING_FP8 = {"VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "float8e4m3"}'}
BACKENDS: dict[str, Backend] = {
    "ours": Backend(ours=True, environment={}, kernels=OURS),
    "ours-fp8": Backend("fp8", ours=True, environment={}, kernels=OURS),
    "ours-split": Backend(ours=True, split=True, environment={}, kernels=OURS),
    # with fp8 inputs vLLM's Marlin refuses every GPU but sm_89 and sm_12x
    "marlin": Backend(moe_backend="marlin", kernels=("marlin", *SHARED_STEPS)),
    "humming": Backend(moe_backend="humming", kernels=("humming", *SHARED_STEPS)),
    "humming-fp8": Backend("fp8", "humming", OFF | HUMMING_FP8, kernels=("humming", *SHARED_STEPS)),
    "triton": Backend(moe_backend="triton", kernels=(*TRITON, *SHARED_STEPS)),
    "triton-unfused": Backend(moe_backend="triton_unfused", kernels=(*TRITON, *SHARED_STEPS)),
    "vllm": Backend(),  # what vLLM selects
}
DEEPSEEK_V4_OPTIONS = {"kv_cache_dtype": "fp8", "block_size": 256}


@dataclass(frozen=True)
class Sizes:
    """The engine's limits and the workloads."""

    max_tokens: int = 8192  # tokens of one step
    kv_gib: float = 32.0
    capture: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64)
    compiler: str = "inductor"  # "eager" splits the graph and compiles nothing: a faster start
    prompts: tuple[tuple[int, int], ...] = ((32, 8192), (4, 65536))  # (count, tokens of each)
    sequences: tuple[int, ...] = (1, 16, 64)
    new_tokens: int = 256
    trials: int = 3
    answer_tokens: int = 64

    @property
    def longest(self) -> int:
        lengths = [tokens for _, tokens in self.prompts]
        return max([*lengths, 512, self.new_tokens + 1]) + self.answer_tokens


def engine_options(model: str, backend: Backend, sizes: Sizes) -> dict[str, Any]:
    """vLLM's options for an engine of this model and backend on this machine."""
    on_gpu = torch.cuda.device_count() > 0  # does not initialise CUDA
    options: dict[str, Any] = {
        "load_format": "auto" if model in CHECKPOINTS else "dummy",
        "dtype": "bfloat16" if on_gpu else "float32",  # not all CPUs have bf16
        "max_model_len": sizes.longest,
        "max_num_seqs": max([*sizes.sequences, *(count for count, _ in sizes.prompts), 8]),
        "max_num_batched_tokens": sizes.max_tokens,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        "kv_cache_memory_bytes": int(sizes.kv_gib * (1 << 30)),
        "gpu_memory_utilization": 0.1,  # must be free at the start, and limits nothing beside a size of the cache
        **backend.settings(experts_of(model)),
        **(DEEPSEEK_V4_OPTIONS if model.startswith("deepseek-v4") else {}),
    }
    if on_gpu:
        options |= {
            "moe_backend": backend.moe_backend,
            "compilation_config": {
                "mode": 3,
                "backend": sizes.compiler,
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": list(sizes.capture),
            },
        }
    return options


def start(model: str, folder: Path, backend: Backend, sizes: Sizes) -> tuple[Any, dict[str, Any]]:
    """The engine and how long its parts took. Environment variables must have been set."""
    from vllm import LLM

    times: dict[str, Any] = {}
    _time_loading(times)
    if model not in CHECKPOINTS:
        fill_dummy_weights()
    begin, compiled_before = time.perf_counter(), len(Cache().keys())
    options = engine_options(model, backend, sizes) | {"skip_tokenizer_init": True}
    llm = LLM(model=str(folder), **options)
    times["start_s"] = round(time.perf_counter() - begin, 2)
    compilation = llm.llm_engine.vllm_config.compilation_config
    times["graphs"] = str(compilation.cudagraph_mode)
    times["our_kernels_compiled"] = len(Cache().keys()) - compiled_before
    return llm, times


def _time_loading(times: dict[str, Any]) -> None:
    """Let `times` have the seconds that the worker needs to make and load the model."""
    from vllm.v1.worker.gpu_worker import Worker

    inner = Worker.load_model

    def load_model(self: Any, **options: Any) -> Any:
        _synchronize()
        begin = time.perf_counter()
        loaded = inner(self, **options)
        _synchronize()
        times["load_s"] = round(time.perf_counter() - begin, 2)
        return loaded

    Worker.load_model = load_model


def fill_dummy_weights() -> None:
    """Let vLLM's dummy loader fill parameters with `fill_parameter`: by name, so equal for all backends."""
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


class Meter:
    """Runs workloads on an engine. Prompts are random tokens; sampling is greedy and never stops early."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.llm = llm
        self.vocabulary = vocabulary
        self.generator = torch.Generator().manual_seed(1)

    def prompts(self, count: int, tokens: int) -> list[dict[str, list[int]]]:
        shape = (count, tokens)
        made = torch.randint(100, self.vocabulary - 1100, shape, generator=self.generator)
        return [{"prompt_token_ids": row} for row in made.tolist()]

    def run(self, prompts: list[dict[str, list[int]]], new: int) -> float:
        """Seconds for all prompts, sent at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        _synchronize()
        begin = time.perf_counter()
        made = self.llm.generate(prompts, sampling, use_tqdm=False)
        _synchronize()
        seconds = time.perf_counter() - begin
        if any(len(one.outputs[0].token_ids) != new for one in made):
            raise RuntimeError("the engine made another number of tokens than asked for")
        return seconds

    def prefill(self, count: int, tokens: int, trials: int) -> dict[str, Any]:
        self.run(self.prompts(min(count, 2), tokens), 1)
        seconds = [self.run(self.prompts(count, tokens), 1) for _ in range(trials)]
        return _rate({"prompts": count, "in": tokens, "out": 1}, count * tokens, seconds)

    def decode(self, count: int, new: int, trials: int) -> dict[str, Any]:
        self.run(self.prompts(count, 1), 8)
        more = 3 if count == 1 else 1  # the host's share of a step is larger and less steady
        seconds = [self.run(self.prompts(count, 1), new) for _ in range(more * trials)]
        return _rate({"prompts": count, "in": 1, "out": new}, count * new, seconds)

    def answers(self, new: int) -> dict[str, Any]:
        """To compare backends: log-probabilities of given tokens, and greedy tokens with their margins."""
        from vllm import SamplingParams

        self.generator.manual_seed(2)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=0
        )
        prompts = self.prompts(4, 192) + self.prompts(4, 7)
        made = self.llm.generate(prompts, sampling, use_tqdm=False)
        return {
            "prompt_logprobs": [_given(prompt, one) for prompt, one in zip(prompts, made, strict=True)],
            "tokens": [list(one.outputs[0].token_ids) for one in made],
            "margins": [[_margin(step) for step in one.outputs[0].logprobs] for one in made],
        }

    def memory(self, steps: int, parts: int = 10) -> dict[str, Any]:
        """Memory in use at first and after each part of so many steps of one sequence, which hold no new shape."""
        readings = [_memory_in_use()]
        for _ in range(parts):
            self.run(self.prompts(1, 1), steps // parts)
            readings.append(_memory_in_use())
        names = ("gpu_bytes", "host_bytes")
        return {"steps": steps} | {name: list(values) for name, values in zip(names, zip(*readings), strict=True)}

    def kernels(self, words: Sequence[str], new: int = 32) -> dict[str, Any]:
        """GPU time of a step with one sequence; the experts' kernels have one of `words` in their name."""
        from torch.profiler import ProfilerActivity, profile

        prompt = self.prompts(1, 1)
        self.run(prompt, new)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.run(prompt, new)
        launched = [
            Kernel(event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3)
            for event in trace.profiler.kineto_results.events()
            if "CUDA" in str(event.device_type())
        ]
        return time_of_experts(launched, words, new)


def _memory_in_use() -> tuple[int, int]:
    """Bytes in use on the GPU, by all processes, and in host memory, by this one."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return total - free, pages * resource.getpagesize()


def _given(prompt: dict[str, list[int]], made: Any) -> list[float]:
    """The log-probability of each token of the prompt but the first."""
    ids = prompt["prompt_token_ids"][1:]
    return [round(step[token].logprob, 5) for token, step in zip(ids, made.prompt_logprobs[1:], strict=True)]


def _margin(step: Any) -> float:
    """How much likelier the first token is than the second."""
    best = sorted((one.logprob for one in step.values()), reverse=True)
    return round(best[0] - best[1], 5)


def _rate(workload: dict[str, int], tokens: int, seconds: list[float]) -> dict[str, Any]:
    rates = sorted(tokens / each for each in seconds)
    return workload | {
        "tokens_per_s": round(rates[len(rates) // 2], 1),  # the median trial
        "seconds": [round(each, 4) for each in seconds],
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def set_environment(backend: Backend) -> None:
    """Before vLLM is asked for an engine: it reads these when it needs them."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    os.environ.update(backend.environment)
