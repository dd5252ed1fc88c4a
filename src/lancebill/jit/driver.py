"""The CUDA driver functions needed to launch kernels, called through ctypes.

A launch through cuda.core costs 17 us of host time, through Triton 19 to 31 us. With the parameters laid out once,
the driver call alone costs a few. A layer makes up to a dozen launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

from lancebill.errors import ContextError, DriverError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy stream, which captures forbid
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_MOST_PIECES = 1024  # that one call copies
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# Tensor-map element types by size: for copies without reduction only the size matters.
_MAP_TYPES = {1: 0, 2: 1, 4: 2}  # UINT8, UINT16, UINT32
_L2_PROMOTION_128B = 2
MAP_BYTES = 128
MapSlot: TypeAlias = "ctypes.Array[ctypes.c_char]"


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes"""

    _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


@cache
def library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError("there is no CUDA driver on this machine") from error


def check(code: int, what: str) -> None:
    """Raise unless the driver's return code is 0."""
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        message = f"{what} failed: {(text.value or b'?').decode()} (error {code})"
        if code == _INVALID_CONTEXT:
            raise ContextError(message)
        raise DriverError(message)


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context, which torch uses too."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    check(library().cuInit(0), "initialising the driver")
    check(library().cuDeviceGet(ctypes.byref(handle), device), f"finding GPU {device}")
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"getting the context of GPU {device}")
    return context


def use_context(device: int) -> None:
    """Make the primary context current, as torch does when a thread first uses the GPU. New threads have none."""
    check(library().cuCtxSetCurrent(_context(device)), f"making the context of GPU {device} current")


@contextmanager
def in_context(device: int) -> Iterator[None]:
    """`use_context` for some launches; afterwards the thread's current GPU is again what its caller chose."""
    before = ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(before)), "asking for the current context")
    use_context(device)
    try:
        yield
    finally:
        if before.value and before.value != _context(device).value:
            check(library().cuCtxSetCurrent(before), "making the earlier context current again")


@cache
def capability(device: int) -> int:
    """The compute capability of a GPU; 90 is sm_90."""
    major, minor = (_attribute(device, number) for number in (_MAJOR, _MINOR))
    return 10 * major + minor


@cache
def reads_locked_pages(device: int) -> bool:
    """Whether a GPU reads pages that `pin` locked under the host's addresses. Under WSL2 it does not."""
    return bool(_attribute(device, _SAME_ADDRESS))


def _attribute(device: int, number: int) -> int:
    check(library().cuInit(0), "initialising the driver")
    handle, found = ctypes.c_int(), ctypes.c_int()
    check(library().cuDeviceGet(ctypes.byref(handle), device), f"finding GPU {device}")
    code = library().cuDeviceGetAttribute(ctypes.byref(found), number, handle)
    check(code, f"asking for attribute {number} of GPU {device}")
    return found.value


@contextmanager
def uncaptured(cuda: ctypes.CDLL | None = None) -> Iterator[None]:
    """Allows calls that a capture in progress forbids: to allocate, and to load kernels. They are not captured.

    The prohibition belongs to the thread that calls and not to the stream, so it is lifted for this thread.
    """
    mode, exchange = ctypes.c_int(_RELAXED), (cuda or library()).cuThreadExchangeStreamCaptureMode
    check(exchange(ctypes.byref(mode)), "changing the capture mode")
    try:
        yield
    finally:  # `mode` is now the thread's former mode
        check(exchange(ctypes.byref(mode)), "changing the capture mode back")


def capture_id(stream: int) -> int:
    """A number that no other capture of this process has; for a stream that is capturing."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = library().cuStreamGetCaptureInfo_v2(
        by_value(stream), ctypes.byref(status), ctypes.byref(number), *[None] * 3
    )
    check(code, "asking for the capture")
    return number.value


@cache
def own_stream(device: int) -> int:
    """A new stream in the current context, which must be the context of `device`. Nobody else can capture it."""
    stream = ctypes.c_void_p()
    check(library().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "creating a stream")
    assert stream.value is not None
    return stream.value


def copy_together(pieces: Sequence[tuple[int, int, int]], stream: int) -> None:
    """Copy pieces (target, source, bytes) between pinned and device memory, in the order of the stream.

    By one call if possible: between copies of their own the wire would be idle.
    """
    for first in range(0, len(pieces), _MOST_PIECES):
        some = pieces[first : first + _MOST_PIECES]
        if not _copied_by_one_call(some, stream):
            copy_each(some, stream)


def copy_each(pieces: Sequence[tuple[int, int, int]], stream: int) -> None:
    """The same for any host memory: what is not pinned is read before this returns, into buffers of the driver."""
    for target, source, size in pieces:
        code = library().cuMemcpyAsync(by_value(target), by_value(source), ctypes.c_size_t(size), by_value(stream))
        check(code, "copying")


def _copied_by_one_call(pieces: Sequence[tuple[int, int, int]], stream: int) -> bool:
    """False: the driver is older than 12.8, or does not take this memory."""
    try:
        copy = library().cuMemcpyBatchAsync
    except AttributeError:
        return False
    columns = [(ctypes.c_uint64 * len(pieces))(*column) for column in zip(*pieces)]
    attributes, first, failed = _CopyAttributes(_IN_STREAM_ORDER, flags=_OVERLAP), ctypes.c_size_t(), ctypes.c_size_t()
    how = ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed)
    return not copy(*columns, ctypes.c_size_t(len(pieces)), *how, by_value(stream))


def pin(address: int, size: int) -> bool:
    """Lock pages of host memory, so that the GPU copies from them directly; False if the driver refuses."""
    return not library().cuMemHostRegister_v2(by_value(address), ctypes.c_size_t(size), _PORTABLE)


def unpin(address: int) -> None:
    library().cuMemHostUnregister(by_value(address))


def launch_host_function(stream: int, function: int, argument: int) -> None:
    """Let the stream call a C function with this argument, on a thread of the driver's."""
    check(library().cuLaunchHostFunc(by_value(stream), by_value(function), by_value(argument)), "queueing a host call")


def load_function(cubin: bytes, name: str, shared: int) -> int:
    """A function handle in the current context, with `shared` bytes of dynamic shared memory permitted."""
    cuda = library()
    handle, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuLibraryLoadData(ctypes.byref(handle), cubin, None, None, 0, None, None, 0), f"loading kernel '{name}'")
    check(cuda.cuLibraryGetKernel(ctypes.byref(kernel), handle, name.encode()), f"finding kernel '{name}'")
    check(cuda.cuKernelGetFunction(ctypes.byref(function), kernel), f"finding function '{name}'")
    check(cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), f"reserving shared memory for '{name}'")
    assert function.value is not None
    return function.value


def encode_map(
    pointer: int,
    item: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    into: int,
) -> None:
    """Write a tensor map for a row-major tensor; `strides` are in elements, `into` is 64-byte aligned."""
    rank = len(shape)
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * max(rank - 1, 1))(*(s * item for s in reversed(strides[:-1])))
    sides = (ctypes.c_uint32 * rank)(*reversed(box))
    ones = (ctypes.c_uint32 * rank)(*([1] * rank))
    code = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(into), _MAP_TYPES[item], rank, ctypes.c_void_p(pointer), sizes, steps, sides, ones, 0, swizzle,
        _L2_PROMOTION_128B, 0,
    )  # fmt: skip
    check(code, f"encoding a tensor map of shape {list(shape)} in boxes of {list(box)}")


def by_value(handle: int | None) -> Any:
    """A handle or address as a ctypes argument, converted once instead of in every call."""
    return ctypes.c_void_p.from_param(handle)


class Launch:
    """One kernel on one stream with its parameters laid out in memory: changing an argument is one store.

    `values` are (name, bytes): a pointer, an integer, a float or a tensor map. The driver gets the same array of
    pointers to these values in every launch.
    """

    def __init__(
        self, function: int, threads: int, shared: int, stream: int, values: list[tuple[str, bytes]], dependent: bool,
        maps: Mapping[str, Mapping[str, object]],
    ) -> None:  # fmt: skip
        self.maps = maps  # the compiler's metadata for each tensor-map argument
        size = sum(-(-len(value) // 64) * 64 for _, value in values) + 64
        self._memory = ctypes.create_string_buffer(size)
        address = -(-ctypes.addressof(self._memory) // 64) * 64
        self._pointers = (ctypes.c_void_p * len(values))()
        self._index: dict[str, int] = {}  # of each argument; the shape and strides of a tensor map share a name
        self._shared: list[ctypes.c_uint64] = []  # keeps slots of `share` alive
        for i, (name, value) in enumerate(values):
            ctypes.memmove(address, value, len(value))
            self._index.setdefault(name, i)
            self._pointers[i] = address
            address += -(-len(value) // 64) * 64
        attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, b"", 1)
        self._attribute = attribute
        self.config = _Config(1, 1, 1, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(dependent))
        self.function, self.parameters = function, ctypes.addressof(self._pointers)
        # The arguments of `launch_function`, already converted: ctypes would convert plain values in every call.
        self.arguments: tuple[Any, ...] = (
            ctypes.byref(self.config),
            by_value(function),
            ctypes.byref(self._pointers),
            None,
        )

    def share(self, name: str, slot: ctypes.c_uint64) -> None:
        """Read a 64-bit argument from `slot`; one store there changes it for all launches that share the slot."""
        self._pointers[self._index[name]] = ctypes.addressof(slot)
        self._shared.append(slot)

    def address(self, name: str) -> int:
        """Where the driver reads an argument."""
        return self._pointers[self._index[name]] or 0

    def map_slot(self, name: str) -> MapSlot:
        """A view of a tensor-map argument; assigning its `raw` changes the argument."""
        return (ctypes.c_char * MAP_BYTES).from_address(self.address(name))

    def integer_slot(self, name: str) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(self.address(name))

    def grid(self, x: int, y: int = 1) -> None:
        self.config.gx, self.config.gy = x, y

    def __call__(self, stream: int) -> None:
        """Launch once on another stream."""
        stream_before, self.config.stream = self.config.stream, stream
        code = launch_function()(*self.arguments)
        self.config.stream = stream_before
        if code:
            check_launch(code)


def launch_function() -> Callable[..., int]:
    """The driver's launch function: takes the `arguments` of a `Launch`, returns an error code (0: success).

    Callers use it directly. A Python wrapper would double the host time of a launch.
    """
    launch: Callable[..., int] = library().cuLaunchKernelEx
    return launch


def check_launch(code: int) -> None:
    """Raise unless the return code of a launch is 0."""
    check(code, "launching a kernel")
