"""A folder that only its owner can write, and lock files in it.

Kernels from this folder are executed, so no other user may be able to put files there. The folder must belong to this
user, or to root (a read-only folder in a shared image), and must not be writable by group or others. The same holds
for the files in it, and a symbolic link to the folder must belong to this user or root too. No folder above may be
writable by everyone, unless it is sticky like /tmp: whoever can write there could replace the folder.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lancebill.errors import CacheError

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def require_private(folder: Path) -> None:
    """Raise if another user could have written to the folder. Passes if the folder does not exist."""
    try:
        link, target = folder.lstat(), folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    for status in (link, target):
        if status.st_uid not in (os.geteuid(), _ROOT):
            raise CacheError(
                "the folder of compiled kernels belongs to another user",
                where=str(folder),
                expected=f"user {os.geteuid()}",
                got=f"user {status.st_uid}",
                hint="set LANCEBILL_CACHE to a folder that you own",
            )
    if target.st_mode & _OTHERS_WRITE:
        raise CacheError(
            "other users can write to the folder of compiled kernels",
            where=str(folder),
            expected="mode 700",
            got=f"mode {stat.S_IMODE(target.st_mode):o}",
            hint="empty it and `chmod 700` it, or set LANCEBILL_CACHE to another folder",
        )
    for parent in {*folder.absolute().parents, *folder.resolve().parents}:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheError(
                "everyone can replace the folder of compiled kernels",
                where=str(folder),
                expected=f"{parent} to be writable by its owner only",
                got=f"mode {stat.S_IMODE(mode):o}",
                hint="set LANCEBILL_CACHE to a folder in your home",
            )


def read_private(path: Path, *, installed: bool = False) -> bytes | None:
    """The bytes of a regular file that only its owner, this user or root, can write; None for any other file.

    An `installed` file may have any owner, as the package's code has. Opening does not block on a pipe.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        ours = status.st_uid in (os.geteuid(), _ROOT) and not status.st_mode & _OTHERS_WRITE
        return file.read() if stat.S_ISREG(status.st_mode) and (ours or installed) else None


def write_private(path: Path, data: bytes) -> None:
    """Write a new file with mode 600 to the disk, in place of whatever has this name."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_private(folder: Path) -> None:
    """Create the folder with mode 700; an existing one that we own gets that mode."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    require_private(folder)
    status = folder.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock across processes and threads. Removes the file afterwards.

    The system releases the lock of a process that dies.
    """
    handle = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path) -> int:
    """Lock the file and return its descriptor.

    The previous owner may have removed the file while we waited. Our lock is then on a file that nobody else opens,
    so we open the path and lock again.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_open_file(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_open_file(handle: int, path: Path) -> bool:
    """Whether `path` still names the file that `handle` has open."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
