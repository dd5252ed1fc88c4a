"""Reads tensors to the device that packs them. On a GPU, a few threads read ahead into pinned memory.

The bytes of a slice of experts are read into a few pinned buffers, by several threads, so that slices are complete in
their order. The thread that packs copies each buffer at once and without waiting, and finds the tensors in the copies.
So the device has the stored bytes of one slice at a time, however many are read ahead. Tensors that the caller has
pinned are copied from where they are, those of one part together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor

from lancebill.checkpoint.read.slices import Index, Reader, reading_into
from lancebill.errors import LancebillError

BUFFER_BYTES = 16 << 20  # of pinned memory; a larger tensor has a buffer of its own
_ALIGNED = 256

Key = tuple[object, ...]
Read = tuple[str, Index]  # a tensor and what to read of it


class TensorSource(Enum):
    """Where the tensors of a load are."""

    FILES = "files, or memory that is not pinned"
    PINNED = "pinned memory: a GPU copies them from there"
    DEVICE = "the device already: there is nothing to wait for"


def source_of(tensors: Iterable[Tensor], device: torch.device) -> TensorSource:
    """Where tensors in memory are, for a load to `device`."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if not on_host:
        return TensorSource.DEVICE
    pinned = device.type == "cuda" and all(map(Tensor.is_pinned, on_host))
    return TensorSource.PINNED if pinned else TensorSource.FILES


class DeviceReader:
    """Reads tensors to a device. `fetch` is called by any thread, everything else by the one that packs.

    `pinned`: what `read` returns is pinned, or on a device.
    """

    def __init__(self, read: Reader, device: torch.device, *, pinned: bool = False) -> None:
        self._read, self.device, self._pinned = read, device, pinned
        self._fetched: Fetched | None = None
        self._reads_callers_memory = False

    @property
    def asynchronous(self) -> bool:
        """Whether the device works while the host goes on."""
        return self.device.type == "cuda"

    def fetch(self, reads: Iterable[Read], fetched: Fetched) -> None:
        """Read tensors into pinned memory. Those that cannot be read are left out: whoever needs them says where."""
        with reading_into(fetched.allocate):
            for name, index in reads:
                try:
                    fetched.add(_key(name, index), self._read(name, index))
                except LancebillError:
                    break

    @contextmanager
    def using(self, fetched: Fetched) -> Iterator[None]:
        """Inside, tensors that were fetched are not read again."""
        self._fetched = fetched
        try:
            yield
        finally:
            self._fetched = None

    def __call__(self, name: str, index: Index) -> Tensor:
        if self._fetched is not None:
            found = self._fetched.take(_key(name, index))
            if found is not None:
                return self._to_device(found)
        return self._to_device(self._read(name, index))

    def all(self, reads: Sequence[Read]) -> Tensor | list[Tensor]:
        """Tensors of several experts: [experts, ...] if reading or one copy to the device puts them together, else
        each."""
        if not self.asynchronous:
            return _read_together(self._read, reads)
        if not self._pinned or self._fetched is not None:
            return [self(name, index) for name, index in reads]
        found = [self._read(name, index) for name, index in reads]
        first = found[0]
        if any(each.device.type != "cpu" or each.shape != first.shape or each.dtype != first.dtype for each in found):
            return [self._to_device(each) for each in found]
        together = torch.empty((len(found), *first.shape), dtype=first.dtype, device=self.device)
        torch._foreach_copy_(list(together.unbind()), found, non_blocking=True)
        self._reads_callers_memory |= first.is_pinned()
        return together

    def _to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device. Tensors that the caller has pinned are copied from where they are."""
        if not self.asynchronous or tensor.device.type != "cpu":
            return tensor
        pinned = tensor.is_pinned()
        self._reads_callers_memory |= pinned
        return tensor.contiguous().to(self.device, non_blocking=pinned)

    def finish(self) -> None:
        """Waits if the device may still read memory of the caller, who may write there again."""
        if self._reads_callers_memory:
            torch.cuda.current_stream(self.device).synchronize()


class Fetched:
    """Tensors in pinned buffers, and their copies on a device. What is pinned already, or on a device, stays there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elsewhere: dict[Key, Tensor] = {}
        self._allocating = threading.Lock()
        self._buffers: list[Tensor] = []
        self._copies: dict[int, Tensor] = {}  # by buffer
        self._used = 0  # bytes of the last buffer
        self._places: dict[Key, tuple[int, int, Tensor]] = {}  # buffer, first byte, the tensor there

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the last buffer, or of a new one."""
        size = torch.Size(shape).numel() * dtype.itemsize
        with self._allocating:
            if not self._buffers or self._used + size > len(self._buffers[-1]):
                pinned = self._device.type == "cuda"
                most = max(size, BUFFER_BYTES)
                self._buffers.append(torch.empty(most, dtype=torch.uint8, device="cpu", pin_memory=pinned))
                self._used = 0
            start, self._used = self._used, -(-(self._used + size) // _ALIGNED) * _ALIGNED
            buffer = self._buffers[-1]
        return buffer[start : start + size].view(dtype).view(tuple(shape))

    def add(self, key: Key, tensor: Tensor) -> None:
        """A tensor that was read, perhaps into memory of `allocate`."""
        place = self._place_of(tensor)
        if place is None:
            if tensor.device.type != "cpu" or tensor.is_pinned() or not tensor.numel():
                self._elsewhere[key] = tensor
                return
            tensor = self.allocate(tensor.shape, tensor.dtype).copy_(tensor)
            place = self._place_of(tensor)
            assert place is not None
        self._places[key] = *place, tensor

    def _place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The buffer that holds a tensor, and its first byte there."""
        for number, buffer in enumerate(self._buffers):
            start = tensor.data_ptr() - buffer.data_ptr()
            if 0 <= start < len(buffer):
                return number, start
        return None

    def take(self, key: Key) -> Tensor | None:
        """The tensor on the device, or where it was; None if it was not fetched."""
        if key not in self._places:
            return self._elsewhere.get(key)
        number, start, tensor = self._places[key]
        if number not in self._copies:
            last = number == len(self._buffers) - 1
            used = self._buffers[number][: self._used] if last else self._buffers[number]
            self._copies[number] = used.to(self._device, non_blocking=True)
        return self._copies[number][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _read_together(read: Reader, reads: Sequence[Read]) -> Tensor | list[Tensor]:
    """[reads, ...] if all are read from files, to tensors of one shape and dtype: into their places. Else each."""
    together: list[Tensor] = []
    places: list[Tensor] = []
    found: list[Tensor] = []

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not together:
            together.append(before((len(reads), *shape), dtype))
            places.extend(together[0].unbind())
        place = places[len(found)]
        return place if place.shape == tuple(shape) and place.dtype == dtype else before(shape, dtype)

    with reading_into(allocate) as before:
        for name, index in reads:
            found.append(read(name, index))
    return together[0] if places and all(map(Tensor.is_set_to, found, places)) else found


def _key(name: str, index: Index) -> Key:
    return name, *((part.start, part.stop) if isinstance(part, slice) else part for part in index)
