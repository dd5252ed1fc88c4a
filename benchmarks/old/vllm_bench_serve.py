"""vLLM's own load test, `vllm bench serve`, against servers with our experts and with vLLM's own kernels, in turns.

python benchmarks/vllm_bench_serve.py --out FILE.json MODEL:BACKEND [MODEL:BACKEND ...]

Every server runs all the time, each on its share of the GPU's memory; only one is asked at a time, on the same cores as
the others before. Models are measured in the order they are named in; a case `MODEL=CASE` is for one of them alone.
Servers and clients are forked from one process that has imported vLLM. The file is written after every case, so a run
that is cut short keeps what it has. A tokenizer of one word for each id lets prompts have exactly the lengths that are
asked for. At the end each server is profiled while it answers one prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from result_files import write_record
from server_processes import Cores, processor_seconds
from vllm_engine import BACKENDS, Sizes
from vllm_load import Case, ask, load_tokenizers, profiled, warm_up
from vllm_models import MODELS, model_folder, word_tokenizer
from vllm_servers import Engine, Server, fill_weights_everywhere, running
from vllm_serving import device, first_tensor, fork, import_vllm, in_child, origin, say, wait_for


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments = parse()
    out, root = Path(arguments.out), Path(arguments.models)
    end_of_time = time.monotonic() + arguments.seconds
    prepare(list(dict.fromkeys(engine.model for engine in arguments.engines)), root)
    fill_weights_everywhere(root)
    record = start_of_record(arguments)

    def write() -> None:
        write_record(out, record)

    with running(arguments, root, out, record) as servers:
        write()
        warm_up(servers, arguments.cases, arguments.limit)
        cores = put_on_cores(servers, record)
        for trial, case, server in in_turns(servers, arguments.cases, arguments.trials):
            if time.monotonic() > end_of_time:
                break
            others = [other.process for other in servers if other is not server]
            before = processor_seconds(others)
            figures = ask(server, case, arguments.limit, trial, cores)
            figures["processor_s_of_others"] = round(processor_seconds(others) - before, 2)
            add_trial(record, server.engine, case, figures)
            write()
            rate = f"{case.rate(figures):,.0f} tokens/s" if "failure" not in figures else figures["failure"]
            say(f"{server.engine.model} {server.engine.backend} {case}: {rate}")
        for server in servers if arguments.profile else ():
            found = profiled(server, BACKENDS[server.engine.backend].kernels, arguments.limit)
            entry_of(record, server.engine)["kernels_of_one_sequence"] = found
            write()
            say(f"{server.engine.model} {server.engine.backend}: {json.dumps(found)[:200]}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", type=Engine.parse, metavar="MODEL:BACKEND")
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="build/models", help="folder for configs and checkpoints")
    parser.add_argument("--cases", nargs="+", default=["128@32:65536/1", "256@64:1/4096"])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case is begun after this time")
    parser.add_argument("--limit", type=int, default=120, help="seconds for all starts and for a case")
    parser.add_argument("--kv-gib", type=float, default=32.0, help="of each server")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--capture", nargs="*", type=int, default=list(Sizes.capture), help="tokens of captured steps")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens in one part of a streamed answer")
    parser.add_argument("--profile", action="store_true", help="also GPU time of a step of one sequence")
    arguments = parser.parse_args()
    try:
        arguments.cases = cases_of_models(arguments.cases, [engine.model for engine in arguments.engines])
    except (KeyError, ValueError) as error:
        parser.error(f"--cases: {error}")
    return arguments


def cases_of_models(words: Sequence[str], models: Sequence[str]) -> dict[str, list[Case]]:
    """The cases of each model: `CASE` is for all of them, `MODEL=CASE` for one."""
    found: dict[str, list[Case]] = {model: [] for model in models}
    for word in words:
        model, named, case = word.rpartition("=")
        for each in [model] if named else found:
            found[each].append(Case.parse(case))
    return found


def in_turns(
    servers: Sequence[Server], cases: dict[str, list[Case]], trials: int
) -> Iterator[tuple[int, Case, Server]]:
    """Servers of one model take turns; the next model comes when all its trials are done."""
    for model in cases:
        compared = [server for server in servers if server.engine.model == model]
        for trial, case, server in product(range(trials), cases[model], compared):
            yield from [(trial, case, server)] * case.repeats


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
    load_tokenizers([root / name for name in models])


def write_model(name: str, root: Path) -> None:
    word_tokenizer(model_folder(name, root, device()), MODELS[name]["vocab_size"])


def start_of_record(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**origin("vllm-bench-serve"), "stream_interval": arguments.stream_interval, "servers": []}


def put_on_cores(servers: list[Server], record: dict[str, Any]) -> Cores | None:
    """All servers on the same cores: those that are not asked sleep."""
    cores = Cores.choose()
    if cores is not None:
        record["cores"] = asdict(cores)
        for server in servers:
            cores.put(server.process)
    return cores


def entry_of(record: dict[str, Any], engine: Engine) -> dict[str, Any]:
    entries: list[dict[str, Any]] = record["servers"]
    return next(one for one in entries if (one["model"], one["backend"]) == (engine.model, engine.backend))


def add_trial(record: dict[str, Any], engine: Engine, case: Case, figures: dict[str, Any]) -> None:
    entry = entry_of(record, engine)
    held = next((one for one in entry["cases"] if one["case"] == asdict(case)), None)
    if held is None:
        held = {"case": asdict(case), "trials": []}
        entry["cases"].append(held)
    held["trials"].append(figures)
    rates = [case.rate(trial) for trial in held["trials"] if "failure" not in trial]
    if rates:
        held["tokens_per_s"] = round(median(rates), 1)


if __name__ == "__main__":
    main()
