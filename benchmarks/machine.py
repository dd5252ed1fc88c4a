"""Where a benchmark ran, and of what: facts for its JSON, without this machine's folders."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def gpu_machine() -> dict[str, str | None]:
    return {
        "gpu": smi("name,driver_version"),
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "triton", "humming-kernels", "cuda-core")},
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def clocks() -> str:
    """SM and memory clocks, power and temperature right now."""
    return smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def smi(what: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return done.stdout.strip()


def command(script: str) -> str:
    """What was run, with file names but no folders of this machine."""
    return " ".join(["python", f"benchmarks/{script}", *(Path(word).name for word in sys.argv[1:])])


def without_local_paths(text: str) -> str:
    """A traceback without this machine's folders."""
    here = str(Path(__file__).resolve().parent.parent)
    return text.replace(here + "/", "").replace(str(Path(sys.prefix)), "<python>").replace(str(Path.home()), "~")


def origin(script: str) -> dict[str, str]:
    """What was run, of which sources, when."""
    return {"command": command(script), "commit": commit(), "date": time.strftime("%Y-%m-%d")}


def commit() -> str:
    """The commit of the sources: `LANCEBILL_COMMIT` if set (a copy without history), else what git says."""
    found = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
    return os.environ.get("LANCEBILL_COMMIT") or (found.stdout.strip() if found.returncode == 0 else "unknown")


def whole_model_machine(device: str) -> dict[str, str | None]:
    """The machine of a whole model's run."""
    gpu = smi("name,driver_version") if device.startswith("cuda") else platform.machine()
    packages = {name: installed(name) for name in ("torch", "transformers")}
    return {"device": gpu, "python": platform.python_version(), **packages}
