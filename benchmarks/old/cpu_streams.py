"""A model of the demo's size on a CPU: native steps of several rows, and one and several streams of its server.

    python benchmarks/cpu_streams.py [--model FOLDER] [--rows 1,2,4,8] [--streams 8,32] [--turns 3] [--tokens 48]
                                     [--steps 20] [--threads N] [--out FILE] [--note WORDS]

Without `--model` the model has random weights, with experts in MXFP4 and all else in bf16 as the demo's. `steps` are
milliseconds of one native step with so many sequences, in turns. `prompts` are those of the first step of one and of
several prompts, native and of the model's own operators, and `most_tokens` up to how many tokens native ones are used;
`split` says what takes the time of each native step. `served` is what `lancebill bench-serve` measures, with one stream
and with several in turns, of `lancebill serve` on as many threads. Prompts have 16 words; each differs in its
first ones from all before, so that throughput owes nothing to starts that the server has read for an earlier one (but
for what a model's chat template writes before them). In `first_token` the last first token of several streams is
compared with the first one of the same streams, and with that of a stream alone. `long_prompt` has the largest time
between two tokens of streams under way while a long prompt is read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import origin, result_path, whole_model_machine
from result_files import write_record
from tokenizers import Tokenizer, models, pre_tokenizers

import lancebill
from lancebill.backends.cpu.decode_program import DecodeProgram, DecodeRows
from lancebill.cli.convert import run_conversion, target_of
from lancebill.cli.engines import running_server
from lancebill.cli.models import small_steps
from lancebill.errors import LaunchError
from lancebill.evaluate.load import WORDS as PROMPT_WORDS
from lancebill.evaluate.load import Load, Request, Server, run_load, send
from lancebill.integrations.transformers.native_decoder import NativeDecoder
from lancebill.integrations.transformers.native_limit import NO_LIMIT
from lancebill.serving.ragged import RaggedModel, runner

VOCABULARY = 49152
SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 576, "intermediate_size": 192, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_local_experts": 8,
    "num_experts_per_tok": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WORDS, PROMPT = 16, 16  # of a prompt to the server; tokens before the first timed step
BESIDE, BESIDE_TOKENS = 4, 400  # streams beside a long prompt, and their tokens at most
BESIDE_SECONDS = 2  # before it


def main() -> None:
    chosen = parse()
    torch.set_num_threads(chosen.threads)
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # of the server
    with model_folder(chosen.model) as folder:
        model = lancebill.from_pretrained(folder, device="cpu")
        ragged = runner(model, small_steps(model))
        if not isinstance(ragged, RaggedModel) or not isinstance(ragged.small, NativeDecoder):
            raise SystemExit("this model has no native steps")
        steps, prompts = step_times(ragged, chosen), prompt_times(ragged, chosen)
        split = split_times(ragged, ragged.small, chosen)
        for part in (steps, prompts, split):
            print(json.dumps(part), flush=True)
        try:
            streams = served(folder, chosen)
        except LaunchError as error:  # uvicorn is not installed, for example
            streams = {"absent": str(error)}
        record = {
            **origin(Path(__file__).name),
            "machine": whole_model_machine("cpu"),
            "model": "random weights" if chosen.model is None else chosen.model.name,
            "threads": chosen.threads,
            "note": chosen.note,
            "steps": steps,
            "prompts": prompts,
            "most_tokens": ragged.small.most_tokens,
            "split": split,
            "served": streams,
            "load": os.getloadavg()[0],
        }
    path = chosen.out or result_path("cpu-streams")
    write_record(path, record)
    print(path)


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint with a tokenizer; default: random weights")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--streams", type=numbers, default=[8, 32], help="the first number is also that of prompts")
    parser.add_argument("--long-prompt", type=int, default=2000, help="its words")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each number of rows, in each turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/cpu-streams")
    parser.add_argument("--note", default="")
    return parser.parse_args()


@contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    """The given model, or a random one that is removed afterwards."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as temporary:
        wide, packed = Path(temporary) / "bf16", Path(temporary) / "mxfp4"
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**SIZE), dtype=torch.bfloat16)
        model.save_pretrained(wide)
        save_tokenizer(wide)
        run_conversion(wide, packed, target_of("mxfp4", None), {"search": False})
        yield packed


def save_tokenizer(folder: Path) -> None:
    """One token for each word; those of prompts are different ones."""
    words = ["w0", "w1", *PROMPT_WORDS.split()]
    words += [f"w{i}" for i in range(len(words), VOCABULARY)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def step_times(steps: RaggedModel, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of sequences."""
    taken: dict[int, list[float]] = {count: [] for count in chosen.rows}
    for _ in range(chosen.turns):
        for count, seconds in taken.items():
            seconds += timed_steps(steps, count, chosen.steps)
    one = statistics.median(taken[min(taken)]) / min(taken)
    return [
        {
            "rows": count,
            "min_ms": round(1e3 * min(seconds), 2),
            "median_ms": round(1e3 * statistics.median(seconds), 2),
            "throughput": round(one * count / statistics.median(seconds), 2),
        }
        for count, seconds in taken.items()
    ]


def random_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(5, VOCABULARY, (count, PROMPT), generator=generator).tolist()
    return found


def timed_steps(steps: RaggedModel, count: int, repeats: int) -> list[float]:
    """Seconds of greedy steps; every sequence has a prompt of its own."""
    prompts = random_prompts(count)
    sequences = [steps.new_sequence() for _ in prompts]
    logits = torch.cat([steps.step([sequence], [prompt]) for sequence, prompt in zip(sequences, prompts)])
    taken = []
    for _ in range(repeats):
        new = [[int(row.argmax())] for row in logits]
        start = time.perf_counter()
        logits = steps.step(sequences, new)
        taken.append(time.perf_counter() - start)
    return taken


def prompt_times(steps: RaggedModel, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of prompts: the fastest first step, of both ways."""
    ways = {"native_ms": steps, "own_ms": RaggedModel(steps.model)}
    assert steps.small is not None
    before, steps.small.most_tokens = steps.small.most_tokens, NO_LIMIT
    found = []
    for count in (1, chosen.streams[0]):
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 * chosen.turns):
            for name, way in ways.items():
                start = time.perf_counter()
                way.step([way.new_sequence() for _ in range(count)], random_prompts(count))
                taken[name].append(time.perf_counter() - start)
        row: dict[str, Any] = {name: round(1e3 * min(seconds), 2) for name, seconds in taken.items()}
        found.append({"prompts": count, "tokens": PROMPT, **row})
    steps.small.most_tokens = before
    return found


def split_times(steps: RaggedModel, decoder: NativeDecoder, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Fastest milliseconds of each kind of native step alone, for single tokens and for prompts."""
    return [
        {"sequences": count, "tokens": tokens, **split_of(steps, decoder, count, tokens, chosen.steps)}
        for tokens in (1, PROMPT)
        for count in (1, chosen.streams[0])
    ]


def split_of(steps: RaggedModel, decoder: NativeDecoder, count: int, tokens: int, repeats: int) -> dict[str, float]:
    prompts, seen = [prompt[:tokens] for prompt in random_prompts(count)], Calls(decoder.program)
    sequences, before = [steps.new_sequence() for _ in prompts], decoder.most_tokens
    decoder.program, decoder.most_tokens = seen, NO_LIMIT  # type: ignore[assignment]
    steps.step(sequences, prompts)
    decoder.program, decoder.most_tokens = seen.program, before
    parts = {"all": seen.program, **seen.program.parts()}
    taken: dict[str, float] = dict.fromkeys(parts, float("inf"))
    for _ in range(repeats):
        for name, part in parts.items():
            start = time.perf_counter()
            part.run(seen.rows[0])
            taken[name] = min(taken[name], time.perf_counter() - start)
    return {name: round(1e3 * seconds, 3) for name, seconds in taken.items()}


class Calls:
    """A program that keeps the rows of its calls."""

    def __init__(self, program: DecodeProgram) -> None:
        self.program = program
        self.rows: list[DecodeRows] = []
        self.current = program.current

    def run(self, rows: DecodeRows) -> None:
        self.rows.append(rows)
        self.program.run(rows)


def served(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """What bench-serve says of one stream and of several, and how much more several give."""
    runs: dict[int, list[dict[str, Any]]] = {streams: [] for streams in (1, *chosen.streams)}
    with running_server([str(folder), "--engine", "transformers", "--device", "cpu"]) as url:
        seeds = itertools.count()  # each gives other prompts
        run_load(url, Load(WORDS, 8, max(runs), max(runs), next(seeds)))  # warm-up
        for _ in range(chosen.turns):
            for streams, found in runs.items():
                found.append(run_load(url, Load(WORDS, chosen.tokens, streams, streams, next(seeds))))
                print(json.dumps(found[-1]), flush=True)
        beside = long_prompt(url, chosen.long_prompt, seeds)
    rate = {streams: statistics.median(run["tokens_per_second"] for run in found) for streams, found in runs.items()}
    return {
        "tokens_per_second": {str(streams): round(found, 2) for streams, found in rate.items()},
        "throughput": {str(streams): round(rate[streams] / rate[1], 2) for streams in chosen.streams},
        "first_token": {str(streams): first_tokens(runs[streams], runs[1]) for streams in chosen.streams},
        "long_prompt": beside,
        "runs": {str(streams): found for streams, found in runs.items()},
    }


def first_tokens(several: list[dict[str, Any]], alone: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the runs; no run has 100 streams, so the 99th percentile is the last of them."""
    times, one = ([run["time_to_first_token_ms"] for run in runs] for runs in (several, alone))
    last, lone = (statistics.median(each["p99"] for each in values) for values in (times, one))
    return {
        "last_ms": round(last, 1),
        "over_first": round(statistics.median(each["p99"] / each["min"] for each in times), 2),
        "over_lone": round(last / lone, 2),
    }


def long_prompt(url: str, words: int, seeds: Iterator[int]) -> dict[str, Any]:
    """Streams under way while a long prompt is read: the largest gap between two of their tokens."""
    server = Server(url)
    model, found = server.model(), list[Request]()

    def follow(seed: int) -> None:
        found.append(send(server, model, Load(WORDS, 1, 1, 1, seed).prompt(0), BESIDE_TOKENS))

    threads = [threading.Thread(target=follow, args=[seed], daemon=True) for seed in itertools.islice(seeds, BESIDE)]
    for thread in threads:
        thread.start()
    time.sleep(BESIDE_SECONDS)
    long = send(server, model, Load(words, 1, 1, 1, next(seeds)).prompt(0), 1)
    for thread in threads:
        thread.join()
    before, during = list[float](), list[float]()
    for request in found:
        for start, end in zip(request.arrivals, request.arrivals[1:]):
            if end < long.sent:
                before.append(end - start)
            elif start < long.arrivals[0]:
                during.append(end - start)
    return {
        "words": words,
        "first_token_ms": round(1e3 * long.time_to_first_token, 1),
        "streams": BESIDE,
        "gap_before_ms": round(1e3 * statistics.median(before), 1),
        "largest_gap_ms": round(1e3 * max(during), 1),
    }


if __name__ == "__main__":
    main()
