"""Builds the C++ libraries: run by `python -m lancebill.native` and by the installation of lancebill.

A library is built from all sources of one folder; a source file can have its own compiler flags. The kernels have one
for each ISA level, and select a level at run time. Nothing is built at import or during a run. This file imports
only the standard library, because setup.py runs it without torch or lancebill installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent  # and headers for all libraries
PACKAGE = HERE.parent
COMMAND = "python -m lancebill.native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-math-errno", "-Wall", "-Wextra")
SANITIZE = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1",
    "-Dalways_inline=unused",  # inlined kernels would take tens of minutes to compile
)  # fmt: skip
EVERYWHERE, HERE_ONLY = "everywhere", "here"  # whether ISA levels were left out that only other machines run
_STAMP_SOURCE = """extern "C" __attribute__((visibility("default")))
const char *lancebill_sources(void) {{ return "{fingerprint} {machines}"; }}
"""


class BuildFailed(Exception):
    """There is no compiler, or it failed."""


@dataclass(frozen=True)
class NativeLibrary:
    """A shared library: the folder of its sources, in which it also is, and its file name."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def fingerprint(self) -> str:
        """Hash of all sources and of this file. A library with another fingerprint is stale and not used."""
        digest = hashlib.sha256()
        for path in sorted([*self.folder.glob("*.cpp"), *self.folder.glob("*.h"), *HERE.glob("*.h"), Path(__file__)]):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    def is_current(self, everywhere: bool = True) -> bool:
        """Whether it is built from the current sources, and, if `everywhere`, with all ISA levels."""
        stamp = f"{self.fingerprint} {EVERYWHERE}" if everywhere else self.fingerprint
        return self.path.exists() and stamp.encode() in self.path.read_bytes()

    def sources(self, machine: str) -> list[CppSource]:
        """The source files that are compiled for this machine (`uname -m`)."""
        all_sources = map(CppSource.read, sorted(self.folder.glob("*.cpp")))
        return [source for source in all_sources if source.machine in (None, machine)]


KERNELS = NativeLibrary(PACKAGE / "backends" / "cpu" / "native", "liblancebill.so")
NUMBERS = NativeLibrary(PACKAGE / "numbers" / "native", "liblancebill_numbers.so")
LIBRARIES = (KERNELS, NUMBERS)


def compiler() -> str | None:
    """The C++ compiler: `CXX` if it is set, else the first of `COMPILERS` on the PATH."""
    return os.environ.get("CXX") or next((path for path in map(shutil.which, COMPILERS) if path), None)


@dataclass(frozen=True)
class CppSource:
    """A source file, the machine it is for (None: any), and its compiler flags. A `?` marks optional flags."""

    path: Path
    machine: str | None
    flags: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> CppSource:
        """Parses the first line: `// flags: ...`, or `// flags MACHINE: ...` if the file is for one machine only.

        The file also compiles without its optional flags, to slower code.
        """
        with path.open(encoding="utf-8") as file:
            header = re.match(r"// flags ?(\w+)?:(.*)", file.readline())
        return cls(path, header[1], tuple(header[2].split())) if header else cls(path, None, ())


def build(
    library: NativeLibrary,
    target: Path,
    extra: Sequence[str] = (),
    cxx: str | None = None,
    machine: str | None = None,
    everywhere: bool = True,
) -> Path:
    """Compile and link. Replaces `target` atomically.

    Unless `everywhere`, ISA levels that this machine cannot run are left out, which halves the time of compilation.
    """
    cxx, machine = cxx or compiler(), machine or platform.machine()
    if cxx is None:
        raise BuildFailed(f"no C++ compiler on the PATH ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(prefix="lancebill-build-") as folder:
        objects = _compile_all(library, cxx, machine, Path(folder), extra, everywhere)
        linked = Path(folder) / library.name
        _run_compiler([cxx, "-shared", "-pthread", *extra, *map(str, objects), "-o", str(linked)])
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, partial)
        partial.replace(target)
    return target


def _compile_all(
    library: NativeLibrary, cxx: str, machine: str, folder: Path, extra: Sequence[str], everywhere: bool
) -> list[Path]:
    """Compile all sources in parallel."""
    possible = buildable(library, cxx, machine, folder)
    sources = possible if everywhere else runnable_here(possible, cxx, folder)
    stamp, machines = folder / "stamp.cpp", EVERYWHERE if sources == possible else HERE_ONLY
    stamp.write_text(_STAMP_SOURCE.format(fingerprint=library.fingerprint, machines=machines))

    def compile_one(source: CppSource) -> Path:
        compiled = folder / f"{source.path.stem}.o"
        _run_compiler([cxx, *FLAGS, f"-I{HERE}", *source.flags, *extra, "-c", str(source.path), "-o", str(compiled)])
        return compiled

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, [*sources, CppSource(stamp, None, ())]))


def buildable(library: NativeLibrary, cxx: str, machine: str, folder: Path) -> list[CppSource]:
    """The sources for this machine with flags that the compiler accepts, without levels whose flags it does not."""
    sources = [replace(source, flags=_usable_flags(cxx, source.flags, folder)) for source in library.sources(machine)]
    return [source for source in sources if _accepts(cxx, source.flags, folder)]


def runnable_here(sources: Sequence[CppSource], cxx: str, folder: Path) -> list[CppSource]:
    """Those that use no instructions but this processor's; all, if the compiler cannot tell which it has."""
    native = ("-march=native",)
    if not _accepts(cxx, native, folder):
        return list(sources)
    always, here = _predefined(cxx, (), folder), _predefined(cxx, native, folder)
    return [source for source in sources if _predefined(cxx, source.flags, folder) - always <= here]


def _usable_flags(cxx: str, flags: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """All required flags, and the optional ones that the compiler accepts."""
    required = tuple(flag for flag in flags if not flag.startswith("?"))
    optional = tuple(flag[1:] for flag in flags if flag.startswith("?"))
    return required + tuple(flag for flag in optional if _accepts(cxx, (flag,), folder))


def _accepts(cxx: str, flags: tuple[str, ...], folder: Path) -> bool:
    """Whether the compiler accepts these flags."""
    empty = folder / "empty.cpp"
    empty.touch()
    try:
        _run_compiler([cxx, "-Werror", *flags, "-c", str(empty), "-o", str(folder / "empty.o")])
    except BuildFailed:
        return not flags
    return True


def _predefined(cxx: str, flags: tuple[str, ...], folder: Path) -> set[str]:
    """The names of the compiler's predefined macros, which tell the instruction sets that these flags allow."""
    empty, machine_flags = folder / "empty.cpp", [flag for flag in flags if flag.startswith("-m")]
    return {line.split()[1] for line in _run_compiler([cxx, *machine_flags, "-dM", "-E", str(empty)]).splitlines()}


def _run_compiler(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildFailed(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Build the C++ libraries in place.")
    parser.add_argument("--everywhere", action="store_true", help="with ISA levels that this machine cannot run, too")
    everywhere = parser.parse_args(words).everywhere
    for library in LIBRARIES:
        if library.is_current(everywhere):
            print(f"{library.name} is up to date")
            continue
        try:
            print(f"built {build(library, library.path, everywhere=everywhere)}")
        except (BuildFailed, OSError) as error:
            sys.exit(f"{library.name} was not built: {error}")
