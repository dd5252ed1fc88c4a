"""Loading a `RoutedExperts` layer: from files, pushed tensor by tensor, refitted, requantised."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.errors import CheckpointProblems, MissingTensor, SpecError, WrongDtype, WrongShape
from lancebill.formats import registry
from lancebill.layer import collect
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.placement import Placement
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import BF16, F16, F32
from lancebill.testing.checkpoints import save
from lancebill.testing.conformance import all_examples


def _same_state(a: RoutedExperts, b: RoutedExperts) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("with_headers", [True, False], ids=["headers-known", "headers-unknown"])
@pytest.mark.parametrize("form", [0, 1], ids=["per-expert", "stacked"])
@pytest.mark.parametrize("fmt", ["gptq", "dense", "fp8"])
def test_push_in_any_order_equals_pull(fmt: str, form: int, with_headers: bool, tmp_path: Path) -> None:
    if fmt == "gptq" and form == 1:
        fmt = "compressed-tensors"
    made = make_checkpoint(fmt, form=form)
    folder = save(made, tmp_path / "m")
    pulled = RoutedExperts.from_checkpoint(folder, layer=0)
    config = Checkpoint.open(folder).config.model
    loader = RoutedExperts.from_config(config, 0, tensors=made.headers if with_headers else None)
    pairs = list(made.tensors.items())
    random.Random(3).shuffle(pairs)
    taken = loader.load_weights(iter(pairs))
    assert taken == {name for name in made.tensors if ".layers.0." in name}
    pushed = loader.finish()
    assert _same_state(pulled, pushed)
    assert pulled.report is not None and pushed.report is not None
    assert replace(pushed.report, seconds=0) == replace(pulled.report, seconds=0)


def test_devices_and_layers_that_do_not_exist(tmp_path: Path) -> None:
    folder = save(make_checkpoint("gptq"), tmp_path / "m")
    assert RoutedExperts.from_checkpoint(folder, layer=0, device=torch.device("cpu")).choice.device.kind == "cpu"
    with pytest.raises(SpecError, match="unknown device '0'; expected cpu, cuda"):
        RoutedExperts.from_checkpoint(folder, layer=0, device=0)  # type: ignore[arg-type]
    with pytest.raises(MissingTensor, match="layer 7 has no routed experts; expected 0-1"):
        RoutedExperts.from_checkpoint(folder, layer=7)


def test_finish_names_every_missing_tensor(tmp_path: Path) -> None:
    made = make_checkpoint("gptq")
    config = Checkpoint.open(save(made, tmp_path / "m")).config.model
    missing = "model.layers.0.mlp.experts.2.up_proj.scales"
    for headers in (made.headers, None):
        loader = RoutedExperts.from_config(config, 0, tensors=headers)
        loader.load_weights((n, t) for n, t in made.tensors.items() if n != missing)
        with pytest.raises(CheckpointProblems, match=r"expert 2, up.*\n?.*") as caught:
            loader.finish()
        assert missing in str(caught.value)
        x, ids, weights = make_inputs()
        loader.load_weights([(missing, made.tensors[missing])])
        layer = loader.finish()
        assert torch.isfinite(layer(x, topk_ids=ids, topk_weights=weights)).all()


@pytest.mark.parametrize("form", [0, 1], ids=["each", "stacked"])
def test_every_expert_is_packed_once_and_freed(form: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_checkpoint("dense", "bf16", form=form)
    config, packed = Checkpoint.open(save(made, tmp_path / "m")).config.model, []
    original = collect.load_layer
    monkeypatch.setattr(
        collect, "load_layer", lambda *args, slots, **more: packed.extend(slots) or original(*args, slots=slots, **more)
    )
    layer: Any = RoutedExperts.from_config(config, 0, tensors=made.headers)
    for _ in range(2):  # a load, and a refit
        packed.clear()
        layer.load_weights(made.tensors.items())
        layer = layer.finish()
        assert layer.refit is not None and not layer.refit.pending
        assert sorted(packed) == list(range(SIZE.experts))


def test_a_second_push_refits_in_place(tmp_path: Path) -> None:
    old, new = make_checkpoint("gptq", seed=1), make_checkpoint("gptq", seed=2)
    refitted = RoutedExperts.from_checkpoint(save(old, tmp_path / "old"), layer=0)
    fresh = RoutedExperts.from_checkpoint(save(new, tmp_path / "new"), layer=0)
    address = {n: p.data_ptr() for n, p in refitted.named_parameters()}
    refitted.load_weights(new.tensors.items())
    refitted.finish()
    assert _same_state(refitted, fresh)
    assert address == {n: p.data_ptr() for n, p in refitted.named_parameters()}, "refit in place"


def test_a_refit_refuses_other_shapes_and_dtypes(tmp_path: Path) -> None:
    """Slicing them as planned would silently load wrong numbers."""
    made = make_checkpoint("fp8", "channel-dynamic")
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    stored = made.tensors[name]
    for wrong, kind in ((torch.cat([stored, stored]), WrongShape), (stored.to(torch.bfloat16), WrongDtype)):
        with pytest.raises(kind, match=r"gate_proj\.weight.*expected"):
            layer.load_weights([(name, wrong)])
    x, ids, weights = make_inputs()
    assert torch.isfinite(layer(x, topk_ids=ids, topk_weights=weights)).all()


def test_a_layer_copies_its_router_bias(tmp_path: Path) -> None:
    made = make_checkpoint("dense", "bf16", "deepseek_v3")
    loader = RoutedExperts.from_config(dict(made.config.model), 0)
    bias = torch.zeros(SIZE.experts)
    loader.load_weights([("model.layers.0.mlp.gate.e_score_correction_bias", bias), *made.tensors.items()])
    layer = loader.finish()
    bias.fill_(7)
    assert layer.router_correction is not None and not layer.router_correction.any()


def test_loading_a_layer_checks_only_that_layer(tmp_path: Path) -> None:
    """Checking all layers of a large model once per layer would take longer than loading it."""
    made = make_checkpoint("gptq")
    missing = "model.layers.1.mlp.experts.2.up_proj.scales"
    del made.tensors[missing]
    folder = save(made, tmp_path / "m")
    layer = RoutedExperts.from_checkpoint(folder, layer=0)
    assert layer.problem.experts == SIZE.experts
    assert layer.refit is not None
    kept = layer.refit.recipe.manifest.tensors
    assert kept and not any(".layers.1." in name for name in kept), "the recipe keeps only the tensors of its layer"
    with pytest.raises(CheckpointProblems, match=missing):
        RoutedExperts.from_checkpoint(folder, layer=1)
    with pytest.raises(MissingTensor, match="layer 2 has no routed experts; expected 0-1"):
        RoutedExperts.from_checkpoint(folder, layer=2)


def test_the_report_lists_unknown_config_keys(tmp_path: Path) -> None:
    made = make_checkpoint("gptq")
    made.config = replace(made.config, quant={**made.config.quant, "mystery": 1})
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0)
    assert layer.report is not None and layer.report.unknown_keys == ("mystery",)
    assert "config keys gptq does not know: mystery" in str(layer.report)


def test_expert_parallel_ranks_load_only_their_experts(tmp_path: Path) -> None:
    made = make_checkpoint("gptq")
    folder = save(made, tmp_path / "m")
    x, ids, weights = make_inputs()
    whole = RoutedExperts.from_checkpoint(folder, layer=0)(x.float(), topk_ids=ids, topk_weights=weights)
    parts = []
    for rank in range(2):
        layer = RoutedExperts.from_checkpoint(folder, layer=0, placement=Placement(ep_rank=rank, ep_size=2))
        assert layer.problem.experts == 2
        parts.append(layer(x.float(), topk_ids=ids, topk_weights=weights))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))


def test_requantising_while_loading_reports_its_cost(tmp_path: Path) -> None:
    folder = save(make_checkpoint("dense", "bf16"), tmp_path / "m")
    rules = [("0", {"w13": "mxfp4", "w2": "int4-g64"}), ("1-9", "fp8-channel")]
    first = RoutedExperts.from_checkpoint(folder, layer=0, weights=rules)
    second = RoutedExperts.from_checkpoint(folder, layer=1, weights=rules)
    assert first.report is not None and second.report is not None
    assert first.report.kept == {"w13": "mxfp4", "w2": "int4-g64"}
    assert second.report.kept["w2"].startswith("fp8")
    assert 0.02 < first.report.losses["w13"].rms_error < 0.2
    x, ids, weights = make_inputs()
    exact = RoutedExperts.from_checkpoint(folder, layer=0)(x, topk_ids=ids, topk_weights=weights)
    near = first(x, topk_ids=ids, topk_weights=weights)
    relative = (near.float() - exact.float()).norm() / exact.float().norm()
    assert 0.01 < relative < 0.4


@pytest.mark.parametrize("fmt", sorted({fmt.name for fmt, example in all_examples() if example.scheme.act_order}))
def test_act_order_is_kept_by_specs_that_keep_the_codes(fmt: str, tmp_path: Path) -> None:
    """The stored spec, the same with fp32 scales and the same with smaller blocks give equal outputs."""
    example = next(e for e in registry()[fmt].examples() if e.scheme.act_order)
    folder = save(make_checkpoint(fmt, example.name), tmp_path / "m")
    spec = example.scheme.spec
    x, ids, weights = make_inputs()

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


def test_experts_int8_scales_rows_by_absmax_over_127(tmp_path: Path) -> None:
    made = make_checkpoint("dense", "bf16")
    layer = RoutedExperts.from_checkpoint(save(made, tmp_path / "m"), layer=0, weights="experts_int8")
    shape = layer.problem.matrices["w2"]
    weight = layer.layout.unpack(shape, {name: t[1] for name, t in layer.packed["w2"].items()})
    source = dequantize(made.weights[0, 1, "down"])
    scale = source.abs().amax(1, keepdim=True) / 127
    assert torch.equal(weight.scales[0], scale)
    assert torch.equal(weight.codes.float() - 128, (source / scale).round().clamp(-127, 127))


def test_quantized_linear_loads_any_module_by_name(tmp_path: Path) -> None:
    made = make_checkpoint("gptq", "int4-g64:fp16-zp-gptq_v2")
    name = "model.layers.1.mlp.experts.3.down_proj"
    linear = QuantizedLinear.from_checkpoint(save(made, tmp_path / "m"), name, activations="fp32")
    x = torch.randn(2, 5, SIZE.intermediate)
    weight = dequantize(made.weights[1, 3, "down"]).double()
    want = x.double() @ weight.t()
    assert ((linear(x) - want).abs() <= 2**-20 * (x.double().abs() @ weight.abs().t())).all()
    assert linear(x[:, :0]).shape == (2, 0, SIZE.hidden)
    rounded = QuantizedLinear.from_checkpoint(tmp_path / "m", name, weights="int8", activations="fp32")
    assert str(rounded.problem.w13.spec).startswith("int8")
    assert 0 < float((rounded(x) - want).norm() / want.norm()) < 0.02
