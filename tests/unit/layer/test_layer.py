"""A loaded `RoutedExperts` layer: its outputs, copied, saved, cast, compiled, and called wrongly."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_checkpoints import ROWS, SIZE, make_checkpoint, make_inputs
from torch import Tensor

from lancebill.backends import base
from lancebill.backends.limited_dict import LimitedDict
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import LaunchError, MissingTensor, SpecError, WrongDtype
from lancebill.formats.base import Example
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device
from lancebill.moe.routing import Routing
from lancebill.testing.checkpoints import Generated, generate, save, small_size
from lancebill.testing.conformance import all_examples, whole_matrices

EXAMPLES = {"dense": "bf16", "gptq": "actorder", "compressed-tensors": "nvfp4", "fp8": "block", "mxfp4": "", "awq": ""}


def _bias(made: Generated, layer: int, expert: int, name: str) -> Tensor:
    weight = made.weights.get((layer, expert, name))
    bias = weight.bias if weight is not None else None
    return torch.zeros(()) if bias is None else bias.double()


def _expected_output(
    made: Generated, family: str, form: int, layer: int, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """silu(x G') * (x U') D', weighted and summed token by token in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    matrices = [whole_matrices(made, ROWS[family].forms[form], layer, e) for e in range(SIZE.experts)]
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            gate, up, down = (m.double() for m in matrices[expert])
            b_gate, b_up, b_down = (_bias(made, layer, expert, name) for name in ("gate", "up", "down"))
            row = x[token].double()
            hidden = torch.nn.functional.silu(gate @ row + b_gate) * (up @ row + b_up)
            out[token] += weights[token, slot].double() * (down @ hidden + b_down)
    return out


@pytest.mark.parametrize("fmt", sorted(EXAMPLES))
def test_forward_equals_a_token_by_token_reference(fmt: str, tmp_path: Path) -> None:
    made = make_checkpoint(fmt, EXAMPLES[fmt])
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=1, activations="fp32")
    x, ids, weights = make_inputs()
    got = layer(x, topk_ids=ids, topk_weights=weights)
    assert torch.equal(layer(x, ids, weights), got), "as torch.cuda.make_graphed_callables calls it"
    want = _expected_output(made, "qwen3_moe", 0, 1, x, ids, weights)
    error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
    assert error.max() < 4e-3, "one bf16 rounding of the output at the worst row"
    assert layer.report is not None
    assert layer.report.format == fmt
    assert "reference" in str(layer.report)


@pytest.mark.parametrize(("family", "form"), [("qwen3_moe", 1), ("mixtral", 0), ("qwen3_vl_moe", 1), ("dbrx", 0)])
def test_fused_stacked_and_transposed_tensors_compute_the_same(family: str, form: int, tmp_path: Path) -> None:
    made = make_checkpoint("dense", "fp32", family, form)
    folder = save(made, tmp_path / "m")
    layer = RoutedExperts.from_checkpoint(folder, layer=0, dtype=torch.float32)
    x, ids, weights = make_inputs()
    got = layer(x.float(), topk_ids=ids, topk_weights=weights)
    want = _expected_output(made, family, form, 0, x, ids, weights)
    assert ((got.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 1e-5


def test_the_number_of_kept_plans_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_PLANS", 2)
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint("dense", "bf16"), tmp_path / "m"), layer=0)
    for tokens in range(1, 6):
        x, ids, weights = make_inputs(tokens)
        layer(x, topk_ids=ids, topk_weights=weights)
    assert len(layer.executor._plans) <= 2 and len(layer.executor.fast_calls) <= 2


def test_a_full_dict_drops_everything_for_a_new_key() -> None:
    kept = LimitedDict[str, int](2)
    kept["a"], kept["b"], kept["a"] = 1, 2, 3
    assert kept == {"a": 3, "b": 2}
    kept["c"] = 4
    assert kept == {"c": 4} and copy.deepcopy(kept) == kept


def test_copies_of_a_layer_share_its_backend_and_plan(tmp_path: Path) -> None:
    """Backends keep state between calls, such as addresses, that must not be copied."""
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), layer=0)
    other = copy.deepcopy(layer)
    assert other.choice.backend is layer.choice.backend
    plan = layer.choice.backend.plan(layer.problem, 4, Device("cpu"))
    assert copy.deepcopy(plan) is plan


def test_a_compiled_copy_computes_with_its_own_weights(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint("dense", "bf16"), tmp_path / "m"), layer=0)
    x, ids, weights = make_inputs()
    other = copy.deepcopy(layer)
    for view in other.expert_weights():
        view.zero_()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    assert not compiled(x, topk_ids=ids, topk_weights=weights).any()
    assert layer(x, topk_ids=ids, topk_weights=weights).any()


def test_state_dict_round_trip_and_dtype_casts_change_nothing(tmp_path: Path) -> None:
    made = make_checkpoint("compressed-tensors", "nvfp4")
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)
    x, ids, weights = make_inputs()
    want = layer(x, topk_ids=ids, topk_weights=weights)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(layer.state_dict())
    for moved in (other, other.to(torch.float16), other.half(), other.to("cpu")):
        assert torch.equal(moved(x, topk_ids=ids, topk_weights=weights), want)


def test_compiled_forward_is_one_operator_and_equal(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = make_inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want, out = layer(x, topk_ids=ids, topk_weights=weights), torch.zeros_like(x)
    assert torch.equal(compiled(x, topk_ids=ids, topk_weights=weights), want)
    compiled(x, topk_ids=ids, topk_weights=weights, out=out)
    assert torch.equal(out, want)


def test_compiled_routing_is_traced_whole_and_equal(tmp_path: Path) -> None:
    """Zero experts, a correction bias and an output scale; the eager call uses the backend's kernel."""
    routing = Routing(
        SIZE.top_k, "sigmoid", True, zero_experts=2, routed_scaling_factor=2.0, apply_scale_to_output=True
    )
    folder = save(make_checkpoint("dense", "bf16"), tmp_path / "m")
    layer = RoutedExperts.from_checkpoint(folder, layer=0, routing=routing)
    columns, x = SIZE.experts + 2, make_inputs()[0]
    layer.take_router("correction", torch.linspace(-0.1, 0.2, columns))
    logits = torch.randn(len(x), columns, generator=torch.Generator().manual_seed(3)).bfloat16()
    routed = layer.route(x, logits)
    assert routed.identity_weight is not None and (routed.identity_weight > 0).any()
    own = layer(x, topk_ids=routed.ids, topk_weights=routed.weights).float()
    want = 2 * (own + routed.identity_weight.unsqueeze(-1) * x.float()).to(x.dtype)
    compiled = torch.compile(layer.forward_routed, backend="aot_eager", fullgraph=True)
    for got in (layer.forward_routed(x, logits), compiled(x, logits)):
        assert torch.equal(got, want)


def test_fp8_activations_are_used_when_requested(tmp_path: Path) -> None:
    folder = save(make_checkpoint("mxfp4"), tmp_path / "m")
    x, ids, weights = make_inputs()
    unrounded = RoutedExperts.from_checkpoint(folder, layer=0)
    fp8 = RoutedExperts.from_checkpoint(folder, layer=0, activations="fp8")
    assert fp8.report is not None and fp8.report.activations == {"w13": "fp8", "w2": "fp8"}
    a, b = (layer(x, topk_ids=ids, topk_weights=weights).float() for layer in (unrounded, fp8))
    assert 0.005 < (a - b).norm() / a.norm() < 0.1


def test_swapping_rows_of_expert_weights_swaps_experts(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = make_inputs()
    ones = torch.ones_like(weights)  # so that the order in which two experts are added changes no bit
    want = layer(x, topk_ids=ids, topk_weights=ones)
    for view in layer.expert_weights():
        assert view.shape[0] == SIZE.experts
        view[[0, 3]] = view[[3, 0]]
    swapped = torch.where(ids == 0, 3, torch.where(ids == 3, 0, ids))
    assert torch.equal(layer(x, topk_ids=swapped, topk_weights=ones), want)


def test_dtype_casts_keep_weights_and_router_bias(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = make_inputs()
    want, bias = layer(x, topk_ids=ids, topk_weights=weights), torch.rand(SIZE.experts) + 1
    layer.take_router("correction", bias)
    layer.to(torch.bfloat16).half()
    assert layer.router_correction is not None and torch.equal(layer.router_correction, bias)
    assert torch.equal(layer(x, topk_ids=ids, topk_weights=weights), want)


def test_calls_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = make_inputs()
    with pytest.raises(LaunchError, match="does not fit"):
        layer(x[:, :64], topk_ids=ids, topk_weights=weights)
    for wrong in (ids[:3], ids.float(), ids.to("meta"), ids > 1):
        with pytest.raises(LaunchError, match="topk_ids"):
            layer(x, topk_ids=wrong, topk_weights=weights)
    with pytest.raises(LaunchError, match="topk_weights"):
        layer(x, topk_ids=ids, topk_weights=ids)
    with pytest.raises(LaunchError, match="out does not fit"):
        layer(x, topk_ids=ids, topk_weights=weights, out=x[:1])
    assert layer(x[:0], topk_ids=ids[:0], topk_weights=weights[:0]).shape == (0, SIZE.hidden)
    with pytest.raises(WrongDtype, match="gate_proj"):
        layer.load_weights([("model.layers.0.mlp.experts.0.gate_proj.scales", torch.zeros(1, dtype=torch.complex64))])
    for wrong_option in ({"weights": "int9"}, {"device": "sm_90"}):
        with pytest.raises(SpecError):
            RoutedExperts.from_checkpoint(tmp_path / "m", layer=0, **wrong_option)


@pytest.mark.parametrize(("fmt", "example"), [pytest.param(f, e, id=f"{f.name}:{e.name}") for f, e in all_examples()])
def test_every_format_computes(fmt: object, example: Example) -> None:
    """Each variant of each format, from memory through the reference backend."""
    from lancebill.checkpoint.resolve import manifest as manifests
    from lancebill.layer.parts import pull
    from lancebill.layer.recipe import LoadOptions, Recipe

    family = example.config.model.get("model_type", "qwen3_moe")
    row = names.find_family({"model_type": family})
    made = generate(example, row, row.forms[0], small_size(example))
    manifest = manifests.build(made.config, made.headers, row)
    layer = RoutedExperts(pull(Recipe.make(manifest, 0, LoadOptions(dtype=torch.float32)), made.read))
    x = torch.randn(3, layer.problem.hidden)
    ids = torch.tensor([[0], [1], [0]]).expand(3, layer.problem.top_k).contiguous()
    ids[:, 1:] = -1
    weights = torch.ones(ids.shape)
    gate, up, down = whole_matrices(made, row.forms[0], 0, 0)
    got = layer(x, topk_ids=ids, topk_weights=weights)
    assert torch.isfinite(got).all()
    if up is not None and example.scheme.part("pre_quant_scale") is None and not example.bias:
        want = layer.problem.activation(torch.cat([x[0] @ gate.t(), x[0] @ up.t()])) @ down.t()
        torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_a_layer_computes_only_when_it_is_complete(tmp_path: Path) -> None:
    made = make_checkpoint()
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), 0, routing=Routing(2, expert_scale=True))
    x, ids, weights = make_inputs()
    with pytest.raises(LaunchError, match="a scale for each expert"):
        layer.route(x, torch.randn(len(x), SIZE.experts))
    with pytest.raises(LaunchError, match="without a checkpoint's config"):
        RoutedExperts(LayerParts(layer.choice, layer.packed)).load_weights(made.tensors.items())
    layer.load_weights([next(iter(made.tensors.items()))])
    with pytest.raises(MissingTensor, match="pushed but not finished"):
        layer(x, topk_ids=ids, topk_weights=weights)


def test_logits_with_a_wrong_expert_count_are_refused(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint("dense", "bf16"), tmp_path / "m"), layer=0)
    x = make_inputs()[0]
    for columns in (SIZE.experts - 1, SIZE.experts + 1):
        with pytest.raises(LaunchError, match="logits do not fit"):
            layer.forward_routed(x, torch.zeros(len(x), columns))
    layer.take_router("bias", torch.zeros(1))
    with pytest.raises(LaunchError, match="bias does not fit"):
        layer.forward_routed(x, torch.zeros(len(x), SIZE.experts))


def test_apply_scale_to_output_gives_the_same_result(tmp_path: Path) -> None:
    folder = save(make_checkpoint("dense", "fp32"), tmp_path / "m")
    folded = Routing(scoring="softmax", top_k=SIZE.top_k, renormalize=True, routed_scaling_factor=2.5)
    outside = replace(folded, apply_scale_to_output=True)
    x = make_inputs()[0].float()
    logits = torch.randn(x.shape[0], SIZE.experts, generator=torch.Generator().manual_seed(5))
    a, b = (
        RoutedExperts.from_checkpoint(folder, layer=0, dtype=torch.float32, routing=r).forward_routed(x, logits)
        for r in (folded, outside)
    )
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))
