"""Runs the tests of the C++ libraries, built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/native/sanitized_tests.py [tests] [options of pytest]

Stops at the first report; tests/campaign/sanitizers.py counts the tests, in several processes. Python itself is not
instrumented, so the sanitizer's runtime is preloaded and leak detection is off. So is the C++ runtime: the sanitizer
looks for its exceptions when the process starts. A GPU is hidden: the libraries compute on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lancebill.native import build

TESTS = Path(__file__).parents[1]
DEFAULT = (
    "backends/test_cpu.py", "backends/test_cpu_calls.py", "backends/test_cpu_layout.py", "backends/test_cpu_route.py",
    "backends/test_cpu_decode_program.py", "e2e/test_native_decoder.py", "unit/backends/test_packing.py",
    "unit/split/test_host_calls.py", "unit/split/test_mailbox.py", "unit/numbers/test_native_numbers.py",
)  # fmt: skip
CHILD = """
import sys, pytest
from dataclasses import replace
from lancebill.native import build
build.KERNELS, build.NUMBERS = (replace(l, name=path) for l, path in zip(build.LIBRARIES, sys.argv[1:3]))
from lancebill.backends.cpu import native
from lancebill.numbers.native import library
print("kernels:", native.state().why, [str(level) for level in native.library().levels], flush=True)
print("numbers:", "built" if library() else "missing", flush=True)
shard, shards = map(int, sys.argv[3:5])
class EveryNth:
    def pytest_collection_modifyitems(self, items):
        items[:] = items[shard::shards]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[5:]], plugins=[EveryNth()]))
"""


def build_libraries(folder: Path) -> list[Path]:
    """Both libraries, in files of the folder."""
    return [build.build(one, folder / one.name, build.SANITIZE) for one in build.LIBRARIES]


def settings() -> dict[str, str]:
    """Variables of the environment with which Python can load the libraries."""
    cxx = build.compiler()
    if cxx is None:
        sys.exit("no C++ compiler")
    runtimes = [_runtime(cxx, name) for name in ("libasan.so", "libstdc++.so")]
    return {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _runtime(cxx: str, name: str) -> str:
    """A compiler that does not have the file prints its bare name."""
    found = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"{cxx} has no {name}: install it, or set CXX to a compiler that has it")
    return found


def command(libraries: Sequence[Path], words: Sequence[str], shard: int = 0, shards: int = 1) -> list[str]:
    """Runs every `shards`-th test, from number `shard` on; `words` are tests and options of pytest."""
    options = [word for word in words if word.startswith("-")]
    tests = [word for word in words if word not in options] or [str(TESTS / name) for name in DEFAULT]
    return [sys.executable, "-c", CHILD, *map(str, libraries), str(shard), str(shards), *tests, *options]


def main() -> None:
    environment = os.environ | settings()
    with tempfile.TemporaryDirectory(prefix="lancebill-sanitize-") as folder:
        libraries = build_libraries(Path(folder))
        finished = subprocess.run(command(libraries, sys.argv[1:]), env=environment)
    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
