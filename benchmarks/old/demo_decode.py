"""One stream of the demo model: `lancebill generate` and llama.cpp in turns, on the same numbers.

    python benchmarks/demo_decode.py --model MXFP4_FOLDER --gguf FILE --llama-python PYTHON [--turns 5] [--out FILE]

`demo_gguf.py` writes the GGUF file. Each turn is a new process of each; the rate is that after the first token. The
texts must agree for the numbers to be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from machine import origin, result_path, whole_model_machine
from result_files import write_record

PROMPT = "What is gravity?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-python", required=True, help="a Python with xllamacpp")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/demo-decode")
    chosen = parser.parse_args()
    turns = []
    for _ in range(chosen.turns):
        turns.append({"ours": ours(chosen), "theirs": theirs(chosen), "load": os.getloadavg()[0]})
        print(json.dumps(turns[-1]), flush=True)
    rates = {
        "ours": median(turn["ours"]["tokens_per_second"] for turn in turns),
        "theirs": median(median(turn["theirs"]["tokens_per_second"]) for turn in turns),
    }
    found = {
        **origin("demo_decode.py"),
        "machine": whole_model_machine("cpu"),
        "tokens": chosen.tokens,
        "tokens_per_second": rates,
        "ours_over_theirs": round(rates["ours"] / rates["theirs"], 3),
        "turns": turns,
    }
    path = chosen.out or result_path("demo-decode")
    write_record(path, found)
    print(path, rates, found["ours_over_theirs"])


def ours(chosen: argparse.Namespace) -> dict[str, Any]:
    words = ["generate", str(chosen.model), PROMPT, "--max-tokens", str(chosen.tokens), "--json"]
    answer = run([sys.executable, "-m", "lancebill.cli.main", *words])["answers"][0]
    return {key: answer[key] for key in ("text", "tokens", "first_seconds", "tokens_per_second")}


def theirs(chosen: argparse.Namespace) -> dict[str, Any]:
    script = Path(__file__).parent / "llama_cpp_decode.py"
    words = [str(chosen.gguf), "--prompt", PROMPT, "--tokens", str(chosen.tokens), "--repeats", "3"]
    return run([chosen.llama_python, str(script), *words, "--threads", str(os.cpu_count())])


def run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result


if __name__ == "__main__":
    main()
