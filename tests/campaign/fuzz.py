"""Fuzzing of everything that reads foreign bytes, text or values, with mutators that know the syntax.

    python tests/campaign/fuzz.py --seconds 600 --record

Every target gets the same share of the time. An input fails if it raises anything but our own errors, takes more than
5 seconds, or makes the process grow by more than 64 MiB. Failing inputs are printed and kept in the record; each is to
become a test.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally, memory_folder
from hostile import ARCH, GOOD, PAIR, array, file_bytes, gguf_bytes, index, info, make_folder, nested, pair
from test_corrupt_fuzz import NUMBERS, mutated, read_everything, rewrite
from test_fuzz_resolve import _document, _mutated_headers, _resolve, _small

from lancebill.checkpoint.read.gguf import STRING
from lancebill.checkpoint.read.hub import INDEX
from lancebill.checkpoint.read.safetensors import read_header
from lancebill.checkpoint.read.strict_json import parse_object
from lancebill.checkpoint.resolve.naming import TABLE
from lancebill.errors import LancebillError
from lancebill.formats import registry
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.testing.conformance import all_examples
from lancebill.testing.gguf import string_bytes
from lancebill.testing.weights import random_example

MOST_SECONDS, MOST_GROWTH = 5, 64 << 10  # growth in KiB
Input = tuple[object, Callable[[], object]]  # what to print if it fails, and the call to try
WORDS = (
    "int4", "int3", "uint4", "fp8", "mxfp4", "nvfp4", "nf4", "bf16", "e4m3", "g32", "g128", "gx", "b2x4", "ball", "zp",
    "min.g32", "channel", "tensor", "block", "static", ":", ":fp16", "/", "-", "--", "0", "9" * 30, "", "\u0660", "#",
)  # fmt: skip


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, numbers replaced, pieces removed, repeated or swapped, or the end cut."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at, action = rng.randrange(len(out) + 1), rng.random()
        if action < 0.4:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif action < 0.7:
            width = rng.choice((1, 2, 4, 8))
            out[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        elif action < 0.8:
            del out[at : at + rng.randint(1, 16)]
        elif action < 0.9:
            out[at:at] = out[: rng.randint(0, 32)]
        else:
            del out[at:]
    return bytes(out)


def safetensors_files(rng: random.Random, folder: Path) -> Iterator[Input]:
    path = folder / "model.safetensors"
    while True:
        header: Any = GOOD
        for _ in range(rng.choice((1, 1, 2, 3))):
            header = mutated(header, rng)
        content = file_bytes(header, 28)
        content = mutated_bytes(content, rng) if rng.random() < 0.5 else content
        rewrite(path, content)
        yield content, lambda: read_header(path)


def gguf_files(rng: random.Random, folder: Path) -> Iterator[Input]:
    path = folder / "x.gguf"
    pairs = (ARCH, PAIR, *pair("k", array(STRING, 2, string_bytes("ab") * 2))[1:], *pair("n", nested(2))[1:])
    good = gguf_bytes(pairs, (info(b"s"), info(b"t", offset=32)), 64)
    while True:
        content = mutated_bytes(good, rng)
        rewrite(path, content)
        yield content, lambda: read_everything(path)


def indexes(rng: random.Random, folder: Path) -> Iterator[Input]:
    checkpoint = make_folder(folder)
    while True:
        text = json.dumps(mutated(mutated(index(), rng), rng)).encode()
        rewrite(checkpoint / INDEX, mutated_bytes(text, rng) if rng.random() < 0.3 else text)
        yield text, lambda: read_everything(checkpoint)


def json_texts(rng: random.Random, folder: Path) -> Iterator[Input]:
    good = json.dumps({"a": GOOD, "b": [1, 2.5, None, True, {"c": "\u00e9"}]}).encode()
    while True:
        text = mutated_bytes(good, rng)
        yield text, lambda text=text: parse_object(text, "here")


def configs(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Configs and headers of every format, resolved as `verify` does."""
    made = [_small(fmt) for fmt in registry()]
    while True:
        one = rng.choice(made)
        document, headers = _document(one), dict(one.headers)
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            if rng.random() < 0.4 and headers:
                headers = _mutated_headers(headers, rng)
            else:
                document = mutated(document, rng)
        if isinstance(document, dict) and headers:
            yield (document, headers), lambda d=document, h=headers: _resolve(d, h)


def spec_names(rng: random.Random, folder: Path) -> Iterator[Input]:
    while True:
        name = "-".join(rng.choices(WORDS, k=rng.randint(1, 5)))
        name = name.replace("-", "", 1) if rng.random() < 0.3 else name
        parse = parse_spec if rng.random() < 0.5 else parse_activation
        yield name, lambda name=name, parse=parse: str(parse(name))


def tensor_names(rng: random.Random, folder: Path) -> Iterator[Input]:
    names = [
        form.module(prefix, 3, 5, projection) + suffix
        for row in TABLE
        for form in row.forms
        for prefix in form.prefixes[:2]
        for projection in form.names
        for suffix in (".weight", "", ".qweight", "_scales")
    ]
    while True:
        words = re.split(r"(\W)", rng.choice(names))
        at = rng.randrange(len(words))
        words[at] = rng.choice((*words, *map(str, NUMBERS), "00", "\u0663", "", ".", "a" * 4000, "experts", ".*", "\n"))
        name, row = "".join(words), rng.choice(TABLE)
        yield name, lambda name=name, row=row: row.claim(name)


def stored_values(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Tensors of the right shape and dtype with any bytes in them."""
    examples = []
    for fmt, example in all_examples():
        weight = random_example(example, 32, example.k, seed=1, order_seed=2)
        with contextlib.suppress(LancebillError):
            examples.append((fmt.name, example, example.scheme.encode(weight)))
    while True:
        name, example, stored = rng.choice(examples)
        role = rng.choice(list(stored))
        tensor = stored[role].contiguous().clone()
        data = tensor.reshape(-1).view(torch.uint8)
        for at in rng.choices(range(max(1, len(data))), k=rng.choice((1, 1, 4, 64))):
            if len(data):
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        changed = {**stored, role: tensor}
        yield (name, example.name, role), lambda e=example, c=changed: e.scheme.decode(c, 32, e.k)


def arguments(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Command lines; nothing they name exists, so that no command does any work. No program can be passed a NUL."""
    from lancebill.cli.main import app

    words = (
        "verify", "inspect", "convert", "explain", "bench", "env", "--json", "--to", "--values", "--help", "--weights",
        "--tokens", "--device", "sm_90", "cpu", "mxfp4", "int4-g32", "-1", "1e9", "", "\x01", "/nowhere", "--",
        "--format", "gptq", "--experts", "--hidden", "[bold]", "\u0660", "%s", "{0}",
    )  # fmt: skip

    def call(line: list[str]) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                app(line, standalone_mode=True)
            except SystemExit as done:
                if done.code not in (0, 1, 2, None):
                    raise ValueError(f"exit code {done.code}") from None

    while True:
        line = rng.choices(words, k=rng.randint(1, 6))
        if line[0] not in ("bench", "env"):
            yield line, lambda line=line: call(line)


TARGETS = (
    safetensors_files, gguf_files, indexes, json_texts, configs, spec_names, tensor_names, stored_values, arguments,
)  # fmt: skip


def run(target: Callable[[random.Random, Path], Iterator[Input]], rng: random.Random, seconds: float) -> Tally:
    tally, end = Tally(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        inputs = target(rng, Path(folder))
        next(inputs)  # set up
        for count in itertools.count():
            if count % 64 == 0 and time.monotonic() > end:
                return tally
            shown, call = next(inputs)
            fault = _fault(call)
            tally.add(fault and f"{target.__name__}: {fault}: {str(shown)[:500]}")
    return tally


def _fault(call: Callable[[], object]) -> str | None:
    grown, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        call()
    except LancebillError as error:
        str(error).encode("utf-8")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if time.process_time() - started > MOST_SECONDS:
        return f"took {time.process_time() - started:.1f} s"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    return f"grew by {grown >> 10} MiB" if grown > MOST_GROWTH else None


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    total = Tally.total(tallies.values())
    each = ", ".join(f"{name.replace('_', ' ')} {tally.cases:,}" for name, tally in tallies.items())
    kinds = Counter(example[: example.index(": ", example.index(": ") + 2)] for example in total_examples(tallies))
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    failed = f"{total.failures} failed" + (f": {listed}" if listed else "")
    return {"R2": total.figure(f"{total.cases:,} inputs ({each}), {failed}")}


def total_examples(tallies: Tallies) -> list[str]:
    """Every failure that was kept: target, error and input."""
    return [example for tally in tallies.values() for example in tally.examples]


def main() -> None:
    part = Part("fuzz", __doc__, figures, seconds=600.0, seed=0)
    torch.set_num_threads(1)
    tallies: dict[str, Tally] = {}
    for target in TARGETS:
        rng = random.Random(f"{target.__name__} {part.arguments.seed}")
        tallies[target.__name__] = run(target, rng, part.arguments.seconds / len(TARGETS))
        part.report_now_and_then(tallies)
    part.finish(tallies)


if __name__ == "__main__":
    main()
