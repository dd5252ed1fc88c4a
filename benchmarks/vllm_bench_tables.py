"""The tables of vLLM's own load test and of split models in vLLM, from recorded results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from result_files import ResultFile, links, markdown_table, result_files
from vllm_answers import compared
from vllm_tables import BUSY, TITLES

NOTHING = "Nothing has been measured yet.\n"
EXPERTS_NOTE = "; experts: µs during which their kernels run in a step of one sequence, by vLLM's profiler"
Server = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One case of one run, and the servers that have a figure."""

    file: ResultFile
    case: dict[str, int]
    servers: list[Server]

    @property
    def trials(self) -> int:
        """Answered trials of every server."""
        return min(len(_seconds(server, self.case)) for server in self.servers)

    @property
    def spread(self) -> str:
        """How far the slowest trial of a server is from its fastest, of the server where that is most."""
        if self.trials == 1:
            return "one trial"
        seconds = [_seconds(server, self.case) for server in self.servers]
        return f"{max(max(each) / min(each) - 1 for each in seconds):.0%}"

    def cell(self, backend: str) -> str:
        rates = {server["backend"]: float(_held(server, self.case)["tokens_per_s"]) for server in self.servers}
        if backend not in rates:
            return ""
        best = max(rates[server["backend"]] for server in self.servers if not _is_ours(server))
        ratio = f" ({rates[backend] / best:.2f}x)" if backend.startswith("ours") else ""
        return f"{rates[backend]:,.0f}{ratio}"


@dataclass(frozen=True)
class Profiled:
    """GPU time of the experts in a step of one sequence: the servers of one run that have it."""

    file: ResultFile
    servers: list[Server]

    def cell(self, backend: str) -> str:
        times = {server["backend"]: float(server["kernels_of_one_sequence"][BUSY]) for server in self.servers}
        if backend not in times:
            return ""
        best = min(times[server["backend"]] for server in self.servers if not _is_ours(server))
        ratio = f" ({times[backend] / best:.2f}x)" if backend.startswith("ours") else ""
        return f"{times[backend]:,.0f}{ratio}"


Columns = dict[tuple[int, ...], Column]


def vllm_bench_serve() -> str:
    """A table for each model and kind of activations: of each case the newest run that has ours and a peer."""
    tables: dict[tuple[str, str], Columns] = {}
    profiled: dict[tuple[str, str], Profiled] = {}
    for file in result_files("vllm-bench-serve"):
        servers = [server for server in file.record["servers"] if "cases" in server]
        for key in dict.fromkeys(_kind(file, server) for server in servers):
            held = [server for server in servers if _kind(file, server) == key]
            tables.setdefault(key, {}).update(_columns(file, held))
            measured = [server for server in held if server.get("kernels_of_one_sequence")]
            if len({_is_ours(server) for server in measured}) == 2:
                profiled[key] = Profiled(file, measured)
    blocks = [_load_table(*key, columns, profiled.get(key)) for key, columns in sorted(tables.items()) if columns]
    return "\n".join(blocks) or NOTHING


def _kind(file: ResultFile, server: Server) -> tuple[str, str]:
    return server.get("model") or file.record["model"], server["activations"]


def _is_ours(server: Server) -> bool:
    return str(server["backend"]).startswith("ours")


def _columns(file: ResultFile, servers: list[Server]) -> Columns:
    """The cases for which ours and a peer have a figure."""
    found: Columns = {}
    for case in (held["case"] for server in servers for held in server["cases"]):
        measured = [server for server in servers if _held(server, case).get("tokens_per_s")]
        if len({_is_ours(server) for server in measured}) == 2:
            found[tuple(case.values())] = Column(file, case, measured)
    return found


def _load_table(model: str, activations: str, columns: Columns, profiled: Profiled | None) -> str:
    chosen = [columns[key] for key in sorted(columns, key=lambda key: (key[3] > 1, key[1], key[3]))]
    servers = {server["backend"]: server for column in chosen for server in column.servers}
    last = [profiled] if profiled is not None else []
    rows = [
        (_backend_name(server), *(column.cell(backend) for column in (*chosen, *last)))
        for backend, server in sorted(servers.items(), key=lambda item: (_is_ours(item[1]), item[0]))
    ]
    rows.append(("trials differ by up to", *(column.spread for column in chosen), *("" for _ in last)))
    record = chosen[-1].file.record
    trials = [column.trials for column in chosen]
    note = (
        f"{TITLES.get(model, model)}, MXFP4 x {activations}: tokens per second by `vllm bench serve`, of prompts where "
        f"one token is asked for, else of answers; median of {_range(trials)} trials, servers in turns (ours over the "
        f"best peer of the same run). vLLM {record['versions']['vllm']}, {_graphs(chosen[-1].servers[0])}; answers are "
        f"streamed in parts of {record['stream_interval']} tokens{EXPERTS_NOTE if last else ''}; "
        f"{links(*dict.fromkeys(column.file.name for column in (*chosen, *last)))}"
    )
    head = [*(_case_name(column.case) for column in chosen), *("experts" for _ in last)]
    return markdown_table(("", *head), rows, note)


def _graphs(server: Server) -> str:
    """Which graphs are captured, and what compiles their parts."""
    options = server["options"]
    config = json.loads(options[options.index("--compilation-config") + 1])
    return f"{config['cudagraph_mode']}, {config['backend']}"


def _range(counts: list[int]) -> str:
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _backend_name(server: Server) -> str:
    return "**lancebill**" if _is_ours(server) else str(server["backend"]).removesuffix("-fp8")


def _seconds(server: Server, case: dict[str, int]) -> list[float]:
    """Of the trials that were answered."""
    return [trial["duration"] for trial in _held(server, case)["trials"] if "failure" not in trial]


def _held(server: Server, case: dict[str, int]) -> dict[str, Any]:
    """What a server has of a case."""
    return next((held for held in server["cases"] if held["case"] == case), {})


def _case_name(case: dict[str, int]) -> str:
    lengths = f"{case['tokens_in']:,} in, {case['tokens_out']:,} out"
    if case["prompts"] == 1:
        return f"{lengths}: one prompt"
    return f"{lengths}: {case['prompts']} prompts, {min(case['prompts'], case['concurrency'])} at once"


def vllm_split() -> str:
    """The newest run: a model with half of its experts on the CPU, beside the whole one."""
    files = result_files("vllm-split")
    engines = [engine for file in files[-1:] for engine in file.record["engines"] if engine.get("decode")]
    if not engines:
        return NOTHING
    cases = [(case["prompts"], case["in"], case["out"]) for e in engines[:1] for case in (*e["prefill"], *e["decode"])]
    rows = [(_split_name(engine), *_split_rates(engine), *_memory(engine)) for engine in engines]
    head = [f"{count} x {new:,} new" if new > 1 else f"{count} prompts of {given:,}" for count, given, new in cases]
    answers = "; ".join(
        f"answers: {one['same_answers']} of {one['answers']} are the same, the others part where the margin is at most "
        f"{max(one['margins_where_answers_part'], default=0):.3f}; log-probabilities of given tokens differ by "
        f"{one['mean']:.4f} on average, {one['largest']:.3f} at most"
        for one in compared(engines)
    )
    note = (
        f"{engines[0]['model']} in vLLM {files[-1].record['versions']['vllm']} with FULL_AND_PIECEWISE graphs: tokens "
        f"per second, and memory in use on the GPU and in the process (growth over {_steps(engines)} steps); "
        f"{answers}; {links(files[-1].name)}"
    )
    return markdown_table(("experts", *head, "GPU memory", "host memory"), rows, note)


def _split_name(engine: dict[str, Any]) -> str:
    return "half on the CPU" if engine["backend"] == "ours-split" else "all on the GPU"


def _split_rates(engine: dict[str, Any]) -> list[str]:
    return [f"{case['tokens_per_s']:,.0f}" for case in (*engine["prefill"], *engine["decode"])]


def _memory(engine: dict[str, Any]) -> tuple[str, str]:
    """At the end, and what was added from the first part of the steps to the last: what the first one needs stays."""
    memory = engine.get("memory")
    if memory is None:
        return "", ""
    gpu, host = (
        f"{memory[name][-1] / 2**30:.2f} GiB ({(memory[name][-1] - memory[name][1]) / 2**20:+.1f} MiB)"
        for name in ("gpu_bytes", "host_bytes")
    )
    return gpu, host


def _steps(engines: list[dict[str, Any]]) -> str:
    steps = {engine["memory"]["steps"] for engine in engines if "memory" in engine}
    return " and ".join(f"{count:,}" for count in sorted(steps))
