"""Tokens per second of `generate`: our experts and those of transformers, in one run on one model.

    python benchmarks/generate.py --device cuda [--layers 4] [--batches 1,16,64] [--rest int8] [--out FILE]

The model has the shape of Qwen3-30B-A3B, with random weights made on the device. All runs use the attention, sampling
and KV cache of the public `generate`; ours both as it is by default (decode steps in CUDA graphs) and with
`disable_compile=True` (transformers' own way). The first token is timed separately and subtracted: the rate is batch x
(tokens - 1) over the seconds after the first token. `same_tokens`: the share of tokens before the first difference
between our two ways; with random weights the best two logits are often as close as 16-bit rounding.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import origin, result_path, whole_model_machine
from result_files import write_record

from lancebill.backends import oracle
from lancebill.backends.gpu.backend import GpuBackend
from lancebill.integrations.transformers.experts_interface import pack_matrices
from lancebill.integrations.transformers.packed_experts import packed_experts
from lancebill.integrations.transformers.packed_rest import RestRules, pack_rest
from lancebill.integrations.transformers.pretrained import packed_class
from lancebill.layer.parts import LayerParts
from lancebill.layer.recipe import LoadOptions
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.problem import Problem
from lancebill.numbers.random_weight import random_weight
from lancebill.testing.layers import layer_problem

THEIRS = ("eager", "grouped_mm")
OURS = ("mxfp4:bf16", "int4-g128:bf16")
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--batches", default="1,16,64", help="batch sizes")
    parser.add_argument("--prompt", type=int, default=64, help="tokens in each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each sequence")
    parser.add_argument("--theirs", default=",".join(THEIRS), help="transformers' own experts; empty: none")
    parser.add_argument("--ours", default=",".join(OURS), help="weights:activations, ...")
    parser.add_argument("--rest", help="spec of our other matrices; default: bf16, as theirs")
    parser.add_argument("--backend", default="auto", help="backend of our experts")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument(
        "--eager-repeats", type=int, default=3, help="the same without graphs; 0: once, without warm-up"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels of one `generate` of each model")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/generate")
    chosen = parser.parse_args()
    batches = [int(batch) for batch in chosen.batches.split(",")]
    if chosen.device.startswith("cuda"):
        problems = [problem_of(name, chosen) for name in filter(None, chosen.ours.split(","))]
        counts = [*batches, *(batch * chosen.prompt for batch in batches)]
        prebuild(problems, counts, chosen.device, chosen.backend)
    rows: list[dict[str, Any]] = []
    for name in filter(None, (*chosen.theirs.split(","), *chosen.ours.split(","))):
        start = time.perf_counter()
        model, experts = make_model(name, chosen)
        print(f"{name}: made in {time.perf_counter() - start:.1f} s", flush=True)
        for batch in batches:
            for row in measure(model, batch, chosen):
                rows.append({"experts": name, **experts, "batch": batch, **row})
                print(json.dumps(rows[-1]), flush=True)
        if chosen.profile:
            print_profile(model, chosen)
        del model
        gc.collect()
        if chosen.device.startswith("cuda"):
            torch.cuda.empty_cache()
    for row in rows:
        theirs = [r["tokens_per_second"] for r in rows if r["batch"] == row["batch"] and r["experts"] in THEIRS]
        if theirs:
            row["over_best_of_transformers"] = round(row["tokens_per_second"] / max(theirs), 3)
    save(chosen, rows)


def problem_of(name: str, chosen: argparse.Namespace) -> Problem:
    shape = SHAPES[chosen.shape]
    sizes = {"hidden": shape["hidden_size"], "intermediate": shape["moe_intermediate_size"]}
    sizes |= {"experts": shape["num_experts"], "top_k": shape["num_experts_per_tok"]}
    return layer_problem(*name.rsplit(":", 1), **sizes)


def prebuild(problems: Iterable[Problem], tokens: Iterable[int], device: str, backend: str) -> None:
    """Compile the kernels of our experts on all cores, so that no timed call compiles."""
    from lancebill.jit.build import build_all
    from lancebill.jit.load import loadable

    start, sources, counts = time.perf_counter(), [], sorted(set(tokens))
    for problem in problems:
        choice = oracle.select(problem, device, backend)
        if isinstance(choice.backend, GpuBackend):
            plans = [choice.backend.plan(problem, count, choice.device) for count in counts]
            steps = [step for plan in plans for step in choice.backend.steps(plan)]
            sources += [loadable(step.source, choice.device.index) for step in steps]
    for source, why in build_all(sources).items():
        print("does not compile:", source.label, why[-300:])
    print(f"kernels compiled in {time.perf_counter() - start:.1f} s", flush=True)


def make_model(name: str, chosen: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model, with random weights; ours as `from_pretrained` would make it."""
    config = transformers.Qwen3MoeConfig(
        **SHAPES[chosen.shape], num_hidden_layers=chosen.layers, intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if chosen.device.startswith("cuda") else torch.float32
    made = transformers.Qwen3MoeForCausalLM
    if name in THEIRS:
        with torch.device(chosen.device):
            model = made._from_config(config, dtype=dtype, experts_implementation=name).eval()
        size = sum(t.nbytes for n, t in model.named_parameters() if ".experts." in n)
        return model, {"backend": "transformers", "expert_bytes": size}
    with torch.device(chosen.device):
        model = packed_class(made)._from_config(config, dtype=dtype).eval()
    gc.collect()
    problem = problem_of(name, chosen)
    choice = oracle.select(problem, chosen.device, chosen.backend)
    generator = torch.Generator(chosen.device).manual_seed(1)

    def weights(_: int) -> dict[str, Any]:
        return {
            matrix: random_weight(shape.spec, shape.n, shape.k, generator) for matrix, shape in problem.matrices.items()
        }

    for _, place in packed_experts(model):
        place.experts = RoutedExperts(LayerParts(choice, pack_matrices(choice, weights)))
    if chosen.rest:
        model.lancebill_rest = pack_rest(model, LoadOptions(chosen.device, dtype=dtype), RestRules(chosen.rest))
        print(model.lancebill_rest)
    return model, {
        "backend": choice.backend.name,
        "expert_bytes": sum(t.nbytes for n, t in model.named_parameters() if ".experts." in n),
        "rest": chosen.rest or "bf16",
    }


def measure(model: Any, batch: int, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Medians over repeats, after one warm-up: of transformers' own way, and of ours where it differs."""
    generator = torch.Generator().manual_seed(batch)
    vocabulary = SHAPES[chosen.shape]["vocab_size"]
    prompt = torch.randint(1, vocabulary, (batch, chosen.prompt), generator=generator).to(chosen.device)
    eager, expected = rate(model, prompt, chosen, chosen.eager_repeats, disable_compile=True)
    yield {"decode": "eager", **eager}
    decoding = getattr(model, "lancebill_decoding", None)
    if decoding is None:
        return
    found, tokens = rate(model, prompt, chosen, chosen.repeats)
    same = (tokens == expected).int().cumprod(1)[:, chosen.prompt :].float().mean()
    yield {"decode": "graphs", **found, "graphs": str(decoding), "same_tokens": round(float(same), 4)}


def rate(
    model: Any, prompt: torch.Tensor, chosen: argparse.Namespace, repeats: int, **options: Any
) -> tuple[dict[str, Any], torch.Tensor]:
    seconds = {}
    for count in (1, chosen.tokens):
        runs = [timed_generate(model, prompt, count, **options) for _ in range(repeats + 1)][min(repeats, 1) :]
        seconds[count] = sorted(taken for taken, _ in runs)[len(runs) // 2]
    decoding = seconds[chosen.tokens] - seconds[1]
    return {
        "first_token_seconds": round(seconds[1], 5),
        "seconds": round(seconds[chosen.tokens], 5),
        "tokens_per_second": round(len(prompt) * (chosen.tokens - 1) / decoding, 1),
    }, runs[0][1]


def timed_generate(model: Any, prompt: torch.Tensor, count: int, **options: Any) -> tuple[float, torch.Tensor]:
    synchronize(prompt)
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, **options,
        )  # fmt: skip
    synchronize(prompt)
    assert out.shape[1] == prompt.shape[1] + count
    return time.perf_counter() - start, out


def print_profile(model: Any, chosen: argparse.Namespace) -> None:
    """Where the time of a decode step goes, on the GPU and on the host."""
    prompt = torch.randint(1, SHAPES[chosen.shape]["vocab_size"], (1, chosen.prompt), device=chosen.device)
    timed_generate(model, prompt, chosen.tokens)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        timed_generate(model, prompt, chosen.tokens)
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        print(profile.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90))


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def save(chosen: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    document = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine(chosen.device),
        "model": {"shape": chosen.shape, "layers": chosen.layers, "weights": "random"},
        "prompt_tokens": chosen.prompt,
        "new_tokens": chosen.tokens,
        "rows": rows,
    }
    path = chosen.out or result_path("generate", chosen.device)
    write_record(path, document)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
