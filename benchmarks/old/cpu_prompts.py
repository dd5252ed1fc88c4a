"""Prompts of one model on a CPU: native steps and the model's own operators in turns, on one thread.

    python benchmarks/cpu_prompts.py --model FOLDER [--tokens 128,512,2048] [--turns 2] [--out FILE]

Seconds are those that the processor spent on this process, the fewest of all turns: other load hardly changes them.
`split` says what takes the time of native steps: each kind of work alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import origin, result_path, whole_model_machine
from result_files import write_record

import lancebill
from lancebill.backends.cpu.decode_program import DecodeRows
from lancebill.cli.models import small_steps
from lancebill.integrations.transformers.native_decoder import NativeDecoder
from lancebill.integrations.transformers.native_limit import NO_LIMIT
from lancebill.serving.ragged import RaggedModel, runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--tokens", default="128,512,2048", help="of each prompt")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/cpu-prompts")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    model = lancebill.from_pretrained(chosen.model, device="cpu")
    native = runner(model, small_steps(model))
    if not isinstance(native, RaggedModel) or not isinstance(native.small, NativeDecoder):
        raise SystemExit("this model has no native steps")
    native.small.most_tokens = NO_LIMIT
    rows = []
    for count in map(int, chosen.tokens.split(",")):
        rows.append(measure(native, native.small, count, chosen.turns))
        print(json.dumps(rows[-1]), flush=True)
    record = {
        **origin(Path(__file__).name),
        "machine": whole_model_machine("cpu"),
        "model": chosen.model.name,
        "threads": 1,
        "rows": rows,
        "load": os.getloadavg()[0],
    }
    path = chosen.out or result_path("cpu-prompts")
    write_record(path, record)
    print(path)


def measure(native: RaggedModel, decoder: NativeDecoder, count: int, turns: int) -> dict[str, Any]:
    """One prompt of random tokens."""
    vocabulary = int(native.model.config.get_text_config().vocab_size)
    tokens = torch.randint(5, vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    ways = {"native": native, "own": RaggedModel(native.model)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            taken[name].append(seconds(lambda way=way: way.step([way.new_sequence()], [tokens])))  # type: ignore[misc]
    return {
        "tokens": count,
        **{f"{name}_seconds": round(min(each), 4) for name, each in taken.items()},
        "split": split(native, decoder, tokens),
    }


def split(native: RaggedModel, decoder: NativeDecoder, tokens: list[int]) -> dict[str, float]:
    """Seconds of each kind of native step. Each kind runs on what the others left, so only its time means something."""
    program, found = decoder.program, dict[str, float]()
    parts = program.parts()

    def run(rows: DecodeRows) -> None:
        for name, part in parts.items():
            found[name] = found.get(name, 0) + seconds(lambda part=part: part.run(rows))  # type: ignore[misc]

    program.run = run  # type: ignore[method-assign]
    native.step([native.new_sequence()], [tokens])
    del program.run
    return {name: round(each, 4) for name, each in found.items()}


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
