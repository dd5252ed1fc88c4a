"""Random weights: every spec has values of the right size, and a config alone is enough to make a layer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs

from lancebill import ModelExperts, Placement, RoutedExperts
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.expected_headers import expected_headers
from lancebill.errors import SpecError
from lancebill.layer.report import LoadReports
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import BF16, CODEBOOK, F16, F32
from lancebill.numbers.random_weight import random_weight
from lancebill.testing.checkpoints import generate, small_size
from lancebill.testing.conformance import all_examples

# The config says fp8 for all modules, or 4 bits for those that may be experts.
ONLY_IN_HEADERS = {("fp8", "mxfp4-experts"), ("w4afp8", "fp8-block")}


def test_every_spec_has_values_of_variance_one_over_k() -> None:
    specs = {str(example.scheme.spec): example for _, example in all_examples()}
    for name, example in specs.items():
        n, k = example.n, example.k
        weight = random_weight(example.scheme.spec, n, k, torch.Generator().manual_seed(1))
        values = dequantize(weight)
        assert values.isfinite().all(), name
        assert 0.5 < float(values.std()) * math.sqrt(k) < 2, name
        assert abs(float(values.mean())) < 0.25 * float(values.std()), name
        assert values.unique().numel() > 2, name
        again = random_weight(example.scheme.spec, n, k, torch.Generator().manual_seed(1))
        dtype = example.scheme.spec.dtype
        used, valid = weight.codes.unique().numel(), len(dtype.valid_codes)
        if dtype.kind == CODEBOOK:
            valid = len(set(dtype.table))  # a codebook may repeat a value
        assert weight.equals(again) and used >= valid - 1, name  # an end of the integers is left out


def test_a_config_suggests_the_headers_of_its_checkpoint() -> None:
    """For every example: the manifest of the suggested headers has no problem, and the specs of the real one."""
    other = set()
    for fmt, example in all_examples():
        row = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
        made = generate(example, row, row.forms[0], small_size(example))
        suggested = manifests.build(made.config, expected_headers(made.config, row, 0), row)
        real = manifests.build(made.config, made.headers, row)
        assert not suggested.problems, (fmt.name, example.name, [p.render() for p in suggested.problems[:2]])
        for name in ("gate", "down"):
            if name in row.forms[0].names:
                got, want = suggested.layers[0].spec(name), real.layers[0].spec(name)
                dtypes = {got.dtype, want.dtype} - {BF16, F16, F32}  # the example does not state which float it is
                if len(dtypes) > 1 or len(got.levels) != len(want.levels):
                    other.add((fmt.name, example.name))
    assert other == ONLY_IN_HEADERS


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("fmt", ["gptq", "fp8", "dense"])
def test_random_layers_compute_and_depend_on_the_seed(fmt: str, family: str) -> None:
    config = make_checkpoint(fmt, family=family).config
    x, ids, weights = make_inputs()
    layer = RoutedExperts.random(config, 0, seed=3)
    out = layer(x, topk_ids=ids, topk_weights=weights)
    assert out.isfinite().all() and 0.02 < float(out.float().std()) < 2
    with torch.device("meta"):  # nothing may be made on the default device
        again = RoutedExperts.random(config, 0, seed=3, device="cpu")
    same = again(x, topk_ids=ids, topk_weights=weights)
    other = RoutedExperts.random(config, 0, seed=4)(x, topk_ids=ids, topk_weights=weights)
    assert torch.equal(out, same) and not torch.equal(out, other)
    assert layer.problem.w13.bias == (family == "gpt_oss")


@pytest.mark.parametrize(
    ("family", "more", "roles"),
    [
        ("inkling", {}, set()),
        ("gemma4", {}, {"scale"}),
        ("deepseek_v3", {}, {"correction"}),
        ("deepseek_v4", {"num_hash_layers": 1, "vocab_size": 64}, {"table"}),
    ],
)
def test_a_random_router_has_what_its_routing_needs(family: str, more: dict[str, int], roles: set[str]) -> None:
    config = make_checkpoint("dense", "bf16", family=family).config
    layer = RoutedExperts.random(replace(config, model={**config.model, **more}), 0)
    tensors = dict(layer.named_buffers()) | dict(layer.named_parameters())
    found = {role for role in ("bias", "correction", "scale", "table") if any(role in name for name in tensors)}
    assert found == roles, list(tensors)


def test_a_router_may_scale_its_experts() -> None:
    layer = RoutedExperts.random(make_checkpoint("dense", "bf16", family="gemma4").config, 0)
    x, logits = make_inputs()[0], torch.randn(9, 4)
    plain = layer.route(x, logits)
    layer.router_scale.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    scaled = layer.route(x, logits)
    assert torch.equal(scaled.ids, plain.ids)
    assert torch.equal(scaled.weights, plain.weights * (1.0 + plain.ids))


def test_static_scales_fit_inputs_of_variance_one() -> None:
    config = make_checkpoint("fp8", "tensor-static").config
    x, ids, weights = make_inputs()
    found, expected = (
        RoutedExperts.random(config, 0, seed=3, activations=activations)(x, topk_ids=ids, topk_weights=weights).float()
        for activations in ("checkpoint", "bf16")
    )
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.2


def test_ranks_agree_on_random_experts() -> None:
    config = make_checkpoint("fp8").config
    x, ids, weights = make_inputs()
    whole = RoutedExperts.random(config, 1)(x.float(), topk_ids=ids, topk_weights=weights)
    total = torch.zeros_like(whole)
    for rank in range(2):
        placement = Placement(ep_rank=rank, ep_size=2)
        total += RoutedExperts.random(config, 1, placement=placement)(x.float(), topk_ids=ids, topk_weights=weights)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


def test_a_model_is_filled_and_later_refitted() -> None:
    made, done = make_checkpoint("dense", "bf16"), []
    experts = ModelExperts(made.config, layers=[0, 1], progress=done.append)
    layers = experts.fill_random(seed=5)
    assert sorted(layers) == [0, 1] and experts.settled
    reports = LoadReports(layer.report for layer in layers.values() if layer.report is not None)
    head, row = str(reports).splitlines()
    assert head.startswith("layers  experts") and row.startswith("0-1     4        bf16")
    assert sum(done) == sum(layer.report.bytes for layer in layers.values() if layer.report is not None)
    with pytest.raises(SpecError, match="layers"):
        ModelExperts(made.config).fill_random()
    fresh = ModelExperts(made.config)
    assert not list(experts.divert(made.tensors.items())) and not list(fresh.divert(made.tensors.items()))
    for index, layer in fresh.finish().items():
        state = experts.finish()[index].state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in layer.state_dict().items())
