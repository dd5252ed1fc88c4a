"""Many streaming clients on a server for a while: errors, requests that never end, and memory.

    python benchmarks/serve_stress.py http://localhost:8000/v1 --pid <of the server> --seconds 60
Uses the `openai` package, as clients do.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=8)
    chosen = parser.parse_args()
    client = openai.OpenAI(base_url=chosen.url, api_key="none", timeout=120, max_retries=0)
    model = client.models.list().data[0].id
    end = time.monotonic() + chosen.seconds
    done, errors, memory = [], [], []

    def work(number: int) -> None:
        while time.monotonic() < end:
            start = time.monotonic()
            try:
                stream = client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": f"w{number} w2 w3"}],
                    max_tokens=chosen.tokens,
                    stream=True,
                )
                pieces = sum(1 for event in stream if event.choices and event.choices[0].delta.content)
                done.append((time.monotonic() - start, pieces))
            except openai.OpenAIError as error:
                errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(chosen.clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        memory.append(_resident(chosen.pid))
        time.sleep(2)
    quarter = max(1, len(memory) // 4)
    print(
        json.dumps(
            {
                "clients": chosen.clients,
                "seconds": chosen.seconds,
                "requests": len(done),
                "pieces": sum(pieces for _, pieces in done),
                "slowest_s": round(max((seconds for seconds, _ in done), default=0), 2),
                "errors": errors[:5],
                "failed": len(errors),
                "resident_mb_after_first_quarter": memory[quarter - 1],
                "resident_mb_at_the_end": memory[-1],
            },
            indent=2,
        )
    )


def _resident(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return round(kilobytes / 1024, 1)


if __name__ == "__main__":
    main()
