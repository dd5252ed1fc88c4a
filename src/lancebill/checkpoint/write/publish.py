"""The hidden folder in which a checkpoint is written, and how it takes the destination's place.

The two folders are exchanged in one step where the system can do that. Elsewhere the destination is renamed away first;
if the process is killed between the two renames, the next writer to this destination renames it back. It also removes
hidden folders that killed writers left. A writer holds a lock on its folder while it lives, so nothing in use is
touched.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL, OLD = ".partial", ".old"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


class HiddenFolder:
    """A new folder beside the destination, locked until `remove`."""

    def __init__(self, destination: Path) -> None:
        self._lock: int | None = None
        while True:
            self.path = destination.with_name(f".{destination.name}.{secrets.token_hex(6)}{PARTIAL}")
            self.path.mkdir()
            try:
                self._lock = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # another writer's `recover` came before the lock
            except OSError:
                self.remove()
                raise
            if self.path.exists():
                return
            self._unlock()

    def publish(self, destination: Path) -> None:
        """Put the folder in the destination's place and delete what was there."""
        if not destination.exists() or not any(destination.iterdir()):
            self.path.rename(destination)
            sync(destination.parent)
        elif _exchange(self.path, destination):
            sync(destination.parent)
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self._rename_twice(destination)

    def remove(self) -> None:
        """Delete what was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _rename_twice(self, destination: Path) -> None:
        old = self.path.with_suffix(OLD)
        destination.rename(old)
        try:
            self.path.rename(destination)
        except BaseException:
            old.rename(destination)
            raise
        sync(destination.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def recover(destination: Path) -> None:
    """Restore the destination if a writer was killed while it was renamed away, and remove what such writers left."""
    for partial, old in _left_behind(destination):
        try:
            lock = _lock(partial) if partial.exists() else None
        except (BlockingIOError, FileNotFoundError):
            continue  # its writer lives, or has just finished
        if lock is None and partial.exists():
            continue  # without locks nobody knows
        if old.exists() and not destination.exists():
            old.rename(destination)
        for folder in (old, partial):
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _left_behind(destination: Path) -> Iterator[tuple[Path, Path]]:
    """The hidden folders of other writers to this destination: (partial, old), of which at least one exists."""
    if not destination.parent.is_dir():
        return
    pattern = re.compile(re.escape(f".{destination.name}.") + f"[0-9a-f]{{12}}({re.escape(PARTIAL)}|{re.escape(OLD)})")
    found = [file for file in destination.parent.iterdir() if pattern.fullmatch(file.name)]
    for stem in sorted({file.with_suffix("") for file in found}):
        yield stem.with_suffix(stem.suffix + PARTIAL), stem.with_suffix(stem.suffix + OLD)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if the file system has no locks.

    Raises `BlockingIOError` if another writer holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def sync(path: Path) -> None:
    """Write a file or the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False if the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))
