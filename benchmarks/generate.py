"""Tokens per second of `generate`: our experts and those of transformers, in one run on one model.

    python benchmarks/generate.py --device cuda [--layers 4] [--batches 1,16,64] [--out FILE]

The model has the shape of Qwen3-30B-A3B with fewer layers and random weights. All runs use the attention, sampling and
KV cache of transformers, through the public `generate`. The first token is timed separately and subtracted: the rate
is batch x (tokens - 1) over the seconds after the first token.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import origin, result_path, whole_model_machine

from lancebill.integrations.transformers.pack_in_memory import pack_experts

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
    parser.add_argument("--ours", default=",".join(OURS), help="weights:activations, ...")
    parser.add_argument("--backend", default="auto", help="backend of our experts")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/generate")
    chosen = parser.parse_args()
    batches = [int(batch) for batch in chosen.batches.split(",")]
    if chosen.device.startswith("cuda"):
        shape = SHAPES[chosen.shape]
        sizes = {"hidden": shape["hidden_size"], "intermediate": shape["moe_intermediate_size"]}
        sizes |= {"experts": shape["num_experts"], "top_k": shape["num_experts_per_tok"]}
        prebuild(chosen.ours.split(","), [*batches, *(batch * chosen.prompt for batch in batches)], **sizes)
    rows: list[dict[str, Any]] = []
    for name in (*THEIRS, *chosen.ours.split(",")):
        model, experts = make_model(name, chosen)
        for batch in batches:
            rows.append({"experts": name, **experts, "batch": batch, **measure(model, batch, chosen)})
            print(json.dumps(rows[-1]), flush=True)
        del model
        gc.collect()
        if chosen.device.startswith("cuda"):
            torch.cuda.empty_cache()
    for row in rows:
        same_batch = {r["experts"]: r for r in rows if r["batch"] == row["batch"]}
        best = max(same_batch[name]["tokens_per_second"] for name in THEIRS)
        row["over_best_of_transformers"] = round(row["tokens_per_second"] / best, 3)
    save(chosen, rows)


def prebuild(specs: Iterable[str], tokens: Iterable[int], **sizes: int) -> None:
    """Compile the kernels of these layers on all cores, so that no timed call compiles."""
    from lancebill.backends.hopper.steps import kernels
    from lancebill.jit.build import build_all
    from lancebill.testing.layers import layer_problem

    problems = [layer_problem(*name.rsplit(":", 1), **sizes) for name in specs]
    counts = sorted(set(tokens))
    start = time.perf_counter()
    failed = build_all(source for p in problems for m in counts for source in kernels(p, m))
    for source, why in failed.items():
        print("does not compile:", source.label, why[-300:])
    print(f"kernels compiled in {time.perf_counter() - start:.1f} s", flush=True)


def make_model(name: str, chosen: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model, always with the same weights; ours has them quantised in place."""
    config = transformers.Qwen3MoeConfig(
        **SHAPES[chosen.shape], num_hidden_layers=chosen.layers, intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if chosen.device.startswith("cuda") else torch.float32
    implementation = name if name in THEIRS else "eager"
    with torch.device(chosen.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation=implementation
        ).eval()
    if name in THEIRS:
        size = sum(t.nbytes for n, t in model.named_parameters() if ".experts." in n)
        return model, {"backend": "transformers", "expert_bytes": size}
    probe = torch.arange(1, 1 + chosen.prompt, device=chosen.device).unsqueeze(0)
    with torch.no_grad():
        dense = model(probe).logits.float()
        spec, _, activations = name.rpartition(":")
        pack_experts(model, weights=spec, activations=activations, backend=chosen.backend)
        packed = model(probe).logits.float()
    layer = next(m.experts for _, m in model.named_modules() if type(m).__name__ == "PackedExperts")
    return model, {
        "backend": layer.choice.backend.name,
        "expert_bytes": sum(t.nbytes for n, t in model.named_parameters() if ".experts." in n),
        "logits_differ_by": round(float((packed - dense).norm() / dense.norm()), 4),
    }


def measure(model: Any, batch: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Medians over repeats, after one warm-up."""
    generator = torch.Generator().manual_seed(batch)
    vocabulary = SHAPES[chosen.shape]["vocab_size"]
    prompt = torch.randint(1, vocabulary, (batch, chosen.prompt), generator=generator).to(chosen.device)
    seconds = {}
    for count in (1, chosen.tokens):
        times = [timed_generate(model, prompt, count) for _ in range(chosen.repeats + 1)][1:]
        seconds[count] = sorted(times)[len(times) // 2]
    decoding = seconds[chosen.tokens] - seconds[1]
    return {
        "first_token_seconds": round(seconds[1], 5),
        "seconds": round(seconds[chosen.tokens], 5),
        "tokens_per_second": round(batch * (chosen.tokens - 1) / decoding, 1),
    }


def timed_generate(model: Any, prompt: torch.Tensor, count: int) -> float:
    synchronize(prompt)
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
    synchronize(prompt)
    assert out.shape[1] == prompt.shape[1] + count
    return time.perf_counter() - start


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
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
