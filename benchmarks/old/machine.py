"""The machine, the sources and the command of a benchmark, for its JSON, and where that JSON is written."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from result_files import RESULTS, ROOT

_CHOOSING = ("LANCEBILL_GPU", "LANCEBILL_NATIVE")  # variables that choose kernels
ARM_PARTS = {"0xd0c": "neoverse-n1"}


def result_path(table: str, device: str = "cpu") -> Path:
    """benchmarks/results/<table>/<machine>/<date>t<time>-<commit>.json, in UTC: names sort by time.

    "t" sorts after "-", so after the runs of a day that were recorded without a time.
    """
    folder = RESULTS / table / machine_name(device)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{time.strftime('%Y-%m-%dt%H%M%S', time.gmtime())}-{commit()[:7]}.json"


def machine_name(device: str) -> str:
    """A short name for the GPU or the CPU, as a folder is called; a GPU that counts as another says so."""
    if device.startswith("cuda"):
        counts_as = os.environ.get("LANCEBILL_GPU")
        name = slug(nvidia_smi("name").splitlines()[0].removeprefix("NVIDIA "))
        return f"{name}-as-{slug(counts_as)}" if counts_as else name
    from lancebill.cli.env import describe

    cpu = describe()["cpu"]
    part = re.search(r"part (0x[0-9a-f]+)", cpu["model"])
    if part:
        return ARM_PARTS.get(part[1], platform.machine())
    return "xeon-amx" if "amx_bf16" in cpu["flags"] else slug(cpu["model"])


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def gpu_machine() -> dict[str, str | None]:
    return {
        "gpu": nvidia_smi("name,driver_version"),
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "triton", "humming-kernels", "cuda-core")},
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def clocks() -> str:
    """Current SM and memory clocks, power and temperature."""
    return nvidia_smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def nvidia_smi(query: str) -> str:
    process = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return process.stdout.strip()


def command(script: str) -> str:
    """The command line, with file names but without this machine's folders."""
    words = (Path(word).name if Path(word).exists() or Path(word).is_absolute() else word for word in sys.argv[1:])
    kernels = [f"{name}={os.environ[name]}" for name in _CHOOSING if name in os.environ]
    return " ".join([*kernels, "python", f"benchmarks/{script}", *words])


def without_local_paths(text: str) -> str:
    """A traceback without this machine's folders."""
    text = text.replace(f"{ROOT}/", "").replace(str(Path(sys.prefix)), "<python>")
    return text.replace(str(Path.home()), "~")


def origin(script: str) -> dict[str, str]:
    """Command, commit and date."""
    return {"command": command(script), "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}


def commit() -> str:
    """The commit of the sources: `LANCEBILL_COMMIT` if set (for a copy without history), else git's HEAD."""
    process = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
    return os.environ.get("LANCEBILL_COMMIT") or (process.stdout.strip() if process.returncode == 0 else "unknown")


def whole_model_machine(device: str) -> dict[str, str | None]:
    """The machine of a run of a whole model."""
    gpu = nvidia_smi("name,driver_version") if device.startswith("cuda") else platform.machine()
    packages = {name: package_version(name) for name in ("torch", "transformers")}
    return {"device": gpu, "python": platform.python_version(), **packages}
