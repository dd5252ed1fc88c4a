"""vLLM's own load test, `vllm bench serve`, against servers with our experts and with vLLM's own kernels, in turns.

python benchmarks/vllm_bench_serve.py --out FILE.json MODEL:BACKEND [MODEL:BACKEND ...]

Every server runs all the time, each on its share of the GPU's memory; only one is asked at a time. Servers and clients
are forked from one process that has imported vLLM. The file is written after every case, so a run that is cut short
keeps what it has. A tokenizer of one word for each id lets prompts have exactly the lengths that are asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import runpy
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm_engine import BACKENDS, FILLED, Backend, Sizes, engine_options, fill_dummy_weights, set_environment
from vllm_models import CHECKPOINTS, MODELS, model_folder, word_tokenizer
from vllm_serving import (
    device,
    end,
    first_tensor,
    fork,
    import_vllm,
    in_child,
    last_lines,
    origin,
    say,
    wait_for,
)

MODEL = "model"  # its name in requests
LOADED = "Model loading took"  # a line of vLLM's log
FIGURES = (
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "total_token_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "median_itl_ms",
)


@dataclass(frozen=True)
class Case:
    """One load: so many prompts of so many tokens, so many at a time, with answers of so many tokens."""

    prompts: int
    concurrency: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """`128@32:65536/1`: 128 prompts, 32 at a time, 65,536 tokens in, 1 out."""
        load, _, lengths = text.partition(":")
        (prompts, concurrency), (tokens_in, tokens_out) = load.split("@"), lengths.split("/")
        return cls(int(prompts), int(concurrency), int(tokens_in), int(tokens_out))

    @property
    def warm_up(self) -> Case:
        """Every shape of a step, in little time."""
        count = self.concurrency if self.tokens_out > 1 else 1
        return Case(count, self.concurrency, self.tokens_in, min(self.tokens_out, 16))

    def rate(self, figures: dict[str, Any]) -> float:
        """Tokens per second: of the prompts if answers have one token, else of the answers."""
        tokens = figures["total_output_tokens" if self.tokens_out > 1 else "total_input_tokens"]
        return float(tokens / figures["duration"])


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


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments = parse()
    out, root = Path(arguments.out), Path(arguments.models)
    end_of_time = time.monotonic() + arguments.seconds
    prepare(list(dict.fromkeys(engine.model for engine in arguments.engines)), root)
    fill_weights_everywhere(root)
    record = start_of_record(arguments)

    def write() -> None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    with running(arguments, root, out, record) as servers:
        write()
        warm_up(servers, arguments.cases, arguments.limit)
        for trial, case, server in product(range(arguments.trials), arguments.cases, servers):
            if time.monotonic() > end_of_time:
                break
            figures = ask(server, case, arguments.limit, seed=trial)
            add_trial(record, server.engine, case, figures)
            write()
            rate = f"{case.rate(figures):,.0f} tokens/s" if "failure" not in figures else figures["failure"]
            say(f"{server.engine.model} {server.engine.backend} {case}: {rate}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", type=Engine.parse, metavar="MODEL:BACKEND")
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="build/models", help="folder for configs and checkpoints")
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=["128@32:65536/1", "256@64:1/4096"])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case is begun after this time")
    parser.add_argument("--limit", type=int, default=120, help="seconds for all starts and for a case")
    parser.add_argument("--kv-gib", type=float, default=32.0, help="of each server")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens in one part of a streamed answer")
    arguments = parser.parse_args()
    arguments.cases = [case if isinstance(case, Case) else Case.parse(case) for case in arguments.cases]
    return arguments


def prepare(models: list[str], root: Path) -> None:
    """Imports vLLM, and meanwhile writes the folders of the models."""
    writers = [fork(lambda name=name: write_model(name, root), None) for name in models]  # type: ignore[misc]
    import_vllm(models)
    for module in ("vllm.benchmarks.serve", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core"):
        import_module(module)
    if in_child(first_tensor, None, 60) is not None:
        sys.exit("CUDA cannot be used in a process that is forked after vLLM was imported")
    failures = [wait_for(writer, 240, None) for writer in writers]
    if any(failures):
        sys.exit(f"not all of {', '.join(models)} could be written: {failures}")


def write_model(name: str, root: Path) -> None:
    word_tokenizer(model_folder(name, root, device()), MODELS[name]["vocab_size"])


def start_of_record(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**origin("vllm-bench-serve"), "stream_interval": arguments.stream_interval, "servers": []}


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
            started.append(start_server(engine, root / engine.model, words, log))
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
    """Options of the server; each has its share of the GPU's memory."""
    cases = arguments.cases
    longest = max(case.tokens_in + case.tokens_out for case in cases)
    sizes = Sizes(
        kv_gib=arguments.kv_gib,
        compiler=arguments.compiler,
        prompts=((max(case.concurrency for case in cases), longest),),
        sequences=(),
    )
    share = {"gpu_memory_utilization": round(0.8 / len(arguments.engines), 2)}
    options = engine_options(engine.model, BACKENDS[engine.backend], sizes) | share
    return words_of(options | {"stream_interval": arguments.stream_interval})


def start_server(engine: Engine, folder: Path, words: Sequence[str], log: Path) -> Server:
    port = free_port()
    given = ["--model", str(folder), "--served-model-name", MODEL, "--port", str(port), *words]
    return Server(engine, folder, fork(lambda: serve(BACKENDS[engine.backend], given), log), port, log)


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


def serve(backend: Backend, words: Sequence[str]) -> None:
    """vLLM's server in this process."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # saves another import of vLLM
    set_environment(backend)
    del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    sys.argv = ["vllm serve", *words]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def warm_up(servers: Sequence[Server], cases: Sequence[Case], limit: int) -> None:
    """All servers at once: nothing is timed."""
    for case in cases:
        asked = [(server, start_client(server, case.warm_up, 0)) for server in servers]
        for server, client in asked:
            failure = wait_for(client, limit, client_log(server))
            if failure is not None:
                say(f"{server.engine.model} {server.engine.backend}, warming up: {failure}")


def ask(server: Server, case: Case, limit: int, seed: int = 0) -> dict[str, Any]:
    """What `vllm bench serve` finds, or why it found nothing."""
    failure = wait_for(start_client(server, case, seed), limit, client_log(server))
    if failure is not None:
        return {"failure": failure}
    figures: dict[str, Any] = json.loads(found_by_client(server).read_text(encoding="utf-8"))
    if figures["failed"] or figures["completed"] != case.prompts:
        return {"failure": f"{figures['completed']} of {case.prompts} prompts were answered: {last_lines(server.log)}"}
    return {name: figures[name] for name in FIGURES}


def start_client(server: Server, case: Case, seed: int) -> int:
    found = found_by_client(server)
    found.unlink(missing_ok=True)
    return fork(lambda: load(server.port, case, server.folder, found, seed), client_log(server))


def found_by_client(server: Server) -> Path:
    return server.log.with_suffix(".json")


def client_log(server: Server) -> Path:
    return server.log.with_suffix(".client.log")


def load(port: int, case: Case, folder: Path, found: Path, seed: int) -> None:
    """`vllm bench serve` in this process."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = {
        "port": port,
        "model": MODEL,
        "tokenizer": folder,
        "dataset-name": "random",
        "random-input-len": case.tokens_in,
        "random-output-len": case.tokens_out,
        "num-prompts": case.prompts,
        "max-concurrency": case.concurrency,
        "temperature": 0,
        "ready-check-timeout-sec": 0,
        "seed": seed,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    figures = asyncio.run(main_async(parser.parse_args([*words, "--disable-tqdm"])))
    found.write_text(json.dumps(figures, default=str), encoding="utf-8")


def add_trial(record: dict[str, Any], engine: Engine, case: Case, figures: dict[str, Any]) -> None:
    entry = next(one for one in record["servers"] if (one["model"], one["backend"]) == (engine.model, engine.backend))
    held = next((one for one in entry["cases"] if one["case"] == asdict(case)), None)
    if held is None:
        held = {"case": asdict(case), "trials": []}
        entry["cases"].append(held)
    held["trials"].append(figures)
    rates = [case.rate(trial) for trial in held["trials"] if "failure" not in trial]
    if rates:
        held["tokens_per_s"] = round(median(rates), 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
