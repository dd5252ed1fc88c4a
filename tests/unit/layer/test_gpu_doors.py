"""Every way to a layer on a GPU, from weights of the CPU: all that kernels are given is on that GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_launches import Given, given_to_kernels  # noqa: F401
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor

from lancebill import ExpertTensors, ModelExperts, QuantizedLinear, RoutedExperts
from lancebill.backends.cpu import native
from lancebill.backends.gpu import decode_attention, executor
from lancebill.backends.registry import registry
from lancebill.errors import LaunchError
from lancebill.layer.packed_module import PackedModule
from lancebill.moe.device import Device, parse_device
from lancebill.moe.dispatch import Indexed
from lancebill.numbers.codec import quantize
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing import judge
from lancebill.testing.checkpoints import Generated, save
from lancebill.testing.layers import layer_problem, make_layer, routing

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FORMATS = ("gptq", "awq", "mxfp4", "fp8", "compressed-tensors")


def from_checkpoint(made: Generated, folder: Path) -> RoutedExperts:
    return RoutedExperts.from_checkpoint(save(made, folder), 0, device="cuda", backend="hopper")


def from_model(made: Generated, folder: Path) -> RoutedExperts:
    model = ModelExperts(made.config, tensors=made.headers, device="cuda:0", backend="hopper")
    assert not [*model.divert(made.tensors.items())]
    return model.finish()[0]


def pushed(made: Generated, folder: Path, device: Callable[[int], torch.device] = lambda number: CPU) -> RoutedExperts:
    door = RoutedExperts.from_config(made.config, 0, tensors=made.headers, device="cuda", backend="hopper")
    door.load_weights((name, t.to(device(i))) for i, (name, t) in enumerate(made.tensors.items()))
    return door.finish()


def pushed_from_gpu(made: Generated, folder: Path) -> RoutedExperts:
    return pushed(made, folder, lambda number: GPU)


def pushed_from_both(made: Generated, folder: Path) -> RoutedExperts:
    return pushed(made, folder, lambda number: (GPU, CPU)[number % 2])


def pushed_from_two_gpus(made: Generated, folder: Path) -> RoutedExperts:
    return pushed(made, folder, lambda number: torch.device("cuda", number % 2))


def refitted(made: Generated, folder: Path) -> RoutedExperts:
    layer = RoutedExperts.random(made.config, 0, tensors=made.headers, device="cuda", backend="hopper")
    layer.load_weights((name, tensor) for name, tensor in made.tensors.items())
    return layer.finish()


DOORS = (from_checkpoint, from_model, pushed, pushed_from_gpu, pushed_from_both, pushed_from_two_gpus, refitted)


def canonical(layer: PackedModule) -> list[LogicalWeight]:
    unpacked = [layer.layout.unpack(shape, layer.packed[name]) for name, shape in layer.problem.matrices.items()]
    return [weight.to(CPU) for weight in unpacked]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_door_to_a_layer(given: Given, fmt: str, door: Callable[..., RoutedExperts], tmp_path: Path) -> None:
    made = make_checkpoint(fmt, layers=1)
    layer = door(made, tmp_path)
    assert given.packing and given.all_on(GPU)
    want = RoutedExperts.from_checkpoint(save(made, tmp_path / "again"), 0, backend="reference")
    assert all(got.equals(weight) for got, weight in zip(canonical(layer), canonical(want)))
    x, ids, weights = (tensor.to(GPU) for tensor in make_inputs())
    for _ in range(2):
        assert layer(x, topk_ids=ids, topk_weights=weights).device == GPU
    assert given.bound and given.all_on(GPU)


@pytest.mark.parametrize("behind", ["nothing", "codes", "scales", "all"])
def test_tensors_of_an_engine(given: Given, behind: str) -> None:
    """By default the layer is where w13's codes are."""
    spec = parse_spec("mxfp4")
    made = [quantize(torch.randn(rows, columns), spec) for rows, columns in ((128, 64), (64, 64))]

    def held(weight: LogicalWeight) -> ExpertTensors:
        codes, scales = (torch.stack([tensor, tensor]) for tensor in (weight.codes, weight.scales[0]))
        return ExpertTensors(
            codes if behind in ("codes", "all") else codes.to(GPU),
            (scales if behind in ("scales", "all") else scales.to(GPU),),
        )

    layer = RoutedExperts.from_tensors(*map(held, made), spec, top_k=1, device="cuda", backend="hopper")
    assert given.all_on(GPU)
    for got, want in zip(canonical(layer), made):
        assert torch.equal(got.codes, torch.stack([want.codes] * 2)) and got.device == CPU


@pytest.mark.parametrize("name", ["mxfp4", "int4-g64:fp16", "fp8-block"])
@pytest.mark.parametrize("bias", [None, "cpu", "cuda"])
def test_every_door_to_a_linear(given: Given, name: str, bias: str | None) -> None:
    """The crash of the issue: a matrix of the CPU for a linear layer of the GPU."""
    spec = parse_spec(name)
    first, second = (quantize(torch.randn(256, 128), spec) for _ in range(2))
    if bias is not None:
        first, second = (replace(weight, bias=torch.randn(256, device=bias)) for weight in (first, second))
    linear = QuantizedLinear.from_weight(first, device="cuda", backend="hopper")
    assert given.packing and given.all_on(GPU) and linear.stored.to(CPU).equals(first.to(CPU))
    linear.refit(second)
    assert given.all_on(GPU) and linear.stored.to(CPU).equals(second.to(CPU))
    linear.refit(first.to(GPU))
    for _ in range(2):
        assert linear(torch.zeros(3, 128, dtype=torch.bfloat16, device="cuda")).shape == (3, 256)
    assert given.bound and given.all_on(GPU)
    with pytest.raises(LaunchError, match="x is on another device than the layer; expected cuda:0; got cpu"):
        linear(torch.zeros(3, 128, dtype=torch.bfloat16))


def test_a_linear_of_a_checkpoint(given: Given, tmp_path: Path) -> None:
    folder = save(make_checkpoint("gptq", layers=1), tmp_path)
    name = "model.layers.0.mlp.experts.1.down_proj"
    linear = QuantizedLinear.from_checkpoint(folder, name, device="cuda", backend="hopper")
    assert given.packing and given.all_on(GPU)
    assert linear.stored.to(CPU).equals(QuantizedLinear.from_checkpoint(folder, name, backend="reference").stored)


def routed_layer(device: str, backend: str, **options: int) -> RoutedExperts:
    config = {
        "model_type": "qwen3_moe", "num_experts": SIZE.experts, "num_experts_per_tok": SIZE.top_k, "hidden_size": 128,
        "moe_intermediate_size": 128, "num_hidden_layers": 1, "norm_topk_prob": True,
    }  # fmt: skip
    return RoutedExperts.random(config, 0, device=device, backend=backend, weights="mxfp4", **options)


Call = Callable[[RoutedExperts, Tensor, Tensor, Tensor, Tensor], object]
CALLS: dict[str, Call] = {
    "forward": lambda layer, x, ids, weights, out: layer(x, topk_ids=ids, topk_weights=weights, out=out),
    "compute": lambda layer, x, ids, weights, out: layer.compute(x, ids, weights, out),
    "run_local": lambda layer, x, ids, weights, out: layer.run_local(x, Indexed(ids.int(), weights), out),
    "forward_routed": lambda layer, x, ids, weights, out: layer.forward_routed(x, logits_for(x)),
    "route": lambda layer, x, ids, weights, out: layer.route(x, logits_for(x)),
}


def logits_for(x: Tensor) -> Tensor:
    return torch.zeros(len(x), SIZE.experts, device=x.device)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("home", "backend"), [("cuda:0", "hopper"), ("cpu", "reference"), ("cpu", "auto")])
def test_inputs_of_another_device_are_refused(given: Given, call: str, home: str, backend: str) -> None:
    """First and after calls that were right; nothing is kept of them."""
    layer = routed_layer(home, backend)
    inputs = [*make_inputs(), torch.empty(9, SIZE.hidden, dtype=torch.bfloat16)]
    for _ in range(3):
        for other in {"cpu", "cuda:0", "cuda:1"} - {home}:
            with pytest.raises(LaunchError, match=f"; expected .*{home}.*; got .*{other}"):
                CALLS[call](layer, *(tensor.to(other) for tensor in inputs))
            if call in ("forward", "compute", "run_local"):
                for number in range(4):  # one of them
                    mixed = [tensor.to(other if i == number else home) for i, tensor in enumerate(inputs)]
                    with pytest.raises(LaunchError, match=f"; expected .*{home}.*; got .*{other}"):
                        CALLS[call](layer, *mixed)
        assert {key[0] for key in executor.WORKSPACES.eager} <= {0}
        assert all(held.memory.device == GPU for held in executor.WORKSPACES.eager.values())
        CALLS[call](layer, *(tensor.to(home) for tensor in inputs))


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_a_split_layer_refuses_them_before_its_parts_are_called(given: Given, other: str) -> None:
    layer = routed_layer("cuda:0", "auto", gpu_experts=2)
    x, ids, weights = (tensor.to(other) for tensor in make_inputs())
    for call in (layer, layer.compute):
        with pytest.raises(LaunchError, match=f"expected cuda:0; got {other}"):
            call(x, topk_ids=ids, topk_weights=weights, out=torch.empty_like(x))
    assert not given.bound and not executor.WORKSPACES.eager


def test_layers_that_are_loaded_later_are_on_the_gpu_of_now(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda` is torch's current GPU when the loader was made, not that of the thread that loads a layer."""
    made = make_checkpoint("mxfp4", layers=2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        model = ModelExperts(made.config, tensors=made.headers, device="cuda", backend="hopper")
    assert not [*model.divert(made.tensors.items())]
    assert {str(tensor.device) for layer in model.finish().values() for tensor in layer.parameters()} == {"cuda:1"}
    assert given.packing and given.all_on(torch.device("cuda", 1))


def test_the_judge_packs_on_its_device(given: Given) -> None:
    """`tests/backends` takes `cuda`, and its cases are made on the CPU."""
    backend, device = registry()["hopper"], parse_device("cuda")
    supported = [case for case in judge.cases() if not [*backend.reasons(case.problem, device)]]
    for case in supported[::8]:
        packed = judge.pack_weights(backend, case, device)
        assert {str(tensor.device) for held in packed.values() for tensor in held.values()} == {"cuda:0"}
    assert len(supported) > 16 and given.packing and given.all_on(GPU)


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
def test_the_cpu_library_is_given_memory_of_the_host(given: Given) -> None:
    """Weights that someone moved, and what a caller gives without the checks of a layer: one after the other."""
    backend = registry()["cpu"]
    problem = layer_problem("int4-g32-zp", "bf16", hidden=128, intermediate=64, experts=4, top_k=2, bias=True)
    weights, plan = make_layer(problem, "cpu", "cpu").weights, backend.plan(problem, 3, Device("cpu"))
    x, routed = torch.zeros(3, 128, dtype=torch.bfloat16), routing(problem, 3, 0, "cpu")
    backend.run(plan, x, routed, weights, torch.empty_like(x))
    for matrix, held in weights.items():
        for name in held.keys() & {"codes", "scales", "zeros", "bias"}:
            moved = {**weights, matrix: {**held, name: held[name].to(GPU)}}
            with pytest.raises(LaunchError, match="not where the CPU reads; expected cpu; got cuda:0"):
                backend.run(plan, x, routed, moved, torch.empty_like(x))
    ids, amounts, out = routed.ids, routed.weights, torch.empty_like(x)
    for wrong in (
        (x.to(GPU), Indexed(ids, amounts), out),
        (x, Indexed(ids.to(GPU), amounts), out),
        (x, Indexed(ids, amounts.to(GPU)), out),
        (x, Indexed(ids, amounts, torch.arange(4, dtype=torch.int32, device=GPU)), out),
        (x, Indexed(ids, amounts), out.to(GPU)),
    ):
        with pytest.raises(LaunchError, match="not where the CPU reads; expected cpu; got cuda:0"):
            backend.run(plan, wrong[0], wrong[1], weights, wrong[2])


def test_attention_kernels_read_one_gpu(given: Given) -> None:
    heads = decode_attention.Heads(4, 2, 64, torch.bfloat16, 0.125)
    q, position = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=GPU), torch.zeros(1, dtype=torch.int64, device=GPU)
    cache = torch.zeros(2, 1, 2, 16, 64, dtype=torch.bfloat16, device=GPU).unbind()
    mask = torch.ones(1, 1, 1, 16, dtype=torch.bool, device=GPU)
    for given_mask, place in ((mask.cpu(), position), (mask.to("cuda:1"), position), (mask, position.cpu())):
        with pytest.raises(LaunchError, match="is not where the kernel reads; expected cuda:0; got c"):
            decode_attention.attend(heads, q, cache, given_mask, place)
