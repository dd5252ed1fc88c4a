"""Bytes of files: regular files only, every failure typed, short reads never taken for data."""

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
    """A descriptor of a regular file. A pipe would hang the reader and a device never end."""
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
    """The file and its size."""
    with os.fdopen(open_read(path), "rb") as file:
        try:
            yield file, os.fstat(file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"cannot read the file: {reason(error)}", where=str(path)) from None


def fill(descriptor: int, out: Tensor, offset: int, path: Path) -> None:
    """Read exactly the bytes of the contiguous `out` from `offset`.

    A read and not a memory map: a file cut short or a failing disk is an error here, where a map
    would kill the process.
    """
    view, done, size = memory(out), 0, out.nbytes
    while done < size:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot read the file: {reason(error)}", where=str(path)) from None
        if count == 0:
            raise MalformedFile(
                "the file ends inside a tensor: it was cut after it was opened",
                where=str(path),
                expected=f"{size} bytes at {offset}",
                got=f"{done} bytes",
            )
        done += count


def drain(descriptor: int, tensor: Tensor, offset: int, path: Path) -> None:
    """Write exactly the bytes of the contiguous `tensor` at `offset`."""
    view, done = memory(tensor), 0
    while done < tensor.nbytes:
        try:
            done += os.pwritev(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot write the file: {reason(error)}", where=str(path)) from None


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, not copied. Keep the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def bytes_of(tensor: Tensor) -> bytes:
    """A copy of the tensor's bytes in row-major order."""
    held = tensor.detach().cpu().contiguous()
    return bytes(memory(held))


def reason(error: Exception) -> str:
    """What the operating system said, without its number and path."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
