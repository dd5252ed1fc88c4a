"""`RoutedExperts` as its user holds it: loaded from real files, pushed, moved, saved, compiled."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.backends import base
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import CheckpointProblems, LaunchError, MissingTensor, SpecError, WrongDtype, WrongShape
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.layer import push
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.placement import Placement
from lancebill.moe.problem import Device
from lancebill.moe.routing import Routing
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import BF16, F16, F32
from lancebill.testing.checkpoints import Generated, Geometry, generate, save
from lancebill.testing.conformance import all_examples, whole_matrices

SIZE = Geometry(experts=4, hidden=128, intermediate=256, layers=2, top_k=2)
ROWS = {row.family: row for row in names.TABLE}
PICKED = {"dense": "bf16", "gptq": "actorder", "compressed-tensors": "nvfp4", "fp8": "block", "mxfp4": "", "awq": ""}


def _example(fmt: str, part: str = "") -> Example:
    return next(e for e in registry()[fmt].examples() if part in e.name)


def _make(fmt: str = "gptq", part: str = "", family: str = "qwen3_moe", form: int = 0, seed: int = 0) -> Generated:
    row = ROWS[family]
    return generate(_example(fmt, part), row, row.forms[form], SIZE, seed=seed)


def _inputs(tokens: int = 9, seed: int = 0, experts: int = SIZE.experts) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, SIZE.hidden, generator=g).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=g)[: SIZE.top_k] for _ in range(tokens)])
    return x, ids, torch.rand(tokens, SIZE.top_k, generator=g)


def _bias(made: Generated, layer: int, expert: int, name: str) -> Tensor:
    weight = made.weights.get((layer, expert, name))
    held = weight.bias if weight is not None else None
    return torch.zeros(()) if held is None else held.double()


def _by_hand(made: Generated, family: str, form: int, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """silu(x G') * (x U') D', weighted and summed, written out token by token in float64."""
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


@pytest.mark.parametrize("fmt", sorted(PICKED))
def test_forward_equals_the_sum_written_out_by_hand(fmt: str, tmp_path: Path) -> None:
    made = _make(fmt, PICKED[fmt])
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=1, activations="fp32")
    x, ids, weights = _inputs()
    got = layer(x, topk_ids=ids, topk_weights=weights)
    want = _by_hand(made, "qwen3_moe", 0, 1, x, ids, weights)
    error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
    assert error.max() < 4e-3, "one bf16 rounding of the output at the worst row"
    assert layer.report is not None
    assert layer.report.format == fmt
    assert "reference" in str(layer.report)


@pytest.mark.parametrize(("family", "form"), [("qwen3_moe", 1), ("mixtral", 0), ("qwen3_vl_moe", 1), ("dbrx", 0)])
def test_fused_stacked_and_transposed_spellings_compute_the_same(family: str, form: int, tmp_path: Path) -> None:
    made = _make("dense", "fp32", family, form)
    folder = save(made, tmp_path / "m")
    layer = RoutedExperts.from_checkpoint(folder, layer=0, dtype=torch.float32)
    x, ids, weights = _inputs()
    got = layer(x.float(), topk_ids=ids, topk_weights=weights)
    want = _by_hand(made, family, form, 0, x, ids, weights)
    assert ((got.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 1e-5


def _same(a: RoutedExperts, b: RoutedExperts) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("known", [True, False], ids=["headers-known", "headers-unknown"])
@pytest.mark.parametrize("form", [0, 1], ids=["per-expert", "stacked"])
@pytest.mark.parametrize("fmt", ["gptq", "dense", "fp8"])
def test_push_in_any_order_equals_pull(fmt: str, form: int, known: bool, tmp_path: Path) -> None:
    if fmt == "gptq" and form == 1:
        fmt = "compressed-tensors"
    made = _make(fmt, form=form)
    folder = save(made, tmp_path / "m")
    pulled = RoutedExperts.from_checkpoint(folder, layer=0)
    config = Checkpoint.open(folder).config.model
    coming = RoutedExperts.from_config(config, 0, tensors=made.headers if known else None)
    pairs = list(made.tensors.items())
    random.Random(3).shuffle(pairs)
    taken = coming.load_weights(iter(pairs))
    assert taken == {name for name in made.tensors if ".layers.0." in name}
    pushed = coming.finish()
    assert _same(pulled, pushed)
    assert pulled.report is not None and pushed.report is not None
    assert replace(pushed.report, seconds=0) == replace(pulled.report, seconds=0)


def test_a_layer_is_checked_by_itself(tmp_path: Path) -> None:
    """Looking at all layers of a large model for each of them would take longer than loading it."""
    made = _make("gptq")
    lost = "model.layers.1.mlp.experts.2.up_proj.scales"
    del made.tensors[lost]
    folder = save(made, tmp_path / "m")
    layer = RoutedExperts.from_checkpoint(folder, layer=0)
    assert layer.problem.experts == SIZE.experts
    assert layer.refit is not None
    kept = layer.refit.recipe.manifest.tensors
    assert kept and not any(".layers.1." in name for name in kept), "nor need it remember them"
    with pytest.raises(CheckpointProblems, match=lost):
        RoutedExperts.from_checkpoint(folder, layer=1)
    with pytest.raises(MissingTensor, match="expected one of 0, 1"):
        RoutedExperts.from_checkpoint(folder, layer=2)


def test_a_refit_takes_only_what_the_layer_was_planned_for(tmp_path: Path) -> None:
    """A plan's slice of a larger tensor, or of one of another type, would be other numbers without a word."""
    made = _make("fp8", "channel-dynamic")
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    stored = made.tensors[name]
    for wrong, kind in ((torch.cat([stored, stored]), WrongShape), (stored.to(torch.bfloat16), WrongDtype)):
        with pytest.raises(kind, match=r"gate_proj\.weight.*expected"):
            layer.load_weights([(name, wrong)])
    x, ids, weights = _inputs()
    assert torch.isfinite(layer(x, topk_ids=ids, topk_weights=weights)).all()


def test_what_a_router_was_given_may_be_overwritten(tmp_path: Path) -> None:
    made = _make("dense", "bf16", "deepseek_v3")
    coming = RoutedExperts.from_config(dict(made.config.model), 0)
    bias = torch.zeros(SIZE.experts)
    coming.load_weights([("model.layers.0.mlp.gate.e_score_correction_bias", bias), *made.tensors.items()])
    layer = coming.finish()
    bias.fill_(7)
    assert layer.router_correction is not None and not layer.router_correction.any()


def test_plans_of_many_batches_are_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_PLANS", 2)
    layer = RoutedExperts.from_checkpoint(save(_make("dense", "bf16"), tmp_path / "m"), layer=0)
    for tokens in range(1, 6):
        x, ids, weights = _inputs(tokens)
        layer(x, topk_ids=ids, topk_weights=weights)
    assert len(layer.executor._plans) <= 2 and len(layer.executor.fast_calls) <= 2


def test_the_report_names_keys_of_the_config_that_nobody_knows(tmp_path: Path) -> None:
    made = _make("gptq")
    made.config = replace(made.config, quant={**made.config.quant, "mystery": 1})
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)
    assert layer.report is not None and layer.report.unknown_keys == ("mystery",)
    assert "config keys gptq does not know: mystery" in str(layer.report)


def test_finish_names_every_tensor_that_never_came(tmp_path: Path) -> None:
    made = _make("gptq")
    config = Checkpoint.open(save(made, tmp_path / "m")).config.model
    lost = "model.layers.0.mlp.experts.2.up_proj.scales"
    for known in (made.headers, None):
        coming = RoutedExperts.from_config(config, 0, tensors=known)
        coming.load_weights((n, t) for n, t in made.tensors.items() if n != lost)
        with pytest.raises(CheckpointProblems, match=r"expert 2, up.*\n?.*") as caught:
            coming.finish()
        assert lost in str(caught.value)
        x, ids, weights = _inputs()
        coming.load_weights([(lost, made.tensors[lost])])
        layer = coming.finish()
        assert torch.isfinite(layer(x, topk_ids=ids, topk_weights=weights)).all()


def test_a_second_push_refits_a_live_layer(tmp_path: Path) -> None:
    old, new = _make("gptq", seed=1), _make("gptq", seed=2)
    live = RoutedExperts.from_checkpoint(save(old, tmp_path / "old"), layer=0)
    fresh = RoutedExperts.from_checkpoint(save(new, tmp_path / "new"), layer=0)
    address = {n: p.data_ptr() for n, p in live.named_parameters()}
    live.load_weights(new.tensors.items())
    live.finish()
    assert _same(live, fresh)
    assert address == {n: p.data_ptr() for n, p in live.named_parameters()}, "refit in place"


@pytest.mark.parametrize("form", [0, 1], ids=["each", "stacked"])
def test_every_expert_is_packed_once_and_let_go(form: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _make("dense", "bf16", form=form)
    config, packed = Checkpoint.open(save(made, tmp_path / "m")).config.model, []
    original = push.load_expert
    monkeypatch.setattr(push, "load_expert", lambda *args: packed.append(args[2]) or original(*args))
    layer: Any = RoutedExperts.from_config(config, 0, tensors=made.headers)
    for _ in range(2):  # a load, and a refit
        packed.clear()
        layer.load_weights(made.tensors.items())
        layer = layer.finish()
        assert layer.refit is not None and not layer.refit.pending
        assert sorted(packed) == list(range(SIZE.experts))


def test_expert_parallel_ranks_take_only_their_own(tmp_path: Path) -> None:
    made = _make("gptq")
    folder = save(made, tmp_path / "m")
    x, ids, weights = _inputs()
    whole = RoutedExperts.from_checkpoint(folder, layer=0)(x.float(), topk_ids=ids, topk_weights=weights)
    parts = []
    for rank in range(2):
        layer = RoutedExperts.from_checkpoint(folder, layer=0, placement=Placement(ep_rank=rank, ep_size=2))
        assert layer.problem.experts == 2
        parts.append(layer(x.float(), topk_ids=ids, topk_weights=weights))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))


def test_copies_of_a_layer_share_its_backend_and_plan(tmp_path: Path) -> None:
    """What backends keep between calls, addresses among it, cannot be copied and need not be."""
    layer = RoutedExperts.from_checkpoint(save(_make(), tmp_path / "m"), layer=0)
    other = copy.deepcopy(layer)
    assert other.choice.backend is layer.choice.backend
    plan = layer.choice.backend.plan(layer.problem, 4, Device("cpu"))
    assert copy.deepcopy(plan) is plan


def test_a_compiled_copy_computes_with_its_own_weights(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(_make("dense", "bf16"), tmp_path / "m"), layer=0)
    x, ids, weights = _inputs()
    other = copy.deepcopy(layer)
    for view in other.expert_weights():
        view.zero_()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    assert not compiled(x, topk_ids=ids, topk_weights=weights).any()
    assert layer(x, topk_ids=ids, topk_weights=weights).any()


def test_state_dict_round_trip_and_dtype_casts_change_nothing(tmp_path: Path) -> None:
    made = _make("compressed-tensors", "nvfp4")
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)
    x, ids, weights = _inputs()
    want = layer(x, topk_ids=ids, topk_weights=weights)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(layer.state_dict())
    for moved in (other, other.to(torch.float16), other.half(), other.to("cpu")):
        assert torch.equal(moved(x, topk_ids=ids, topk_weights=weights), want)


def test_compiled_forward_is_one_operator_and_equal(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(_make("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = _inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want, out = layer(x, topk_ids=ids, topk_weights=weights), torch.zeros_like(x)
    assert torch.equal(compiled(x, topk_ids=ids, topk_weights=weights), want)
    compiled(x, topk_ids=ids, topk_weights=weights, out=out)
    assert torch.equal(out, want)


def test_requantising_while_loading_reports_its_cost(tmp_path: Path) -> None:
    folder = save(_make("dense", "bf16"), tmp_path / "m")
    rules = [("0", {"w13": "mxfp4", "w2": "int4-g64"}), ("1-9", "fp8-channel")]
    first = RoutedExperts.from_checkpoint(folder, layer=0, weights=rules)
    second = RoutedExperts.from_checkpoint(folder, layer=1, weights=rules)
    assert first.report is not None and second.report is not None
    assert first.report.kept == {"w13": "mxfp4", "w2": "int4-g64"}
    assert second.report.kept["w2"].startswith("fp8")
    assert 0.02 < first.report.losses["w13"].rms_error < 0.2
    x, ids, weights = _inputs()
    exact = RoutedExperts.from_checkpoint(folder, layer=0)(x, topk_ids=ids, topk_weights=weights)
    near = first(x, topk_ids=ids, topk_weights=weights)
    relative = (near.float() - exact.float()).norm() / exact.float().norm()
    assert 0.01 < relative < 0.4


@pytest.mark.parametrize("fmt", sorted({fmt.name for fmt, example in all_examples() if example.scheme.act_order}))
def test_an_act_order_outlives_a_spec_that_keeps_the_codes(fmt: str, tmp_path: Path) -> None:
    """Asked for as it is stored, or with wider scales or finer blocks: the same numbers."""
    example = next(e for e in registry()[fmt].examples() if e.scheme.act_order)
    folder = save(_make(fmt, example.name), tmp_path / "m")
    spec = example.scheme.spec
    x, ids, weights = _inputs()

    def computed(**options: object) -> Tensor:
        layer = RoutedExperts.from_checkpoint(folder, 0, dtype=torch.float32, backend="reference", **options)
        return layer(x.float(), topk_ids=ids, topk_weights=weights)

    want = computed()
    wider = replace(spec, scales=tuple(replace(s, dtype=F32) for s in spec.scales))
    for target in (spec, wider, spec.map_blocks(1, 16), {"w13": spec}, {"w2": spec}):
        assert torch.equal(computed(weights=target), want), target
    rounded = replace(spec, scales=tuple(replace(s, dtype=F16 if s.dtype == BF16 else BF16) for s in spec.scales))
    for target in ("bf16", rounded, {"w13": "int8-g32"}, {"w2": "int8-g32"}, {"w13": "fp8-block"}):
        error = (computed(weights=target) - want).norm() / want.norm()
        assert error < 0.06, target


def test_asking_for_eight_bit_activations_gives_them(tmp_path: Path) -> None:
    folder = save(_make("mxfp4"), tmp_path / "m")
    x, ids, weights = _inputs()
    wide = RoutedExperts.from_checkpoint(folder, layer=0)
    narrow = RoutedExperts.from_checkpoint(folder, layer=0, activations="fp8")
    assert narrow.report is not None and narrow.report.activations == {"w13": "fp8", "w2": "fp8"}
    a, b = (layer(x, topk_ids=ids, topk_weights=weights).float() for layer in (wide, narrow))
    assert 0.005 < (a - b).norm() / a.norm() < 0.1


def test_expert_weights_are_views_that_move_an_expert(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(_make("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = _inputs()
    want = layer(x, topk_ids=ids, topk_weights=weights)
    for view in layer.expert_weights():
        assert view.shape[0] == SIZE.experts
        view[[0, 3]] = view[[3, 0]]
    swapped = torch.where(ids == 0, 3, torch.where(ids == 3, 0, ids))
    assert torch.equal(layer(x, topk_ids=swapped, topk_weights=weights), want)


def test_another_float_type_rounds_nothing(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(_make("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = _inputs()
    want, bias = layer(x, topk_ids=ids, topk_weights=weights), torch.rand(SIZE.experts) + 1
    layer.take_router("correction", bias)
    layer.to(torch.bfloat16).half()
    assert layer.router_correction is not None and torch.equal(layer.router_correction, bias)
    assert torch.equal(layer(x, topk_ids=ids, topk_weights=weights), want)


def test_quantized_linear_loads_any_module_by_name(tmp_path: Path) -> None:
    made = _make("gptq", "int4-g64:fp16-zp-gptq_v2")
    name = "model.layers.1.mlp.experts.3.down_proj"
    linear = QuantizedLinear.from_checkpoint(save(made, tmp_path / "m"), name, activations="fp32")
    x = torch.randn(2, 5, SIZE.intermediate)
    want = x @ dequantize(made.weights[1, 3, "down"]).t()
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-4)


def test_calls_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(_make("gptq"), tmp_path / "m"), layer=0)
    x, ids, weights = _inputs()
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
    size = Geometry(experts=2, hidden=example.k, intermediate=example.k)
    made = generate(example, row, row.forms[0], size)
    manifest = manifests.build(made.config, made.headers, row)
    layer = RoutedExperts(pull(Recipe.make(manifest, 0, LoadOptions(dtype=torch.float32)), made.read))
    x = torch.randn(3, example.k)
    ids = torch.tensor([[0], [1], [0]]).expand(3, layer.problem.top_k).contiguous()
    ids[:, 1:] = -1
    weights = torch.ones(ids.shape)
    gate, up, down = whole_matrices(made, row.forms[0], 0, 0)
    got = layer(x, topk_ids=ids, topk_weights=weights)
    assert torch.isfinite(got).all()
    if up is not None and example.scheme.part("pre_quant_scale") is None and not example.bias:
        want = layer.problem.activation(torch.cat([x[0] @ gate.t(), x[0] @ up.t()])) @ down.t()
        torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_logits_of_other_experts_are_refused(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(_make("dense", "bf16"), tmp_path / "m"), layer=0)
    x = _inputs()[0]
    for columns in (SIZE.experts - 1, SIZE.experts + 1):
        with pytest.raises(LaunchError, match="logits do not fit"):
            layer.forward_routed(x, torch.zeros(len(x), columns))
    layer.take_router("bias", torch.zeros(1))
    with pytest.raises(LaunchError, match="bias does not fit"):
        layer.forward_routed(x, torch.zeros(len(x), SIZE.experts))


def test_a_scale_left_to_the_output_is_applied_there(tmp_path: Path) -> None:
    folder = save(_make("dense", "fp32"), tmp_path / "m")
    folded = Routing(scoring="softmax", top_k=SIZE.top_k, renormalize=True, routed_scaling_factor=2.5)
    outside = replace(folded, apply_scale_to_output=True)
    x = _inputs()[0].float()
    logits = torch.randn(x.shape[0], SIZE.experts, generator=torch.Generator().manual_seed(5))
    a, b = (
        RoutedExperts.from_checkpoint(folder, layer=0, dtype=torch.float32, routing=r).forward_routed(x, logits)
        for r in (folded, outside)
    )
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def test_experts_int8_is_a_row_scale_of_absmax_over_127(tmp_path: Path) -> None:
    made = _make("dense", "bf16")
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0, weights="experts_int8")
    shape = layer.problem.matrices["w2"]
    weight = layer.layout.unpack(shape, {name: t[1] for name, t in layer.packed["w2"].items()})
    source = dequantize(made.weights[0, 1, "down"])
    scale = source.abs().amax(1, keepdim=True) / 127
    assert torch.equal(weight.scales[0], scale)
    assert torch.equal(weight.codes.float() - 128, (source / scale).round().clamp(-127, 127))
