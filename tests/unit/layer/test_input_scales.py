"""Input scales and pre-scales of a checkpoint: pulled, pushed, sliced for ranks, padded and refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.load.input_scales import combine_input_scales
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import BadValue, CheckpointProblems, MissingTensor
from lancebill.formats import registry
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.placement import Placement
from lancebill.numbers.activations import round_activations
from lancebill.numbers.codec import dequantize
from lancebill.numbers.spec import NVFP4, ActivationSpec
from lancebill.numbers.weight import FACTORS
from lancebill.testing.checkpoints import Generated, Geometry, generate, save

SIZE = Geometry(experts=4, hidden=128, intermediate=256, top_k=2)
ROW = names.find_family({"model_type": "qwen3_moe"})


def _make(fmt: str = "modelopt", example: str = "NVFP4_AWQ", seed: int = 0) -> Generated:
    chosen = next(e for e in registry()[fmt].examples() if e.name == example)
    return generate(chosen, ROW, ROW.forms[0], SIZE, seed=seed)


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(SIZE.experts, generator=g)[:2] for _ in range(7)])
    return torch.randn(7, SIZE.hidden, generator=g), ids, torch.rand(7, 2, generator=g)


def _expected_output(made: Generated, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """w2 @ (f2 * (silu(g @ (f1 * x)) * (u @ (f1 * x)))) in float64, slot by slot."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1])):
        projections = {name: made.weights[0, int(ids[token, slot]), name] for name in ("gate", "up", "down")}
        matrix = {name: dequantize(w).double() for name, w in projections.items()}
        factor = {name: w.inputs[FACTORS].double() for name, w in projections.items()}
        row = x[token].double() * factor["gate"]
        hidden = torch.nn.functional.silu(matrix["gate"] @ row) * (matrix["up"] @ row) * factor["down"]
        out[token] += weights[token, slot].double() * (matrix["down"] @ hidden)
    return out


@pytest.mark.parametrize("activations", [None, "checkpoint"])
@pytest.mark.parametrize("pad_to", [1, 96])
def test_tensor_parallel_ranks_add_up_with_pre_scales(tmp_path: Path, activations: str | None, pad_to: int) -> None:
    made = _make()
    folder = save(made, tmp_path / "m")
    x, ids, weights = _batch()
    options = {"activations": activations, "dtype": torch.float32}
    single = RoutedExperts.from_checkpoint(folder, layer=0, **options)
    want = single(x, topk_ids=ids, topk_weights=weights)
    if activations is None:
        torch.testing.assert_close(
            want.double(), _expected_output(made, x, ids, weights), rtol=1e-4, atol=1e-5 * float(want.abs().max())
        )
    total = torch.zeros_like(want)
    for rank in range(2):
        placement = Placement(tp_rank=rank, tp_size=2, pad_to=pad_to)
        part = RoutedExperts.from_checkpoint(folder, layer=0, placement=placement, **options)
        assert part.packed["w2"]["pre_scale"].shape == (SIZE.experts, part.problem.intermediate)
        total += part(x, topk_ids=ids, topk_weights=weights)
    assert (total - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("with_headers", [True, False], ids=["headers", "no-headers"])
def test_push_equals_pull_with_input_scales(tmp_path: Path, with_headers: bool) -> None:
    made = _make()
    placement = Placement(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2)
    options = {"activations": "checkpoint", "placement": placement}
    pulled = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0, **options)
    config = {**made.config.model, "quantization_config": {"quant_method": "modelopt", **made.config.quant}}
    loader = RoutedExperts.from_config(config, 0, tensors=made.headers if with_headers else None, **options)
    pairs = list(made.tensors.items())
    random.Random(0).shuffle(pairs)
    loader.load_weights(pairs)
    pushed = loader.finish()
    got, want = pushed.state_dict(), pulled.state_dict()
    assert got.keys() == want.keys() and {"w13_input_scale", "w2_pre_scale"} <= got.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_the_report_has_the_declared_activations(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(_make(), tmp_path / "m"), layer=0)
    assert layer.report is not None
    assert layer.report.declared_activations == {"w13": "nvfp4", "w2": "nvfp4"}
    assert layer.report.activations == {"w13": "bf16", "w2": "bf16"}


def test_static_activations_require_input_scales(tmp_path: Path) -> None:
    made = _make(example="FP8")
    for name in [n for n in made.tensors if n.endswith(".input_scale")]:
        del made.tensors[name]
    folder = save(made, tmp_path / "m")
    with pytest.raises(MissingTensor, match="layer 0, w13: fp8-static"):
        RoutedExperts.from_checkpoint(folder, layer=0, activations="fp8-static")
    with pytest.raises(MissingTensor, match="gate_proj: fp8-static"):
        QuantizedLinear.from_checkpoint(folder, "model.layers.0.mlp.experts.0.gate_proj", activations="fp8-static")


def test_a_pre_scale_missing_for_one_expert_is_refused(tmp_path: Path) -> None:
    made = _make()
    del made.tensors["model.layers.0.mlp.experts.2.up_proj.pre_quant_scale"]
    with pytest.raises(CheckpointProblems, match=r"expert 2, up: 'pre_quant_scale' is present for other experts"):
        RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)


def test_different_pre_scales_of_gate_and_up_are_refused(tmp_path: Path) -> None:
    made = _make()
    name = "model.layers.0.mlp.experts.3.up_proj.pre_quant_scale"
    made.tensors[name] = made.tensors[name] * 2
    with pytest.raises(BadValue, match="layer 0, expert 3: gate and up share an input"):
        RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)


def test_unequal_scales_of_gate_and_up(tmp_path: Path) -> None:
    """The shared input is divided by the larger of the two."""
    made = _make("compressed-tensors", "nvfp4-pack-quantized-nvfp4-div-input_global_scale")
    placement = Placement(ep_rank=0, ep_size=2)
    folder = save(made, tmp_path / "m")
    layer = RoutedExperts.from_checkpoint(folder, layer=0, activations="checkpoint", placement=placement)
    for slot in range(2):
        stored = [made.weights[0, slot, name].inputs["input_global_scale"] for name in ("gate", "up")]
        got = layer.packed["w13"]["input_scale"][slot].view(torch.float32)
        assert got == max(1 / stored[0], 1 / stored[1])


def test_a_linear_with_pre_scales(tmp_path: Path) -> None:
    made = _make()
    folder, name = save(made, tmp_path / "m"), "model.layers.0.mlp.experts.1.down_proj"
    weight, x = made.weights[0, 1, "down"], torch.randn(3, SIZE.intermediate)
    plain = QuantizedLinear.from_checkpoint(folder, name, dtype=torch.float32)
    want = (x * weight.inputs[FACTORS]) @ dequantize(weight).t()
    torch.testing.assert_close(plain(x), want, rtol=1e-5, atol=1e-3)
    declared = QuantizedLinear.from_checkpoint(folder, name, dtype=torch.float32, activations="checkpoint")
    assert declared.problem.activations == ActivationSpec(NVFP4)
    rows = round_activations(x * weight.inputs[FACTORS], declared.problem.activations, weight.inputs["input_scale"])
    torch.testing.assert_close(declared(x), rows @ dequantize(weight).t(), rtol=1e-5, atol=1e-3)


def test_pre_scales_are_sliced_with_the_columns() -> None:
    weight = _make().weights[0, 0, "down"]
    part = weight.cut((0, 64), (32, 160))
    assert torch.equal(part.inputs[FACTORS], weight.inputs[FACTORS][32:160])
    assert torch.equal(part.inputs["input_scale"], weight.inputs["input_scale"])
    assert torch.equal(dequantize(part), dequantize(weight)[:64, 32:160])


def test_combining_input_scales() -> None:
    one, two = {"input_scale": torch.tensor([0.5])}, {"input_scale": torch.tensor(2.0)}
    assert combine_input_scales([one, two]).scale == 2.0
    assert combine_input_scales([{}]) == combine_input_scales([])
    with pytest.raises(MissingTensor, match="input scale"):
        replace(combine_input_scales([]), pre_scale=torch.ones(4)).write(
            {"input_scale": torch.zeros(1, dtype=torch.int32)}
        )


def test_inputs_that_nobody_quantises_are_as_declared(tmp_path: Path) -> None:
    """Also where their dtype is another: the checkpoint says nothing about them."""
    example = next(e for e in registry()["mxfp4"].examples())
    folder = save(generate(example, ROW, ROW.forms[0], SIZE, seed=0), tmp_path / "m")
    for activations, said in (("bf16", False), ("int8", True)):
        layer = RoutedExperts.from_checkpoint(folder, layer=0, activations=activations, dtype=torch.float32)
        assert ("(the checkpoint declares none)" in str(layer.report)) == said
        assert ("the checkpoint declares" in str(layer.report)) == said
