"""Runs the tests of the C++ libraries, built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/native/sanitize.py [tests] [options of pytest]

Stops at the first report; tests/campaign/sanitizers.py counts the tests. Python itself is not instrumented, so the
sanitizer runtime is preloaded and leak detection is off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lancebill.native import build

TESTS = Path(__file__).parents[1]
DEFAULT = (
    "backends/test_cpu.py", "backends/test_cpu_layout.py", "backends/test_cpu_route.py",
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
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[3:]]))
"""


def main() -> None:
    cxx = build.compiler()
    if cxx is None:
        sys.exit("no C++ compiler")
    runtime = subprocess.run([cxx, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="lancebill-sanitize-") as folder:
        built = [str(build.build(one, Path(folder) / one.name, build.SANITIZE)) for one in build.LIBRARIES]
        settings = {
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=99",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
        }
        options = [word for word in sys.argv[1:] if word.startswith("-")]
        tests = [word for word in sys.argv[1:] if word not in options] or [str(TESTS / name) for name in DEFAULT]
        finished = subprocess.run([sys.executable, "-c", CHILD, *built, *tests, *options], env=os.environ | settings)
    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
