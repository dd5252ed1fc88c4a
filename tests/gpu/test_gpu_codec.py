"""The codec gives the same bits on a GPU as on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancebill.numbers.codec import dequantize, loss, quantize, requantize
from lancebill.numbers.scales import CEIL
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
        stored=weight.codes.to(device),
        scales=tuple(t.to(device) for t in weight.scales),
        zero=None if weight.zero is None else weight.zero.to(device),
        minimum=tuple(t.to(device) for t in weight.minimum),
    )


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_on_a_cpu(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 520, generator=generator) * torch.exp2(torch.randn(300, 520, generator=generator) * 3)
    spec = parse_spec(name)
    on_cpu, on_gpu = (quantize(values.to(device), spec, mx_rule=CEIL) for device in ("cpu", DEVICE))
    assert to(on_gpu, "cpu").equals(on_cpu)
    assert torch.equal(dequantize(on_gpu).cpu(), dequantize(on_cpu))
    cpu_loss, gpu_loss = loss(values, on_cpu), loss(values.to(DEVICE), on_gpu)
    assert (cpu_loss.saturated, cpu_loss.flushed, cpu_loss.count) == (
        gpu_loss.saturated,
        gpu_loss.flushed,
        gpu_loss.count,
    )
    assert gpu_loss.rms_error == pytest.approx(cpu_loss.rms_error, rel=1e-6)
    gpu_result, gpu_cost = requantize(on_gpu, parse_spec("mxfp4"))
    cpu_result, cpu_cost = requantize(on_cpu, parse_spec("mxfp4"))
    assert to(gpu_result, "cpu").equals(cpu_result)
    assert gpu_cost.rms_error == pytest.approx(cpu_cost.rms_error, rel=1e-6)
