"""The header of a GGUF file: metadata, then tensor infos, then aligned data.

Every length and count is checked against the bytes that remain in the file before it is used, so that a hostile header
cannot cause large allocations or long loops. Long arrays (vocabularies) are skipped.

A quantised tensor is described as bytes with an axis of blocks: Q4_K of [E, N, K] has the shape (E, N, K/256, 144), so
that a shard is sliced between blocks like any other tensor.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lancebill.checkpoint.read.file_bytes import opened
from lancebill.checkpoint.read.ggml_types import TYPES, GgmlType, why_unreadable
from lancebill.checkpoint.read.tensor_info import TensorInfo, quoted
from lancebill.errors import CheckpointError, MalformedFile
from lancebill.formats.stored import Config

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
MAX_DIMS = 4
MAX_NAME = 65_535  # bytes of a key or of a tensor name
MAX_TEXT = 100_000_000  # bytes of a string that is kept
MAX_DEPTH = 4  # of nested arrays
MAX_VARIABLE = 1 << 21  # array elements of variable length in a file: each takes an iteration
MAX_KEPT = 1024  # elements; of a longer array only the length is kept
MIN_PAIR, MIN_INFO = 14, 33  # bytes of the smallest key-value pair and the smallest tensor info

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}


# config.json keys and the GGUF metadata keys that hold the same values ({} is the architecture).
MODEL_KEYS = {
    "num_hidden_layers": "{}.block_count",
    "hidden_size": "{}.embedding_length",
    "intermediate_size": "{}.feed_forward_length",
    "num_experts": "{}.expert_count",
    "num_experts_per_tok": "{}.expert_used_count",
    "moe_intermediate_size": "{}.expert_feed_forward_length",
    "num_shared_experts": "{}.expert_shared_count",
    "moe_latent_size": "{}.moe_latent_size",
    "vocab_size": "{}.vocab_size",
    "expert_gating_func": "{}.expert_gating_func",
    "expert_weights_scale": "{}.expert_weights_scale",
    "expert_weights_norm": "{}.expert_weights_norm",
    "expert_group_count": "{}.expert_group_count",
    "expert_group_used_count": "{}.expert_group_used_count",
    "num_hash_layers": "{}.hash_layer_count",
    "swiglu_limit": "{}.swiglu_clamp_exp",
}


@dataclass(frozen=True)
class Skipped:
    """Stands in for an array that was too long to keep."""

    length: int


@dataclass
class _Reader:
    """A cursor that checks every length against the rest of the file."""

    file: BinaryIO
    size: int
    where: str
    at: int = 0
    variable_elements: int = 0

    def fail(self, what: str, **facts: object) -> MalformedFile:
        return MalformedFile(what, where=f"{self.where} (header, byte {self.at})", **facts)  # type: ignore[arg-type]

    def need(self, count: int, what: str) -> None:
        left = self.size - self.at
        if count > left:
            raise self.fail(f"{what} does not fit the file", expected=f"<= {left} bytes", got=count)

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise self.fail("the file was truncated while it was read")
        self.at += count
        return data

    def skip(self, count: int, what: str) -> None:
        self.need(count, what)
        self.file.seek(count, 1)
        self.at += count

    def number(self, form: str, what: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0]

    def count(self, what: str, least: int) -> int:
        """Read a count of items of at least `least` bytes each; raises if the file cannot hold them."""
        value: int = self.number("Q", what)
        self.need(value * least, f"{what} of {value}")
        return value

    def name(self, what: str) -> str:
        length = self.number("Q", what)
        if not 0 < length <= MAX_NAME:
            raise self.fail(f"the length of {what} is out of range", expected=f"1 to {MAX_NAME}", got=length)
        try:
            text = self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None
        if not text.isprintable():
            raise self.fail(f"{what} is not printable", got=quoted(text))
        return text

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == STRING:
            length = self.number("Q", what)
            if length > MAX_TEXT:
                raise self.fail(f"{what} is too long", expected=f"<= {MAX_TEXT} bytes", got=length)
            return self.take(length, what).decode("utf-8", errors="replace")
        if kind == ARRAY:
            return self._array(what, depth)
        if kind not in NUMBERS:
            raise self.fail(f"{what} has an unknown type", expected="0 to 12", got=kind)
        value = self.number(NUMBERS[kind], what)
        if kind != BOOL:
            return value
        if value > 1:
            raise self.fail(f"{what} is not a bool", expected="0 or 1", got=value)
        return bool(value)

    def _array(self, what: str, depth: int) -> Any:
        if depth == MAX_DEPTH:
            raise self.fail(f"{what} nests arrays too deeply", expected=f"<= {MAX_DEPTH}")
        kind = self.number("I", what)
        if kind in NUMBERS:
            width = struct.calcsize("<" + NUMBERS[kind])
            count = self.count(f"the array length of {what}", width)
            if count > MAX_KEPT:
                self.skip(count * width, what)
                return Skipped(count)
            return struct.unpack(f"<{count}{NUMBERS[kind]}", self.take(count * width, what))
        if kind not in (STRING, ARRAY):
            raise self.fail(f"{what} is an array of an unknown type", expected="0 to 12", got=kind)
        count = self.count(f"the array length of {what}", 8 if kind == STRING else 12)
        self.variable_elements += count
        if self.variable_elements > MAX_VARIABLE:
            raise self.fail(f"{what} has too many elements", expected=f"<= {MAX_VARIABLE}", got=self.variable_elements)
        if kind == STRING:
            self._skip_strings(count, what)
        else:
            for _ in range(count):
                self._array(what, depth + 1)
        return Skipped(count)

    def _skip_strings(self, count: int, what: str) -> None:
        """Skip strings. Inlined, because a vocabulary has half a million of them."""
        read, seek, at, size = self.file.read, self.file.seek, self.at, self.size
        for _ in range(count):
            prefix = read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - at - 8:
                self.at = at
                raise self.fail(
                    f"a string of {what} does not fit the file", expected=f"<= {size - at - 8} bytes", got=length
                )
            if length:
                seek(length, 1)
            at += 8 + length
        self.at = at


@dataclass(frozen=True)
class _Header:
    metadata: Mapping[str, Any]
    tensors: list[TensorInfo]
    types: Mapping[str, str] = field(default_factory=dict)


def read_gguf(files: Sequence[Path]) -> tuple[Config, list[TensorInfo]]:
    """The configuration and tensors of a model in one file or in splits."""
    headers = [_read_header(path) for path in files]
    for path, header in zip(files, headers):
        count = header.metadata.get("split.count", len(files))
        if len(files) > 1 and count != len(files):
            raise MalformedFile(
                "split.count disagrees with the file names", where=str(path), expected=len(files), got=quoted(count)
            )
    types = {name: kind for header in headers for name, kind in header.types.items()}
    model = _model(headers[0].metadata, str(files[0]))
    config = Config(model, {"types": types}, "gguf", files[0].name)
    return config, [tensor for header in headers for tensor in header.tensors]


def read_metadata(path: Path) -> Mapping[str, Any]:
    """All metadata of a model; of long arrays only the length."""
    return _read_header(split_files(path)[0]).metadata


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` belongs to: name-00001-of-00003.gguf comes with two others."""
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        return (path,)
    total = int(match[3])
    if not 1 <= int(match[2]) <= total:
        raise CheckpointError(
            "the split number in the file name is out of range", where=str(path), expected=f"1 to {total}"
        )
    files = tuple(path.with_name(f"{match[1]}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1))
    missing = [file.name for file in files if not file.exists()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError("files of a split model are missing", where=str(path.parent), got=shown)
    return files


def _read_header(path: Path) -> _Header:
    with opened(path) as (file, size):
        reader = _Reader(file, size, str(path))
        _check_start(reader)
        tensors = reader.count("the number of tensors", MIN_INFO)
        pairs = reader.count("the number of metadata pairs", MIN_PAIR)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = reader.name("a metadata key")
            if key in metadata:
                raise reader.fail(f"the metadata key {quoted(key)} occurs twice")
            metadata[key] = reader.value(reader.number("I", key), f"the metadata {quoted(key)}")
        alignment = _alignment(metadata, reader)
        infos = [_info(reader) for _ in range(tensors)]
        begin = -(-reader.at // alignment) * alignment
    return _place_tensors(infos, begin, alignment, size, metadata, path)


def _check_start(reader: _Reader) -> None:
    magic = reader.take(4, "the magic number")
    if magic != MAGIC:
        raise reader.fail("not a GGUF file", expected=MAGIC, got=magic)
    version = reader.number("I", "the version")
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise reader.fail("a big-endian GGUF file", expected="little-endian", hint="convert it to little-endian")
    raise reader.fail("unknown GGUF version", expected=" or ".join(map(str, VERSIONS)), got=version)


def _alignment(metadata: Mapping[str, Any], reader: _Reader) -> int:
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 1 or value & (value - 1):
        raise reader.fail(f"{ALIGNMENT_KEY} is not a power of two", got=quoted(value))
    return value


@dataclass(frozen=True)
class _Info:
    """A tensor info of the header; `shape` in numpy's order, `offset` from the start of the data."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.elements * self.kind.size


def _info(reader: _Reader) -> _Info:
    name = reader.name("a tensor's name")
    what = f"tensor {quoted(name)}"
    rank = reader.number("I", what)
    if not 1 <= rank <= MAX_DIMS:
        raise reader.fail(f"{what} has too many or no dimensions", expected=f"1 to {MAX_DIMS}", got=rank)
    dims = tuple(reader.number("Q", what) for _ in range(rank))
    if 0 in dims:
        raise reader.fail(f"{what} has a dimension of 0", got=dims)
    number = reader.number("I", what)
    if number not in TYPES:
        got, hint = why_unreadable(number)
        expected = ", ".join(kind.name for kind in TYPES.values())
        raise reader.fail(f"{what} has a type that is not supported", expected=expected, got=got, hint=hint)
    kind = TYPES[number]
    if dims[0] % kind.elements:
        raise reader.fail(
            f"{what} of type {kind.name} does not consist of whole blocks",
            expected=f"a first dimension that is a multiple of {kind.elements}",
            got=dims[0],
        )
    return _Info(name, kind, dims[::-1], reader.number("Q", what))


def _place_tensors(
    infos: list[_Info], begin: int, alignment: int, size: int, metadata: Mapping[str, Any], path: Path
) -> _Header:
    """Check that tensors follow each other with only alignment padding between them."""
    tensors, at = [], 0
    for info in sorted(infos, key=lambda i: i.offset):
        where = f"{path}: tensor {quoted(info.name)}"
        if info.offset % alignment:
            raise MalformedFile("the offset is not aligned", where=where, expected=f"a multiple of {alignment}")
        if info.offset != at:
            kind = "overlaps the previous one" if info.offset < at else "leaves a gap before it"
            raise MalformedFile(f"the tensor {kind}", where=where, expected=f"offset {at}", got=info.offset)
        start = begin + info.offset
        if start + info.nbytes > size:
            raise MalformedFile(
                "the tensor reaches past the end of the file",
                where=where,
                expected=f"{start + info.nbytes} bytes",
                got=f"{size} bytes",
                hint="the file is not complete: download it again",
            )
        at += -(-info.nbytes // alignment) * alignment
        tensors.append(_present(info, path, start))
    return _Header(metadata, tensors, {info.name: info.kind.name for info in infos})


def _present(info: _Info, path: Path, start: int) -> TensorInfo:
    dtype, shape = info.kind.dtype, info.shape
    if dtype is None:
        dtype, shape = "U8", (*shape[:-1], shape[-1] // info.kind.elements, info.kind.size)
    return TensorInfo(info.name, dtype, shape, path, start, start + info.nbytes)


def _model(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The metadata of the experts under config.json keys."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise MalformedFile("general.architecture is not a string", where=where, got=quoted(architecture))
    model: dict[str, Any] = {"model_type": "gguf", "architecture": architecture}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Skipped):
        model["vocab_size"] = tokens.length
    for key, template in MODEL_KEYS.items():
        value = metadata.get(template.format(architecture))
        if isinstance(value, tuple) and len(set(value)) == 1:  # one value per layer, all equal
            value = value[0]
        if value is None or isinstance(value, tuple | Skipped):
            continue
        if isinstance(value, str) or not math.isfinite(value):
            raise MalformedFile(f"'{template.format(architecture)}' is not a number", where=where, got=quoted(value))
        model[key] = value
    extra = metadata.get(f"{architecture}.nextn_predict_layers")
    if isinstance(extra, int) and isinstance(layers := model.get("num_hidden_layers"), int) and 0 < extra < layers:
        model["num_hidden_layers"] = layers - extra  # config.json counts layers that predict further tokens apart
        model["num_nextn_predict_layers"] = extra
    return model
