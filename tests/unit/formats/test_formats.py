"""The conformance tests, run on every registered format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lancebill.formats as formats
from lancebill.formats.base import Example, Format
from lancebill.testing import conformance

CASES = [pytest.param(f, e, id=f"{f.name}:{e.name}") for f, e in conformance.all_examples()]


@pytest.mark.parametrize(("fmt", "example"), CASES)
def test_round_trip_is_exact_and_one_format_matches(fmt: Format, example: Example) -> None:
    conformance.check_round_trip(fmt, example)


@pytest.mark.parametrize(("fmt", "example"), CASES)
def test_a_missing_tensor_is_reported_by_name(fmt: Format, example: Example) -> None:
    conformance.check_leave_one_out(example)


@pytest.mark.parametrize(("fmt", "example"), CASES)
def test_a_wrong_shape_or_dtype_is_reported_by_name(fmt: Format, example: Example) -> None:
    conformance.check_wrong_headers(example)


@pytest.mark.parametrize(("fmt", "example"), CASES)
def test_every_shard_is_a_slice_of_the_whole(fmt: Format, example: Example) -> None:
    conformance.check_shards(example)


@pytest.mark.parametrize(("fmt", "example"), CASES)
def test_nan_scales_are_refused_by_decode_and_encode(fmt: Format, example: Example) -> None:
    conformance.check_nan_scales(example)


NEW_FORMAT = """
from lancebill.numbers.dtypes import E5M2
from lancebill.formats.base import BIAS, Config, Example, Format, Scheme, codes_of, dense, part
from lancebill.numbers.spec import CHANNEL, fp8_spec
from lancebill.numbers.weight import LogicalWeight
import torch


class RowFloat(Scheme):
    def unpack(self, stored, n, k):
        scale = stored["scale"].reshape(n, 1){fault}
        return LogicalWeight(self.spec, codes_of(stored["codes"]), (scale,))

    def pack(self, weight):
        codes = weight.codes.view(torch.float8_e5m2)
        return {{"codes": codes, "scale": weight.scales[0].reshape(-1)}}


SCHEME = RowFloat(
    fp8_spec(CHANNEL, dtype=E5M2),
    (part("codes", ".row_float", "F8_E5M2", "n k"), part("scale", ".row_scale", "F32", "n"), BIAS),
)


class Rows(Format):
    name = "row-float"

    def matches(self, config):
        return config.method == "row-float"

    def scheme(self, config, module):
        return SCHEME

    def examples(self):
        yield Example("only", Config(method="row-float"), SCHEME)


FORMAT = Rows()
"""


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Format]]:
    def dropped(fault: str) -> Format:
        (tmp_path / f"dropped_{len(fault)}.py").write_text(NEW_FORMAT.format(fault=fault))
        monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
        formats.registry.cache_clear()
        return formats.registry()["row-float"]

    yield dropped
    formats.registry.cache_clear()


def test_a_new_module_is_registered(drop: Callable[[str], Format]) -> None:
    conformance.check_format(drop(""))


def test_a_faulty_new_format_is_caught(drop: Callable[[str], Format]) -> None:
    fmt = drop(" * 2")
    with pytest.raises(conformance.Nonconforming, match="is not w"):
        conformance.check_format(fmt)
