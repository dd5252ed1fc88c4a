"""vLLM's own load test, `vllm bench serve`, against servers with our experts and with vLLM's own kernels, in turns.

Every server runs all the time, each on its share of the GPU's memory; only one is asked at a time, on the same cores as
the others before. Servers and clients are forked from one process that has imported vLLM. A tokenizer of one word for
each id lets prompts have exactly the lengths that are asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.runner import Case, Run, subject
from benchmarks.vllm import (
    BACKENDS,
    CHECKPOINTS,
    ENGINE,
    FILLED,
    Backend,
    Load,
    device,
    end,
    engine_options,
    engines,
    fill_dummy_weights,
    fork,
    labels_of,
    last_lines,
    launches_of_trace,
    set_environment,
    start_run,
    time_of_experts,
    wait_for,
)

NAME = "model"  # its name in requests
LOADED = "Model loading took"  # a line of vLLM's log
PROFILED = Load(1, 1, 1, 32)
MODULES = ("vllm.benchmarks.serve", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core")


@subject(
    "vllm-bench-serve",
    lambda: engines("gpt-oss-20b", ("marlin", "triton", "ours"),
                    ("4@4:65536/1", "16@16:8192/1", "1@1:1/256", "16@16:1/512", "64@64:1/512")),
    device=device(), stream_interval=(16, "tokens in one part of a streamed answer"),
    profile=(False, "also GPU time of experts in a step of one sequence"), **ENGINE,
)  # fmt: skip
def vllm_bench_serve(run: Run) -> None:
    """vLLM's servers with our experts and with vLLM's own kernels under `vllm bench serve`, in turns.

    A load `128@32:65536/1` is 128 prompts, 32 at once, of 65,536 tokens, with answers of one token. The loads of
    Humming's release were `load=128@32:65536/1,256@64:1/4096`.
    """
    start_run(run, *MODULES)
    fill_weights_everywhere(run.options.folder)
    run.facts |= {"stream_interval": run.options.stream_interval}
    loads = {engine: [Load.parse(case["load"]) for case in cases] for engine, cases in run.groups("model", "backend")}
    with running(run, loads) as servers:
        load_tokenizers([server.folder for server in servers])
        for server in servers:
            for load in dict.fromkeys(load.warm_up for load in loads[server.engine]):
                found = server.ask(load, run.options.limit)
                run.skip(f"{server.engine}, warming up", found["failure"]) if "failure" in found else None
        cores = Cores.choose()
        for server in servers if cores else ():
            cores.put(server.process)
        trials = Trials(run)
        for trial, server, load in in_turns(servers, loads, run.options.trials):
            if not run.late(f"{server.engine}: {load}, trial {trial}"):
                trials.add(server.engine, load, server.ask(load, run.options.limit, trial, cores))
        trials.finish()
        for server in servers if run.options.profile else ():
            found = server.profiled(BACKENDS[server.engine["backend"]].kernels, run.options.limit)
            if found:
                run.add(Case.of(**labels_of(server.engine, "kernels")), found)


def in_turns(
    servers: Sequence[Server], loads: dict[Case, list[Load]], trials: int
) -> Iterator[tuple[int, Server, Load]]:
    """Servers of one model take turns; the next model comes when all its trials are done."""
    for model in dict.fromkeys(server.engine["model"] for server in servers):
        compared = [server for server in servers if server.engine["model"] == model]
        asked = dict.fromkeys(load for server in compared for load in loads[server.engine])
        for trial, load, server in product(range(trials), asked, compared):
            if load in loads[server.engine]:
                yield from [(trial, server, load)] * load.repeats


class Trials:
    """The answered trials of each engine and load, as rows: what they have so far, so that a cut run keeps it."""

    def __init__(self, run: Run) -> None:
        self.run, self.seconds = run, dict[tuple[Case, Load], list[float]]()

    def add(self, engine: Case, load: Load, found: dict[str, Any]) -> None:
        if "failure" in found:
            self.run.skip(f"{engine}: {load}", found["failure"])
            return
        self.seconds.setdefault((engine, load), []).append(found["duration"])
        print(engine, load, f"{found['duration']:.2f} s, {found['processor_s']:.1f} of processors", flush=True)

    def finish(self) -> None:
        for (engine, load), taken in self.seconds.items():
            tokens = load.prompts * (load.tokens_out if load.tokens_out > 1 else load.tokens_in)
            figures = {"tokens_per_s": tokens / statistics.median(taken), "trials": len(taken)}
            figures["spread"] = max(taken) / min(taken) - 1
            self.run.add(Case.of(**labels_of(engine, "rate"), **vars(load)), figures)


# Servers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server: its model and backend, its model's folder, its process, where it listens and writes."""

    engine: Case
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
                fills = self.engine["model"] not in CHECKPOINTS
                return "its weights are vLLM's zeros" if fills and FILLED not in self._said() else None
            time.sleep(0.2)
        return f"no answer: {last_lines(self.log)}"

    def ask(self, load: Load, limit: float, seed: int = 0, cores: Cores | None = None) -> dict[str, Any]:
        """What `vllm bench serve` finds, and the server's processor time; or why nothing was found."""
        before = machine.processor_seconds([self.process])
        found, log = self.log.with_suffix(".json"), self.log.with_suffix(".client.log")
        found.unlink(missing_ok=True)

        def work() -> None:
            if cores is not None:
                os.sched_setaffinity(0, cores.client)
            bench_serve(self.port, load, self.folder, found, seed)

        failure = wait_for(fork(work, log), limit, log)
        if failure is not None:
            return {"failure": failure}
        figures: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        if figures["failed"] or figures["completed"] != load.prompts:
            done = f"{figures['completed']} of {load.prompts} prompts were answered"
            return {"failure": f"{done}: {last_lines(self.log)}"}
        return {**figures, "processor_s": machine.processor_seconds([self.process]) - before}

    def profiled(self, words: Sequence[str], limit: float) -> dict[str, float]:
        """GPU time of a step of one sequence, by vLLM's own profiler; nothing where it found no kernel."""
        with suppress(OSError):
            self._post("start_profile")
            self.ask(PROFILED, limit)
            self._post("stop_profile")
        traces = sorted(trace_folder(self.log).glob("*.pt.trace.json*"))
        launches = [launch for trace in traces for launch in launches_of_trace(trace)]
        return time_of_experts(launches, words, PROFILED.tokens_out) if launches else {}

    def _post(self, page: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{page}", method="POST")
        urllib.request.urlopen(request, timeout=60).close()

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
def running(run: Run, loads: dict[Case, list[Load]]) -> Iterator[list[Server]]:
    """The servers that could be started; they are ended at the end.

    Each starts when the one before has its weights: some need twice their memory while they load.
    """
    started: list[Server] = []
    deadline = time.monotonic() + run.options.limit
    try:
        for engine, asked in loads.items():
            backend, folder = BACKENDS[engine["backend"]], run.options.folder / engine["model"]
            log = run.options.folder / f"{engine['model']}-{engine['backend']}.server.log"
            options = engine_options(engine["model"], backend, asked, run.options)
            options |= {"stream_interval": run.options.stream_interval}
            options |= {"profiler_config": profiler(log)} if run.options.profile else {}
            port = free_port()
            words = ["--model", str(folder), "--served-model-name", NAME, "--port", str(port), *words_of(options)]
            process = fork(lambda: serve(backend, words), log)  # noqa: B023
            started.append(Server(engine, folder, process, port, log))
            started[-1].wait_for_weights(deadline)
        failures = {server.engine: server.wait(deadline) for server in started}
        for engine, failure in failures.items():
            run.skip(engine, failure) if failure is not None else None
        yield [server for server in started if failures[server.engine] is None]
    finally:
        for server in started:
            end(server.process)


def profiler(log: Path) -> dict[str, Any]:
    """Only the kernels, without stacks: a trace of few steps is small."""
    small = {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False, "ignore_frontend": True}
    return {"profiler": "torch", "torch_profiler_dir": str(trace_folder(log).resolve()), **small}


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
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: random-weights\nVersion: 0\n", encoding="utf-8")
    entry = f"random_weights = {fill_dummy_weights.__module__}:{fill_dummy_weights.__name__}"
    (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n", encoding="utf-8")
    found_in = [str(root.resolve()), str(machine.ROOT)]
    sys.path += found_in
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *found_in])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Clients -------------------------------------------------------------------------------------------------


def load_tokenizers(folders: Sequence[Path]) -> None:
    """Once for all clients, which are forked from this process: loading takes longer than many answers."""
    from vllm.benchmarks import serve

    serve.get_tokenizer = cache(serve.get_tokenizer)
    for folder in folders:
        serve.get_tokenizer(str(folder), tokenizer_mode="auto", trust_remote_code=False)


def bench_serve(port: int, load: Load, folder: Path, found: Path, seed: int) -> None:
    """`vllm bench serve` in this process."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = {
        "port": port, "model": NAME, "tokenizer": folder, "dataset-name": "random", "random-input-len": load.tokens_in,
        "random-output-len": load.tokens_out, "num-prompts": load.prompts, "max-concurrency": load.concurrency,
        "temperature": 0, "ready-check-timeout-sec": 0, "seed": seed,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    figures = asyncio.run(main_async(parser.parse_args([*words, "--disable-tqdm"])))
    found.write_text(json.dumps(figures, default=str), encoding="utf-8")


ENGINE_CORES, SERVER_CORES, CLIENT_CORES = 3, 2, 2


@dataclass(frozen=True)
class Cores:
    """Where each part of a server runs while it is asked, and its client.

    A model of few layers decodes one sequence as fast as the server's Python does. Where the scheduler puts its
    processes then decides by up to 40%, and it leaves them there.
    """

    engine: Sequence[int]
    server: Sequence[int]
    client: Sequence[int]

    @classmethod
    def choose(cls) -> Cores | None:
        """Physical cores of their own, or nothing on a small machine."""
        physical, first = machine.physical_cores(), ENGINE_CORES + SERVER_CORES
        if len(physical) < first + CLIENT_CORES:
            return None
        chosen = machine.quietest_cores(physical, first + CLIENT_CORES)
        return cls(chosen[:ENGINE_CORES], chosen[ENGINE_CORES:first], chosen[first:])

    def put(self, server: int) -> None:
        """The server's own process, and the engine's, which it started."""
        own, *started = machine.processes(server)
        machine.pin(machine.threads_of(own), self.server)
        for process in started:
            machine.pin(machine.threads_of(process), self.engine)
