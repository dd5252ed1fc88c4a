"""GPUs without a GPU: tensors in memory of the CPU that say they are on `cuda:i`, and obey torch's rules for that.

A tensor moves only by `to`, `cpu`, `cuda` and `copy_`, into memory of its own; operations refuse tensors of several
devices; numpy refuses those of a GPU. So what a fake driver is told, and what interpreted kernels read, was moved
there by the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
STREAM = 0  # the default one
# Of any devices: they move tensors, write to where one is, or ask where it is.
_ANYWHERE = {"to", "copy_", "cpu", "cuda", "type_as", "__getitem__", "__setitem__", "__set__", "is_set_to"}


class GpuTensor(Tensor):
    """A tensor on a fake GPU."""

    gpu: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def record_stream(self, stream: object) -> None: ...  # type: ignore[override]

    def __repr__(self, *given: object, **options: object) -> str:
        return f"GpuTensor(cuda:{self.gpu}, {tuple(self.shape)}, {self.dtype})"


class FakeGpus(TorchFunctionMode):
    """Inside, `device="cuda:0"` makes such tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def on_gpu(tensor: Tensor, gpu: int = 0) -> Tensor:
    """The same memory, as a tensor of a fake GPU."""
    with torch._C.DisableTorchFunction():
        made = tensor.as_subclass(GpuTensor)
    made.gpu = gpu
    return made


def memory_of(tensor: Tensor, device: torch.device | str = "cuda:0") -> Tensor:
    """What a kernel on this device reads: a plain tensor. Fails for a tensor that is elsewhere."""
    assert tensor.device == torch.device(device), f"a kernel on {device} was given a tensor on {tensor.device}"
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(Tensor)


def _place(tensor: Tensor) -> torch.device:
    return torch.device("cuda", tensor.gpu) if isinstance(tensor, GpuTensor) else Tensor.device.__get__(tensor)  # type: ignore[attr-defined]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _device(value: object) -> torch.device | None:
    """The device that an argument names; `cuda` is the current one."""
    if isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "meta"):
        value = torch.device(value)
    if not isinstance(value, torch.device):
        return None
    current = value.type == "cuda" and value.index is None
    return torch.device("cuda", torch.cuda.current_device()) if current else value


def _real(value: object) -> object:
    """An argument as the CPU takes it."""
    device = _device(value)
    return value if device is None or device.type != "cuda" else CPU


def _call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("device", "_parse_to"):  # they only name a device
        return func(*args, **kwargs)
    if name == "__get__":
        name = f"get {func.__self__.__name__}"  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunction():
        tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        places = {_place(tensor) for tensor in tensors if tensor.dim() or isinstance(tensor, GpuTensor)}
        own = _place(tensors[0]) if tensors else CPU
        if name in _ASKED and tensors:
            return _ASKED[name](own)
        if name == "_has_compatible_shallow_copy_type":  # a parameter's class says where it is: modules make a new one
            return len(places) == 1
        if len(places) > 1 and name not in _ANYWHERE:
            raise RuntimeError(f"Expected all tensors to be on the same device, got {places} ({name})")
        if name == "numpy" and own.type == "cuda":
            raise TypeError("can't convert cuda device type tensor to numpy")
        named = [_device(value) for value in (*args, kwargs.get("device"))]
        target = next((device for device in named if device is not None), own)
        if name == "to" and len(tensors) > 1:
            target = _place(tensors[1])
        if name in ("cpu", "cuda"):
            given = args[1] if len(args) > 1 else torch.cuda.current_device()
            target = CPU if name == "cpu" else torch.device("cuda", getattr(given, "index", given))
            func, args = Tensor.to, (args[0], CPU)
        kwargs = {key: _real(value) for key, value in kwargs.items() if key != "pin_memory"}
        result = func(*map(_real, args), **kwargs)
        if result is (args[0] if args else None) and _place(result) != target and name in ("to", "cpu", "cuda"):
            result = result.clone()
        return _wrapped(result, target)


_ASKED: dict[str, Callable[[torch.device], Any]] = {
    "get device": lambda own: own,
    "get is_cuda": lambda own: own.type == "cuda",
    "get is_cpu": lambda own: own.type == "cpu",
    "get_device": lambda own: -1 if own.index is None else own.index,
    "is_pinned": lambda own: False,
}


def _wrapped(result: Any, target: torch.device) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)([_wrapped(part, target) for part in result])
    if not isinstance(result, Tensor) or isinstance(result, GpuTensor):
        return result
    if target.type != "cuda":
        return result
    made = result.as_subclass(GpuTensor)
    made.gpu = target.index
    return made


class FakeGenerator(torch.Generator):
    """A generator of any device, on the CPU."""

    def __new__(cls, device: object = CPU) -> FakeGenerator:
        return super().__new__(cls)


class FakeStream:
    """The only stream; what is queued on it is done at once. An event, too."""

    cuda_stream = STREAM

    def synchronize(self) -> None: ...

    def record(self, stream: FakeStream) -> None: ...

    def wait_event(self, event: FakeStream) -> None: ...


@contextmanager
def plugged_in(monkeypatch: pytest.MonkeyPatch, count: int = 1, arch: int = 90) -> Iterator[None]:
    """So many GPUs, for torch and for us; kernels are not launched by this."""
    facts = SimpleNamespace(
        major=arch // 10, minor=arch % 10, multi_processor_count=132, total_memory=1 << 37, name="fake"
    )
    stream = FakeStream()
    empty = torch.empty
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: count, "current_device": lambda: 0,
        "get_device_properties": lambda device=None: facts, "get_device_capability": lambda device=None: (9, 0),
        "current_stream": lambda device=None: stream, "synchronize": lambda device=None: None,
        "device": lambda device: nullcontext(), "mem_get_info": lambda device=None: (1 << 37, 1 << 37),
        "is_current_stream_capturing": lambda: False, "Event": FakeStream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_cuda_getCurrentRawStream": lambda index: STREAM, "_cuda_getDevice": lambda: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch, "Generator", FakeGenerator)
    # Threads that read ahead are in no mode of torch's.
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory=False, **options: empty(*given, **options))
    with FakeGpus():
        yield
