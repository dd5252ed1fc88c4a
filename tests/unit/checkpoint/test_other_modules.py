"""Single modules by name, and modules that a saved model cannot keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conversion import find_example, find_row

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.other_modules import OtherModule, find_module, quantized_modules
from lancebill.checkpoint.write.rest import RestModule
from lancebill.errors import CannotEncode, LancebillError, MissingTensor, UnsupportedFormat, WrongShape
from lancebill.formats.stored import Stored
from lancebill.testing.checkpoints import Generated, Geometry, generate

NAME = "model.layers.0.mlp.experts.0.up_proj"


def _made(fmt: str, example: str) -> Generated:
    row = find_row("qwen3_moe")
    return generate(find_example(fmt, example), row, row.forms[0], Geometry(experts=1, hidden=128, intermediate=128))


def _found(made: Generated, name: str = NAME, **changed: Stored) -> OtherModule:
    headers = {**made.headers, **{f"{NAME}.{suffix}": stored for suffix, stored in changed.items()}}
    return find_module(made.config, headers, made.read, name)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"name": "model.layers.9"}, MissingTensor, "no tensor is stored"),
        ({"weight_scale_inv": Stored("F32", (3, 5))}, WrongShape, "'scale' in"),
        ({"weight": Stored("F8_E4M3", (128,)), "weight_scale_inv": Stored("F32", (1,))}, UnsupportedFormat, "the size"),
    ],
    ids=["name", "shape", "size"],
)
def test_modules_that_cannot_be_found(arguments: dict[str, Any], kind: type[LancebillError], message: str) -> None:
    made = _made("fp8", "block-F32")
    assert (_found(made).n, _found(made).k) == (128, 128)
    with pytest.raises(kind, match=message):
        _found(made, **arguments)


@pytest.mark.parametrize(
    ("fmt", "example", "message"),
    [
        ("modelopt", "NVFP4_AWQ", "scales of this module's inputs"),
        ("gptq", "int4-g32:fp16-zp-gptq-actorder", "order of this module's"),
    ],
)
def test_modules_whose_inputs_change_cannot_be_saved(fmt: str, example: str, message: str) -> None:
    module = _found(_made(fmt, example))
    with pytest.raises(CannotEncode, match=message):
        RestModule(module, module.scheme.spec, torch.bfloat16).check()


@pytest.mark.parametrize(("fmt", "example"), [("bitsandbytes", "nf4"), ("compressed-tensors", "pack-quantized-int4")])
def test_a_stored_size_is_that_of_the_module(fmt: str, example: str) -> None:
    module = _found(_made(fmt, example))
    assert (module.n, module.k) == (128, 128)


def test_settings_that_the_format_refuses_matter_only_to_quantised_modules() -> None:
    made, query = _made("mlx", "4-bit-BF16"), "model.layers.0.self_attn.q_proj"
    config = replace(made.config, quant={**made.config.quant, query: {"unheard": 1}})

    def found(tensors: dict[str, torch.Tensor]) -> list[OtherModule]:
        whole = replace(made, config=config, tensors={**made.tensors, **tensors})
        return quantized_modules(manifests.build(config, whole.headers), whole.headers, whole.read)

    assert not found({f"{query}.weight": torch.ones(128, 128)})
    stored = {suffix: made.tensors[f"{NAME}.{suffix}"] for suffix in ("weight", "scales", "biases")}
    with pytest.raises(UnsupportedFormat, match="unknown keys"):
        found({f"{query}.{suffix}": tensor for suffix, tensor in stored.items()})
