"""`lancebill kernels`: list, compile and verify GPU kernels. Only `warmup` needs a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.console import Json
from lancebill.cli.flags import Command, Group
from lancebill.errors import CompileError, SpecError, UnsupportedProblem
from lancebill.jit.targets import TARGETS

if TYPE_CHECKING:
    from lancebill.jit.compile import KernelSource

app = typer.Typer(
    cls=Group,
    help="Kernels of the GPU backends: list them, compile them ahead of time, load them, verify the cache.",
    no_args_is_help=True,
)
DEFAULT, ALL = "sm_90", "all"
SHOWN = 20  # damaged entries printed without --json
Folder = Annotated[
    Path | None, typer.Option(help="Cache folder; the default is $LANCEBILL_CACHE or ~/.cache/lancebill/kernels.")
]
Arch = Annotated[str, typer.Option(help=f"The GPUs to compile for: {', '.join(TARGETS)} or all.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Compiler processes; the default is one per core.")]


@app.command("list", cls=Command)
def list_kernels(folder: Folder = None, arch: Arch = DEFAULT, as_json: Json = False) -> None:
    """List the shipped kernels, which of them are compiled, and what each block of them takes of a GPU."""
    from lancebill.jit.cache import Cache

    with ui.reported(as_json):
        cache = Cache(folder)
        rows = [_row(source, cache) for source in _shipped(arch)]
    if as_json:
        ui.print_json({"folder": str(cache.folder), "kernels": rows})
        return
    out = ui.console()
    for row in rows:
        size = "not compiled" if row["bytes"] is None else _resources(row)
        out.print(f"{row['key'][:12]}  [dim]{size:<62}[/]  {escape(row['label'])}", soft_wrap=True)
    compiled = sum(row["bytes"] is not None for row in rows)
    out.print(f"{compiled} of {len(rows)} kernels are compiled; the cache is {cache.folder}", soft_wrap=True)


@app.command(cls=Command)
def build(
    folder: Folder = None,
    jobs: Jobs = None,
    arch: Arch = DEFAULT,
    ship: Annotated[bool, typer.Option("--ship", help="Then copy the kernels into the package, for a wheel.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the shipped kernels into the cache; needs Triton, but no GPU."""
    start = time.perf_counter()
    with ui.reported(as_json):
        from lancebill.jit import ship as shipping
        from lancebill.jit.cache import Cache

        sources = _shipped(arch)
        failed = _compile(sources, folder, jobs)
        shipped = shipping.ship_kernels(sources, Cache(folder)) if ship and not failed else None
    summary = {
        "folder": str(Cache(folder).folder),
        "kernels": len(sources) - len(failed),
        "failed": {source.label: why for source, why in failed.items()},
        "seconds": round(time.perf_counter() - start, 1),
        "shipped_bytes": shipped,
    }
    if as_json:
        ui.print_json(summary)
    else:
        _print_built(summary)
    raise typer.Exit(ui.PROBLEM if failed else ui.FINE)


@app.command(cls=Command)
def warmup(
    device: Annotated[str, typer.Option(help="The GPU to load onto.")] = "cuda",
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Load the shipped kernels onto a GPU and compile missing ones, so that no later call waits for them."""
    start = time.perf_counter()
    with ui.reported(as_json):
        import torch

        from lancebill.backends.shipped import targets_of
        from lancebill.moe.device import parse_device

        where = parse_device(device)
        targets = targets_of(where.arch) if where.kind == "cuda" else ()
        if not targets or not torch.cuda.is_available():
            raise SpecError(
                "kernels cannot be loaded onto this device",
                expected=f"a GPU of this machine that runs kernels for {', '.join(TARGETS)}",
                got=device,
            )
        sources = [source for target in targets for source in _shipped(target)]
        _require_all(_compile(sources, None, jobs))
        _load(sources, where.torch)
    summary = {"device": device, "kernels": len(sources), "seconds": round(time.perf_counter() - start, 1)}
    if as_json:
        ui.print_json(summary)
    else:
        ui.console().print(f"{summary['kernels']} kernels loaded on {device} in {summary['seconds']} s")


@app.command(cls=Command)
def verify(folder: Folder = None, as_json: Json = False) -> None:
    """Check every compiled kernel, in the cache and in the package, against its hash."""
    from lancebill.jit import private_folder as private
    from lancebill.jit.cache import SUFFIX, Cache

    with ui.reported(as_json):
        cache = Cache(folder)
        private.require_private(cache.folder)
        paths = [path for place in (cache.shipped, cache.folder) for path in sorted(place.glob(f"*{SUFFIX}"))]
        damaged = [path for path in paths if _is_damaged(path, installed=path.parent == cache.shipped)]
    if as_json:
        ui.print_json({"intact": len(paths) - len(damaged), "damaged": [str(path) for path in damaged]})
    else:
        out = ui.console()
        for path in damaged[:SHOWN]:
            out.print(f"[red]damaged:[/] {escape(str(path))}", soft_wrap=True)
        if len(damaged) > SHOWN:
            out.print(f"... and {len(damaged) - SHOWN} more (all of them with --json)")
        hint = "; damaged kernels are rebuilt when needed" if damaged else ""
        out.print(f"{len(paths) - len(damaged)} kernels intact, {len(damaged)} damaged{hint}")
    raise typer.Exit(ui.PROBLEM if damaged else ui.FINE)


def _is_damaged(path: Path, *, installed: bool) -> bool:
    from lancebill.jit.cache import SUFFIX, read_entry

    return read_entry(path.parent, path.name[: -len(SUFFIX)], installed=installed) is None


def _shipped(arch: str) -> list[KernelSource]:
    """The kernels of a wheel for one kind of GPUs, or for all."""
    if arch not in (*TARGETS, ALL):
        raise SpecError(
            "a wheel has no kernels for this architecture", expected=f"{', '.join(TARGETS)} or {ALL}", got=arch
        )
    from lancebill.backends.shipped import shipped_for

    return [source for target in TARGETS if arch in (target, ALL) for source in shipped_for(target)]


def _resources(row: dict[str, Any]) -> str:
    threads = f"{row['registers']} registers x {row['threads']}"
    return f"{row['bytes']} B, {threads}, {row['shared']} B shared, {row['spills']} B spilled"


def _row(source: KernelSource, cache: Any) -> dict[str, Any]:
    from lancebill.jit.compile import compiler_version

    binary = cache.find(source)
    return {
        "key": source.key(compiler_version()),
        "kernel": source.kernel,
        "label": source.label,
        "bytes": None if binary is None else len(binary.cubin),
        "registers": None if binary is None else binary.registers,
        "threads": None if binary is None else binary.threads,
        "shared": None if binary is None else binary.shared,
        "spills": None if binary is None else binary.spills,
    }


def _compile(sources: list[KernelSource], folder: Path | None, jobs: int | None) -> dict[KernelSource, str]:
    """Compile with a progress bar; returns the kernels that failed, with the reason."""
    from lancebill.backends.gpu.kernels.triton_version import problem
    from lancebill.jit.build import build_all
    from lancebill.jit.cache import Cache

    why, cache = problem(), Cache(folder)
    if why is not None and any(cache.find(source) is None for source in sources):
        raise UnsupportedProblem(f"kernels cannot be compiled: {why}", hint="pip install 'lancebill[gpu]'")
    with ui.progress("compiling", len(sources)) as advance:
        return build_all(sources, folder, jobs, lambda source, error: advance(1))


def _require_all(failed: Mapping[KernelSource, str]) -> None:
    """Raise if a kernel did not compile."""
    for source, why in failed.items():
        raise CompileError(why, where=source.label)


def _load(sources: list[KernelSource], device: Any) -> None:
    import torch

    from lancebill.jit.load import load_kernel

    with torch.cuda.device(device), ui.progress("loading", len(sources)) as advance:
        torch.cuda.synchronize(device)  # creates the CUDA context and makes it current
        for source in sources:
            load_kernel(source, device.index)
            advance(1)


def _print_built(summary: dict[str, Any]) -> None:
    out = ui.console()
    for label, why in summary["failed"].items():
        ui.print_error(CompileError(why, where=label), ui.console(error=True))
    out.print(f"{summary['kernels']} kernels in {summary['folder']}, built in {summary['seconds']} s", soft_wrap=True)
    if summary["shipped_bytes"] is not None:
        out.print(f"copied into the package: {ui.size(summary['shipped_bytes'])}")
