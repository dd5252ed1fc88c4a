"""What scale search gives: rounding error, time and perplexity of each spec, with and without it.

    python benchmarks/rounding.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.txt --device cuda

The demo's mixture computes exactly what its dense model computes. So each expert's matrices are quantised and
dequantised, put back into the dense model, and that is measured in fp32: no kernel takes part. The model's weights
were rounded once before, by the tool that wrote the file. Rounding runs on one CPU core, as a thread of `convert` does,
and its CPU time counts; only perplexity is measured on the device. The project contains no text: pass your own.

Perplexity says how well the text is predicted, and chance makes it better or worse. The divergence (Kullback-Leibler,
in nats) says how far the predictions are from those of the stored weights, token by token: with few tokens it tells
two ways of rounding apart where perplexity does not. Both are over the same windows of the text, at equal distances.
Standard errors are those of the windows' means, because the tokens of a window depend on each other; where two ways of
rounding are compared, of the differences on the same windows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from machine import origin, result_path, whole_model_machine
from perplexity import dense_model
from result_files import write_record
from torch import Tensor

from lancebill.demo.model import EXPERTS
from lancebill.demo.vocabulary import read_metadata, save_tokenizer
from lancebill.evaluate.perplexity import Perplexity
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.native import library
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import parse_spec

# Every number type that `convert` writes, with every kind of block.
SPECS = (
    "mxfp4,nvfp4,mxfp8,mxfp6-e2m3,nf4,bnbfp4-g64,fp8-block,fp8-block:e8m0,fp8-channel,fp8-g64,fp8-tensor,ternary-g256:fp16,"
    "int4-g128,int4-g32,int4-g64,int4-channel,int2-g64,int3-g64,int5-g64,int6-g64,int7-g64,int8-g64,int8,int2-g64-zp,"
    "int3-g64-zp,int4-g128-zp,int4-g32-zp,int5-g64-zp,int6-g64-zp,int7-g64-zp,int8-g64-zp,mxfp4-h32,int4-g64-h64"
)
BATCH = 4  # windows that are computed together


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
    stored = list(predictions(model, text))
    found: dict[str, Any] = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine(chosen.device),
        "model": chosen.gguf.name,
        "text": chosen.text.name,
        "tokens": text.numel(),
        "window": chosen.window,
        "native": library() is not None,
        "stored_perplexity": Perplexity(scores_of(stored, text, stored).losses.flatten()).value,
        "rows": [],
    }
    print(f"stored: {found['stored_perplexity']:.3f}", flush=True)
    for name in chosen.specs.split(","):
        row = compare(model, experts, text, stored, parse_spec(name))
        found["rows"].append(row)
        write_record(chosen.out, found)  # an interrupted run keeps its results
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


@dataclass(frozen=True)
class Scores:
    """Of every token but the first of each window, in nats: [windows, tokens - 1]."""

    losses: Tensor
    divergences: Tensor  # from the predictions with the stored weights


@torch.no_grad()
def predictions(model: Any, text: Tensor) -> Iterator[Tensor]:
    """Log-probabilities [windows, tokens - 1, vocabulary], a batch at a time."""
    for batch in text.split(BATCH):
        yield F.log_softmax(model(batch.to(model.device)).logits[:, :-1].float(), dim=-1)


def scores_of(predicted_batches: Iterable[Tensor], text: Tensor, stored: list[Tensor]) -> Scores:
    losses, divergences = [], []
    for batch, expected, predicted in zip(text.split(BATCH), stored, predicted_batches):
        targets = batch[:, 1:, None].to(predicted.device)
        losses.append(-predicted.gather(2, targets).squeeze(2).double().cpu())
        divergences.append((expected.exp() * (expected - predicted)).sum(-1).double().cpu())
    return Scores(torch.cat(losses), torch.cat(divergences))


def feed_forward(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The matrices that the mixture splits into experts."""
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{index}.{name}", layer.mlp.get_submodule(name).weight


def compare(
    model: Any, experts: dict[str, Tensor], text: Tensor, stored: list[Tensor], spec: QuantSpec
) -> dict[str, Any]:
    """Both ways of rounding to `spec`, one after the other."""
    row: dict[str, Any] = {"spec": str(spec)}
    scores: dict[bool, Scores] = {}
    for search in (False, True):
        rounding = round_experts(model, experts, partial(quantize, spec=spec, search=search))
        scores[search] = scores_of(predictions(model, text), text, stored) if rounding.changed else scores[False]
        row["search" if search else "plain"] = {
            "rms_error": rounding.rms_error,
            "weighted_error": rounding.weighted_error,
            "rounding_seconds": round(rounding.seconds, 2),
            "perplexity": Perplexity(scores[search].losses.flatten()).value,
            "divergence": statistics(scores[search].divergences),
        }
    row["loss_difference"] = statistics(scores[True].losses - scores[False].losses)
    row["divergence_difference"] = statistics(scores[True].divergences - scores[False].divergences)
    row["seconds_ratio"] = row["search"]["rounding_seconds"] / row["plain"]["rounding_seconds"]
    return row


def statistics(of_tokens: Tensor) -> dict[str, float]:
    """The mean, and its standard error from the means of the windows."""
    means = of_tokens.mean(1)
    return {"mean": float(means.mean()), "stderr": float(means.std()) / len(means) ** 0.5}


@dataclass
class Rounding:
    """Sums over all matrices of what rounding them did."""

    squares: float = 0.0
    energy: float = 0.0
    weighted_squares: float = 0.0  # each error times its weight: what the search minimises
    weighted_energy: float = 0.0
    seconds: float = 0.0  # of CPU time
    changed: bool = False  # whether the model had other weights before

    def add(self, weight: Tensor, rounded: Tensor) -> None:
        error = rounded.double() - weight
        self.squares += float(error.square().sum())
        self.energy += float(weight.double().square().sum())
        self.weighted_squares += float((error * weight).square().sum())
        self.weighted_energy += float(weight.double().square().square().sum())

    @property
    def rms_error(self) -> float:
        return float((self.squares / self.energy) ** 0.5)

    @property
    def weighted_error(self) -> float:
        return float((self.weighted_squares / self.weighted_energy) ** 0.5)


def round_experts(model: Any, experts: dict[str, Tensor], to: Callable[[Tensor], Any]) -> Rounding:
    """Replace every matrix by its rounded form."""
    threads, total = torch.get_num_threads(), Rounding()
    torch.set_num_threads(1)
    for name, weight in feed_forward(model):
        axis = 1 if name.endswith("down_proj") else 0
        parts = []
        for part in experts[name].chunk(EXPERTS, dim=axis):
            part = part.contiguous()
            start = time.process_time()
            rounded = to(part)
            total.seconds += time.process_time() - start
            parts.append(dequantize(rounded))
        result = torch.cat(parts, dim=axis)
        total.add(experts[name], result)
        total.changed |= not torch.equal(weight.data.cpu(), result)
        weight.data.copy_(result)
    torch.set_num_threads(threads)
    return total


if __name__ == "__main__":
    main()
