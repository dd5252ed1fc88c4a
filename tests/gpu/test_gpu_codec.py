"""The codec on a GPU gives the bits it gives on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancebill.numbers.codec import CEIL, dequantize, loss, quantize, requantize
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
NAMES = [
    "bf16", "fp16", "fp32", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8", "mxfp8-e5m2", "nvfp4", "nvfp4-div", "nf4",
    "int3-g64", "int4-g128", "int4-g32-zp", "int4-g32-zp:fp16", "int8", "twos4-g32", "iq4-g32:fp16", "bnbfp4-g64",
    "uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256", "fp8-tensor", "fp8-channel", "fp8-block", "e4m3fnuz-channel",
    "e3m4-g16", "e2m1-g16:ue5m3-/channel", "ternary-tensor",
]  # fmt: skip


def to(weight: LogicalWeight, device: str) -> LogicalWeight:
    return replace(
        weight,
        codes=weight.codes.to(device),
        scales=tuple(t.to(device) for t in weight.scales),
        zero=None if weight.zero is None else weight.zero.to(device),
        minimum=tuple(t.to(device) for t in weight.minimum),
    )


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_on_a_cpu(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 520, generator=generator) * torch.exp2(torch.randn(300, 520, generator=generator) * 3)
    spec = parse_spec(name)
    here, there = (quantize(values.to(device), spec, mx_rule=CEIL) for device in ("cpu", DEVICE))
    assert to(there, "cpu").equals(here)
    assert torch.equal(dequantize(there).cpu(), dequantize(here))
    one, other = loss(values, here), loss(values.to(DEVICE), there)
    assert (one.saturated, one.flushed, one.count) == (other.saturated, other.flushed, other.count)
    assert other.rms_error == pytest.approx(one.rms_error, rel=1e-6)
    result, cost = requantize(there, parse_spec("mxfp4"))
    again, price = requantize(here, parse_spec("mxfp4"))
    assert to(result, "cpu").equals(again)
    assert cost.rms_error == pytest.approx(price.rms_error, rel=1e-6)
