"""Building the CPU kernels: `python -m lancebill.backends.cpu.native`, and what installing lancebill runs.

One shared library holds every level of instructions; each source is compiled for its own level and the
library chooses when it runs. Nothing is ever built at import or in the middle of a run. This file uses the
standard library alone and imports nothing of lancebill: setup.py runs it where torch is not installed.

OpenMP is compiled in but not linked: its functions are found in the copy that torch has loaded, so
that there is one pool of threads.
"""

from __future__ import annotations

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

HERE = Path(__file__).parent
LIBRARY = "liblancebill.so"
COMMAND = "python -m lancebill.backends.cpu.native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")
_MARK = """extern "C" __attribute__((visibility("default"))) const char *lancebill_sources(void) {{ return "{}"; }}
"""


class BuildFailed(Exception):
    """There is no compiler, or it refused; the text says which and why."""


def compiler() -> str | None:
    """The C++ compiler: `CXX` where it is set, else the first of the usual names on the PATH."""
    named = os.environ.get("CXX")
    return named or next((found for found in map(shutil.which, COMPILERS) if found), None)


@dataclass(frozen=True)
class CppSource:
    """A file, the flags it is compiled with, and the machine it is for (any where None)."""

    path: Path
    machine: str | None
    flags: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> CppSource:
        """The first line may say `// flags: ...`, or `// flags MACHINE: ...` where it is for one kind of machine.

        Without the flags marked `?` the file compiles too, to something slower.
        """
        with path.open(encoding="utf-8") as file:
            said = re.match(r"// flags ?(\w+)?:(.*)", file.readline())
        return cls(path, said[1], tuple(said[2].split())) if said else cls(path, None, ())


def sources(machine: str) -> list[CppSource]:
    """Everything that is compiled for this kind of machine."""
    every = map(CppSource.read, sorted(HERE.glob("*.cpp")))
    return [source for source in every if source.machine in (None, machine)]


def fingerprint() -> str:
    """Of everything the library is made from: a library built from other sources is not used."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def current(library: Path) -> bool:
    """Whether a library is there and made from these very sources."""
    return library.exists() and fingerprint().encode() in library.read_bytes()


def build(target: Path, extra: Sequence[str] = (), cxx: str | None = None, machine: str | None = None) -> Path:
    """Compile and link; the library appears whole at `target` or not at all."""
    cxx, machine = cxx or compiler(), machine or platform.machine()
    if cxx is None:
        raise BuildFailed(f"no C++ compiler on the PATH ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(prefix="lancebill-build-") as folder:
        made = _compile_all(cxx, machine, Path(folder), extra)
        library = Path(folder) / LIBRARY
        _run([cxx, "-shared", *extra, *map(str, made), "-o", str(library)])
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(library, partial)
        partial.replace(target)
    return target


def _compile_all(cxx: str, machine: str, folder: Path, extra: Sequence[str]) -> list[Path]:
    """All sources beside each other, on as many cores as there are; levels the compiler does not know are left out."""
    mark = folder / "fingerprint.cpp"
    mark.write_text(_MARK.format(fingerprint()))
    openmp = ("-fopenmp",) if _knows(cxx, ("-fopenmp",), folder) else ()
    usable = [replace(source, flags=_usable(cxx, source.flags, folder)) for source in sources(machine)]
    todo = [source for source in usable if _knows(cxx, source.flags, folder)]

    def compile_one(source: CppSource) -> Path:
        made = folder / f"{source.path.stem}.o"
        _run([cxx, *FLAGS, *openmp, *source.flags, *extra, "-c", str(source.path), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, [*todo, CppSource(mark, None, ())]))


def _usable(cxx: str, flags: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """All that are needed, and of those marked `?` the ones the compiler knows."""
    plain = tuple(flag for flag in flags if not flag.startswith("?"))
    extra = tuple(flag[1:] for flag in flags if flag.startswith("?"))
    return plain + tuple(flag for flag in extra if _knows(cxx, (flag,), folder))


def _knows(cxx: str, flags: tuple[str, ...], folder: Path) -> bool:
    """Whether the compiler takes these flags."""
    empty = folder / "empty.cpp"
    empty.touch()
    try:
        _run([cxx, "-Werror", *flags, "-c", str(empty), "-o", str(folder / "empty.o")])
    except BuildFailed:
        return not flags
    return True


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildFailed(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr.strip()}")


def main() -> None:
    if current(HERE / LIBRARY):
        print("the CPU kernels are built already, from these sources")
        return
    try:
        print(f"built {build(HERE / LIBRARY)}")
    except BuildFailed as error:
        sys.exit(f"the CPU kernels were not built: {error}")
