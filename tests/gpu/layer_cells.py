"""Cells of layers and linears: every way to make one, from tensors on the CPU, on the device, or some on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from unittest import SkipTest

import torch
from cells import Cell, Place
from layer_checkpoints import make_checkpoint, make_inputs
from torch import Tensor

from lancebill import ExpertTensors, ModelExperts, QuantizedLinear, RoutedExperts
from lancebill.backends.cpu import native
from lancebill.errors import LancebillError, UnsupportedProblem
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing.checkpoints import Generated, save
from lancebill.testing.layers import worst_row

BOUND = 0.02  # of a row: bf16 inputs, hidden values and outputs
Move = Callable[[Tensor, int], Tensor]  # a tensor and its number to where it shall be
LAYERS = (
    ("fp8", "block-F32", "qwen3_moe"), ("gptq", "int4-g32:fp16-zp-gptq-actorder", "qwen3_moe"),
    ("mxfp4", "", "gpt_oss"), ("modelopt", "NVFP4", "qwen3_moe"),
    ("compressed-tensors", "pack-quantized-int4-g64", "qwen3_moe"),
    ("awq", "int4-g32-zp", "qwen3_moe"), ("gguf", "", "gguf"), ("dense", "bf16", "gpt_oss"),
)  # fmt: skip
STACKS = ("mxfp4", "int4-g32", "int4-g32-zp:fp16", "int8", "fp8-channel", "fp8-block", "nvfp4", "bf16")
LINEARS = ("int8", "int4-g32", "int4-g32-zp", "int4-g128:fp16", "fp8-block", "fp8-channel", "mxfp4", "nvfp4", "nf4")


def layer_cells() -> Iterator[Cell]:
    for fmt, part, family in LAYERS:
        for how, run in WAYS.items():
            if fmt == "gguf" and run in FROM_FILES:
                continue  # whole models have those files
            yield Cell("layer", f"{how}, {fmt} {part}", 2, partial(run_layer, fmt, part, family, run))
    for where in MOVES:
        for spec in STACKS:
            yield Cell("layer", f"from_tensors on {where}, {spec}", 2, partial(run_stack, spec, where))
        for spec in LINEARS:
            yield Cell("linear", f"weight on {where}, {spec}", 2, partial(run_linear, spec, where))
    yield Cell("linear", "from_checkpoint", 2, run_stored_linear)
    yield Cell("layer", "inputs on another device", 2, run_wrong_inputs)
    yield Cell("layer", "default device", 2, run_default_device)


def _mover(where: str, device: str) -> Move:
    """cpu, device, or both: every second tensor on the device."""

    def move(tensor: Tensor, number: int) -> Tensor:
        return tensor.to(device) if where == "device" or (where == "both" and number % 2) else tensor

    return move


MOVES = ("cpu", "device", "both")


def check_rows(got: Tensor, want: Tensor, what: str) -> None:
    error = worst_row(got.cpu().flatten(0, -2), want.cpu().flatten(0, -2))
    assert error <= BOUND, f"{what}: a row differs by {error:.3f}"


# Layers


def run_layer(fmt: str, part: str, family: str, run: Callable[..., RoutedExperts], place: Place) -> None:
    """Made in one way, called with different numbers of rows, moved away and back."""
    made = make_checkpoint(fmt, part, family)
    judge = _reference(made)
    layer = run(made, place)
    for rows in (9, 1, 70):
        x, ids, weights = make_inputs(rows, seed=rows)
        want = judge(x, topk_ids=ids, topk_weights=weights)
        check_rows(layer(*(t.to(place.device) for t in (x, ids, weights))), want, f"{rows} rows")
    if layer.is_split or place.device == "cpu":
        return
    before = {name: tensor.cpu() for name, tensor in layer.state_dict().items()}
    layer.to("cpu")
    check_rows(layer(x, topk_ids=ids, topk_weights=weights), want, "on the CPU")
    layer.to(place.device)
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in layer.state_dict().items()), "moved"
    check_rows(layer(*(t.to(place.device) for t in (x, ids, weights))), want, "back on the device")


def _reference(made: Generated) -> RoutedExperts:
    return RoutedExperts(_pulled(made))


def _pulled(made: Generated) -> object:
    from lancebill.layer.parts import pull

    return pull(ModelExperts(made.config, tensors=made.headers, backend="reference").recipe(0), made.read)


def _from_checkpoint(made: Generated, place: Place, **options: object) -> RoutedExperts:
    return RoutedExperts.from_checkpoint(save(made, place.folder / "model"), 0, device=place.device, **options)


def _split(made: Generated, place: Place) -> RoutedExperts:
    if native.library() is None:
        raise SkipTest("the C++ library is not built")
    try:
        return _from_checkpoint(made, place, gpu_experts=2)
    except UnsupportedProblem as error:  # unquantised experts: the CPU's kernels have none
        raise SkipTest(error.what) from error


def _pushed(made: Generated, place: Place, where: str, known: bool = True) -> RoutedExperts:
    pushed = RoutedExperts.from_config(
        made.config, 0, tensors=made.headers if known else None, device=place.device, router=False
    )
    move = _mover(where, place.device)
    for number, (name, tensor) in enumerate(made.tensors.items()):
        claim = pushed.claim(name)
        if claim is not None:
            pushed.push(claim, name, move(tensor, number))
    return pushed.finish()


def _model_experts(made: Generated, place: Place) -> RoutedExperts:
    """Each expert has tensors on both devices."""
    experts = ModelExperts(made.config, tensors=made.headers, device=place.device, router=False)
    move = _mover("both", place.device)
    assert not list(experts.divert((name, move(t, i)) for i, (name, t) in enumerate(made.tensors.items())))
    return experts.finish()[0]


def _refitted(made: Generated, place: Place, where: str) -> RoutedExperts:
    """First with other numbers, and called with them."""
    zeroed = replace(made, tensors={name: tensor.clone() for name, tensor in made.tensors.items()})
    zeroed.tensors |= {name: tensor.flip(0) for name, tensor in made.tensors.items() if tensor.ndim > 1}
    layer = _pushed(zeroed, place, "cpu")
    layer(*(t.to(place.device) for t in make_inputs(9, seed=9)))
    move = _mover(where, place.device)
    for number, (name, tensor) in enumerate(made.tensors.items()):
        claim = layer.claim(name)
        if claim is not None:
            layer.push(claim, name, move(tensor, number))
    layer.finish()
    return layer


WAYS: Mapping[str, Callable[[Generated, Place], RoutedExperts]] = {
    "from_checkpoint": _from_checkpoint,
    "from_checkpoint split": _split,
    "from_config on cpu": partial(_pushed, where="cpu"),
    "from_config on device": partial(_pushed, where="device", known=False),
    "from_config on both": partial(_pushed, where="both"),
    "ModelExperts on both": _model_experts,
    "refit on cpu": partial(_refitted, where="cpu"),
    "refit on device": partial(_refitted, where="device"),
    "refit on both": partial(_refitted, where="both"),
}
FROM_FILES = (_from_checkpoint, _split)


def run_stack(name: str, where: str, place: Place) -> None:
    """Tensors of an engine, all experts stacked."""
    spec, move = parse_spec(name), _mover(where, place.device)

    def matrix(n: int, k: int) -> tuple[ExpertTensors, Tensor]:
        weights = [quantize(torch.randn(n, k) * k**-0.5, spec) for _ in range(4)]
        scales = [torch.stack(levels) for levels in zip(*(w.scales for w in weights))]
        whole = [level.block == (0, 0) for level in spec.scales]
        scales = [s.flatten(1) if s.shape[-1] == 1 else s for s in scales]
        scales = [s.flatten() if alone else s for s, alone in zip(scales, whole)]
        zero = None if spec.zero is None else move(torch.stack([w.zero for w in weights if w.zero is not None]), 1)
        codes = move(torch.stack([w.codes for w in weights]), 0)
        dense = torch.stack([dequantize(w) for w in weights])
        return ExpertTensors(codes, tuple(move(s, i + 1) for i, s in enumerate(scales)), zero), dense

    (w13, gate_up), (w2, down) = matrix(512, 256), matrix(256, 256)
    layer = RoutedExperts.from_tensors(w13, w2, name, top_k=2, device=place.device)
    x = torch.randn(9, 256).bfloat16()
    ids, weights = torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    got = layer(*(t.to(place.device) for t in (x, ids, weights)))
    want = torch.zeros(9, 256)
    for row, slot in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
        gate, up = (gate_up[ids[row, slot]] @ x[row].float()).chunk(2)
        want[row] += weights[row, slot] * (down[ids[row, slot]] @ (torch.nn.functional.silu(gate) * up))
    check_rows(got, want, name)


def run_wrong_inputs(place: Place) -> None:
    """An input on another device is an error that says so, and the layer works after it."""
    if place.device == "cpu":
        raise SkipTest("needs a second device")
    made = make_checkpoint("mxfp4", "", "gpt_oss")
    layer = _pushed(made, place, "cpu")
    given = make_inputs(9)
    linear = _linear(quantize(torch.randn(256, 128), parse_spec("int8")), place.device)
    on_device = [t.to(place.device) for t in given]
    for number, tensor in enumerate(given):
        mixed = [*on_device[:number], tensor, *on_device[number + 1 :]]
        _refused(lambda mixed=mixed: layer(*mixed))
    _refused(lambda: linear(given[0]))
    check_rows(layer(*on_device), _reference(made)(*given), "after refused calls")


def _refused(call: Callable[[], object]) -> None:
    try:
        call()
    except LancebillError as error:
        assert "cpu" in str(error), error
    else:
        raise AssertionError("an input on another device was computed")


def run_default_device(place: Place) -> None:
    """As engines set it while they build models."""
    made = make_checkpoint("gptq", "int4-g32:fp16-zp-gptq-actorder")
    x, ids, weights = make_inputs(9)
    want = _reference(made)(x, topk_ids=ids, topk_weights=weights)
    linear = quantize(torch.randn(256, 128), parse_spec("int8"))
    folder = save(made, place.folder / "model")
    try:
        torch.set_default_device(place.device)
        for device in dict.fromkeys((place.device, "cpu")):
            layer = RoutedExperts.from_checkpoint(folder, 0, device=device)
            check_rows(layer(*(t.to(device) for t in (x, ids, weights))), want, f"layer on {device}")
            check_rows(_linear(linear, device)(x.to(device)), x.float() @ dequantize(linear).T, f"linear on {device}")
    finally:
        torch.set_default_device(None)
    check_rows(RoutedExperts.from_checkpoint(folder, 0)(x, topk_ids=ids, topk_weights=weights), want, "afterwards")


# Linears


def _linear(weight: LogicalWeight, device: str) -> QuantizedLinear:
    return QuantizedLinear.from_weight(weight, device=device)


def run_linear(name: str, where: str, place: Place) -> None:
    """`from_weight`, `refit`, `.to()` away and back, with tensors on the CPU, on the device, or codes there alone."""
    first, second = (_weight(name, where, place.device, seed) for seed in (0, 1))
    layer = _linear(first[0], place.device)
    for number, (weight, dense, bias) in enumerate((first, second, first)):
        if number:
            layer.refit(weight)
        for shape in ((1, 256), (2, 5, 256), (70, 256), (0, 256)):
            x = torch.randn(shape).bfloat16()
            if x.numel():
                check_rows(layer(x.to(place.device)), x.float() @ dense.T + bias, f"{list(shape)}")
            else:
                assert layer(x.to(place.device)).shape == (0, 384)
    layer.to("cpu")
    layer.to(place.device)
    x = torch.randn(3, 256).bfloat16()
    check_rows(layer(x.to(place.device)), x.float() @ first[1].T + first[2], "moved away and back")


def _weight(name: str, where: str, device: str, seed: int) -> tuple[LogicalWeight, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = quantize(torch.randn(384, 256, generator=generator) / 16, parse_spec(name))
    bias = torch.randn(384, generator=generator).bfloat16()
    dense = dequantize(weight)
    there = weight.to(torch.device("cpu" if where == "cpu" else device))
    return replace(there, bias=bias.to(device) if where == "device" else bias), dense, bias.float()


def run_stored_linear(place: Place) -> None:
    from model_cells import source, tiny

    from lancebill.formats import registry

    example = next(e for e in registry()["gptq"].examples() if e.name == "int4-g32:fp16-zp-gptq-actorder")
    packed, plain = place.folder / "packed", place.folder / "plain"
    tiny.quantized_copy(
        source(place.folder / "source"),
        packed,
        plain,
        dict(example.config.quant),
        example.scheme,
        lambda m: "attn." in m,
    )
    module = "model.layers.1.self_attn.o_proj"
    judge = QuantizedLinear.from_checkpoint(plain, module, backend="reference")
    x = torch.randn(5, 256).bfloat16()
    for weights in (None, "int8"):
        layer = QuantizedLinear.from_checkpoint(packed, module, device=place.device, weights=weights)
        error = worst_row(layer(x.to(place.device)).cpu(), judge(x))
        assert error <= (BOUND if weights is None else 2 * BOUND), f"{weights}: {error:.3f}"
