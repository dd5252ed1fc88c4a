"""24 figures of speed, as shares of what this card reads and multiplies in the same minute.

A share is the time that the card's read rate, or its bf16 rate, needs for a call, over the time of the call. Each is
compared with the last record; a share below 0.93 of it is measured once more, and then fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
from cells import Cell, Failed, Notes, Place
from torch import Tensor

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu-suite"
WORST = 0.93  # of the recorded share
ROUTINGS = 16  # different ones in turns, so that weights do not stay in the cache
MATRICES = 8  # likewise
QWEN = {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
QWEN |= {"num_experts": 128, "num_hidden_layers": 1}
OSS = {"model_type": "qwen3_moe", "hidden_size": 2880, "moe_intermediate_size": 2880, "num_experts_per_tok": 4}
OSS |= {"num_experts": 32, "num_hidden_layers": 1}
FLASH = {"model_type": "qwen3_moe", "hidden_size": 4096, "moe_intermediate_size": 2048, "num_experts_per_tok": 6}
FLASH |= {"num_experts": 64, "num_hidden_layers": 1}
LAYERS: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "qwen3-30b-a3b int4-g128": (QWEN, "int4-g128", (1, 64, 4096)),
    "gpt-oss-20b mxfp4": (OSS, "mxfp4", (1, 16, 4096)),
    "deepseek-v4-flash fp8-block": (FLASH, "fp8-block", (1, 64, 4096)),
    "qwen3-30b-a3b nvfp4": (QWEN, "nvfp4", (1, 4096)),
    "qwen3-30b-a3b bf16": (QWEN, "bf16", (1,)),
}
LINEARS = {"mxfp4": (1, 16, 4096), "int4-g128": (1, 16, 4096), "fp8-channel": (1, 16, 4096)}  # 8192 x 8192
STEPS = (1, 8, 32)  # sequences of a decode step
Figures = dict[str, dict[str, float]]


class Meter:
    """Figures of calls. Without rates of the card it only makes the calls, which compiles their kernels."""

    def __init__(self, windows: Any = None, rates: Mapping[str, float] | None = None) -> None:
        self.windows, self.rates = windows, rates

    def calls(self, calls: list[Callable[[], object]], size: float, flops: float) -> dict[str, float]:
        """Calls that move so many bytes, each, and take so many operations."""
        if self.rates is None:
            return {"share": float(len([call() for call in calls]))}
        return self.figure(self.windows.measure({"ours": calls})["ours"].median, size, flops)

    def figure(self, us: float, size: float, flops: float = 0.0) -> dict[str, float]:
        rates = self.rates or {"read_gbs": 1.0, "bf16": 1.0}
        floor = max(size / rates["read_gbs"] / 1e3, flops / rates["bf16"] / 1e6)
        return {"us": round(us, 2), "share": round(floor / us, 4)}


def timed_cells() -> Iterator[Cell]:
    """Each group twice: beside other cells, which compiles its kernels, and alone."""
    groups: dict[str, Callable[[Meter], Figures]] = {
        **{name: partial(time_layer, name) for name in LAYERS},
        **{f"linear {spec}": partial(time_linear, spec) for spec in LINEARS},
        "decode step": time_steps,
    }
    for name, group in groups.items():
        yield Cell("warm", name, 2, partial(warm, group))
    for name, group in groups.items():
        yield Cell("timed", name, 2, partial(run_timed, group), alone=True)


def _needs_gpu(place: Place) -> None:
    if place.device == "cpu":
        raise SkipTest("needs a GPU")


@torch.no_grad()
def warm(group: Callable[[Meter], Figures], place: Place) -> None:
    _needs_gpu(place)
    group(Meter())


@torch.no_grad()
def run_timed(group: Callable[[Meter], Figures], place: Place) -> Notes:
    _needs_gpu(place)
    from lancebill.bench.sustained import Windows, window_rates

    windows = Windows(torch.device(place.device, torch.cuda.current_device()))
    found: Figures = {}
    last = _last_record()
    for _ in range(2):
        rates = window_rates(windows)
        again = group(Meter(windows, rates))
        found = {name: max(figure, found.get(name, figure), key=_share_of) for name, figure in again.items()}
        if not _slower(found, last):
            break
    notes = {"times": found, "rates": {name: round(rate, 1) for name, rate in rates.items()}}
    if _slower(found, last):
        raise Failed(f"slower than recorded: {', '.join(_slower(found, last))}", notes)
    return notes


def _share_of(figure: Mapping[str, float]) -> float:
    return figure["share"]


def _slower(found: Figures, last: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        f"{name} {figure['share']:.3f}, was {last[name]['share']:.3f}"
        for name, figure in found.items()
        if name in last and figure["share"] < WORST * last[name]["share"]
    ]


def _last_record() -> dict[str, dict[str, float]]:
    path = RECORDS / f"{torch.cuda.get_device_name().split()[-1].lower()}.json"
    times: dict[str, dict[str, float]] = json.loads(path.read_text())["times"] if path.exists() else {}
    return times


def time_layer(name: str, meter: Meter) -> Figures:
    from lancebill import RoutedExperts
    from lancebill.bench.results import BenchCase
    from lancebill.bench.workload import batches

    config, spec, sizes = LAYERS[name]
    layer = RoutedExperts.random(config, 0, device="cuda", weights=spec)
    found: Figures = {}
    for tokens in sizes:
        routed = batches(layer.problem, tokens, "uniform", ROUTINGS if tokens < 256 else 2, torch.device("cuda"))
        calls = [partial(layer, batch.x, batch.ids, batch.weights) for batch in routed]
        work = BenchCase.of(layer.problem, routed)
        found[f"{name} x {tokens}"] = meter.calls(calls, work.bytes, work.flops)
    return found


def time_linear(spec: str, meter: Meter) -> Figures:
    from lancebill import QuantizedLinear
    from lancebill.numbers.random_weight import random_weight
    from lancebill.numbers.spec_names import parse_spec

    side, generator = 8192, torch.Generator("cuda").manual_seed(0)
    weights = [random_weight(parse_spec(spec), side, side, generator) for _ in range(MATRICES)]
    layers = [QuantizedLinear.from_weight(weight, device="cuda") for weight in weights]
    size = sum(tensor.nbytes for tensor in layers[0].parameters())
    found: Figures = {}
    for rows in LINEARS[spec]:
        x = torch.randn(rows, side, device="cuda").bfloat16()
        calls = [partial(layer, x) for layer in layers]
        found[f"linear {spec} x {rows}"] = meter.calls(calls, size + 4 * x.numel(), 2.0 * rows * side * side)
    return found


def time_steps(meter: Meter) -> Figures:
    """A model of four layers of Qwen3-30B-A3B; int4 experts, int8 elsewhere. The time of a token in `generate`."""
    import transformers

    from lancebill.integrations.transformers.pack_in_memory import pack_experts
    from lancebill.integrations.transformers.packed_rest import RestRules, pack_rest
    from lancebill.layer.recipe import LoadOptions

    sizes = {**QWEN, "num_hidden_layers": 4, "vocab_size": 32768, "num_attention_heads": 32, "num_key_value_heads": 4}
    sizes |= {"head_dim": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    del sizes["model_type"]
    with torch.device("cuda"):
        config = transformers.Qwen3MoeConfig(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    pack_experts(model, weights="int4-g128")
    rest = pack_rest(model, LoadOptions("cuda"), RestRules("int8"))
    experts = [place.experts for place in model.modules() if hasattr(place, "experts") and place.experts is not None]
    expert_bytes = sum(t.nbytes for layer in experts for t in layer.parameters()) / QWEN["num_experts"]
    found: Figures = {}
    for batch in STEPS:
        ids = torch.randint(1, 1000, (batch, 16), device="cuda")
        used = QWEN["num_experts"] * (1 - (1 - QWEN["num_experts_per_tok"] / QWEN["num_experts"]) ** batch)
        found[f"decode step x {batch}"] = meter.figure(_step_us(model, ids), expert_bytes * used + rest.bytes)
    return found


def _step_us(model: Any, ids: Tensor) -> float:
    """Microseconds of a further token."""

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(72)
    return min(seconds(72) - seconds(8) for _ in range(4)) / 64 * 1e6
