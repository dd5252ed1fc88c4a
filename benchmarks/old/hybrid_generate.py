"""Whole small models with half of their experts in host memory: tokens, speed, Ctrl-C, and memory over many steps.

    python benchmarks/hybrid_generate.py [--seconds 90] [--steps 10000] [--moving 0] [--device cuda] [--out FILE]

It ends after `--seconds`, whatever happens: the models run in processes of their own, which write what they have found
as they go. Every line is printed with its time.

`interrupt`: a process that decodes gets SIGINT. KeyboardInterrupt must end it soon, and leave no GPU memory occupied:
the next process, which measures all the rest, must find as much free memory. Python then ends by the signal
(`by_signal`), or with status 1 if a library runs code by PyRun_String or its like while the interpreter ends.
`model` (4 layers of 64 experts): `equal_tokens` is how many of the first 64 tokens are those of the model that is whole
on the GPU: rounding differs, so the two may part where two tokens are nearly as likely. `graphs` is how steps ran.
`steps`: a model so small that many steps take little time, in calls of `generate` of 1,000 steps. Between them memory
must not grow. The last call comes after one that was interrupted. `moves`: the same with experts that move.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from machine import origin, result_path
from result_files import write_record

MODELS = Path(__file__).resolve().with_name("hybrid_models.py")  # what the processes run
DECODING = "decodes"  # what a process says when it can be interrupted
START_S, END_S = 45.0, 15.0  # at most until a process decodes, and until it has ended after SIGINT
RESERVE_S = 4.0  # to write the result


def main() -> None:
    arguments, start = parse(), time.time()
    until = start + arguments.seconds - RESERVE_S
    path = arguments.out or result_path("hybrid-generate", arguments.device)
    record: dict[str, Any] = {**origin("hybrid_generate.py"), "interrupt": interrupt(arguments, until)}
    write_record(path, record)
    say(f"interrupt: {json.dumps(record['interrupt'])}")
    ended = _ended(_process(arguments, "measure", until, path), until)
    record = json.loads(path.read_text(encoding="utf-8"))
    record |= {"ended_with": ended, "seconds": round(time.time() - start, 1)}
    write_record(path, record)
    say(json.dumps(record))


def interrupt(arguments: argparse.Namespace, until: float) -> dict[str, Any]:
    """What a process does that gets SIGINT while it decodes."""
    process = _process(arguments, "decode", until, None)
    begun, found = time.time(), {}
    try:
        for line in _lines(process, min(until, begun + START_S)):
            if line.startswith("{"):
                found |= json.loads(line)
            if line.strip() == DECODING:
                break
        else:
            return found | {"ended_with": _ended(process, time.time() + 1), "error": "it did not begin to decode"}
        time.sleep(1.0)
        asked = time.time()
        process.send_signal(signal.SIGINT)
        ended = _ended(process, asked + END_S)
        by_signal = ended == -signal.SIGINT
        return found | {"ended_with": ended, "by_signal": by_signal, "end_s": round(time.time() - asked, 2)}
    finally:
        process.kill()


def _process(arguments: argparse.Namespace, part: str, until: float, path: Path | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(MODELS), "--part", part, "--until", str(until), "--device", arguments.device]
    command += ["--steps", str(arguments.steps), "--moving", str(arguments.moving)]
    command += [] if path is None else ["--out", str(path.resolve())]
    piped = subprocess.PIPE if part == "decode" else None
    return subprocess.Popen(command, stdout=piped, text=True)


def _lines(process: subprocess.Popen[str], until: float) -> Iterator[str]:
    """What the process prints, until it ends or the time is over."""
    assert process.stdout is not None
    found: Queue[str | None] = Queue()

    def read(lines: Iterable[str]) -> None:
        for line in lines:
            print(line, end="", flush=True)
            found.put(line)
        found.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    while time.time() < until:
        try:
            line = found.get(timeout=max(0.1, until - time.time()))
        except Empty:
            return
        if line is None:
            return
        yield line


def _ended(process: subprocess.Popen[str], until: float) -> int | str:
    """The exit status. A process that has not ended by then is killed."""
    try:
        return process.wait(max(0.1, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "killed"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="for everything")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--moving", type=int, default=0, help="steps with experts that move")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=["decode", "measure"], help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
