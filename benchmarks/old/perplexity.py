"""Perplexity of a real model: mixture of experts against dense model, and kernels against the reference.

    python benchmarks/perplexity.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.txt --device cuda

Three models are measured on one text: the dense model in fp32; the mixture of experts made from it, in fp32, which must
give the same result; and the mixture with quantised experts, once with a backend's kernels and once with `reference` on
the same quantised weights. Windows do not overlap. The project contains no text: pass your own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from generate import prebuild
from machine import origin, result_path, whole_model_machine
from result_files import write_record

import lancebill
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.demo.model import build, dense_tensors
from lancebill.demo.vocabulary import read_metadata
from lancebill.evaluate.perplexity import Perplexity, batches, perplexity, windows
from lancebill.integrations.transformers.packed_experts import packed_experts, set_activations
from lancebill.integrations.transformers.pretrained import reload_experts
from lancebill.testing.layers import layer_problem

PAIRS = "mxfp4:bf16,mxfp4:int8,int4-g32:bf16,int4-g32:int8"
START = time.perf_counter()
# Relative bounds: mixture to dense model; kernels to reference with bf16 activations, and with 8-bit activations.
MIXTURE_BOUND, KERNEL_BOUNDS, EIGHT_BIT_BOUND = 1e-5, {"bf16": 1e-3}, 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the demo's model")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--moe", type=Path, help="folder of the mixture of experts; written if missing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", help="the backend to compare with the reference")
    parser.add_argument("--pairs", default=PAIRS, help="weights:activations, ...")
    parser.add_argument("--seconds", type=float, default=3600, help="no new pair is started after that")
    parser.add_argument("--dtype", default="float32", help="of everything but the quantised experts")
    parser.add_argument("--tokens", type=int, help="use only the first tokens of the text")
    parser.add_argument("--window", type=int, default=2048, help="tokens in one window")
    parser.add_argument("--batch", type=int, default=1, help="windows in one batch")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/perplexity")
    chosen = parser.parse_args()
    chosen.out = chosen.out or result_path("perplexity", chosen.device)
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory(prefix="lancebill-bench-") as scratch:
        moe = chosen.moe or Path(scratch) / "moe"
        if not moe.exists():
            build(chosen.gguf, moe)
        tokenizer = transformers.AutoTokenizer.from_pretrained(moe)
        text = chosen.text.read_text(encoding="utf-8")
        ids = tokenizer(text, return_tensors="pt").input_ids[0][: chosen.tokens]
        if chosen.backend == "hopper":
            spans = batches(windows(ids.numel(), chosen.window, chosen.window), chosen.batch)
            counts = {len(span) * (span[0][1] - span[0][0]) for span in spans}
            sizes = {"hidden": 576, "intermediate": 192, "experts": 8, "top_k": 8}
            problems = [layer_problem(*pair.rsplit(":", 1), **sizes) for pair in chosen.pairs.split(",")]
            prebuild(problems, counts, chosen.device, chosen.backend)
        found = {"tokens": ids.numel(), "window": chosen.window, "whole_text": chosen.tokens is None, "rows": []}
        print(f"{ids.numel()} tokens after {time.perf_counter() - START:.0f} s", flush=True)
        found |= unquantised(chosen, moe, ids)
        save(chosen, found)
        for row in quantised(chosen, moe, ids):
            found["rows"].append(row)
            save(chosen, found)  # after every row, so that an interrupted run keeps its results


def unquantised(chosen: argparse.Namespace, moe: Path, ids: torch.Tensor) -> dict[str, Any]:
    """The dense model and the mixture, both in fp32."""
    dense = dense_model(chosen.gguf).to(chosen.device)
    of_dense = timed(dense, ids, chosen)
    del dense
    mixture = lancebill.from_pretrained(moe, device=chosen.device, dtype=torch.float32)
    of_mixture = timed(mixture, ids, chosen)
    difference = abs(of_mixture[0].value / of_dense[0].value - 1)
    return {
        "dense": figures(*of_dense),
        "mixture": {**figures(*of_mixture), "backend": backend_of(mixture)},
        "mixture_differs_by": difference,
        "largest_difference_of_a_token_nats": float((of_mixture[0].losses - of_dense[0].losses).abs().max()),
        "same": difference <= MIXTURE_BOUND,
    }


def dense_model(gguf: Path) -> Any:
    """The original dense model, from the same file."""
    metadata = read_metadata(gguf)
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    config = transformers.LlamaConfig(
        vocab_size=llama["vocab_size"],
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=round(llama["attention.layer_norm_rms_epsilon"], 9),
        rope_theta=llama["rope.freq_base"],
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with Checkpoint.open(gguf) as checkpoint:
        tensors = {name: tensor.float() for name, tensor in dense_tensors(checkpoint, metadata)}
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model


def quantised(chosen: argparse.Namespace, moe: Path, ids: torch.Tensor) -> Iterator[dict[str, Any]]:
    """For each pair of weights and activations: kernels and reference on the same quantised weights."""
    dtype = vars(torch)[chosen.dtype]
    ours, judge = (lancebill.from_pretrained(moe, device=chosen.device, dtype=dtype) for _ in range(2))
    judge_spec = None
    for pair in chosen.pairs.split(","):
        if time.perf_counter() - START > chosen.seconds:
            print(f"time limit reached before {pair}")
            continue
        spec, activations = pair.rsplit(":", 1)
        reload_experts(ours, weights=spec, activations=activations, backend=chosen.backend)
        if spec != judge_spec:
            reload_experts(judge, weights=spec, backend="reference")
            judge_spec = spec
        set_activations(judge, activations, dtype)
        assert backend_of(judge) == "reference"
        kernels, reference = (timed(model, ids, chosen) for model in (ours, judge))
        difference, bound = (
            abs(kernels[0].value / reference[0].value - 1),
            KERNEL_BOUNDS.get(activations, EIGHT_BIT_BOUND),
        )
        row = {
            "weights": spec,
            "activations": activations,
            "backend": backend_of(ours),
            "kernels": figures(*kernels),
            "reference": figures(*reference),
            "differs_by": difference,
            "bound": bound,
            "within": difference <= bound,
        }
        print(json.dumps(row), flush=True)
        yield row


def timed(model: Any, ids: torch.Tensor, chosen: argparse.Namespace) -> tuple[Perplexity, float]:
    start = time.perf_counter()
    found = perplexity(model, ids, window=chosen.window, stride=chosen.window, batch=chosen.batch)
    return found, time.perf_counter() - start


def figures(found: Perplexity, seconds: float) -> dict[str, float]:
    return {"perplexity": found.value, "stderr": found.stderr, "seconds": round(seconds, 2)}


def backend_of(model: Any) -> str:
    return ",".join(sorted({m.experts.choice.backend.name for _, m in packed_experts(model)}))


def save(chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    document = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine(chosen.device),
        "model": chosen.gguf.name,
        "text": chosen.text.name,
        **found,
    }
    write_record(chosen.out, document)
    print(f"{chosen.out.name}: mixture differs by {found['mixture_differs_by']:.1e}, ", end="")
    print(f"{sum(row['within'] for row in found['rows'])} of {len(found['rows'])} rows within their bounds", flush=True)


if __name__ == "__main__":
    main()
