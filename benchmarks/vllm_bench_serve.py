"""vLLM's own load test, `vllm bench serve`, against servers with our experts and with vLLM's own kernels, in turns.

python benchmarks/vllm_bench_serve.py --out FILE.json MODEL BACKEND [BACKEND ...]

Every server runs all the time, each on its share of the GPU's memory; only one is asked at a time. Servers and clients
are forked from one process that has imported vLLM. The file is written after every case, so a run that is cut short
keeps what it has. A tokenizer of one word for each id lets prompts have exactly the lengths that are asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm_engine import BACKENDS, FILLED, Backend, Sizes, engine_options, fill_dummy_weights, set_environment
from vllm_models import CHECKPOINTS, MODELS, model_folder, word_tokenizer
from vllm_serving import device, end, first_tensor, fork, in_child, last_lines, origin, say

MODEL = "model"  # its name in requests
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
class Server:
    """A server: who computes its experts, its process, where it listens and writes, and whether it fills weights."""

    backend: str
    process: int
    port: int
    log: Path
    fills: bool

    def wait(self, deadline: float) -> str | None:
        """Until it answers; returns what went wrong."""
        while time.monotonic() < deadline:
            if os.waitpid(self.process, os.WNOHANG)[0]:
                return f"the server ended: {last_lines(self.log)}"
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                filled = FILLED in self.log.read_text(encoding="utf-8", errors="replace")
                return "its weights are vLLM's zeros" if self.fills and not filled else None
            time.sleep(0.2)
        return f"no answer: {last_lines(self.log)}"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments = parse()
    out = Path(arguments.out)
    import_vllm()
    if in_child(first_tensor, None, 60) is not None:
        sys.exit("CUDA cannot be used in a process that is forked after vLLM was imported")
    folder = Path(arguments.models) / arguments.model
    in_child(lambda: model_folder(arguments.model, folder.parent, device()), None, 120)
    word_tokenizer(folder, MODELS[arguments.model]["vocab_size"])
    fill_weights_everywhere(folder.parent)
    record = start_of_record(arguments)

    def write() -> None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    with running(arguments, folder, out, record) as servers:
        write()
        for case, server in product(arguments.cases, servers):
            ask(server, case.warm_up, folder, arguments.limit)
        for trial, case, server in product(range(arguments.trials), arguments.cases, servers):
            figures = ask(server, case, folder, arguments.limit, seed=trial)
            add_trial(record, server.backend, case, figures)
            write()
            rate = f"{case.rate(figures):,.0f} tokens/s" if "failure" not in figures else figures["failure"]
            say(f"{server.backend} {case}: {rate}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("backends", nargs="+", choices=BACKENDS)
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="build/models", help="folder for configs and checkpoints")
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=["128@32:65536/1", "256@64:1/4096"])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--limit", type=int, default=120, help="seconds for a start and for a case")
    parser.add_argument("--kv-gib", type=float, default=32.0, help="of each server")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens in one part of a streamed answer")
    arguments = parser.parse_args()
    arguments.cases = [case if isinstance(case, Case) else Case.parse(case) for case in arguments.cases]
    return arguments


def import_vllm() -> None:
    import vllm.benchmarks.serve
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_worker  # noqa: F401


def start_of_record(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **origin("vllm-bench-serve"),
        "model": arguments.model,
        "stream_interval": arguments.stream_interval,
        "servers": [],
    }


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
def running(arguments: argparse.Namespace, folder: Path, out: Path, record: dict[str, Any]) -> Iterator[list[Server]]:
    """The servers that could be started, all at once; they are ended at the end."""
    started = []
    try:
        for number, name in enumerate(arguments.backends):
            words = server_words(name, arguments)
            record["servers"].append({"backend": name, "activations": BACKENDS[name].activations, "options": words})
            log = out.with_suffix(f".{number}-{name}.log")
            started.append(start_server(name, folder, words, log, fills=arguments.model not in CHECKPOINTS))
        deadline = time.monotonic() + arguments.limit
        for entry, server in zip(record["servers"], started, strict=True):
            failure = server.wait(deadline)
            entry |= {"cases": []} if failure is None else {"failure": failure}
            say(f"{server.backend} {'answers' if failure is None else failure}")
        yield [server for server, entry in zip(started, record["servers"], strict=True) if "failure" not in entry]
    finally:
        for server in started:
            end(server.process)


def server_words(name: str, arguments: argparse.Namespace) -> list[str]:
    """Options of the server; each has its share of the GPU's memory."""
    cases = arguments.cases
    longest = max(case.tokens_in + case.tokens_out for case in cases)
    sizes = Sizes(
        kv_gib=arguments.kv_gib,
        compiler=arguments.compiler,
        prompts=((max(case.concurrency for case in cases), longest),),
        sequences=(),
    )
    share = {"gpu_memory_utilization": round(0.8 / len(arguments.backends), 2)}
    options = engine_options(arguments.model, BACKENDS[name], sizes) | share
    return words_of(options | {"stream_interval": arguments.stream_interval})


def start_server(name: str, folder: Path, words: Sequence[str], log: Path, *, fills: bool) -> Server:
    port = free_port()
    given = ["--model", str(folder), "--served-model-name", MODEL, "--port", str(port), *words]
    return Server(name, fork(lambda: serve(BACKENDS[name], given), log), port, log, fills)


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


def ask(server: Server, case: Case, folder: Path, limit: int, seed: int = 0) -> dict[str, Any]:
    """What `vllm bench serve` finds, or why it found nothing."""
    found = server.log.with_suffix(".json")
    found.unlink(missing_ok=True)
    failure = in_child(lambda: load(server.port, case, folder, found, seed), found.with_suffix(".client.log"), limit)
    if failure is not None:
        return {"failure": failure}
    figures: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    found.unlink()
    if figures["failed"] or figures["completed"] != case.prompts:
        return {"failure": f"{figures['completed']} of {case.prompts} prompts were answered: {last_lines(server.log)}"}
    return {name: figures[name] for name in FIGURES}


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


def add_trial(record: dict[str, Any], backend: str, case: Case, figures: dict[str, Any]) -> None:
    entry = next(one for one in record["servers"] if one["backend"] == backend)
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
