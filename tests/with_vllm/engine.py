"""Starts vLLM in this process, asks it for tokens, and asks transformers with our experts for the same."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from references import reference_process

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
SIZES = {"max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 48}
DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 16 << 20,
}
PROMPTS = ([5, 9, 33, 7], [100, 3, 4, 5, 6, 7, 8, 9, 10], [11] * 6)
TOKENS = 8


@dataclass(frozen=True)
class Answers:
    """Greedy tokens of each prompt, and their log-probabilities."""

    tokens: list[list[int]]
    logprobs: list[list[float]]

    def distance(self, other: Answers) -> float:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def engine(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A vLLM engine in this process; `settings` are lancebill's."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    additional = {} if settings is None else {"additional_config": {"lancebill": settings}}
    gc.freeze()  # vLLM collects garbage several times; what was imported need not be searched each time
    llm = LLM(model=str(model), **{**SIZES, **DEFAULTS, **additional, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()  # unfreezes and collects


def ask(llm: Any, chosen: Sequence[Sequence[int]] = PROMPTS) -> Answers:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in chosen]
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    logprobs = [[next(iter(step.values())).logprob for step in output.logprobs] for output in outputs]
    return Answers([list(output.token_ids) for output in outputs], logprobs)


def reference(model: Path, **options: Any) -> Answers:
    """The same from transformers, with lancebill's experts."""
    return _from_transformers(model, own_experts=False, options=options)


def reference_without_lancebill(model: Path) -> Answers:
    """The same from transformers alone, for unquantised checkpoints."""
    return _from_transformers(model, own_experts=True, options={})


def _from_transformers(model: Path, **job: Any) -> Answers:
    return Answers(**reference_process().ask({"model": str(model), "prompts": PROMPTS, "count": TOKENS, **job}))


def model_of(llm: Any) -> Any:
    """vLLM's model in an engine of this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def takeover_of(llm: Any) -> Any:
    """The plugin's state in an engine of this process."""
    return model_of(llm).lancebill_takeover
