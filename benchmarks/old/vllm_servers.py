"""vLLM's servers for a load test: one for each engine, with random weights, all running at a time."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_engine import BACKENDS, FILLED, Backend, Sizes, engine_options, fill_dummy_weights, set_environment
from vllm_models import CHECKPOINTS, MODELS
from vllm_serving import end, fork, last_lines, say

MODEL = "model"  # its name in requests
LOADED = "Model loading took"  # a line of vLLM's log


@dataclass(frozen=True)
class Engine:
    """A model, and who computes its experts."""

    model: str
    backend: str

    @classmethod
    def parse(cls, text: str) -> Engine:
        model, _, backend = text.partition(":")
        if model not in MODELS or backend not in BACKENDS:
            raise argparse.ArgumentTypeError(f"{text}: not a model of {', '.join(MODELS)}:{', '.join(BACKENDS)}")
        return cls(model, backend)

    @property
    def fills(self) -> bool:
        """Whether it has random weights by the loader."""
        return self.model not in CHECKPOINTS


@dataclass(frozen=True)
class Server:
    """A server: its engine, its model's folder, its process, where it listens and writes."""

    engine: Engine
    folder: Path
    process: int
    port: int
    log: Path

    def wait_for_weights(self, deadline: float) -> None:
        """Until its weights are loaded (vLLM on CPUs does not say so: until it answers), or it has ended."""
        while time.monotonic() < deadline and not (self._ended() or self._answers() or LOADED in self._said()):
            time.sleep(0.2)

    def wait(self, deadline: float) -> str | None:
        """Until it answers; returns what went wrong."""
        while time.monotonic() < deadline:
            if self._ended():
                return f"the server ended: {last_lines(self.log)}"
            if self._answers():
                return "its weights are vLLM's zeros" if self.engine.fills and FILLED not in self._said() else None
            time.sleep(0.2)
        return f"no answer: {last_lines(self.log)}"

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Needs `--profile`."""
        self._post("start_profile")
        yield
        self._post("stop_profile")

    def traces(self) -> list[Path]:
        """What the profiler wrote."""
        return sorted(trace_folder(self.log).glob("*.pt.trace.json*"))

    def _post(self, page: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{page}", method="POST")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
            return True
        return False

    def _ended(self) -> bool:
        try:
            return os.waitpid(self.process, os.WNOHANG)[0] != 0
        except ChildProcessError:  # it was waited for
            return True

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


@contextmanager
def running(arguments: argparse.Namespace, root: Path, out: Path, record: dict[str, Any]) -> Iterator[list[Server]]:
    """The servers that could be started; they are ended at the end.

    Each starts when the one before has its weights: some need twice their memory while they load.
    """
    started: list[Server] = []
    deadline = time.monotonic() + arguments.limit
    try:
        for number, engine in enumerate(arguments.engines):
            words = server_words(engine, arguments)
            activations = BACKENDS[engine.backend].activations
            record["servers"].append({**asdict(engine), "activations": activations, "options": words})
            log = out.with_suffix(f".{number}-{engine.model}-{engine.backend}.log")
            traced = words_of({"profiler_config": profiler(log)}) if arguments.profile else []
            started.append(start_server(engine, root / engine.model, [*words, *traced], log))
            started[-1].wait_for_weights(deadline)
        for entry, server in zip(record["servers"], started, strict=True):
            failure = server.wait(deadline)
            entry |= {"cases": []} if failure is None else {"failure": failure}
            say(f"{server.engine.model} {server.engine.backend} {'answers' if failure is None else failure}")
        yield [server for server, entry in zip(started, record["servers"], strict=True) if "failure" not in entry]
    finally:
        for server in started:
            end(server.process)


def server_words(engine: Engine, arguments: argparse.Namespace) -> list[str]:
    """Options of the server."""
    cases = arguments.cases[engine.model]
    longest = max(case.tokens_in + case.tokens_out for case in cases)
    sizes = Sizes(
        kv_gib=arguments.kv_gib,
        capture=tuple(arguments.capture),
        compiler=arguments.compiler,
        prompts=((max(case.concurrency for case in cases), longest),),
        sequences=(),
    )
    options = engine_options(engine.model, BACKENDS[engine.backend], sizes)
    return words_of(options | {"stream_interval": arguments.stream_interval})


def profiler(log: Path) -> dict[str, Any]:
    """Only the kernels, without stacks: a trace of few steps is small."""
    folder = str(trace_folder(log).resolve())
    small = {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False, "ignore_frontend": True}
    return {"profiler": "torch", "torch_profiler_dir": folder, **small}


def trace_folder(log: Path) -> Path:
    return log.with_suffix(".traces")


def words_of(options: dict[str, Any]) -> list[str]:
    """Options of an engine as its server takes them."""
    words = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def start_server(engine: Engine, folder: Path, words: Sequence[str], log: Path) -> Server:
    port = free_port()
    given = ["--model", str(folder), "--served-model-name", MODEL, "--port", str(port), *words]
    return Server(engine, folder, fork(lambda: serve(BACKENDS[engine.backend], given), log), port, log)


def serve(backend: Backend, words: Sequence[str]) -> None:
    """vLLM's server in this process."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # saves another import of vLLM
    set_environment(backend)
    del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    sys.argv = ["vllm serve", *words]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def fill_weights_everywhere(root: Path) -> None:
    """A plugin of vLLM, so that dummy weights are filled in every process that vLLM starts, however it does that."""
    installed = root / "random_weights-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: random-weights\nVersion: 0\n", encoding="utf-8")
    entry = f"random_weights = {fill_dummy_weights.__module__}:{fill_dummy_weights.__name__}"
    (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n", encoding="utf-8")
    found_in = [str(root.resolve()), str(Path(__file__).parent.resolve())]
    sys.path += found_in
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *found_in])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
