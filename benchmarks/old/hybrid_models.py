"""The processes of `hybrid_generate.py`: one that decodes until it is interrupted, and one that measures the rest."""

from __future__ import annotations

import argparse
import gc
import json
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_kernels import compile_first
from hybrid_generate import DECODING, parse, say
from machine import gpu_machine
from result_files import write_record

import lancebill
from lancebill.split import mailbox

EACH = 1000  # steps of one call of `generate`
PROMPT, COMPARED, TIMED = 24, 64, 400
ENOUGH_S = 6.0  # that must be left before another call begins


@dataclass(frozen=True)
class Size:
    """Of a model of random weights."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int


SMALL = Size(layers=4, experts=64, top_k=8, hidden=1024, intermediate=512, heads=8)
TINY = Size(layers=2, experts=16, top_k=4, hidden=256, intermediate=128, heads=2)


def run(arguments: argparse.Namespace) -> None:
    say(f"{arguments.part}: imported")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part == "decode":
            decode_until_interrupted(Path(folder), arguments)
        else:
            Measuring(arguments, Path(folder)).run()


def decode_until_interrupted(folder: Path, arguments: argparse.Namespace) -> None:
    print(json.dumps({"free_gpu": free_gpu()}), flush=True)
    model = Model(TINY, folder, arguments.device).split()
    generate(model, COMPARED)
    print(json.dumps({"graphs": str(model.lancebill_decoding)}), flush=True)
    print(DECODING, flush=True)
    while time.time() < arguments.until:
        generate(model, EACH)


class Model:
    """A checkpoint of random weights, and its models."""

    def __init__(self, size: Size, folder: Path, device: str) -> None:
        self.folder, self.device = folder / f"hidden{size.hidden}", device
        config = transformers.Qwen3MoeConfig(
            hidden_size=size.hidden, num_attention_heads=size.heads, num_key_value_heads=2, head_dim=128,
            vocab_size=2000, num_hidden_layers=size.layers, num_experts=size.experts, norm_topk_prob=True,
            num_experts_per_tok=size.top_k, moe_intermediate_size=size.intermediate, bos_token_id=None,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.save_pretrained(self.folder)
        say(f"saved {self.folder.name}")

    def whole(self, **options: Any) -> Any:
        model = lancebill.from_pretrained(self.folder, weights="mxfp4", device=self.device, **options)
        if self.device == "cuda":
            failed = compile_first((layer.problem, tokens) for layer in layers_of(model) for tokens in (1, PROMPT))
            assert not failed, failed
        say(f"loaded {self.folder.name} {options or 'whole'}")
        return model

    def split(self, **options: Any) -> Any:
        """With half of the experts on the GPU."""
        checkpoint = lancebill.ModelExperts.from_checkpoint(self.folder, weights="mxfp4", device=self.device)
        return self.whole(gpu_memory=checkpoint.bytes // 2, **options)


class Measuring:
    """Everything after the interrupt, written as it is found."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder, self.path = arguments, folder, arguments.out
        self.record: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        self.record["free_gpu"] = free_gpu()
        if arguments.device == "cuda":
            before = self.record["interrupt"].get("free_gpu", 0)
            self.record |= {"machine": gpu_machine(), "lost_gpu": before - self.record["free_gpu"]}

    def run(self) -> None:
        self.add("model", self.model())
        tiny = Model(TINY, self.folder, self.arguments.device)
        self.steps(tiny.split(), "steps", self.arguments.steps)
        if self.arguments.moving and self.left() > ENOUGH_S:
            self.steps(tiny.split(moves="recency"), "moves", self.arguments.moving)

    def left(self) -> float:
        return float(self.arguments.until) - time.time()

    def add(self, name: str, found: dict[str, Any]) -> None:
        self.record[name] = found
        write_record(self.path, self.record)
        say(f"{name}: {json.dumps({key: value for key, value in found.items() if key != 'rows'})}")

    def model(self) -> dict[str, Any]:
        """A small model against the same one that is whole on the GPU."""
        made = Model(SMALL, self.folder, self.arguments.device)
        whole = made.whole()
        want, whole_rate = generate(whole, COMPARED).tolist(), tokens_per_s(whole)
        del whole
        gc.collect()
        model = made.split()
        split = [layer for layer in layers_of(model) if layer.is_split]
        found = generate(model, COMPARED).tolist()
        return {
            "layers": SMALL.layers, "experts": SMALL.experts, "split_layers": len(split),
            "on_gpu": [layer.problem.experts for layer in split], "whole_tokens_per_s": whole_rate,
            "equal_tokens": next((i for i, (a, b) in enumerate(zip(found, want)) if a != b), COMPARED),
            "tokens_per_s": tokens_per_s(model), "graphs": str(model.lancebill_decoding),
        }  # fmt: skip

    def steps(self, model: Any, name: str, count: int) -> None:
        """So many steps, with the memory after each call, and one call after an interrupt."""
        rows: list[dict[str, Any]] = []
        first = generate(model, EACH)  # captures the graphs
        begun = memory()
        while len(rows) * EACH < count and self.left() > ENOUGH_S:
            start = time.perf_counter()
            tokens = generate(model, EACH)
            rate = round(EACH / (time.perf_counter() - start), 1)
            rows.append({"tokens_per_s": rate, **memory(), "same": torch.equal(tokens, first)})
            self.add(name, self._found(model, rows, begun))
            say(json.dumps(rows[-1]))
        if rows and self.left() > ENOUGH_S:
            stopped = interrupted(model)
            after = {"interrupted": stopped, "same_after": torch.equal(generate(model, EACH), first)}
            self.add(name, self._found(model, rows, begun) | after)

    def _found(self, model: Any, rows: list[dict[str, Any]], begun: dict[str, int]) -> dict[str, Any]:
        found = {
            "steps": EACH * len(rows), "graphs": str(model.lancebill_decoding), "before": begun, "rows": rows,
            "grown": {key: rows[-1][key] - begun[key] for key in begun},
            "split_layers": sum(layer.is_split for layer in layers_of(model)),
        }  # fmt: skip
        moved = [layer.moves.moved for layer in layers_of(model) if layer.moves is not None]
        return found | ({"moved": moved} if moved else {})


def layers_of(model: Any) -> list[lancebill.RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, lancebill.RoutedExperts)]


def generate(model: Any, tokens: int) -> torch.Tensor:
    ids = torch.randint(1, 2000, (1, PROMPT), generator=torch.Generator().manual_seed(3)).to(model.device)
    found: torch.Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, PROMPT:]
    return found


def tokens_per_s(model: Any) -> float:
    """Of a second call, whose steps are captured."""
    generate(model, TIMED)
    start = time.perf_counter()
    generate(model, TIMED)
    return round(TIMED / (time.perf_counter() - start), 1)


def free_gpu() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def memory() -> dict[str, int]:
    gc.collect()
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return {"rss": int(resident.split()[1]) << 10, "gpu": on_gpu, "threads": threading.active_count(),
            "mailboxes": len(mailbox._watched)}  # fmt: skip


def interrupted(model: Any) -> bool:
    """Whether a Ctrl-C ends a call of `generate` with KeyboardInterrupt."""
    timer = threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    try:
        generate(model, 100 * EACH)
    except KeyboardInterrupt:
        return True
    finally:
        timer.cancel()
    return False


if __name__ == "__main__":
    run(parse())
