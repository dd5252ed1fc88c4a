"""`lancebill env`: versions and hardware, for bug reports."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.console import Json

PACKAGES = (
    "lancebill", "torch", "triton", "transformers", "humming-kernels", "vllm", "gguf", "compressed-tensors",
)  # fmt: skip
# CPU flags that decide how fast integers and 16-bit floats are unpacked and multiplied.
FLAGS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512_vbmi", "gfni", "avx_vnni",
    "amx_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def env(as_json: Json = False) -> None:
    """Show versions, devices, formats and backends."""
    with ui.reported(as_json):
        machine = describe()
    if as_json:
        ui.print_json(machine)
    else:
        show(machine, ui.console())


def describe() -> dict[str, Any]:
    from lancebill import formats
    from lancebill.backends.registry import registry

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES} | {"torch": _torch_build()},
        "cpu": _cpu(),
        "native": _native(),
        "cuda": _cuda(),
        "formats": list(formats.registry()),
        "backends": list(registry()),
    }


def show(machine: dict[str, Any], out: Console) -> None:
    rows = ui.table("", "")
    rows.show_header = False
    rows.add_row("python", f"{machine['python']} on {escape(machine['platform'])}")
    for name, number in machine["packages"].items():
        rows.add_row(name, number or "[dim]not installed[/]")
    cpu = machine["cpu"]
    rows.add_row("cpu", f"{escape(cpu['model'])}, {cpu['cores']} cores, {' '.join(cpu['flags']) or 'no known flags'}")
    rows.add_row("cpu kernels", _kernels_line(machine["native"]))
    for device in machine["cuda"]["devices"]:
        memory = ui.size(device["memory"])
        rows.add_row("cuda", f"{escape(device['name'])}, sm_{device['capability']}, {memory}")
    if not machine["cuda"]["devices"]:
        rows.add_row("cuda", f"[dim]{escape(machine['cuda']['why_not'])}[/]")
    rows.add_row("formats", ", ".join(machine["formats"]))
    rows.add_row("backends", ", ".join(machine["backends"]))
    out.print(rows)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_build() -> str:
    """With the build's suffix, such as +cu130, which the package's metadata may lack."""
    import torch

    return str(torch.__version__)


def _cpu() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    lines = [line.partition(":") for line in text.splitlines() if ":" in line]
    facts = {key.strip().lower(): value.strip() for key, _, value in reversed(lines)}
    flags = set((facts.get("flags") or facts.get("features") or "").split())
    part = f" (implementer {facts['cpu implementer']}, part {facts['cpu part']})" if "cpu part" in facts else ""
    model = facts.get("model name") or platform.machine() + part
    return {"model": model, "cores": os.cpu_count(), "flags": [flag for flag in FLAGS if flag in flags]}


def _native() -> dict[str, Any]:
    """Which CPU kernels are loaded; otherwise why none are, and how to get them."""
    from lancebill.backends.cpu import native

    state = native.state()
    library = state.library
    return {
        "level": None if library is None else str(library.best),
        "levels": [] if library is None else [str(level) for level in library.levels],
        "why": state.why,
        "hint": state.hint,
    }


def _kernels_line(native: dict[str, Any]) -> str:
    if native["level"] is None:
        how = f" ({escape(native['hint'])})" if native["hint"] else ""
        return f"[dim]{escape(native['why'])}: torch is used instead{how}[/]"
    lower = [level for level in native["levels"] if level != native["level"]]
    return str(native["level"]) + (f" [dim](also {', '.join(lower)})[/]" if lower else "")


def _cuda() -> dict[str, Any]:
    """CUDA devices; a missing or broken driver is reported in `why_not`, not raised."""
    import torch

    try:
        if not torch.cuda.is_available():
            built = torch.version.cuda
            why = "no device is visible" if built else "this torch is built without CUDA"
            return {"version": built, "devices": [], "why_not": why}
        devices = [_device(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:
        return {"version": torch.version.cuda, "devices": [], "why_not": str(error).splitlines()[0]}
    return {"version": torch.version.cuda, "devices": devices, "why_not": None}


def _device(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "capability": f"{properties.major}{properties.minor}",
        "memory": properties.total_memory,
        "processors": properties.multi_processor_count,
    }
