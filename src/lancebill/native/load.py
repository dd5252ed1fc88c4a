"""Finds, checks and loads a C++ library, or says why it cannot. `LANCEBILL_NATIVE=off` uses none."""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import c_char_p
from dataclasses import dataclass

from lancebill.native import build
from lancebill.native.build import NativeLibrary

log = logging.getLogger("lancebill")

SWITCH = "LANCEBILL_NATIVE"
OFF = "off"


@dataclass(frozen=True)
class Opened:
    """A loaded library, or the reason why it is missing and a hint."""

    calls: ctypes.CDLL | None
    why: str = ""
    hint: str | None = None
    only_here: bool = False  # it lacks the ISA levels that the machine that built it does not run


def setting() -> str:
    """The user's choice; only this function reads `LANCEBILL_NATIVE`."""
    return os.environ.get(SWITCH, "")


def open_library(library: NativeLibrary, what: str) -> Opened:
    """Load a library that was built from the current sources. `what` names it in messages.

    Warns if the library exists but does not match the sources: after an update it would only make everything slow.
    """
    if setting() == OFF:
        return Opened(None, f"switched off ({SWITCH}={OFF})")
    if not library.path.exists():
        return Opened(None, f"{what} are not built", _how_to_build())
    try:
        calls = ctypes.CDLL(str(library.path))
    except OSError as error:
        return _unusable(f"{what} failed to load: {error}")
    calls.lancebill_sources.restype = c_char_p
    fingerprint, *machines = calls.lancebill_sources().decode().split()
    if fingerprint != library.fingerprint:
        return _unusable(f"{what} were built from other sources")
    return Opened(calls, only_here=build.HERE_ONLY in machines)


def _unusable(why: str) -> Opened:
    hint = _how_to_build()
    log.warning("%s and are not used; to build them again: %s", why, hint)
    return Opened(None, why, hint)


def _how_to_build() -> str:
    if build.compiler() is None:
        return f"install a C++ compiler, then: {build.COMMAND}"
    return build.COMMAND
