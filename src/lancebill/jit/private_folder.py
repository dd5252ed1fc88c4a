"""A folder that is its owner's alone, and locks in it: what is read from it is run.

Others must not be able to put anything there. So the folder belongs to this user (or to root: a folder of an
image that everyone shares, read only), and nobody else may write to it; the same goes for a link that leads to it.
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


def require(folder: Path) -> None:
    """Raise unless what lies in the folder can be trusted; one that does not exist can."""
    try:
        itself, target = folder.lstat(), folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    for found in (itself, target):
        if found.st_uid not in (os.geteuid(), _ROOT):
            raise CacheError(
                "the folder of compiled kernels belongs to another user",
                where=str(folder),
                expected=f"user {os.geteuid()}",
                got=f"user {found.st_uid}",
                hint="set LANCEBILL_CACHE to a folder of your own",
            )
    if target.st_mode & _OTHERS_WRITE:
        raise CacheError(
            "others may write to the folder of compiled kernels",
            where=str(folder),
            expected="mode 700",
            got=f"mode {stat.S_IMODE(target.st_mode):o}",
            hint="empty it and `chmod 700` it, or set LANCEBILL_CACHE to another",
        )


def make(folder: Path) -> None:
    """The folder, there and private."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    require(folder)
    found = folder.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among processes and threads while inside. The file is gone afterwards; a dead owner's lock is free."""
    handle = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path) -> int:
    """The last owner removes the file: a lock on a removed one is worth nothing, and is taken again."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _same(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
