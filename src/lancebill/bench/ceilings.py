"""What the machine can do, measured on it: memory reads and matrix products through torch.

The floor of a layer follows from these: no fewer bytes than the activated experts and the tokens, no
fewer products than rows times weights, each at the best rate seen here.
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
from lancebill.moe.problem import Device
from lancebill.numbers.dtypes import INTEGER
from lancebill.numbers.spec import ActivationSpec

REPEATS = 5
_READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # or twice a CPU's last cache, where that is more
_LARGEST = {"cpu": 2048, "cuda": 8192}
_LONG_ENOUGH = 0.02  # seconds of one product: larger ones would not be faster
_IN_A_ROW = {"cpu": 1, "cuda": 8}  # calls between two looks at the clock

WINDOW = f"the fastest of {REPEATS} after a warm-up: a burst, power limits may not show"


@dataclass(frozen=True)
class Ceilings:
    """Bytes read a second, and products by number type, on so many threads."""

    read_gbs: float
    tflops: Mapping[str, float]
    size: Mapping[str, int]  # of the square matrices that were multiplied

    def rate(self, activations: ActivationSpec) -> float:
        """TFLOP/s of the fastest product that inputs of this kind could use."""
        spec = activations.spec
        usable = {"fp32", "bf16"}
        if spec.quantized:
            usable.add("int8" if spec.dtype.kind == INTEGER else "fp8")
        return max(rate for name, rate in self.tflops.items() if name in usable)

    def floor_us(self, flops: float, moved: float, activations: ActivationSpec) -> float:
        """No version of the work is faster than this at these rates."""
        return max(flops / (self.rate(activations) * 1e6), moved / (self.read_gbs * 1e3))

    def describe(self) -> dict[str, object]:
        return {"read_gbs": self.read_gbs, "tflops": dict(self.tflops), "size": dict(self.size), "window": WINDOW}


def measure_ceilings(device: Device, activations: ActivationSpec) -> Ceilings:
    """Reads, bf16 and fp32 products, and 8-bit ones where the inputs are so narrow."""
    wanted = dict(_PRODUCTS)
    if not activations.spec.quantized:
        wanted = {name: make for name, make in wanted.items() if name in ("bf16", "fp32")}
    rates, sizes = {}, {}
    for name, make in wanted.items():
        try:
            with warnings.catch_warnings():  # a product that torch has only a slow way for says so at length
                warnings.simplefilter("ignore")
                rates[name], sizes[name] = _product_rate(device, make)
        except RuntimeError:  # torch has no such product on this device
            continue
    return Ceilings(read_rate(device), rates, sizes)


def read_rate(device: Device) -> float:
    """The fastest way to read a buffer that no cache holds: two reductions, and on CPUs several streams at once."""
    cached = last_level_cache() if device.kind == "cpu" else 0
    buffer = torch.ones(max(_READ_BYTES[device.kind], 2 * cached) // 4, device=device.torch)
    ways: list[Callable[[], object]] = [buffer.sum, buffer.amax]
    kernels = native.library() if device.kind == "cpu" else None
    if kernels is not None:
        ways.append(partial(kernels.read, buffer, torch.get_num_threads()))
    best = min(_seconds(device, call, _IN_A_ROW[device.kind]) for call in ways)
    return buffer.numel() * buffer.element_size() / best / 1e9


def _product_rate(device: Device, make: Callable[[int, torch.device], Callable[[], Tensor]]) -> tuple[float, int]:
    """TFLOP/s of square products, grown until one takes long enough to be timed."""
    size = 128
    while size < _LARGEST[device.kind]:
        if _seconds(device, make(size, device.torch), 1) > _LONG_ENOUGH:
            break
        size *= 2
    in_a_row = _IN_A_ROW[device.kind]
    return 2 * size**3 / _seconds(device, make(size, device.torch), in_a_row) / 1e12, size


def _seconds(device: Device, call: Callable[[], object], in_a_row: int) -> float:
    """Of the fastest look: a ceiling is what the machine can do, and disturbances only slow it."""
    call()
    return min(_once(device, call, in_a_row) for _ in range(REPEATS))


def _once(device: Device, call: Callable[[], object], in_a_row: int) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(in_a_row):
        call()
    _finish(device)
    return (time.perf_counter() - start) / in_a_row


def _finish(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize(device.torch)


def _wide(dtype: torch.dtype) -> Callable[[int, torch.device], Callable[[], Tensor]]:
    def make(size: int, device: torch.device) -> Callable[[], Tensor]:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return lambda: a @ b.t()

    return make


def _fp8(size: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def _int8(size: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = (torch.randint(-127, 128, (size, size), device=device).to(torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


_PRODUCTS = {"bf16": _wide(torch.bfloat16), "fp32": _wide(torch.float32), "fp8": _fp8, "int8": _int8}
