"""`colibri kernels`: what is compiled, compile it, check it. Nothing here needs a GPU but `warmup`."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Compiled kernels: list, build ahead, warm up, verify.", no_args_is_help=True)

Folder = typer.Option(None, help="Cache folder; the default is $COLIBRI_CACHE or ~/.cache/colibri/kernels.")


@app.command("list")
def list_kernels(folder: Path | None = Folder) -> None:
    """The shipped set, and which of it is compiled."""
    from colibri.backends.hopper.shipped import shipped
    from colibri.jit.cache import Cache

    cache = Cache(folder)
    for source in shipped():
        held = cache.find(source.key)
        facts = "not compiled" if held is None else f"{len(held.cubin):>7} B  {held.registers:>3} registers"
        typer.echo(f"{source.key[:12]}  {facts}  {source.label}")


@app.command()
def build(
    folder: Path | None = Folder,
    jobs: int | None = typer.Option(None, help="Processes; the default is one for each core."),
    arch: str = typer.Option("sm_90", help="Only sm_90 has kernels."),
) -> None:
    """Compile the shipped set into the cache; needs Triton, no GPU."""
    from rich.progress import Progress

    from colibri.backends.hopper.shipped import shipped
    from colibri.jit.build import build_all
    from colibri.jit.cache import Cache

    if arch != "sm_90":
        raise typer.BadParameter(f"no kernels for {arch}; sm_90 has them")
    sources = list(shipped())
    with Progress() as bar:
        task = bar.add_task("compiling", total=len(sources))
        failed = build_all(sources, folder, jobs, lambda source, error: bar.advance(task))
    for source, error in failed.items():
        typer.echo(f"failed: {source.label}: {error}", err=True)
    typer.echo(f"{len(sources) - len(failed)} kernels in {Cache(folder).folder}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def warmup() -> None:
    """Load the shipped set onto the GPU that is here: everything compiled, nothing missing."""
    import torch

    from colibri.backends.hopper.shipped import shipped
    from colibri.jit.load import function

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    count = 0
    for source in shipped():
        function(source, torch.cuda.current_device())
        count += 1
    typer.echo(f"{count} kernels loaded")


@app.command()
def verify(folder: Path | None = Folder) -> None:
    """Read every cached kernel and check it against its hash."""
    from colibri.jit.cache import SUFFIX, Cache, parse

    cache = Cache(folder)
    damaged = []
    held = cache.keys()
    for key in held:
        try:
            parse((cache.folder / f"{key}{SUFFIX}").read_bytes())
        except (ValueError, KeyError, TypeError):
            damaged.append(key)
    for key in damaged:
        typer.echo(f"damaged: {key}", err=True)
    typer.echo(f"{len(held) - len(damaged)} kernels intact, {len(damaged)} damaged")
    raise typer.Exit(1 if damaged else 0)
