"""Tokens per second of llama.cpp on one GGUF file; prints JSON. Run it with a Python that has xllamacpp.

python benchmarks/llama_cpp_decode.py FILE --threads 2 --tokens 64 --repeats 5 [--streams 8]
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--prompt", default="What is gravity?")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1)
    chosen = parser.parse_args()
    server = xllamacpp.Server(parameters(chosen))
    answer(server, chosen)  # warm-up
    rates, totals, cpu, text = [], [], [], ""
    for _ in range(chosen.repeats):
        start, used = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(chosen.streams) as pool:
            results = list(pool.map(lambda _: answer(server, chosen), range(chosen.streams)))
        totals.append(chosen.streams * chosen.tokens / (time.perf_counter() - start))
        cpu.append((time.process_time() - used) / (chosen.streams * chosen.tokens))
        rates.append(results[0]["timings"]["predicted_per_second"])
        text = results[0]["choices"][0]["message"]["content"]
    version = f"xllamacpp {xllamacpp.__version__}"
    print(json.dumps({"library": version, "system": xllamacpp.get_system_info(), "tokens_per_second": rates,
                      "throughput": totals, "cpu_seconds_per_token": cpu, "text": text}))  # fmt: skip


def parameters(chosen: argparse.Namespace) -> xllamacpp.CommonParams:
    given = xllamacpp.CommonParams()
    given.model.path = chosen.file
    given.n_ctx, given.n_parallel = 2048 * chosen.streams, chosen.streams
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = chosen.threads
    given.warmup, given.verbosity, given.n_gpu_layers = True, 0, 0
    return given


def answer(server: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": chosen.prompt}], "max_tokens": chosen.tokens, "temperature": 0}
    reply = server.handle_chat_completions({**asked, "ignore_eos": True, "cache_prompt": False})
    return dict(reply if isinstance(reply, dict) else json.loads(reply))


if __name__ == "__main__":
    main()
