"""Problems, devices, quantisation rules, and layers that are not loaded yet."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lancebill.backends import oracle
from lancebill.checkpoint.load.layer_plan import plan_layer
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import LaunchError, SpecError, UnsupportedProblem
from lancebill.formats import registry
from lancebill.formats.stored import Config
from lancebill.layer.recipe import unquantised_inputs
from lancebill.layer.rules import activation_specs, weight_targets
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device, parse_device
from lancebill.moe.layout import MatrixShape
from lancebill.moe.placement import Placement
from lancebill.moe.problem import Problem
from lancebill.moe.routing import Routing
from lancebill.numbers.activations import round_activations
from lancebill.numbers.spec import DENSE_BF16, MXFP4
from lancebill.numbers.spec_names import ACTIVATIONS, parse_activation, parse_spec
from lancebill.testing.checkpoints import Geometry, generate


def _problem(rows: int, inter: int, activation: str, **fields: Any) -> Problem:
    w13, w2 = MatrixShape("w13", rows, 64, DENSE_BF16), MatrixShape("w2", 64, inter, DENSE_BF16)
    return Problem(w13, w2, 2, 2, activation=Activation(activation), **{"top_k": 2, **fields})


def test_only_gated_experts_have_twice_the_rows() -> None:
    assert _problem(96, 48, "silu").intermediate == _problem(48, 48, "relu2_no_mul").intermediate == 48
    for rows, activation in ((48, "silu"), (96, "relu2_no_mul")):
        with pytest.raises(SpecError, match="w13 and w2 disagree about the intermediate size"):
            _problem(rows, 48, activation)
    with pytest.raises(SpecError, match="top-1"):
        _problem(96, 48, "silu", weight_on_input=True)
    for rows, columns in ((0, 64), (64, 0)):
        shape = MatrixShape("w13", rows, columns, DENSE_BF16)
        with pytest.raises(SpecError, match="a matrix needs rows and columns"):
            Problem(shape, None, 2, 2, 2)
    with pytest.raises(SpecError, match="a matrix has the wrong name"):
        Problem(MatrixShape("w2", 64, 64, DENSE_BF16), None, 2, 2, 2)


@pytest.mark.parametrize(("what", "count"), [("experts", -1), ("global_experts", 0), ("top_k", 0), ("top_k", -1)])
def test_a_layer_without_experts_or_choices_is_refused(what: str, count: int) -> None:
    with pytest.raises(SpecError, match="needs experts") as refused:
        replace(_problem(96, 48, "silu"), **{what: count})
    assert what in str(refused.value) and str(count) in str(refused.value)


def test_tokens_may_choose_more_experts_than_have_weights() -> None:
    """The others are zero experts, which a problem does not count; a `Routing` knows all columns and checks them."""
    problem = replace(_problem(96, 48, "silu"), top_k=3)
    assert problem.top_k > problem.global_experts
    routing = Routing(3, zero_experts=2)
    routing.check(problem.global_experts + routing.zero_experts, biased=False)
    with pytest.raises(SpecError, match="top_k is larger than the number of experts"):
        routing.check(problem.global_experts, biased=False)


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_90"])
def test_a_part_without_experts_is_planned_as_a_part_of_one(device: str) -> None:
    whole = _problem(256, 128, "silu")
    empty, one = (oracle.select(replace(whole, experts=count), device) for count in (0, 1))
    assert empty.problem.experts == 0 and empty.backend is one.backend


def test_equal_shapes_can_have_different_activations() -> None:
    shape = MatrixShape("w13", 64, 64, parse_spec("int4-g32"))
    problem = Problem(
        shape, replace(shape, name="w2"), 1, 1, 1, Activation("relu2_no_mul"),
        activations=ACTIVATIONS["int8"], activations_w2=ACTIVATIONS["bf16"],
    )  # fmt: skip
    inputs = [problem.inputs_of(name) for name in problem.matrices]
    assert inputs == [ACTIVATIONS["int8"], ACTIVATIONS["bf16"]]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_no_rows_stay_none(name: str) -> None:
    assert round_activations(torch.empty(0, 64), ACTIVATIONS[name]).shape == (0, 64)


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-static", "nvfp4", "mxfp8"])
def test_a_non_finite_row_does_not_affect_other_rows(name: str) -> None:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    activations, static = parse_activation(name), torch.tensor(0.5) if name == "fp8-static" else None
    want = round_activations(rows, activations, static)
    for bad in (torch.inf, torch.nan):
        rows[1, 7] = bad
        got = round_activations(rows, activations, static)
        assert got[1].isnan().all() and torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])


def test_unknown_option_values_are_refused() -> None:
    for key in ("order", "dispatch"):
        with pytest.raises(SpecError, match=f"unknown {key} 'sorted'"):
            _problem(96, 48, "silu", **{key: "sorted"})
    with pytest.raises(SpecError, match="no kernel takes inputs"):
        unquantised_inputs(torch.float64)


@pytest.mark.parametrize("name", ["int8-zp-static", "mxfp8-static", "fp8-g128-static"])
def test_static_activations_need_one_scale_per_tensor(name: str) -> None:
    assert _problem(96, 48, "silu", activations=parse_activation("nvfp4-static")).activations.static
    for key in ("activations", "activations_w2"):
        with pytest.raises(SpecError, match="static activations must have one scale"):
            _problem(96, 48, "silu", **{key: parse_activation(name)})


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-div"])
def test_a_static_scale_divides_the_input_for_both_scale_operators(name: str) -> None:
    rows, scale = torch.randn(3, 64), torch.tensor(0.0078125)
    got = round_activations(rows, parse_activation(name), scale)
    assert torch.equal(got, round_activations(rows / scale, parse_activation("nvfp4"), torch.tensor(1.0)) * scale)
    assert (got - rows).norm() / rows.norm() < 0.15


@pytest.mark.parametrize(("family", "rows"), [("nemotron_h", 64), ("qwen3_moe", 128)])
def test_w13_has_the_rows_of_its_family(family: str, rows: int) -> None:
    row = names.find_family({"model_type": family})
    example = next(iter(registry()["dense"].examples()))
    made = generate(example, row, row.forms[0], Geometry(experts=2, hidden=96, intermediate=128))
    manifest = manifests.build(made.config, made.headers, row)
    plan = plan_layer(manifest.layers[0], Placement(tp_size=2))
    assert (plan.w13.n, plan.w13.k, plan.w2.n, plan.w2.k) == (rows, 96, 96, 64)


def test_missing_sizes_are_reported() -> None:
    row = names.find_family({"model_type": "qwen3_moe"})
    example = next(iter(registry()["gptq"].examples()))
    made = generate(example, row, row.forms[0], Geometry(experts=3, hidden=128, intermediate=256))
    bare = Config({"model_type": "qwen3_moe"}, made.config.quant, made.config.method)
    layer = manifests.build(bare, made.headers).layers[0]
    assert (layer.experts, layer.hidden, layer.intermediate) == (3, 128, 256)
    scales = {name: header for name, header in made.headers.items() if name.endswith(".scales")}
    problems = [p.render() for p in manifests.build(bare, scales).problems]
    assert any("the size of the experts follows neither from the config nor" in text for text in problems)


def test_static_activations_need_a_scale() -> None:
    with pytest.raises(LaunchError, match="an input scale from the checkpoint"):
        round_activations(torch.ones(1, 32), parse_activation("fp8-static"))


def test_devices_are_plain_values() -> None:
    assert parse_device("cpu") == Device("cpu") and str(parse_device("cpu")) == "cpu"
    assert parse_device("sm_90a") == parse_device("sm90") == Device("cuda", 90)
    assert str(parse_device("sm_80")) == "sm_80"
    for wrong in ("gpu", "sm_x", "cuda:99", ""):
        with pytest.raises(SpecError):
            parse_device(wrong)


def test_a_gpu_may_count_as_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    assert parse_device("cuda") == Device("cuda", 90, 0, 132)
    monkeypatch.setenv("LANCEBILL_GPU", "sm_86")
    assert parse_device("cuda:0") == Device("cuda", 86, 0, 132) and parse_device("sm_90") == Device("cuda", 90)
    assert parse_device("cuda").torch == torch.device("cuda", 0)
    with pytest.raises(SpecError, match="another GPU"):
        _ = parse_device("sm_90").torch
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # a rank's own GPU
    for name in ("cuda", torch.device("cuda")):
        assert parse_device(name).index == 1 and parse_device(name).torch == torch.device("cuda", 1)
    assert parse_device("cuda:0").index == 0
    with pytest.raises(SpecError, match="no cuda:2"):
        parse_device("cuda:2")
    monkeypatch.setenv("LANCEBILL_GPU", "rtx")
    with pytest.raises(SpecError, match="LANCEBILL_GPU"):
        parse_device("cuda")


def test_rules_for_weights() -> None:
    mxfp4, int8 = parse_spec("mxfp4"), parse_spec("int8")
    assert weight_targets(None, 0) == {}
    assert weight_targets("mxfp4", 0) == weight_targets(MXFP4, 0) == {"w13": mxfp4, "w2": mxfp4}
    assert weight_targets({"w2": "int8"}, 0) == {"w2": int8}
    rules = [("0", "int8"), ("1-3", {"w13": "mxfp4"}), ("*", None)]
    assert [len(weight_targets(rules, layer)) for layer in (0, 1, 3, 4)] == [2, 1, 1, 0]
    for wrong in ({"w3": "int8"}, "int9", [("a", "int8")], [("0",)], [7], 7):
        with pytest.raises(SpecError):
            weight_targets(wrong, 0)  # type: ignore[arg-type]


def test_rules_for_activations() -> None:
    fp8 = parse_activation("fp8")
    assert activation_specs(None, 0) == {}
    assert activation_specs({"w13": fp8, "w2": "checkpoint"}, 0) == {"w13": fp8, "w2": None}
    assert activation_specs([("2", "fp8")], 0) == {}
    with pytest.raises(SpecError):
        activation_specs(8, 0)  # type: ignore[arg-type]


def test_big_endian_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsupportedProblem, match="little-endian"):
        Checkpoint.open(tmp_path)
