"""BitNet against values from its definition and transformers' packer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import detect
from lancebill.formats.base import Config, Dense, Module, Stored
from lancebill.formats.bitnet import FORMAT, BitNetScheme
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import BF16, F32, TERNARY
from lancebill.numbers.spec import DIV, MUL, TENSOR, QuantSpec, Scale
from lancebill.numbers.spec_names import parse_activation, parse_spec

DIGITS = [[-1, 0], [1, 1], [0, -1], [1, 0], [-1, -1], [0, 1], [1, 1], [0, 0]]
STORED = {".weight": Stored("U8", (2, 2)), ".weight_scale": Stored("F32", (1,))}


def resolve(**values: Any) -> BitNetScheme:
    scheme = FORMAT.scheme(Config(quant=values, method="bitnet"), Module("m", STORED))
    assert isinstance(scheme, BitNetScheme)
    return scheme


def stored(scale: float = 4.0) -> dict[str, Tensor]:
    return {
        "codes": torch.tensor([[0x84, 0x81], [0x5A, 0x66]], dtype=torch.uint8),
        "scale": torch.tensor([scale]),
    }


@pytest.mark.parametrize(("kind", "factor"), [("bitlinear", 0.25), ("autobitlinear", 4.0)])
def test_values_of_both_layer_classes(kind: str, factor: float) -> None:
    """The same tensors: one layer class divides by the scale, the other multiplies."""
    scheme = resolve(linear_class=kind)
    weight = scheme.decode(stored(), 8, 2)
    assert TERNARY.decode(weight.codes).tolist() == DIGITS
    assert torch.equal(dequantize(weight), torch.tensor(DIGITS) * factor)
    again = scheme.encode(weight)
    assert all(torch.equal(again[role], tensor) for role, tensor in stored().items())


def test_division_is_not_multiplication_by_a_reciprocal() -> None:
    weight = resolve().decode(stored(3.0), 8, 2)
    assert torch.equal(dequantize(weight), torch.tensor(DIGITS) / torch.tensor(3.0))


@pytest.mark.parametrize("n", [8, 128, 10])  # 10 rows need padding
def test_agrees_with_transformers(n: int) -> None:
    from transformers.integrations.bitnet import pack_weights, unpack_weights  # slow

    digits = torch.randint(-1, 2, (n, 48), generator=torch.Generator().manual_seed(0))
    theirs = pack_weights(digits.clone())
    scheme = resolve()
    weight = scheme.decode({"codes": theirs, "scale": torch.ones(1)}, n, 48)
    assert torch.equal(dequantize(weight), digits.float())
    assert torch.equal(scheme.encode(weight)["codes"], theirs)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(unpack_weights(scheme.encode(weight)["codes"], torch.float32)[:n], digits.float())


def test_code_3_is_refused() -> None:
    scheme = resolve()
    bad = stored()
    bad["codes"][1, 1] |= 0b11
    with pytest.raises(BadValue, match="code 3"):
        scheme.decode(bad, 8, 2)
    weight = scheme.decode(stored(), 8, 2)
    weight.codes[0, 0] = 3
    with pytest.raises(CannotEncode, match="not a ternary digit"):
        scheme.encode(weight)


def test_rows_are_interleaved_so_the_tensor_is_read_whole() -> None:
    assert resolve().units is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"linear_class": "linear"}, "linear_class"),
        ({"quantization_mode": "online"}, "at run time"),
        ({"quantization_mode": "later"}, "quantization_mode"),
        ({"use_rms_norm": True}, "normalise"),
    ],
)
def test_unsupported_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        resolve(**values)


def test_unquantised_modules() -> None:
    read = Config(quant={"modules_to_not_convert": ["lm_head", "mlp.gate"]}, method="bitnet")
    assert isinstance(FORMAT.scheme(read, Module("model.layers.0.mlp.gate")), Dense)
    assert not isinstance(FORMAT.scheme(read, Module("model.layers.0.mlp.gate_proj")), Dense)
    assert isinstance(FORMAT.scheme(read, Module("x", {".weight": Stored("BF16", (8, 2))})), Dense)
    assert FORMAT.activations(read, Module("lm_head")) is None
    assert FORMAT.activations(read, Module("x", STORED)) == parse_activation("int8")


@pytest.mark.parametrize(("name", "kind"), [("ternary-tensor", "autobitlinear"), ("ternary-/tensor:fp32", "bitlinear")])
def test_export_reads_back(name: str, kind: str) -> None:
    spec = parse_spec(name)
    quant, scheme = FORMAT.export(spec, ["lm_head"])
    assert quant["linear_class"] == kind
    read = Config(quant=quant, method="bitnet")
    headers = {".weight": Stored("U8", ()), ".weight_scale": Stored("BF16" if kind == "autobitlinear" else "F32", ())}
    assert detect(read) is FORMAT and FORMAT.scheme(read, Module("m", headers)) == scheme
    weight = quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), spec)
    assert scheme.decode(scheme.encode(weight), 16, 64).equals(weight)


def test_export_refuses_other_specs() -> None:
    for spec in (
        parse_spec("int2"),
        parse_spec("ternary-g64"),
        QuantSpec(TERNARY, (Scale(F32, TENSOR), Scale(BF16, TENSOR))),
    ):
        with pytest.raises(CannotEncode, match="BitNet stores"):
            FORMAT.export(spec, [])


def test_stored_scale_dtypes_are_kept() -> None:
    assert resolve().spec == QuantSpec(TERNARY, (Scale(F32, TENSOR, DIV),))
    module = Module("m", {**STORED, ".weight_scale": Stored("BF16", ())})
    read = Config(quant={"linear_class": "autobitlinear"}, method="bitnet")
    assert FORMAT.scheme(read, module).spec == QuantSpec(TERNARY, (Scale(BF16, TENSOR, MUL),))
