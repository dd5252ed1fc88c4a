"""A whole small model with half of its experts in host memory: speed, tokens, and memory over many steps.

    python benchmarks/hybrid_generate.py [--layers 4] [--experts 64] [--steps 10000] [--moving 2000] [--device cuda]
                                         [--out FILE]

`equal_tokens` is how many of the first 64 tokens are those of the model that is whole on the GPU: rounding differs, so
the two may part where two tokens are nearly as likely. Between the calls of `generate` memory must not grow; the last
call comes after one that was interrupted (Ctrl-C). Then the same with experts that move (`moves`), which changes the
last bits of results and with them, now and then, a token.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_kernels import compile_first
from machine import gpu_machine, origin, result_path

import lancebill
from lancebill.split import mailbox

EACH = 1000  # steps of one call of `generate`
PROMPT, COMPARED = 24, 64


def checkpoint(folder: Path, arguments: argparse.Namespace) -> Path:
    config = transformers.Qwen3MoeConfig(
        hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, head_dim=128, vocab_size=2000,
        num_hidden_layers=arguments.layers, num_experts=arguments.experts, num_experts_per_tok=8,
        moe_intermediate_size=512, bos_token_id=None, eos_token_id=None, pad_token_id=0, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    return folder


def load(folder: Path, device: str, **options: Any) -> Any:
    model = lancebill.from_pretrained(folder, weights="mxfp4", device=device, **options)
    if device == "cuda":
        failed = compile_first((layer.problem, tokens) for layer in layers_of(model) for tokens in (1, PROMPT))
        assert not failed, failed
    return model


def layers_of(model: Any) -> list[lancebill.RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, lancebill.RoutedExperts)]


def bytes_of(model: Any) -> int:
    """Of all experts."""
    return sum(tensor.nbytes for layer in layers_of(model) for tensor in layer.parameters())


def generate(model: Any, tokens: int) -> torch.Tensor:
    ids = torch.randint(1, 2000, (1, PROMPT), generator=torch.Generator().manual_seed(3)).to(model.device)
    found: torch.Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, PROMPT:]
    return found


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


def steps(model: Any, count: int) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """So many steps in calls of `generate`, with the memory after each; and the tokens of the first call."""
    rows: list[dict[str, Any]] = []
    first: torch.Tensor | None = None
    for _ in range(max(1, count // EACH)):
        start = time.perf_counter()
        tokens = generate(model, EACH)
        first = tokens if first is None else first
        row = {"tokens_per_s": round(EACH / (time.perf_counter() - start), 1), **memory()}
        rows.append(row | {"same": torch.equal(tokens, first)})
        print(json.dumps(rows[-1]), flush=True)
    assert first is not None
    return rows, first


def grown(rows: list[dict[str, Any]]) -> dict[str, int]:
    """From the second call to the last."""
    return {name: rows[-1][name] - rows[min(1, len(rows) - 1)][name] for name in ("rss", "gpu", "mailboxes")}


def measure_moves(folder: Path, arguments: argparse.Namespace, on_gpu: int) -> dict[str, Any]:
    model = load(folder, arguments.device, gpu_memory=on_gpu, moves="recency")
    rows, _ = steps(model, arguments.moving)
    moved = [layer.moves.moved for layer in layers_of(model) if layer.moves is not None]
    return {"rows": rows, "moved": moved, "graphs": str(model.lancebill_decoding), "grown": grown(rows)}


def main() -> None:
    arguments, start = parse(), time.perf_counter()
    path = arguments.out or result_path("hybrid-generate", arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoint(Path(folder) / "model", arguments)
        whole = load(saved, arguments.device)
        want, on_gpu = generate(whole, COMPARED).tolist(), bytes_of(whole) // 2
        whole_rows, _ = steps(whole, 2 * EACH)
        del whole
        gc.collect()
        model = load(saved, arguments.device, gpu_memory=on_gpu)
        split = [layer for layer in layers_of(model) if layer.is_split]
        found = generate(model, COMPARED).tolist()
        equal = next((i for i, (a, b) in enumerate(zip(found, want)) if a != b), COMPARED)
        rows, first = steps(model, arguments.steps)
        stopped = interrupted(model)
        record = {
            **origin("hybrid_generate.py"), "machine": gpu_machine() if arguments.device == "cuda" else {},
            "split_layers": len(split), "layers": arguments.layers, "experts": arguments.experts,
            "on_gpu": [layer.problem.experts for layer in split], "equal_tokens": equal, "steps": EACH * len(rows),
            "graphs": str(model.lancebill_decoding), "whole_tokens_per_s": whole_rows[-1]["tokens_per_s"],
            "rows": rows, "grown": grown(rows), "interrupted": stopped,
            "same_after_interrupt": torch.equal(generate(model, EACH), first),
        }  # fmt: skip
        write(path, record)
        if arguments.moving:
            del model, split
            gc.collect()
            record["moves"] = measure_moves(saved, arguments, on_gpu)
    record["seconds"] = round(time.perf_counter() - start, 1)
    write(path, record)
    print(json.dumps({name: value for name, value in record.items() if name != "rows"}), flush=True)


def write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--moving", type=int, default=2000, help="steps with experts that move; 0: none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
