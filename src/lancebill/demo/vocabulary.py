"""Converts the tokenizer in a GGUF file's metadata: byte-level BPE like GPT-2, each digit its own token.

Only used on a file whose hash was checked, so this reader does not check lengths.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _CONTROL = 8, 9, 3


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata keys and values of a GGUF file."""
    with path.open("rb") as file:
        _, _, count = struct.unpack("<IIQ", file.read(16)), None, struct.unpack("<Q", file.read(8))[0]
        return dict(_pair(file) for _ in range(count))


def _pair(file: BinaryIO) -> tuple[str, Any]:
    name = _text(file)
    return name, _value(file, _number(file, "I"))


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        inner, length = _number(file, "I"), _number(file, "Q")
        return [_value(file, inner) for _ in range(length)]
    return _number(file, _NUMBERS[kind])


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode("utf-8")


def save_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer for transformers, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds) if kind == _CONTROL]
    inner.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])
    special = {role: words[metadata[f"tokenizer.ggml.{key}_token_id"]] for role, key in _ROLES.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=metadata["tokenizer.chat_template"], **special
    )
    tokenizer.save_pretrained(folder)


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
