"""The limits of this machine, measured: memory read bandwidth and GEMM throughput through torch.

They give a lower bound (the floor) for the time of a layer: it has to read the activated experts and the tokens,
and to multiply rows by weights, and neither is faster than the best rate measured here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.bench.timing import last_level_cache
from lancebill.moe.device import Device
from lancebill.numbers.dtypes import INTEGER
from lancebill.numbers.spec import ActivationSpec

REPEATS = 5
_READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # on a CPU, twice the last-level cache if that is larger
_LARGEST = {"cpu": 2048, "cuda": 8192}
_LONG_ENOUGH = 0.02  # seconds of one GEMM; larger ones reach no higher rate
_CALLS_PER_SAMPLE = {"cpu": 1, "cuda": 8}

WINDOW = f"the fastest of {REPEATS} after a warm-up; too short for power limits to show"


@dataclass(frozen=True)
class Ceilings:
    """Read bandwidth in GB/s, and GEMM throughput by input type."""

    read_gbs: float
    tflops: Mapping[str, float]
    size: Mapping[str, int]  # of the square matrices that were multiplied

    def rate(self, activations: ActivationSpec) -> float:
        """TFLOP/s of the fastest GEMM that can take these activations."""
        spec = activations.spec
        usable = {"fp32", "bf16"}
        if spec.quantized:
            usable.add("int8" if spec.dtype.kind == INTEGER else "fp8")
        return max(rate for name, rate in self.tflops.items() if name in usable)

    def floor_us(self, flops: float, moved: float, activations: ActivationSpec) -> float:
        """The lower bound in microseconds for so many flops and bytes moved."""
        return max(flops / (self.rate(activations) * 1e6), moved / (self.read_gbs * 1e3))

    def describe(self) -> dict[str, object]:
        return {"read_gbs": self.read_gbs, "tflops": dict(self.tflops), "size": dict(self.size), "window": WINDOW}


def measure_ceilings(device: Device, activations: ActivationSpec) -> Ceilings:
    """Read bandwidth, bf16 and fp32 GEMMs, and 8-bit GEMMs if the activations are quantised."""
    gemms = dict(_GEMMS)
    if not activations.spec.quantized:
        gemms = {name: make for name, make in gemms.items() if name in ("bf16", "fp32")}
    rates, sizes = {}, {}
    for name, make in gemms.items():
        try:
            with warnings.catch_warnings():  # torch warns about GEMMs for which it has only a slow fallback
                warnings.simplefilter("ignore")
                rates[name], sizes[name] = _gemm_rate(device, make)
        except RuntimeError:  # torch has no such GEMM on this device
            continue
    return Ceilings(read_rate(device), rates, sizes)


def read_rate(device: Device) -> float:
    """GB/s of the fastest way to read a buffer larger than the caches: torch's sum or max, or our own CPU loop."""
    cached = last_level_cache() if device.kind == "cpu" else 0
    buffer = torch.ones(max(_READ_BYTES[device.kind], 2 * cached) // 4, dtype=torch.float32, device=device.torch)
    readers: list[Callable[[], object]] = [buffer.sum, buffer.amax]
    kernels = native.library() if device.kind == "cpu" else None
    if kernels is not None:
        readers.append(partial(kernels.read, buffer, torch.get_num_threads()))
    best = min(_fastest_seconds(device, call, _CALLS_PER_SAMPLE[device.kind]) for call in readers)
    return buffer.numel() * buffer.element_size() / best / 1e9


def _gemm_rate(device: Device, make: Callable[[int, torch.device], Callable[[], Tensor]]) -> tuple[float, int]:
    """TFLOP/s of square GEMMs; the size doubles until one GEMM takes long enough."""
    size = 128
    while size < _LARGEST[device.kind]:
        if _fastest_seconds(device, make(size, device.torch), 1) > _LONG_ENOUGH:
            break
        size *= 2
    calls = _CALLS_PER_SAMPLE[device.kind]
    return 2 * size**3 / _fastest_seconds(device, make(size, device.torch), calls) / 1e12, size


def _fastest_seconds(device: Device, call: Callable[[], object], calls: int) -> float:
    """The minimum, not the median: a ceiling is the best the machine can do, and noise only slows it."""
    call()
    return min(_mean_seconds(device, call, calls) for _ in range(REPEATS))


def _mean_seconds(device: Device, call: Callable[[], object], calls: int) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _synchronize(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize(device.torch)


def _matmul(dtype: torch.dtype) -> Callable[[int, torch.device], Callable[[], Tensor]]:
    def make(size: int, device: torch.device) -> Callable[[], Tensor]:
        a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
        return lambda: a @ b.t()

    return make


def _fp8(size: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def _int8(size: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = (torch.randint(-127, 128, (size, size), device=device).to(torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


_GEMMS = {"bf16": _matmul(torch.bfloat16), "fp32": _matmul(torch.float32), "fp8": _fp8, "int8": _int8}
