"""Mutate parsed headers: the syntax stays valid, so that the checks behind the parser are reached."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import safetensors
from hostile import ARCH, GOOD, HUGE, PAIR, array, file_bytes, gguf_bytes, index, info, make_folder, nested, pair

from lancebill import errors as e
from lancebill.checkpoint.read.config import read_config
from lancebill.checkpoint.read.files import INDEX, Checkpoint
from lancebill.checkpoint.read.gguf import STRING
from lancebill.checkpoint.read.strict_json import parse_object
from lancebill.testing.gguf import string_bytes

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    24,
    28,
    255,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 53,
    HUGE,
    1 << 63,
    (1 << 64) - 1,
    1 << 70,
)
ODD = (None, True, -1, 1.5, "", "F32", "U8", "F4", "BOOL", "I64", [], {}, [0], [2, 3], [0, 24], {"dtype": "U8"})


def mutated(value: Any, rng: random.Random) -> Any:
    """The document with one change: a value, a key, an added or removed entry."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        copy = dict(value)
        action = rng.random()
        if action < 0.1:
            del copy[key]
        elif action < 0.2:
            copy[rng.choice(["a", "z", "", "__metadata__", "shape"])] = copy[key]
        else:
            copy[key] = mutated(value[key], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.85:
        copy = list(value)
        at = rng.randrange(len(copy))
        action = rng.random()
        if action < 0.15:
            del copy[at]
        elif action < 0.3:
            copy.insert(at, rng.choice(NUMBERS))
        else:
            copy[at] = mutated(copy[at], rng)
        return copy
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-24, -4, -1, 1, 4, 24))
    return rng.choice(NUMBERS + ODD)


def read_everything(path: Path) -> bool:
    """Whether the file opens. Only our own errors may be raised, and what opens must be readable."""
    try:
        with Checkpoint.open(path) as checkpoint:
            for name, tensor in checkpoint.tensors.items():
                assert checkpoint.read(name).nbytes == tensor.nbytes
    except e.LancebillError as error:
        str(error).encode("utf-8")
        return False
    return True


def rewrite(path: Path, content: bytes) -> None:
    """Overwrite in place: truncating first makes some file systems wait for the disk."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(content)
        file.truncate()


def test_mutated_safetensors_headers(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "model.safetensors"
    accepted = 0
    for _ in range(3000):
        header: Any = json.loads(json.dumps(GOOD))
        for _ in range(rng.choice((1, 1, 2, 3))):
            header = mutated(header, rng)
        content = file_bytes(header, 28)
        rewrite(path, content)
        if read_everything(path):
            accepted += 1
            safetensors.deserialize(content)  # the library accepts what we accept
    assert 20 < accepted < 2000


def test_mutated_gguf_headers(tmp_path: Path) -> None:
    """Replace fields of the header by extreme numbers, or single bytes by random ones."""
    rng = random.Random(2)
    path = tmp_path / "x.gguf"
    pairs = (ARCH, PAIR, *pair("k", array(STRING, 2, string_bytes("ab") * 2))[1:], *pair("n", nested(2))[1:])
    good = gguf_bytes(pairs, (info(b"s"), info(b"t", offset=32)), 64)
    accepted = 0
    for _ in range(3000):
        content = bytearray(good)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(good) - 64)
            if rng.random() < 0.5:
                content[at] = rng.randrange(256)
            else:
                width = rng.choice((4, 8))
                content[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        rewrite(path, bytes(content[: rng.randrange(len(content))] if rng.random() < 0.1 else content))
        accepted += read_everything(path)
    assert 20 < accepted < 2000


def test_mutated_configs_and_indexes(tmp_path: Path) -> None:
    rng = random.Random(3)
    folder = make_folder(tmp_path)
    config = {"model_type": "x", "text_config": {"quantization_config": {"bits": 4, "desc_act": True}}}
    for _ in range(1500):
        rewrite(folder / "config.json", json.dumps(mutated(mutated(config, rng), rng)).encode())
        try:
            read_config(folder)
        except e.LancebillError as error:
            str(error).encode("utf-8")
    (folder / "config.json").unlink()
    for _ in range(1500):
        rewrite(folder / INDEX, json.dumps(mutated(index(), rng)).encode())
        read_everything(folder)


def test_mutated_json_text() -> None:
    rng = random.Random(4)
    good = json.dumps(GOOD).encode()
    for _ in range(5000):
        text = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 2)] = bytes(rng.choice(b'{}[]",:\\u0019eE.-+ndNaI\xff\x00') for _ in range(2))
        try:
            parse_object(bytes(text), "here")
        except e.MalformedFile as error:
            assert error.where == "here"
