"""What scale search gives: rounding error, time and perplexity of each spec, with and without it.

    python benchmarks/rounding.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.txt --device cuda

The demo's mixture computes exactly what its dense model computes. So each expert's matrices are quantised and
dequantised, put back into the dense model, and that is measured in fp32: no kernel takes part. The model's weights
were rounded once before, by the tool that wrote the file. Windows do not overlap. Rounding runs on one CPU core, as a
thread of `convert` does; only perplexity is measured on the device. The project contains no text: pass your own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import origin, result_path, whole_model_machine
from perplexity import dense_model
from torch import Tensor

from lancebill.demo.model import EXPERTS
from lancebill.demo.vocabulary import read_metadata, save_tokenizer
from lancebill.evaluate.perplexity import perplexity
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.native import library
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import parse_spec

SPECS = (
    "mxfp4,mxfp6-e2m3,mxfp8,nvfp4,int4-g32,int4-g64,int4-channel,int4-g32-zp,int4-g64-zp,int3-g64,int2-g64,int8,nf4,"
    "fp8-channel,fp8-block"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the demo's model")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--specs", default=SPECS)
    parser.add_argument("--tokens", type=int, help="use only the first tokens of the text")
    parser.add_argument("--window", type=int, default=2048, help="tokens in one window")
    parser.add_argument("--batch", type=int, default=1, help="windows in one batch")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/rounding")
    chosen = parser.parse_args()
    chosen.out = chosen.out or result_path("rounding", chosen.device)
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = token_ids(chosen)
    model = dense_model(chosen.gguf).to(chosen.device)
    experts = {name: matrix.detach().cpu().clone() for name, matrix in feed_forward(model)}
    found: dict[str, Any] = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine(chosen.device),
        "model": chosen.gguf.name,
        "text": chosen.text.name,
        "tokens": ids.numel(),
        "whole_text": chosen.tokens is None,
        "window": chosen.window,
        "native": library() is not None,
        "unquantised": measure(model, ids, chosen),
        "rows": [],
    }
    print(f"unquantised: {found['unquantised']['perplexity']:.3f}", flush=True)
    for name in chosen.specs.split(","):
        row = compare(model, experts, ids, parse_spec(name), chosen)
        found["rows"].append(row)
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")  # an interrupted run keeps its results
        print(json.dumps(row), flush=True)


def token_ids(chosen: argparse.Namespace) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(read_metadata(chosen.gguf), Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids: Tensor = tokenizer(chosen.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    return ids[: chosen.tokens]


def feed_forward(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The matrices that the mixture splits into experts."""
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{index}.{name}", layer.mlp.get_submodule(name).weight


def compare(
    model: Any, experts: dict[str, Tensor], ids: Tensor, spec: QuantSpec, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Both ways of rounding to `spec`, one after the other."""
    row: dict[str, Any] = {"spec": str(spec)}
    for word, search in (("plain", False), ("search", True)):
        to = partial(quantize, spec=spec, search=search)
        rms, seconds = round_experts(model, experts, to)
        row[word] = {"rms_error": rms, "rounding_seconds": round(seconds, 2), **measure(model, ids, chosen)}
    row["perplexity_ratio"] = row["search"]["perplexity"] / row["plain"]["perplexity"]
    row["seconds_ratio"] = row["search"]["rounding_seconds"] / row["plain"]["rounding_seconds"]
    return row


def round_experts(model: Any, experts: dict[str, Tensor], to: Callable[[Tensor], Any]) -> tuple[float, float]:
    """Replace every matrix by its rounded form; returns the relative RMS error and the seconds that rounding took."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    error = energy = seconds = 0.0
    for name, weight in feed_forward(model):
        columns = name.endswith("down_proj")
        parts = []
        for part in experts[name].chunk(EXPERTS, dim=1 if columns else 0):
            part = part.contiguous()
            start = time.process_time()
            rounded = to(part)
            seconds += time.process_time() - start
            parts.append(dequantize(rounded))
        result = torch.cat(parts, dim=1 if columns else 0)
        error += float((result - experts[name]).double().square().sum())
        energy += float(experts[name].double().square().sum())
        weight.data.copy_(result)
    torch.set_num_threads(threads)
    return (error / energy) ** 0.5, seconds


def measure(model: Any, ids: Tensor, chosen: argparse.Namespace) -> dict[str, float]:
    found = perplexity(model, ids, window=chosen.window, stride=chosen.window, batch=chosen.batch)
    return {"perplexity": found.value, "stderr": found.stderr}


if __name__ == "__main__":
    main()
