"""Many streaming clients on `lancebill serve`: errors, requests that never end, and memory over time.

    python benchmarks/serve_stress.py --model PATH [--clients 16] [--seconds 60] [--weights mxfp4]

Starts the server, sends requests with the `openai` package, stops the server with SIGTERM, and records the outcome in
benchmarks/results/serve. A request is stuck if it is still open two minutes after the last one was sent.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
from machine import origin, result_path

TIMEOUT = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--weights", default="mxfp4", help="weight spec of the experts")
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients")
    parser.add_argument("--seconds", type=float, default=60, help="how long requests are sent")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per answer")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/serve")
    chosen = parser.parse_args()
    url, server = start_server(chosen.model, chosen.weights)
    try:
        found = stress(url, server.pid, chosen)
    finally:
        server.send_signal(signal.SIGTERM)
    found["exit_code_after_sigterm"] = server.wait(timeout=TIMEOUT)
    save(chosen, found)


def start_server(model: Path, weights: str) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server, wait until it answers; its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", str(model), "--weights", weights, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "lancebill.cli.main", *words, "--dtype", "float32"])
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return f"http://127.0.0.1:{port}/v1", server
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not start") from None
            time.sleep(0.2)


def stress(url: str, pid: int, chosen: argparse.Namespace) -> dict[str, Any]:
    client = openai.OpenAI(base_url=url, api_key="none", timeout=TIMEOUT, max_retries=0)
    model = client.models.list().data[0].id
    done: list[tuple[float, int]] = []
    errors: list[str] = []
    end = time.monotonic() + chosen.seconds

    def work(number: int) -> None:
        while time.monotonic() < end:
            sent = time.monotonic()
            try:
                stream = client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": f"Count from {number}."}],
                    max_tokens=chosen.tokens,
                    stream=True,
                )
                pieces = sum(1 for event in stream if event.choices and event.choices[0].delta.content)
                done.append((time.monotonic() - sent, pieces))
            except openai.OpenAIError as error:
                errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(chosen.clients)]
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end + TIMEOUT:
        memory.append(resident_megabytes(pid))
        time.sleep(1)
    quarter = max(1, len(memory) // 4)
    return {
        "requests": len(done),
        "failed": len(errors),
        "errors": errors[:5],
        "stuck": sum(thread.is_alive() for thread in threads),
        "pieces": sum(pieces for _, pieces in done),
        "empty_answers": sum(pieces == 0 for _, pieces in done),
        "slowest_seconds": round(max((seconds for seconds, _ in done), default=0), 2),
        "resident_mb": {
            "after_a_quarter": memory[quarter - 1],
            "at_the_end": memory[-1],
            "most": max(memory),
        },
    }


def resident_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return round(kilobytes / 1024, 1)


def save(chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    from lancebill.cli.env import describe

    machine = describe()
    document = {
        **origin(Path(__file__).name),
        "machine": {
            "cpu": machine["cpu"],
            "python": machine["python"],
            **{name: machine["packages"][name] for name in ("torch", "transformers")},
        },
        "clients": chosen.clients,
        "seconds": chosen.seconds,
        "tokens": chosen.tokens,
        **found,
    }
    path = chosen.out or result_path("serve")
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
