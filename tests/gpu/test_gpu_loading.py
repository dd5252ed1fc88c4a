"""Layers from tensors on the GPU: pushed, stacked or random. They are packed there, not on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import OURS, skip_unless_ours
from layer_checkpoints import make_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lancebill import ExpertTensors, ModelExperts, RoutedExperts
from lancebill.layer.parts import pull
from lancebill.moe.problem import Problem
from lancebill.testing.checkpoints import Generated
from lancebill.testing.layers import layer_problem

skip_unless_ours()

V4_FLASH = {
    "model_type": "qwen3_moe", "num_experts": 256, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 6, "num_hidden_layers": 1,
}  # fmt: skip
CASES = [
    ("fp8", "block", "qwen3_moe", 0),
    ("fp8", "block", "qwen3_moe", 1),
    ("gptq", "", "qwen3_moe", 0),
    ("mxfp4", "", "gpt_oss", 0),
    ("modelopt", "NVFP4", "qwen3_moe", 0),
    ("compressed-tensors", "", "qwen3_moe", 0),
    ("gguf", "", "gguf", 0),
    ("dense", "bf16", "gpt_oss", 0),
]


FEW = 16


class NoCopyToCpu(TorchDispatchMode):
    """Fails when a CUDA tensor is copied to the CPU; a few numbers may be, to be checked."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in args[:2] if func is torch.ops.aten.copy_.default else args[:1]:
            if isinstance(tensor, Tensor) and isinstance(out, Tensor) and tensor.is_cuda and out.device.type == "cpu":
                assert out.numel() <= FEW, f"{func} copies {list(out.shape)} to the CPU"
        return out


def plans() -> Iterator[tuple[Problem, int]]:
    yield layer_problem("mxfp4", hidden=512, intermediate=256, experts=8, top_k=2, bias=True), 32


def _pulled(made: Generated, **options: Any) -> RoutedExperts:
    return RoutedExperts(pull(ModelExperts(made.config, tensors=made.headers, **options).recipe(0), made.read))


def _assert_same(a: RoutedExperts, b: RoutedExperts) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor.cpu(), right[name].cpu()), name


@pytest.mark.parametrize(("fmt", "part", "family", "form"), CASES)
@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
def test_pushed_gpu_tensors_stay_on_the_gpu(fmt: str, part: str, family: str, form: int, known: bool) -> None:
    made = make_checkpoint(fmt, part, family, form)
    want = _pulled(made, backend="reference")
    headers = made.headers if known else None
    experts = ModelExperts(made.config, tensors=headers, device="cuda", backend="reference", router=False)
    on_gpu = {name: tensor.cuda() for name, tensor in made.tensors.items()}
    with NoCopyToCpu():
        assert not list(experts.divert(on_gpu.items()))
        layer = experts.finish()[0]
    assert all(tensor.is_cuda for tensor in layer.parameters())
    _assert_same(layer, want)


def test_pushed_tensors_of_any_memory_give_one_layer() -> None:
    made = make_checkpoint("fp8", "block")
    options: dict[str, Any] = {"device": "cuda", "backend": OURS}
    want = _pulled(made, **options)
    for move in (Tensor.cpu, Tensor.pin_memory, Tensor.cuda):
        experts = ModelExperts(made.config, **options)
        assert not list(experts.divert((name, move(tensor)) for name, tensor in made.tensors.items()))
        _assert_same(experts.finish()[0], want)


@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
def test_tensors_pushed_from_another_stream_are_read_when_they_are_written(known: bool) -> None:
    """Every second tensor is written late on a stream of its own, which then uses the memory of freed ones again."""
    made = make_checkpoint("fp8", "block")
    options: dict[str, Any] = {"device": "cuda", "backend": OURS, "router": False, "layers": [0]}
    want = _pulled(made, device="cuda", backend=OURS, router=False)
    experts = ModelExperts(made.config, tensors=made.headers if known else None, **options)
    pairs = [(name, tensor.pin_memory()) for name, tensor in made.tensors.items() if experts.claim(name)]
    side = torch.cuda.Stream()
    for number, (name, tensor) in enumerate(pairs):
        with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
            late = torch.empty_like(tensor, device="cuda")
            if number % 2:
                torch.cuda._sleep(20_000_000)
            late.copy_(tensor, non_blocking=True)
            experts.push(name, late)
            del late
    layer = experts.finish()[0]
    with torch.cuda.stream(side):
        again = [torch.full(tensor.shape, 0x5A, dtype=torch.uint8, device="cuda") for _, tensor in pairs]
    torch.cuda.synchronize()
    assert again
    _assert_same(layer, want)


def test_stacked_tensors_of_an_engine() -> None:
    """MXFP4 as engines hold it, rows interleaved, through the Hopper layout and back."""
    g = torch.Generator("cuda").manual_seed(0)
    experts, hidden, inner = 8, 512, 256

    def matrix(n: int, k: int) -> ExpertTensors:
        codes = torch.randint(256, (experts, n, k // 2), generator=g, device="cuda", dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, n, k // 32), generator=g, device="cuda", dtype=torch.uint8)
        return ExpertTensors(codes, (scales,), bias=torch.randn(experts, n, generator=g, device="cuda"))

    w13, w2 = matrix(2 * inner, hidden), matrix(hidden, inner)
    x = torch.randn(32, hidden, generator=g, device="cuda").to(torch.bfloat16)
    ids = torch.rand(32, experts, generator=g, device="cuda").topk(2).indices.to(torch.int32)
    weights = torch.rand(32, 2, generator=g, device="cuda")
    outputs = []
    for backend in (OURS, "reference"):
        with NoCopyToCpu():
            layer = RoutedExperts.from_tensors(w13, w2, "mxfp4", rows="interleaved", top_k=2, backend=backend)
        outputs.append(layer(x, topk_ids=ids, topk_weights=weights).float())
    assert (outputs[0] - outputs[1]).norm() / outputs[1].norm() < 0.01


@pytest.mark.parametrize("spec", ["mxfp4", "fp8-block", "int4-g128"])
def test_a_large_layer_is_made_in_seconds(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of DeepSeek-V4-Flash's size with random weights; then the same as pushed tensors, expert by expert."""
    from lancebill.numbers.spec_names import parse_spec

    target = parse_spec(spec)
    start = time.perf_counter()
    layer = RoutedExperts.random(V4_FLASH, 0, device="cuda", backend=OURS, weights=target)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n{spec}: random in {seconds:.2f} s, {layer.report.bytes / seconds / 1e9:.1f} GB/s")  # type: ignore[union-attr]
    assert seconds < 10


def test_pushing_a_large_layer_expert_by_expert(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    config = {**V4_FLASH, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    tensors: dict[str, Tensor] = {}
    for expert in range(256):
        for name in names:
            n, k = (4096, 2048) if name == "down_proj" else (2048, 4096)
            prefix = f"model.layers.0.mlp.experts.{expert}.{name}"
            codes = torch.randint(0, 120, (n, k), device="cuda", dtype=torch.uint8)
            tensors[f"{prefix}.weight"] = codes.view(torch.float8_e4m3fn)
            tensors[f"{prefix}.weight_scale_inv"] = torch.full((n // 128, k // 128), 1e-3, device="cuda")
    size = sum(tensor.nbytes for tensor in tensors.values())
    experts = ModelExperts(config, device="cuda", backend=OURS)
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    assert not list(experts.divert(tensors.items()))
    layer = experts.finish()[0]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    working = torch.cuda.max_memory_allocated() - before - sum(p.nbytes for p in layer.parameters())
    with capsys.disabled():
        rate = f"{size / 1e9:.1f} GB in {seconds:.2f} s, {size / seconds / 1e9:.1f} GB/s"
        print(f"\npushed {rate}, {working >> 20} MiB more")
    assert seconds < 5 and working < 1 << 30
