"""Runs the tests of the CPU backend with kernels built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/native/sanitize.py [pytest arguments]

Stops at the first report. Python itself is not instrumented, so the sanitizer runtime is preloaded and leak detection
is off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lancebill.backends.cpu.native import build

TESTS = Path(__file__).parents[1] / "backends"
CHILD = """
import sys, pytest
from lancebill.backends.cpu.native import build
build.LIBRARY = sys.argv[1]
from lancebill.backends.cpu import native
print("kernels:", native.state().why, [str(level) for level in native.library().levels], flush=True)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]]))
"""


def main() -> None:
    cxx = build.compiler()
    if cxx is None:
        sys.exit("no C++ compiler")
    runtime = subprocess.run([cxx, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="lancebill-sanitize-") as folder:
        library = build.build(Path(folder) / build.LIBRARY, build.SANITIZE)
        settings = {
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=99",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
        }
        tests = sys.argv[1:] or [str(TESTS / name) for name in ("test_cpu.py", "test_cpu_route.py")]
        finished = subprocess.run([sys.executable, "-c", CHILD, str(library), *tests], env=os.environ | settings)
    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
