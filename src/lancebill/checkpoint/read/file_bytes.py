"""Read and write bytes of regular files. Every failure, short reads included, raises a `CheckpointError`."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from lancebill.errors import CheckpointError, MalformedFile


def open_read(path: Path) -> int:
    """Open a regular file; returns its descriptor. Pipes would block and devices never end, so they are refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"cannot open the file: {reason(error)}", where=str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError("not a regular file", where=str(path))
    return descriptor


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file; yields it and its size."""
    with os.fdopen(open_read(path), "rb") as file:
        try:
            yield file, os.fstat(file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"cannot read the file: {reason(error)}", where=str(path)) from None


def read_exactly(descriptor: int, out: Tensor, offset: int, path: Path) -> None:
    """Read exactly the bytes of the contiguous `out` from `offset`.

    This reads instead of mapping the file: a truncated file or a failing disk raises here, but would kill a
    process that mapped it.
    """
    view, done, size = byte_view(out), 0, out.nbytes
    while done < size:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot read the file: {reason(error)}", where=str(path)) from None
        if count == 0:
            raise MalformedFile(
                "the file ends inside a tensor: it was truncated after it was opened",
                where=str(path),
                expected=f"{size} bytes at {offset}",
                got=f"{done} bytes",
            )
        done += count


def write_exactly(descriptor: int, tensor: Tensor, offset: int, path: Path) -> None:
    """Write exactly the bytes of the contiguous `tensor` at `offset`."""
    view, done = byte_view(tensor), 0
    while done < tensor.nbytes:
        try:
            done += os.pwritev(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot write the file: {reason(error)}", where=str(path)) from None


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy. The caller must keep the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def bytes_of(tensor: Tensor) -> bytes:
    """A copy of the tensor's bytes in row-major order."""
    contiguous = tensor.detach().cpu().contiguous()
    return bytes(byte_view(contiguous))


def reason(error: Exception) -> str:
    """The operating system's message without errno and path."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
