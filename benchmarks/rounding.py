"""What scale search gives: rounding error, time and perplexity of each spec, with and without it.

    python benchmarks/rounding.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.txt --device cuda

The demo's mixture computes exactly what its dense model computes. So each expert's matrices are quantised and
dequantised, put back into the dense model, and that is measured in fp32: no kernel takes part. The model's weights
were rounded once before, by the tool that wrote the file. Rounding runs on one CPU core, as a thread of `convert` does,
and its CPU time counts; only perplexity is measured on the device. The project contains no text: pass your own.

Perplexity says how well the text is predicted, and chance makes it better or worse. The divergence (Kullback-Leibler,
in nats) says how far the predictions are from those of the stored weights, token by token: with few tokens it tells
two ways of rounding apart where perplexity does not. Both are over the same windows of the text, at equal distances.
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
import torch.nn.functional as F
import transformers
from machine import origin, result_path, whole_model_machine
from perplexity import dense_model
from torch import Tensor

from lancebill.demo.model import EXPERTS
from lancebill.demo.vocabulary import read_metadata, save_tokenizer
from lancebill.evaluate.perplexity import Perplexity
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.native import library
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import parse_spec

SPECS = (
    "mxfp4,nvfp4,int4-g128,int4-g32,int4-g64,int4-channel,int4-g128-zp,int4-g32-zp,int3-g64,int2-g64,fp8-block,"
    "fp8-channel,fp8-tensor,mxfp8,mxfp6-e2m3,nf4,ternary-tensor,int8"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the demo's model")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--specs", default=SPECS)
    parser.add_argument("--windows", type=int, default=32, help="how many parts of the text are measured")
    parser.add_argument("--window", type=int, default=512, help="tokens in one of them")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/rounding")
    chosen = parser.parse_args()
    chosen.out = chosen.out or result_path("rounding", chosen.device)
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    text = windows(token_ids(chosen), chosen.windows, chosen.window)
    model = dense_model(chosen.gguf).to(chosen.device)
    experts = {name: matrix.detach().cpu().clone() for name, matrix in feed_forward(model)}
    stored = predictions(model, text)
    found: dict[str, Any] = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine(chosen.device),
        "model": chosen.gguf.name,
        "text": chosen.text.name,
        "tokens": text.numel(),
        "window": chosen.window,
        "native": library() is not None,
        "stored_perplexity": Perplexity(losses(stored, text)).value,
        "rows": [],
    }
    print(f"stored: {found['stored_perplexity']:.3f}", flush=True)
    for name in chosen.specs.split(","):
        row = compare(model, experts, text, stored, parse_spec(name))
        found["rows"].append(row)
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")  # an interrupted run keeps its results
        print(json.dumps(row), flush=True)


def token_ids(chosen: argparse.Namespace) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(read_metadata(chosen.gguf), Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids: Tensor = tokenizer(chosen.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    return ids


def windows(ids: Tensor, count: int, size: int) -> Tensor:
    """[count, size]: parts of the text at equal distances."""
    starts = torch.linspace(0, len(ids) - size, count).long()
    return torch.stack([ids[start : start + size] for start in starts.tolist()])


@torch.no_grad()
def predictions(model: Any, text: Tensor) -> Tensor:
    """Log-probabilities [windows, tokens - 1, vocabulary]."""
    logits = [model(window.unsqueeze(0).to(model.device)).logits[0, :-1].float() for window in text]
    return torch.stack([F.log_softmax(each, dim=-1) for each in logits])


def losses(predicted: Tensor, text: Tensor) -> Tensor:
    """Of every token but the first of each window, in nats."""
    targets = text[:, 1:, None].to(predicted.device)
    return -predicted.gather(2, targets).flatten().double().cpu()


def feed_forward(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The matrices that the mixture splits into experts."""
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{index}.{name}", layer.mlp.get_submodule(name).weight


def compare(model: Any, experts: dict[str, Tensor], text: Tensor, stored: Tensor, spec: QuantSpec) -> dict[str, Any]:
    """Both ways of rounding to `spec`, one after the other."""
    row: dict[str, Any] = {"spec": str(spec)}
    of_tokens = {}
    for word, search in (("plain", False), ("search", True)):
        rms, seconds = round_experts(model, experts, partial(quantize, spec=spec, search=search))
        predicted = predictions(model, text)
        of_tokens[word] = losses(predicted, text)
        row[word] = {
            "rms_error": rms,
            "rounding_seconds": round(seconds, 2),
            "perplexity": Perplexity(of_tokens[word]).value,
            "divergence": statistics(torch.cat([divergence(*pair) for pair in zip(stored, predicted)])),
        }
    row["loss_difference"] = statistics(of_tokens["search"] - of_tokens["plain"])
    row["seconds_ratio"] = row["search"]["rounding_seconds"] / row["plain"]["rounding_seconds"]
    return row


def divergence(stored: Tensor, predicted: Tensor) -> Tensor:
    return F.kl_div(predicted, stored, reduction="none", log_target=True).sum(-1).double().cpu()


def statistics(numbers: Tensor) -> dict[str, float]:
    return {"mean": float(numbers.mean()), "stderr": float(numbers.std()) / len(numbers) ** 0.5}


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


if __name__ == "__main__":
    main()
