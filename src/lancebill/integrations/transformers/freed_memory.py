"""Gives freed memory back to the system before experts are loaded.

Matrices that are packed one after another leave some tens of MiB of free memory in glibc's heap. Experts are larger
pieces, which glibc takes from the system instead: at its peak, the process would hold both.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def give_back_freed() -> None:
    """Does nothing where the C library is not glibc."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
