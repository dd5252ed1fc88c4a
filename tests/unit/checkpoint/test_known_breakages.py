"""Every way in which published checkpoints are known to be broken is recreated here, and `verify` finds it.

A row changes an intact checkpoint. What metadata shows is found without reading a tensor; the rest with `--values`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.unquantized_experts import unquantized_experts
from lancebill.cli.verify import examine, kinds
from lancebill.errors import LancebillError
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.testing.checkpoints import Generated, Geometry, generate, save
from lancebill.testing.conformance import all_examples
from lancebill.testing.gguf import write_gguf

HOME = "model.layers.1.mlp.experts.2"
Change = Callable[[Generated], None]


def example(fmt: str, name: str) -> Example:
    return next(e for e in registry()[fmt].examples() if e.name == name)


def made_of(chosen: Example, form: int = 0, experts: int = 4, layers: int = 2) -> Generated:
    row = names.find_family({"model_type": chosen.config.model.get("model_type", "qwen3_moe")})
    made = generate(chosen, row, row.forms[form], Geometry(experts, chosen.k, chosen.k, layers))
    for name, tensor in made.tensors.items():
        if tensor.numel() == 1:  # a scale of the whole matrix or of its input: the same for gate and up
            tensor.copy_(made.tensors[name.replace("up_proj", "gate_proj")])
    return made


def drop(name: str) -> Change:
    def change(made: Generated) -> None:
        del made.tensors[name]

    return change


def on(name: str, act: Callable[[Tensor], object]) -> Change:
    def change(made: Generated) -> None:
        act(made.tensors[name])

    return change


def everywhere(part: str, act: Callable[[Tensor], object]) -> Change:
    """Change all tensors whose name ends so."""

    def change(made: Generated) -> None:
        chosen = [tensor for name, tensor in made.tensors.items() if name.endswith(part)]
        assert chosen
        for tensor in chosen:
            act(tensor)

    return change


def copy(source: str, target: str) -> Change:
    """Write one expert's tensors under another expert's name."""

    def change(made: Generated) -> None:
        for name in [name for name in made.tensors if name.startswith(source)]:
            made.tensors[target + name.removeprefix(source)] = made.tensors[name].clone()

    return change


def config(**values: Any) -> Change:
    def change(made: Generated) -> None:
        made.config = replace(made.config, model={**made.config.model, **values})

    return change


def add(name: str, *shape: int) -> Change:
    def change(made: Generated) -> None:
        made.tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)

    return change


def set_byte(value: int) -> Callable[[Tensor], object]:
    return lambda tensor: tensor.view(torch.uint8).view(-1)[:1].fill_(value)


def all_eights(tensor: Tensor) -> object:
    """The middle code of 4-bit integers: zero."""
    return tensor.view(torch.uint8).fill_(0x88)


def zero(tensor: Tensor) -> object:
    return tensor.view(torch.uint8).zero_() if tensor.ndim else tensor.zero_()


NVFP4, CT_NVFP4 = ("modelopt", "NVFP4"), ("compressed-tensors", "nvfp4-pack-quantized-nvfp4-div")
INT4, FP8, BLOCK = (
    ("compressed-tensors", "pack-quantized-int4-g64:fp16"),
    ("fp8", "tensor-static"),
    ("fp8", "block-F32"),
)
GPTQ, AWQ = ("gptq", "int4-g64:fp16-gptq"), ("awq", "int4-g64:fp16-zp")
MXFP4, BF16 = ("compressed-tensors", "mxfp4-pack-quantized-mxfp4"), ("dense", "bf16")
GATE = f"{HOME}.gate_proj"

# (format and example, what was done to it, where it is visible, a part of the message)
METADATA: dict[str, tuple[tuple[str, str], Change, str]] = {
    "global scale of one half missing": (NVFP4, drop(f"{HOME}.up_proj.weight_scale_2"), "'scale_2' is missing"),
    "divisor of one half missing": (CT_NVFP4, drop(f"{HOME}.up_proj.weight_global_scale"), "'scale_2' is missing"),
    "input scale of one expert missing": (FP8, drop(f"{GATE}.input_scale"), "layer 1, expert 2, gate: 'input_scale'"),
    "more experts in the config": (BF16, config(num_experts=5), "expert 4"),
    "fewer experts in the config": (BF16, config(num_experts=3), "the config has no such expert"),
    "more layers in the config": (BF16, config(num_hidden_layers=3), "layer 2: there are no tensors at all"),
    "fewer layers in the config": (BF16, config(num_hidden_layers=1), "layers 1: the config has no such layers"),
    "top-k above the experts": (BF16, config(num_experts_per_tok=5), "more experts than there are"),
    "a router of other experts": (BF16, add("model.layers.0.mlp.gate.weight", 3, 256), "4 rows, one for each expert"),
}
VALUES: dict[str, tuple[tuple[str, str], Change, str]] = {
    "scales all zero": (INT4, everywhere("weight_scale", zero), "zero over non-zero codes"),
    "block scales all zero": (NVFP4, everywhere("weight_scale", zero), "zero over non-zero codes"),
    "global scale zero": (NVFP4, on(f"{GATE}.weight_scale_2", zero), "zero over non-zero codes"),
    "NaN code": (BLOCK, on(f"{GATE}.weight", set_byte(0x7F)), "codes: NaN or infinite"),
    "E8M0 255": (MXFP4, on(f"{GATE}.weight_scale", set_byte(0xFF)), "scales are NaN"),
    "infinite scale": (INT4, on(f"{GATE}.weight_scale", lambda t: t.fill_(torch.inf)), "scale 1: NaN or infinite"),
    "input scale zero": (FP8, on(f"{GATE}.input_scale", zero), "input_scale: not a positive number"),
    "input scale infinite": (FP8, on(f"{GATE}.input_scale", lambda t: t.fill_(torch.inf)), "not a positive number"),
    "NaN in attention": (BF16, lambda made: made.tensors.update(norm=torch.full((4,), torch.nan)), "norm: NaN"),
}
WARNINGS: dict[str, tuple[tuple[str, str], Change, str]] = {
    "global scale dropped": (NVFP4, on(f"{GATE}.weight_scale_2", lambda t: t.fill_(1e4)), "another magnitude"),
    "global scales of the halves differ": (NVFP4, on(f"{GATE}.weight_scale_2", lambda t: t.mul_(1.5)), "gate and up"),
    "input scales of the halves differ": (FP8, on(f"{GATE}.input_scale", lambda t: t.mul_(2)), "activation scales"),
    "one input scale for all": (FP8, everywhere("input_scale", lambda t: t.fill_(1)), "all layers and experts"),
    "no token reached the expert": (FP8, on(f"{GATE}.input_scale", lambda t: t.fill_(1e-30)), "no calibration"),
    "constant scales": (INT4, on(f"{GATE}.weight_scale", lambda t: t.fill_(1)), "all blocks have the same"),
    "saturated scales": (NVFP4, on(f"{GATE}.weight_scale", lambda t: t.fill_(448)), "saturated at 448"),
    "identical experts": (MXFP4, copy("model.layers.1.mlp.experts.0.", f"{HOME}."), "identical weights"),
    "a dead expert": (BF16, on(f"{GATE}.weight", zero), "dead experts"),
    "identical experts, packed along K": (GPTQ, copy("model.layers.1.mlp.experts.0.", f"{HOME}."), "identical weights"),
    "identical experts, packed along N": (AWQ, copy("model.layers.1.mlp.experts.0.", f"{HOME}."), "identical weights"),
    "a dead expert, packed along K": (GPTQ, on(f"{GATE}.qweight", all_eights), "dead experts"),
}  # fmt: skip


def reports(case: tuple[tuple[str, str], Change, str], folder: Path, *, values: bool) -> tuple[Any, str]:
    which, change, text = case
    made = made_of(example(*which))
    change(made)
    return examine(save(made, folder / "checkpoint"), values=values), text


def rendered(errors: list[LancebillError]) -> list[str]:
    return [error.render() for error in errors]


@pytest.mark.parametrize("case", METADATA.values(), ids=METADATA)
def test_found_in_metadata(case: tuple[tuple[str, str], Change, str], tmp_path: Path) -> None:
    report, text = reports(case, tmp_path, values=False)
    assert not report.ok and any(text in found for found in rendered(report.problems)), rendered(report.problems)


@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
def test_found_in_values(case: tuple[tuple[str, str], Change, str], tmp_path: Path) -> None:
    report, text = reports(case, tmp_path, values=True)
    assert any(text in found for found in rendered(report.problems)), rendered(report.problems)
    assert not report.warnings, rendered(report.warnings)  # nothing is said of experts that are intact
    assert examine(tmp_path / "checkpoint").ok  # the headers are intact


@pytest.mark.parametrize("case", WARNINGS.values(), ids=WARNINGS)
def test_suspicious_values_are_warnings_that_say_where(
    case: tuple[tuple[str, str], Change, str], tmp_path: Path
) -> None:
    report, text = reports(case, tmp_path, values=True)
    assert report.ok
    found = [warning for warning in report.warnings if text in warning.render()]
    assert found and all(warning.hint for warning in found), rendered(report.warnings)
    if text != "all layers and experts":
        assert all("layer 1" in str(warning.where) for warning in found)
        assert all("2" in f"{warning.where} {warning.got}" for warning in found)
    assert not examine(tmp_path / "checkpoint", values=True, strict=True).ok


def test_the_same_words_in_another_order_are_another_expert(tmp_path: Path) -> None:
    made, (first, second) = made_of(example(*GPTQ)), (f"model.layers.1.mlp.experts.{e}." for e in (0, 1))
    copy(first, second)(made)
    codes = made.tensors[f"{second}gate_proj.qweight"]
    codes.copy_(codes.flip(0))
    report = examine(save(made, tmp_path / "checkpoint"), values=True)
    found = [warning.where for warning in report.warnings if "identical" in warning.render()]
    assert found == ["layer 1, up", "layer 1, down"]


GGUF_COUNTS: dict[str, tuple[str, int, str]] = {
    "more blocks": ("block_count", 3, "layer 2: there are no tensors at all"),
    "fewer blocks": ("block_count", 1, "layers 1: the config has no such layers"),
    "more experts": ("expert_count", 5, "expected [5, 256, 256]; got [4, 256, 256]"),
    "fewer experts": ("expert_count", 3, "expected [3, 256, 256]; got [4, 256, 256]"),
    "top-k above the experts": ("expert_used_count", 5, "at most 4 experts for each token; got 5"),
}


@pytest.mark.parametrize("case", GGUF_COUNTS.values(), ids=GGUF_COUNTS)
def test_counts_of_a_gguf_file_that_its_tensors_contradict(case: tuple[str, int, str], tmp_path: Path) -> None:
    key, value, text = case
    row = names.find_family({"model_type": "gguf"})
    made = generate(next(iter(registry()["gguf"].examples())), row, row.forms[0], Geometry(4, 256, 256, 2))
    counts = {"block_count": 2, "expert_count": 4, "expert_used_count": 2, "embedding_length": 256}
    counts["expert_feed_forward_length"] = 256
    for file, said in (("sound", counts), ("broken", {**counts, key: value})):
        metadata = {"general.architecture": "qwen3moe", **{f"qwen3moe.{name}": count for name, count in said.items()}}
        write_gguf(
            tmp_path / f"{file}.gguf", metadata, {name: ("F32", tensor) for name, tensor in made.tensors.items()}
        )
    assert examine(tmp_path / "sound.gguf").ok
    report = examine(tmp_path / "broken.gguf")
    assert any(text in found for found in rendered(report.problems)), rendered(report.problems)


QUANTISED = {
    f.name: e
    for f, e in all_examples()
    if e.scheme.spec.quantized and e.config.method and f.name != "gguf" and f.lists_dense
}


@pytest.mark.parametrize("chosen", QUANTISED.values(), ids=QUANTISED)
def test_experts_left_unquantised_are_found(chosen: Example) -> None:
    """For every format, one tensor for each expert and stacked ones."""
    dense = replace(example(*BF16), k=chosen.k)
    row = names.find_family({"model_type": chosen.config.model.get("model_type", "qwen3_moe")})
    for form in (row.forms[0], next(f for f in row.forms if f.stacked)):
        made = generate(dense, row, form, Geometry(2, chosen.k, chosen.k, 1))
        said = replace(chosen.config, model={**made.config.model, **chosen.config.model})
        manifest = manifests.build(said, made.headers, row)
        assert not manifest.problems
        (error,) = unquantized_experts(manifest)
        assert error.got == "bf16" and error.where == "layers 0"


@pytest.mark.parametrize("which", [NVFP4, CT_NVFP4, INT4, FP8, BLOCK, MXFP4, BF16, GPTQ, AWQ])
def test_an_intact_checkpoint_has_no_findings(which: tuple[str, str], tmp_path: Path) -> None:
    report = examine(save(made_of(example(*which)), tmp_path / "checkpoint"), values=True)
    assert report.ok and not report.warnings, rendered(report.warnings)


def test_one_mistake_in_many_experts_is_one_kind(tmp_path: Path) -> None:
    made = made_of(example(*INT4))
    everywhere("weight_scale", zero)(made)
    report = examine(save(made, tmp_path / "checkpoint"), values=True)
    assert len(report.problems) == 2 * 4 * 3
    assert [len(kind) for kind in kinds(report.problems)] == [24]
