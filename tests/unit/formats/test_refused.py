"""What single formats refuse: tensors, weights and settings that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lancebill.formats as formats
from lancebill.errors import BadValue, CannotEncode, LancebillError, UnsupportedFormat, WrongShape
from lancebill.formats import auto_round, bitnet, compressed_tensors, fp8, gptq, hqq, humming, quanto, torchao
from lancebill.formats.base import Config, Format, Module, Scheme
from lancebill.numbers.codec import quantize
from lancebill.numbers.dtypes import E8M0, TERNARY
from lancebill.numbers.spec import DIV, TENSOR, QuantSpec, Scale
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight

NAME = "model.layers.0.mlp.experts.3.down_proj"


def example(fmt: str, name: str) -> Scheme:
    return next(each.scheme for each in formats.registry()[fmt].examples() if each.name == name)


def weight(spec: QuantSpec, k: int, n: int = 8) -> LogicalWeight:
    return quantize(torch.randn(n, k), spec)


# ---- Weights that a scheme cannot write


@pytest.mark.parametrize(
    ("scheme", "k"),
    [
        (hqq.hqq_scheme(4, 64, "F32"), 96),
        (quanto.grouped_scheme(4, 64, "BF16"), 96),
        (example("w4afp8", "experts-F32"), 129),
        (example("quark", "mx-fp4"), 48),
    ],
    ids=["hqq", "quanto", "w4afp8", "quark"],
)
def test_rows_that_a_word_or_block_would_span_are_not_written(scheme: Scheme, k: int) -> None:
    with pytest.raises(CannotEncode, match=r"groups must end|share a byte|rows of whole blocks"):
        scheme.encode(weight(scheme.spec, k))


def test_a_scheme_writes_its_own_spec_in_natural_order() -> None:
    scheme = hqq.hqq_scheme(4, 64, "F32")
    with pytest.raises(CannotEncode, match="another spec"):
        scheme.encode(weight(parse_spec("int4-g64"), 64))
    with pytest.raises(CannotEncode, match="act-order"):
        scheme.encode(replace(weight(scheme.spec, 64), perm=torch.arange(64, dtype=torch.int32)))


ROTATED = parse_spec("int4-g32-h32")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda: gptq.FORMAT.add_modules({}, parse_spec("int4-g32"), [NAME]), "one spec"),
        (lambda: gptq.FORMAT.config_for(ROTATED, []), "cannot store a rotation"),
        (lambda: compressed_tensors.FORMAT.add_modules({}, ROTATED, [NAME]), "for all matrices or none"),
        (lambda: fp8.FORMAT.export(parse_spec("fp8-channel:e8m0"), []), "FP8 has float scales"),
        (lambda: bitnet.FORMAT.export(QuantSpec(TERNARY, (Scale(E8M0, TENSOR, DIV),)), []), "bf16, fp16 or fp32"),
    ],
    ids=["several specs", "rotation", "some rotated", "powers of two", "scale"],
)
def test_what_a_format_cannot_state_is_not_written(write: Any, message: str) -> None:
    with pytest.raises(CannotEncode, match=message):
        write()


# ---- Tensors that do not fit the matrix


@pytest.mark.parametrize(
    ("scheme", "change", "k", "kind"),
    [
        (example("fp8", "channel-dynamic"), {"scale": torch.ones(3)}, 64, WrongShape),
        (next(bitnet.FORMAT.examples()).scheme, {"scale": torch.ones(2)}, 64, BadValue),
        (hqq.hqq_scheme(4, 64, "F32"), {}, 96, BadValue),
        (quanto.grouped_scheme(4, 64, "BF16"), {}, 96, BadValue),
    ],
    ids=["scales", "one scale", "hqq", "quanto"],
)
def test_tensors_of_another_size_are_not_read(
    scheme: Scheme, change: Mapping[str, torch.Tensor], k: int, kind: type[LancebillError]
) -> None:
    stored = scheme.encode(weight(scheme.spec, 64)) | change
    with pytest.raises(kind, match=r"number of scales|one element|groups span rows"):
        scheme.decode(stored, 8, k)


# ---- Settings


def _torchao(granularity: object) -> dict[str, Any]:
    arguments = {"granularity": {"_type": "PerGroup", "_data": granularity}}
    return {"quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": arguments}}}


def _inputs(**changes: object) -> dict[str, Any]:
    quant, _ = compressed_tensors.FORMAT.export(parse_spec("nvfp4-div"), [])
    inputs = {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True, "dynamic": True, **changes}
    return {**quant, "config_groups": {"group_0": {**quant["config_groups"]["group_0"], "input_activations": inputs}}}


_HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 64}, "scale_quant_params": {"nbits": 8}}
_PACKING = {"packing_format": "auto_round:llm_compressor"}
_FLOATS = {"bits": 4, "group_size": 16, "sym": True, "data_type": "nv_fp", **_PACKING}


@pytest.mark.parametrize(
    ("fmt", "quant", "message"),
    [
        (hqq.FORMAT, {"quant_config": _HQQ}, "scale_quant_params"),
        (humming.FORMAT, {"dtype": "uint4", "group_size": -1}, "the size of a group"),
        (humming.FORMAT, {"dtype": "uint4", "scale_type": "block", "group_size": 32}, "two sizes"),
        (humming.FORMAT, {"group_size": 32}, "no number type"),
        (torchao.FORMAT, _torchao({"group_size": 0}), "the size of 'PerGroup'"),
        (torchao.FORMAT, _torchao({"group_size": None}), "the size of 'PerGroup'"),
        (auto_round.FORMAT, {**_FLOATS, "act_bits": 4, "act_data_type": "odd"}, "act_data_type"),
        (compressed_tensors.FORMAT, _inputs(group_size=64), "input_activations"),
    ],
)
def test_settings_that_are_refused(fmt: Format, quant: dict[str, Any], message: str) -> None:
    config, module = Config(quant=quant, method=fmt.name), Module(NAME)
    with pytest.raises(UnsupportedFormat, match=message):
        fmt.scheme(config, module)
        fmt.activations(config, module)


# ---- The registry

TWIN = """
from lancebill.formats.gptq import Gptq

class Twin(Gptq):
    name = "{name}"

FORMAT = Twin()
"""


@pytest.fixture
def _fresh_registry() -> object:
    formats.registry.cache_clear()
    yield
    formats.registry.cache_clear()


@pytest.mark.usefixtures("_fresh_registry")
@pytest.mark.parametrize(("name", "message"), [("gptq", "two formats"), ("gptq-twin", "more than one format")])
def test_formats_that_contradict_each_other(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name.replace('-', '_')}_refused.py").write_text(TWIN.format(name=name))
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    with pytest.raises(UnsupportedFormat, match=message):
        formats.detect(next(iter(gptq.FORMAT.examples())).config)


@pytest.mark.usefixtures("_fresh_registry")
def test_an_entry_point_that_names_no_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "odd_formats-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-formats\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{formats.ENTRY_POINTS}]\nodd = math:pi\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedFormat, match="must name a Format"):
        formats.registry()
    (tmp_path / "twin_format.py").write_text(TWIN.format(name="twin"))
    (installed / "entry_points.txt").write_text(f"[{formats.ENTRY_POINTS}]\ntwin = twin_format:FORMAT\n")
    formats.registry.cache_clear()
    assert formats.registry()["twin"].name == "twin"
