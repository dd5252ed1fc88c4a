"""The C++ paths of `numbers` give the bits of the torch definitions that they replace."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from lancebill.formats.base import Example
from lancebill.native import build
from lancebill.numbers import native, scan
from lancebill.numbers.bit_packing import Nibbles, transposed, turn_awq, unpack_bits
from lancebill.numbers.codec import quantize, requantize
from lancebill.numbers.native.rounding import _code_type
from lancebill.numbers.scales import CEIL, FLOOR
from lancebill.numbers.spec import DENSE_F32, QuantSpec
from lancebill.numbers.weight import LogicalWeight, same_bits
from lancebill.testing import conformance
from lancebill.testing.weights import random_weight

pytestmark = pytest.mark.skipif(native.library() is None, reason="the C++ paths of numbers are not built")
Result = TypeVar("Result")


def by_torch(compute: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        return compute(*arguments, **options)


def random_bits(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    data = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator).to(torch.uint8)
    return data.view(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.int32], ids=str)
def test_transpose(dtype: torch.dtype) -> None:
    for shape in ((1, 1), (16, 32), (2, 3, 40, 20), (33, 17), (0, 4), (3, 0, 2)):
        matrices = random_bits(*shape, dtype=dtype)
        assert same_bits(transposed(matrices), by_torch(transposed, matrices))


@pytest.mark.parametrize("k", [2, 30, 32, 34, 160])
def test_awq_words_are_turned(k: int) -> None:
    for words, n in ((1, 8), (3, 20), (4, 32), (17, 136)):
        stored = random_bits(2, k, words, dtype=torch.int32)
        fast, slow = turn_awq(stored, n), by_torch(turn_awq, stored, n)
        assert isinstance(fast, Nibbles) and isinstance(slow, Nibbles)
        assert same_bits(fast.data, slow.data)


@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_streams_are_unpacked(bits: int) -> None:
    for shape, count in (((3, bits), 8), ((2, 3, 5 * bits), 37), ((1, 40 * bits + 1), 320), ((0, bits), 8)):
        data = random_bits(*shape)
        assert same_bits(unpack_bits(data, bits, count), by_torch(unpack_bits, data, bits, count))


def stored_experts(example: Example) -> dict[str, Tensor]:
    """The tensors of one expert, or of two where the scheme takes them together."""
    scheme, generator = example.scheme, torch.Generator().manual_seed(1)
    count = 2 if scheme.batched and not scheme.act_order else 1
    experts = [scheme.encode(random_weight(scheme, example.n, example.k, generator)) for _ in range(count)]
    return experts[0] if count == 1 else {role: torch.stack([e[role] for e in experts]) for role in experts[0]}


def test_every_format_decodes_to_the_same_bits() -> None:
    examples = {example.scheme: (fmt, example) for fmt, example in conformance.all_examples()}
    for fmt, example in examples.values():
        stored = stored_experts(example)
        decoded = example.scheme.decode(stored, example.n, example.k)
        expected = by_torch(example.scheme.decode, stored, example.n, example.k)
        assert decoded.equals(expected), f"{fmt.name}:{example.name}"


def specs() -> dict[str, QuantSpec]:
    found = {str(spec): spec for _, example in conformance.all_examples() for spec in (example.scheme.spec.unrotated,)}
    return {name: spec for name, spec in found.items() if spec.quantized and _code_type(spec.dtype) is not None}


@pytest.mark.parametrize("spec", specs().values(), ids=str)
def test_rounding_gives_the_codes_and_the_error_of_torch(spec: QuantSpec) -> None:
    n, k = 2 * max(1, *(level.block[0] for level in spec.levels)), 512
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(min(n, 256), k, generator=generator) * torch.exp2(torch.arange(k) // 32 * 2.0 - 16)
    values[0, :64], values[0, 1:8:3], values[1, :32] = 0.0, -0.0, 3.4e38
    values[1, 32:64], values[0, 64:96] = 1e-45, torch.arange(32) / 4  # underflow; ties
    weight = LogicalWeight(DENSE_F32, values)
    for rule in (FLOOR, CEIL):
        fast, cost = requantize(weight, spec, mx_rule=rule)
        slow, expected = by_torch(requantize, weight, spec, mx_rule=rule)
        assert fast.equals(slow)
        assert (cost.saturated, cost.flushed, cost.count) == (expected.saturated, expected.flushed, expected.count)
        assert cost.max_error == expected.max_error
        assert math.isclose(cost.rms_error, expected.rms_error, rel_tol=1e-6)


@pytest.mark.parametrize("spec", specs().values(), ids=str)
def test_search_finds_the_scales_of_torch(spec: QuantSpec) -> None:
    generator = torch.Generator().manual_seed(3)
    for n, k in ((3, 80), (130, 400), (2, 1024)):
        values = torch.randn(n, k, generator=generator) * torch.exp2(torch.arange(k) // 32 % 8 * 2.0 - 8)
        values[0, :70], values[1, 5] = 0.0, 1e30
        assert quantize(values, spec, search=True).equals(by_torch(quantize, values, spec, search=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scans_find_single_numbers(dtype: torch.dtype) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for at in (0, 4095, 4096, 9999):
            numbers = torch.ones(10000, dtype=dtype)
            assert scan.all_finite(numbers)
            numbers[at] = bad
            assert not scan.all_finite(numbers)
    codes = torch.arange(250, dtype=torch.uint8)
    assert scan.contains_any(codes, (255, 249)) and not scan.contains_any(codes, (255, 250))
    assert not scan.contains_any(codes[:0], (0,)) and not scan.contains_any(codes, ())


def test_surveys_are_those_of_torch() -> None:
    for size in (1, 7, 8, 4095, 4099, 10000):
        data = random_bits(size) & 0x7E
        assert scan.survey(data) == by_torch(scan.survey, data)
    assert scan.survey(torch.tensor([3, 0, 8], dtype=torch.uint8)) == scan.Survey(11 << 64, 11, 0, 8)


STRUCTS = {
    "lancebill_survey": native.SurveyStruct,
    "lancebill_plane": native.PlaneStruct,
    "lancebill_field": native.FieldStruct,
    "lancebill_level": native.LevelStruct,
    "lancebill_code_type": native.CodeTypeStruct,
    "lancebill_rounding": native.RoundingStruct,
    "lancebill_trials": native.TrialsStruct,
}


def test_structs_match_the_header(tmp_path: Path) -> None:
    header = (build.NUMBERS.folder / "numbers.h").read_text(encoding="utf-8")
    assert re.search(rf"LANCEBILL_MOST_SCALES = {native.MOST_SCALES}\b", header)
    lines = ['#include "numbers.h"', "#include <cstddef>"]
    for name, struct in STRUCTS.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field, *_ in struct._fields_:
            lines.append(f"static_assert(offsetof({name}, {field}) == {vars(struct)[field].offset});")
    source = tmp_path / "offsets.cpp"
    source.write_text("\n".join(lines) + "\n")
    cxx = build.compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    subprocess.run([cxx, "-std=c++17", "-fsyntax-only", f"-I{build.NUMBERS.folder}", str(source)], check=True)
