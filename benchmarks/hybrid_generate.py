"""A whole small model with half of its experts in host memory: speed, tokens, and memory over many steps.

    python benchmarks/hybrid_generate.py [--layers 4] [--experts 64] [--steps 10000] [--device cuda] [--out FILE]

`equal_tokens` is how many of the first 64 tokens are those of the model that is whole on the GPU: rounding differs, so
the two may part where two tokens are nearly as likely. Between the calls of `generate` memory must not grow; the last
call comes after one that was interrupted (Ctrl-C).
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


def load(folder: Path, device: str, share: float | None) -> Any:
    """The model, with this share of the bytes of its experts on the GPU; None: all."""
    whole = lancebill.from_pretrained(folder, weights="mxfp4", device=device)
    if share is None:
        return whole
    held = sum(
        tensor.nbytes
        for module in whole.modules()
        if isinstance(module, lancebill.RoutedExperts)
        for tensor in module.parameters()
    )
    del whole
    gc.collect()
    return lancebill.from_pretrained(folder, weights="mxfp4", device=device, gpu_memory=int(held * share))


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


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(Path(folder) / "model", arguments)
        whole = load(path, arguments.device, None)
        want = generate(whole, COMPARED).tolist()
        del whole
        model = load(path, arguments.device, 0.5)
    split = [module for module in model.modules() if isinstance(module, lancebill.RoutedExperts) and module.is_split]
    found = generate(model, COMPARED).tolist()
    equal = next((i for i, (a, b) in enumerate(zip(found, want)) if a != b), COMPARED)
    rows, first = [], None
    for _ in range(max(1, arguments.steps // EACH)):
        start = time.perf_counter()
        tokens = generate(model, EACH)
        first = tokens if first is None else first
        row = {"tokens_per_s": round(EACH / (time.perf_counter() - start), 1), **memory()}
        row["same"] = torch.equal(tokens, first)
        rows.append(row)
        print(json.dumps(row), flush=True)
    stopped = interrupted(model)
    after = torch.equal(generate(model, EACH), first)
    record = {
        **origin("hybrid_generate.py"), "machine": gpu_machine() if arguments.device == "cuda" else {},
        "split_layers": len(split), "layers": arguments.layers, "experts": arguments.experts,
        "on_gpu": [module.problem.experts for module in split], "equal_tokens": equal, "steps": EACH * len(rows),
        "graphs": str(getattr(model, "lancebill_decoding", "none")), "rows": rows, "interrupted": stopped,
        "same_after_interrupt": after,
        "grown": {name: rows[-1][name] - rows[min(1, len(rows) - 1)][name] for name in ("rss", "gpu", "mailboxes")},
    }  # fmt: skip
    print(json.dumps({name: value for name, value in record.items() if name != "rows"}), flush=True)
    path = arguments.out or result_path("hybrid-generate", arguments.device)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
