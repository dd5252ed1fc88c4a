"""Layers with two mixtures, for text and for images, as ERNIE-4.5-VL has them: read, checked, pushed and converted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversion import run_conversion
from torch import Tensor
from typer.testing import CliRunner

from lancebill import ModelExperts, RoutedExperts
from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.cli.main import app
from lancebill.cli.verify import examine
from lancebill.errors import LancebillError, MissingTensor, SpecError, UnexpectedTensor, UnsupportedFormat, WrongShape
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.layer.mixtures import mixtures_of
from lancebill.layer.recipe import LoadOptions
from lancebill.numbers.codec import dequantize

EXPERTS, HIDDEN, SIZES = 4, 64, {"text": 64, "vision": 32}
CONFIG = {
    "model_type": "ernie4_5_moe_vl",
    "num_hidden_layers": 3,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_num_experts": [EXPERTS, EXPERTS],
    "moe_intermediate_size": list(SIZES.values()),
    "moe_k": 2,
    "vocab_size": 16,
}
MLP = "model.layers.{}.mlp."


def hub_tensors() -> dict[str, Tensor]:
    """The hub's names: one numbering, one gate with two matrices, one correction."""
    generator = torch.Generator().manual_seed(3)
    tensors = {"model.layers.0.mlp.gate_proj.weight": torch.randn(8, HIDDEN, generator=generator)}
    for layer in (1, 2):
        mlp = MLP.format(layer)
        for number, inter in enumerate(SIZES.values()):
            for expert in range(number * EXPERTS, (number + 1) * EXPERTS):
                for name, shape in (("gate", (inter, HIDDEN)), ("up", (inter, HIDDEN)), ("down", (HIDDEN, inter))):
                    tensor = torch.randn(shape, generator=generator).bfloat16()
                    tensors[f"{mlp}experts.{expert}.{name}_proj.weight"] = tensor
        for gate in ("weight", "weight_1"):
            tensors[f"{mlp}gate.{gate}"] = torch.randn(HIDDEN, EXPERTS, generator=generator)
        correction = torch.randn(2, EXPERTS, generator=generator)
        tensors[f"{mlp}moe_statics.e_score_correction_bias"] = correction
    return tensors


def stacked_tensors() -> dict[str, Tensor]:
    """transformers' own names: everything apart, stacked."""
    hub = hub_tensors()
    tensors = {name: tensor for name, tensor in hub.items() if ".layers.0." in name}
    for layer in (1, 2):
        mlp = MLP.format(layer)
        for number, mixture in enumerate(SIZES):
            own, each = f"{mlp}{mixture}_moe.", range(number * EXPERTS, (number + 1) * EXPERTS)
            halves = [[hub[f"{mlp}experts.{e}.{name}_proj.weight"] for name in ("gate", "up")] for e in each]
            tensors[f"{own}experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in halves])
            downs = [hub[f"{mlp}experts.{e}.down_proj.weight"] for e in each]
            tensors[f"{own}experts.down_proj"] = torch.stack(downs)
            tensors[f"{own}gate.weight"] = hub[f"{mlp}gate.weight" + "_1" * number].t().contiguous()
            correction = hub[f"{mlp}moe_statics.e_score_correction_bias"][number : number + 1]
            tensors[f"{own}gate.moe_statics.e_score_correction_bias"] = correction.contiguous()
    return tensors


SPELLINGS = {"hub": hub_tensors, "stacked": stacked_tensors}


def headers_of(tensors: dict[str, Tensor]) -> dict[str, Stored]:
    return {name: Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    with CheckpointWriter(folder, headers_of(tensors)) as out:
        out.write_json("config.json", {**CONFIG, **config})
        for name, tensor in tensors.items():
            out.write(name, tensor)
    return folder


def weights_of(path: Path) -> dict[tuple[str, int, str], Tensor]:
    with Checkpoint.open(path) as checkpoint:
        manifest = manifests.build(checkpoint.config, checkpoint.headers)
        manifest.check(str(path))
        return {
            (layer.where, *key): dequantize(load_projection(checkpoint.read, projection))
            for layer in manifest.stored_layers
            for key, projection in layer.projections.items()
        }


def problems(tensors: dict[str, Tensor], folder: Path) -> list[LancebillError]:
    return examine(write(folder, tensors)).problems


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_both_mixtures_are_read_checked_and_route(spelling: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model", SPELLINGS[spelling]())
    report = examine(path, values=True, strict=True)
    assert report.ok and report.layers == 2 and report.matrices == 2 * 2 * EXPERTS * 3, report.problems
    hub, x = hub_tensors(), torch.randn(5, HIDDEN)
    for number, (mixture, inter) in enumerate(SIZES.items()):
        layer = RoutedExperts.from_checkpoint(path, 2, mixture=mixture, backend="reference", dtype=torch.float32)
        assert (layer.problem.experts, layer.problem.intermediate) == (EXPERTS, inter)
        assert f"{EXPERTS} {mixture} experts" in str(layer.report)
        routed = layer.route(x, x @ hub[f"{MLP.format(2)}gate.weight" + "_1" * number])
        scores = (x @ hub[f"{MLP.format(2)}gate.weight" + "_1" * number]).softmax(-1)
        correction = hub[f"{MLP.format(2)}moe_statics.e_score_correction_bias"][number]
        best = (scores + correction).topk(2).indices
        assert torch.equal(routed.ids.long().sort().values, best.sort().values)
        down = weights_of(path)[f"layer 2, {mixture}", 1, "down"]
        assert torch.equal(down, hub[f"{MLP.format(2)}experts.{number * EXPERTS + 1}.down_proj.weight"].float())
    assert RoutedExperts.from_checkpoint(path, 1).problem.intermediate == SIZES["text"], "the first by default"


def test_names_of_mixtures_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "model", hub_tensors())
    with pytest.raises(SpecError, match="text or vision"):
        RoutedExperts.from_checkpoint(path, 1, mixture="audio")
    with pytest.raises(UnsupportedFormat, match="how many experts each mixture"):
        RoutedExperts.from_config({**CONFIG, "moe_num_experts": None}, 1)
    config = {**CONFIG, "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_intermediate_size": 64}
    with pytest.raises(SpecError, match="each layer has one"):
        RoutedExperts.from_config(config, 1, mixture="vision")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_whatever_is_missing_of_either_is_named(spelling: str, tmp_path: Path) -> None:
    tensors = SPELLINGS[spelling]()
    for number, lost in enumerate(name for name in tensors if ".layers.1." in name):
        found = problems({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / str(number))
        both = lost.endswith("mlp.moe_statics.e_score_correction_bias")
        assert [type(problem) for problem in found] == [MissingTensor] * (2 if both else 1), lost
        for problem in found:
            assert any(lost.endswith(name) for name in str(problem.expected).split(" or ")), problem.render()
            assert str(problem.where).startswith(("layer 1, text", "layer 1, vision"))


def test_experts_beyond_both_and_strays_are_reported_once(tmp_path: Path) -> None:
    tensors, mlp = hub_tensors(), MLP.format(1)
    beyond = f"{mlp}experts.{2 * EXPERTS}.up_proj.weight"
    (one,) = problems({**tensors, beyond: tensors[f"{mlp}experts.0.up_proj.weight"]}, tmp_path / "beyond")
    assert isinstance(one, UnexpectedTensor) and one.got == beyond
    (one,) = problems({**tensors, f"{mlp}experts.0.lost.weight": torch.ones(2, 2)}, tmp_path / "stray")
    assert isinstance(one, UnexpectedTensor) and one.where == f"{mlp}experts.0.lost.weight"
    wrong = {**tensors, f"{mlp}moe_statics.e_score_correction_bias": torch.ones(1, EXPERTS)}
    (one,) = problems(wrong, tmp_path / "rows")
    assert isinstance(one, WrongShape) and one.where == "layer 1, vision, router"
    with pytest.raises(WrongShape, match="no row for each mixture"):
        RoutedExperts.from_checkpoint(tmp_path / "rows", 1, mixture="vision")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("target", [("int8", None), ("mxfp4", "gpt-oss"), ("bf16", None)])
def test_a_conversion_writes_the_experts_of_both(spelling: str, target: tuple[str, str | None], tmp_path: Path) -> None:
    path = write(tmp_path / "model", SPELLINGS[spelling]())
    for options in ({}, {"experts_only": True}):
        out = tmp_path / f"out{len(options)}"
        run_conversion(path, out, *target, **options)
        assert options or examine(out).ok, [problem.render() for problem in examine(out).problems]
        before, after = weights_of(path), weights_of(out)
        assert before.keys() == after.keys()
        assert all(0 <= (after[key] - before[key]).norm() / before[key].norm() < 0.2 for key in before)
        assert target[0] == "bf16" or all(not torch.equal(after[key], before[key]) for key in before)


def test_tensors_are_pushed_to_the_mixture_they_belong_to(tmp_path: Path) -> None:
    tensors = hub_tensors()
    path = write(tmp_path / "model", tensors)
    for mixture in SIZES:
        experts = ModelExperts(CONFIG, mixture=mixture)
        left = dict(experts.divert(tensors.items()))
        assert sum(".experts." in name for name in left) == 2 * EXPERTS * 3, "those of the other mixture"
        whole = RoutedExperts.from_checkpoint(path, 1, mixture=mixture)
        pushed = experts.finish()[1]
        assert all(torch.equal(a, b) for a, b in zip(pushed.parameters(), whole.parameters(), strict=True))
        assert pushed.router_correction is not None and whole.router_correction is not None
        assert torch.equal(pushed.router_correction, whole.router_correction)


def test_the_commands_show_both(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model", hub_tensors()))
    shown = CliRunner().invoke(app, ["inspect", path, "--memory", "--layer", "1"])
    assert shown.exit_code == 0
    for text in ("2 layers x 4 (text) + 4 (vision) experts", "64 (text) + 32 (vision)", "1-2 vision", "experts.4.up"):
        assert text in " ".join(shown.output.split()), text
    summary = json.loads(CliRunner().invoke(app, ["inspect", path, "--gpu", "1GiB", "--json"]).output)
    assert summary["mixtures"]["vision"]["intermediate"] == 32 and summary["bits_per_weight"] == 16
    assert set(summary["split"]["gpu_experts"]) == {"1 text", "2 text", "1 vision", "2 vision"}
    for arguments, size in (((), 64), (("--mixture", "vision"), 32)):
        explained = CliRunner().invoke(app, ["explain", path, "--device", "cpu", *arguments])
        assert f"intermediate {size}" in explained.output, explained.output


def test_mixtures_share_the_memory_of_a_gpu(tmp_path: Path) -> None:
    with Checkpoint.open(write(tmp_path / "model", hub_tensors())) as checkpoint:
        options = LoadOptions(backend="reference")
        sizes = {name: experts.bytes for name, experts in mixtures_of(checkpoint, options).items()}
        half = sum(sizes.values()) // 2
        shared = mixtures_of(checkpoint, replace(options, gpu_memory=half))
        for name, experts in shared.items():
            on_device = [len(experts.recipe(layer).plan.experts) for layer in experts.layers]
            assert on_device == [EXPERTS // 2] * 2 and experts.bytes == sizes[name], name
