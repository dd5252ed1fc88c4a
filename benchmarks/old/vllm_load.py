"""`vllm bench serve` in processes of its own, against one server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from server_processes import Cores, processor_seconds
from vllm_kernels import kernels_of_trace, time_of_experts
from vllm_servers import MODEL, Server
from vllm_serving import fork, last_lines, say, wait_for

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
    "p99_itl_ms",
)
PROFILED_TOKENS = 32


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
    def repeats(self) -> int:
        """How often it is asked in each turn: one sequence is the least steady, and soon answered."""
        return 3 if self.prompts == 1 else 1

    @property
    def warm_up(self) -> Case:
        """Every shape of a step, in little time."""
        count = self.concurrency if self.tokens_out > 1 else 1
        return Case(count, self.concurrency, self.tokens_in, min(self.tokens_out, 16))

    def rate(self, figures: dict[str, Any]) -> float:
        """Tokens per second: of the prompts if answers have one token, else of the answers."""
        tokens = figures["total_output_tokens" if self.tokens_out > 1 else "total_input_tokens"]
        return float(tokens / figures["duration"])


def load_tokenizers(folders: Sequence[Path]) -> None:
    """Once for all clients, which are forked from this process: loading takes longer than many answers."""
    from vllm.benchmarks import serve

    serve.get_tokenizer = cache(serve.get_tokenizer)
    for folder in folders:
        serve.get_tokenizer(str(folder), tokenizer_mode="auto", trust_remote_code=False)


def warm_up(servers: Sequence[Server], cases: dict[str, list[Case]], limit: int) -> None:
    """All servers at once: nothing is timed."""
    shapes = {model: [case.warm_up for case in of_model] for model, of_model in cases.items()}
    for shape in dict.fromkeys(shape for of_model in shapes.values() for shape in of_model):
        chosen = [server for server in servers if shape in shapes[server.engine.model]]
        asked = [(server, start_client(server, shape, 0)) for server in chosen]
        for server, client in asked:
            failure = wait_for(client, limit, client_log(server))
            if failure is not None:
                say(f"{server.engine.model} {server.engine.backend}, warming up: {failure}")


def ask(server: Server, case: Case, limit: int, seed: int = 0, cores: Cores | None = None) -> dict[str, Any]:
    """What `vllm bench serve` finds, and the server's processor time; or why nothing was found."""
    before = processor_seconds([server.process])
    failure = wait_for(start_client(server, case, seed, cores), limit, client_log(server))
    if failure is not None:
        return {"failure": failure}
    figures: dict[str, Any] = json.loads(found_by_client(server).read_text(encoding="utf-8"))
    if figures["failed"] or figures["completed"] != case.prompts:
        return {"failure": f"{figures['completed']} of {case.prompts} prompts were answered: {last_lines(server.log)}"}
    spent = processor_seconds([server.process]) - before
    return {name: figures[name] for name in FIGURES} | {"processor_s": round(spent, 2)}


def start_client(server: Server, case: Case, seed: int, cores: Cores | None = None) -> int:
    found = found_by_client(server)
    found.unlink(missing_ok=True)

    def work() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores.client)
        load(server.port, case, server.folder, found, seed)

    return fork(work, client_log(server))


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


def profiled(server: Server, words: Sequence[str], limit: int) -> dict[str, Any]:
    """GPU time of a step of one sequence, by vLLM's own profiler; nothing where it found no kernel."""
    with suppress(OSError), server.profiling():
        wait_for(start_client(server, Case(1, 1, 1, PROFILED_TOKENS), 0), limit, client_log(server))
    launched = [kernel for trace in server.traces() for kernel in kernels_of_trace(trace)]
    return time_of_experts(launched, words, PROFILED_TOKENS) if launched else {}
