"""Whole small models with half of their experts in host memory: tokens, speed, Ctrl-C, and memory over many steps.

python -m benchmarks hybrid-generate
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lancebill
from benchmarks.gpu import compile_kernels
from benchmarks.machine import memory_bytes
from benchmarks.runner import Case, Run, subject
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.split import mailbox

EACH = 1000  # steps of one call of `generate`
PROMPT, COMPARED, TIMED = 24, 64, 400
DECODES = "decodes"  # what a process says when it can be interrupted


@dataclass(frozen=True)
class Size:
    """Of a model of random weights."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int


SMALL, TINY = Size(4, 64, 8, 1024, 512, 8), Size(2, 16, 4, 256, 128, 2)


@subject("hybrid-generate", lambda: Case.product(what=("SIGINT", "model", "call")), device="cuda",
         steps=(10000, "of a tiny model"))  # fmt: skip
def hybrid_generate(run: Run) -> None:
    """Whole small models with half of their experts in host memory: tokens, speed, Ctrl-C, memory over many steps.

    SIGINT: a process that decodes gets it. KeyboardInterrupt must end it soon, and leave no GPU memory occupied. model:
    `equal_tokens` is how many of the first 64 tokens are those of the model that is whole on the GPU: rounding differs,
    so the two may part where two tokens are nearly as likely. call: a model so small that many steps take little time,
    in calls of 1,000 steps, between which memory must not grow; then one call after one that was interrupted.
    """
    wanted = {case["what"] for case in run.cases}
    with tempfile.TemporaryDirectory() as folder:
        if "SIGINT" in wanted:
            free = free_gpu()
            found = interrupt(run.device)
            run.add(Case.of(what="SIGINT", layers=TINY.layers, experts=TINY.experts),
                    {**found, "lost_gpu_bytes": free - free_gpu()})  # fmt: skip
        if "model" in wanted:
            run.add(*beside_whole(Model(SMALL, Path(folder), run.device)))
        if "call" in wanted:
            many_calls(run, Model(TINY, Path(folder), run.device).split())


def interrupt(device: str) -> dict[str, Any]:
    """What a process does that gets SIGINT while it decodes."""
    code = f"from split_models import decode_until_interrupted as run; run({device!r})"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        assert process.stdout is not None
        try:
            if not any(line.strip() == DECODES for line in process.stdout):
                raise RuntimeError("the process did not begin to decode")
            time.sleep(1.0)
            start = time.time()
            process.send_signal(signal.SIGINT)
            status = process.wait(15.0)
        finally:
            process.kill()
    return {"seconds": time.time() - start, "status": status}


def decode_until_interrupted(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(TINY, Path(folder), device).split()
        generate(model, COMPARED)
        print(DECODES, flush=True)
        while True:
            generate(model, EACH)


class Model:
    """A checkpoint of random weights, and its models."""

    def __init__(self, size: Size, folder: Path, device: str) -> None:
        import transformers

        self.size, self.folder, self.device = size, folder / f"hidden{size.hidden}", device
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

    def whole(self, **options: Any) -> Any:
        model = lancebill.from_pretrained(self.folder, weights="mxfp4", device=self.device, **options)
        failed = compile_kernels(((layer.problem, n) for layer in layers_of(model) for n in (1, PROMPT)), self.device)
        assert not failed, failed
        return model

    def split(self) -> Any:
        """With half of the experts on the GPU."""
        checkpoint = lancebill.ModelExperts.from_checkpoint(self.folder, weights="mxfp4", device=self.device)
        return self.whole(gpu_memory=checkpoint.bytes // 2)


def beside_whole(made: Model) -> tuple[Case, dict[str, Any], dict[str, float]]:
    """A small model against the same one that is whole on the GPU."""
    model = made.whole()
    want, whole_rate = generate(model, COMPARED).tolist(), tokens_per_s(model)
    del model
    gc.collect()
    model = made.split()
    found = generate(model, COMPARED).tolist()
    equal = next((i for i, (a, b) in enumerate(zip(found, want)) if a != b), COMPARED)
    case = Case.of(what="model", layers=made.size.layers, experts=made.size.experts)
    return case, {"tokens_per_s": tokens_per_s(model), "equal_tokens": equal}, {"whole": whole_rate}


def many_calls(run: Run, model: Any) -> None:
    """The memory after each call, and one call after an interrupt."""
    names = {"layers": sum(layer.is_split for layer in layers_of(model)), "experts": TINY.experts}
    first = generate(model, EACH)  # captures the graphs
    run.add(Case.of(what="before", **names), memory())
    for number in range(1, run.options.steps // EACH + 1):
        start = time.perf_counter()
        tokens = generate(model, EACH)
        rate = EACH / (time.perf_counter() - start)
        found = {"tokens_per_s": rate, **memory(), "same": torch.equal(tokens, first)}
        run.add(Case.of(what="call", **names, call=number), found)
    run.add(Case.of(what="after", **names), {"same": interrupted(model) and torch.equal(generate(model, EACH), first)})


def layers_of(model: Any) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def generate(model: Any, tokens: int) -> Tensor:
    ids = torch.randint(1, 2000, (1, PROMPT), generator=torch.Generator().manual_seed(3)).to(model.device)
    found: Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, PROMPT:]
    return found


def tokens_per_s(model: Any) -> float:
    """Of a second call, whose steps are captured."""
    generate(model, TIMED)
    start = time.perf_counter()
    generate(model, TIMED)
    return TIMED / (time.perf_counter() - start)


def free_gpu() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def memory() -> dict[str, int]:
    gc.collect()
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    threads = {"threads": threading.active_count(), "mailboxes": len(mailbox._watched)}
    return {"rss": memory_bytes()["VmRSS"], "gpu": on_gpu, **threads}


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
