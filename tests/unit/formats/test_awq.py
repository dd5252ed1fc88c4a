"""AWQ against values from its definition and a slow reference packer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import detect
from lancebill.formats.awq import FORMAT, AwqScheme
from lancebill.formats.base import Config, Dense, Module, Stored
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import F16
from lancebill.numbers.spec import CHANNEL, group, int_spec
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.weights import random_weight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NAME = "model.layers.0.mlp.experts.7.gate_proj"


def words(*values: int) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.int32).copy())


def resolve(module: Module | None = None, **values: Any) -> AwqScheme:
    quant = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", **values}
    scheme = FORMAT.scheme(Config(quant=quant, method="awq"), module or Module(NAME))
    assert isinstance(scheme, AwqScheme)
    return scheme


def by_hand(columns: np.ndarray) -> Tensor:
    """Nibble j of a word is column ORDER[j]: [rows, N] to [rows, N/8]."""
    rows, n = columns.shape
    out = np.zeros((rows, n // 8), dtype=np.uint32)
    for row in range(rows):
        for word in range(n // 8):
            for nibble in range(8):
                out[row, word] |= np.uint32(int(columns[row, 8 * word + ORDER[nibble]]) << (4 * nibble))
    return torch.from_numpy(out.view(np.int32).copy())


def test_values_of_the_definition() -> None:
    scheme = resolve(group_size=-1)
    stored = {
        "codes": words(0x75316420).reshape(1, 1),
        "zero": words(0x88888888).reshape(1, 1),
        "scale": torch.full((1, 8), 0.25, dtype=torch.float16),
    }
    weight = scheme.decode(stored, 8, 1)
    assert weight.codes.flatten().tolist() == list(range(8))
    assert dequantize(weight).flatten().tolist() == [-2, -1.75, -1.5, -1.25, -1, -0.75, -0.5, -0.25]
    assert all(torch.equal(scheme.encode(weight)[role], stored[role]) for role in stored)


@pytest.mark.parametrize("zero_point", [True, False])
@pytest.mark.parametrize("size", [32, -1])
def test_agrees_with_a_nibble_by_nibble_packer(zero_point: bool, size: int) -> None:
    rng = np.random.default_rng(1)
    n, k = 24, 96
    groups = 1 if size == -1 else k // size
    codes = rng.integers(0, 16, (n, k))
    zero = rng.integers(0, 16, (n, groups)) if zero_point else np.full((n, groups), 8)
    scale = rng.standard_normal((n, groups)).astype(np.float16)
    stored = {"codes": by_hand(codes.T), "zero": by_hand(zero.T), "scale": torch.from_numpy(scale.T.copy())}
    expected = np.empty((n, k), dtype=np.float32)
    for row in range(n):
        for column in range(k):
            g = 0 if size == -1 else column // size
            expected[row, column] = np.float32(codes[row, column] - zero[row, g]) * np.float32(scale[row, g])
    scheme = resolve(group_size=size, zero_point=zero_point)
    weight = scheme.decode(stored, n, k)
    assert np.array_equal(dequantize(weight).numpy(), expected)
    assert all(torch.equal(scheme.encode(weight)[role], stored[role]) for role in stored)
    if not zero_point:
        del stored["zero"]
        assert scheme.decode(stored, n, k).equals(weight)


def test_symmetric_zero_points_are_checked() -> None:
    scheme = resolve(zero_point=False)
    stored = scheme.encode(random_weight(scheme, 8, 64, torch.Generator().manual_seed(0)))
    stored["zero"] = words(0x88888887).reshape(1, 1)
    with pytest.raises(BadValue, match="symmetric"):
        scheme.decode(stored, 8, 64)


@pytest.mark.parametrize("version", ["gemv", "GEMV_fast", "marlin", "exllama", "ipex", "llm-awq", "new"])
def test_other_packings_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedFormat, match="only gemm is supported, which packs along N"):
        resolve(version=version)


def test_gemv_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="gemv' packs along K"):
        resolve(version="gemv")
    for other in ({"backend": "llm-awq"}, {"format": "gemv"}, {"checkpoint_format": "gemv_fast"}):
        with pytest.raises(UnsupportedFormat, match="only gemm"):
            resolve(**other)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 8}, "bits"),
        ({"bits": None}, "bits"),
        ({"bits": 4, "w_bit": 3}, "disagree"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": None}, "group_size"),
        ({"zero_point": 1}, "zero_point"),
        ({"version": 4}, "version"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"modules_to_not_convert": [4]}, "modules_to_not_convert"),
        ({"dynamic": {"+:[": {}}}, "regular expression"),
    ],
)
def test_unsupported_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        resolve(**values)


def test_old_config_keys() -> None:
    quant = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    scheme = FORMAT.scheme(Config(quant=quant, method="awq"), Module(NAME))
    assert scheme.spec == int_spec(4, group(32), zero_point=True, scale=F16)
    assert resolve(group_size=-1).spec.scales[0].block == CHANNEL


def test_unquantised_modules() -> None:
    """By substrings of names if nothing is stored, otherwise by the stored tensors."""
    quant = {"bits": 4, "group_size": 64, "modules_to_not_convert": ["mlp.gate", "lm_head"]}
    read = Config(quant=quant, method="awq")
    stored = {".qweight": Stored("I32", (64, 8)), ".scales": Stored("F16", (1, 64))}
    plain = {".weight": Stored("F16", (8, 8))}
    assert isinstance(FORMAT.scheme(read, Module("model.layers.0.mlp.gate")), Dense)
    assert not isinstance(FORMAT.scheme(read, Module(NAME)), Dense)
    assert not isinstance(FORMAT.scheme(read, Module("model.layers.0.mlp.gate_proj", stored)), Dense)
    assert isinstance(FORMAT.scheme(read, Module(NAME, plain)), Dense)


@pytest.mark.parametrize("name", ["int4-g128:fp16-zp", "int4-g32", "int4-channel:fp16-zp", "int4"])
def test_export_reads_back(name: str) -> None:
    spec = parse_spec(name)
    quant, scheme = FORMAT.export(spec, ["lm_head"])
    read = Config(quant=quant, method=quant["quant_method"])
    scale = "F16" if spec.scales[0].dtype == F16 else "BF16"
    module = Module(NAME, {".qweight": Stored("I32", ()), ".scales": Stored(scale, ())})
    assert detect(read) is FORMAT and FORMAT.scheme(read, module) == scheme
    assert quant["zero_point"] is (spec.zero is not None)
    assert isinstance(FORMAT.scheme(read, Module("lm_head")), Dense)
    weight = quantize(torch.randn(32, 256, generator=torch.Generator().manual_seed(3)), spec)
    assert scheme.decode(scheme.encode(weight), 32, 256).equals(weight)
    with pytest.raises(CannotEncode, match="multiple of 8 rows"):
        scheme.encode(quantize(torch.randn(12, 256), spec))


@pytest.mark.parametrize("name", ["int8", "int3-g64", "nf4", "fp8-tensor", "int4-g32:fp32", "int4-tensor"])
def test_export_refuses_other_specs(name: str) -> None:
    with pytest.raises(CannotEncode, match="AWQ stores"):
        FORMAT.export(parse_spec(name), [])
