"""Corrupt files and configs raise the right error, quickly, without allocating the sizes they claim.

Each row of a table is one kind of corruption. `test_the_uncorrupted_files_open` opens the same files without it, so
that a row cannot fail to open for another reason.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile import (
    ARCH,
    GOOD,
    HUGE,
    LFS,
    PLACES,
    SLACK,
    SOUND,
    U32,
    Row,
    array,
    assert_refused,
    entry,
    file_bytes,
    gguf_bytes,
    index,
    info,
    make_folder,
    nested,
    pair,
)

from lancebill import errors as e
from lancebill.checkpoint.read.files import INDEX, Checkpoint
from lancebill.checkpoint.read.gguf import STRING
from lancebill.testing.gguf import info_bytes, string_bytes, value_bytes

# safetensors headers


SAFETENSORS: dict[str, Row] = {
    "empty file": (b"", e.MalformedFile, "too short"),
    "seven bytes": (b"\x01" * 7, e.MalformedFile, "too short"),
    "header length of 2**63": (file_bytes(GOOD, 28, 1 << 63), e.MalformedFile, "header is too large"),
    "header length over the limit": (file_bytes(GOOD, 28, 100_000_001), e.MalformedFile, "header is too large"),
    "header length past the file": (file_bytes(GOOD, 28, 99_999_999), e.MalformedFile, "does not fit"),
    "header length of zero": (file_bytes(b"", 24), e.MalformedFile, "not a JSON object"),
    "git lfs pointer": (LFS, e.MalformedFile, "git lfs pull"),
    "html page": (b"<!DOCTYPE html><html>404</html>", e.MalformedFile, "header is too large"),
    "not JSON": (file_bytes(b"{'a': 1}"), e.MalformedFile, "line 1 column 2"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), e.MalformedFile, "UTF-8"),
    "a JSON list": (file_bytes([1]), e.MalformedFile, "not a JSON object"),
    "space before the header": (file_bytes(b" {}", 0), e.MalformedFile, "'{' at byte 8"),
    "cut header": (file_bytes(json.dumps(GOOD).encode()[:-5], 28), e.MalformedFile, "not valid JSON"),
    "two documents": (file_bytes(b"{}{}", 0), e.MalformedFile, "Extra data"),
    "nesting bomb": (file_bytes(b'{"a":' * 100_000), e.MalformedFile, "nested too deeply"),
    "list bomb": (file_bytes(b'{"a":' + b"[" * 200_000), e.MalformedFile, "nested too deeply"),
    "the same name twice": (
        file_bytes(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2)), e.MalformedFile, "'a' occurs twice",
    ),
    "the same field twice": (file_bytes(b'{"a":{"dtype":"F32","dtype":"U8"}}'), e.MalformedFile, "'dtype' occurs"),
    "NaN": (file_bytes(b'{"a":NaN}'), e.MalformedFile, "literal NaN"),
    "infinite number": (file_bytes(b'{"a":1e999}'), e.MalformedFile, "not finite"),
    "a number of a million digits": (file_bytes(b'{"a":' + b"9" * 100_000 + b"}"), e.MalformedFile, "100000 digits"),
    "lone surrogate": (file_bytes({"\ud800": entry()}), e.MalformedFile, "UTF-8"),
    "empty name": (file_bytes({"": entry()}), e.MalformedFile, "empty or not printable"),
    "escape codes in a name": (file_bytes({"a\x1b[2J": entry()}), e.MalformedFile, "not printable"),
    "a name of 100 KB": (file_bytes({"a" * 100_000: entry("F9")}), e.WrongDtype, "aaa..."),
    "a layer of 5000 digits": (file_bytes({f"layers.{'9' * 5000}": entry()}), e.MalformedFile, "too long"),
    "metadata that is not a map": (file_bytes({"__metadata__": [], "a": entry()}), e.MalformedFile, "__metadata__"),
    "metadata of a number": (file_bytes({"__metadata__": {"a": 1}, "a": entry()}), e.MalformedFile, "__metadata__"),
    "an entry that is a list": (file_bytes({"a": [1]}), e.MalformedFile, "tensor 'a'"),
    "an entry without offsets": (file_bytes({"a": {"dtype": "F32", "shape": [6]}}), e.MalformedFile, "tensor 'a'"),
    "an entry with strides": (file_bytes({"a": entry(strides=[1])}), e.MalformedFile, "'strides'"),
    "unknown dtype": (file_bytes({"a": entry("F12")}), e.WrongDtype, "tensor 'a'"),
    "dtype below a byte": (file_bytes({"a": entry("F6_E2M3", [6, 8])}), e.WrongDtype, "'F6_E2M3'"),
    "half a byte": (file_bytes({"a": entry("F4", [8, 6, 1])}), e.MalformedFile, "last axis of F4 is not even"),
    "dtype that is a number": (file_bytes({"a": entry(4)}), e.WrongDtype, "tensor 'a'"),
    "dtype that is a list": (file_bytes({"a": entry(["F32"])}), e.WrongDtype, "tensor 'a'"),
    "shape that is a number": (file_bytes({"a": entry(shape=6)}), e.MalformedFile, "shape is not a list"),
    "negative size": (file_bytes({"a": entry(shape=[-2, -3])}), e.MalformedFile, "shape is not a list"),
    "fractional size": (file_bytes({"a": entry(shape=[2.0, 3])}), e.MalformedFile, "shape is not a list"),
    "size that is true": (file_bytes({"a": entry(shape=[6, True])}), e.MalformedFile, "shape is not a list"),
    "a hundred axes": (file_bytes({"a": entry(shape=[6] + [1] * 100)}), e.MalformedFile, "at most 64"),
    "sizes that wrap to 24 bytes": (file_bytes({"a": entry(shape=[(1 << 61) + 3, 2])}), e.MalformedFile, "disagree"),
    "huge and empty": (file_bytes({"a": entry("U8", [0, HUGE], [0, 0])}, 0), e.MalformedFile, "too large"),
    "shape unlike offsets": (file_bytes({"a": entry(shape=[2, 4])}), e.MalformedFile, "expected 32 bytes; got 24"),
    "offsets that are text": (file_bytes({"a": entry(offsets="0")}), e.MalformedFile, "[start, end]"),
    "three offsets": (file_bytes({"a": entry(offsets=[0, 24, 24])}), e.MalformedFile, "[start, end]"),
    "offsets backwards": (file_bytes({"a": entry(offsets=[24, 0])}), e.MalformedFile, "[start, end]"),
    "negative offset": (file_bytes({"a": entry(offsets=[-24, 0])}), e.MalformedFile, "[start, end]"),
    "tensor past the end": (file_bytes({"a": entry(offsets=[24, 48])}), e.MalformedFile, "past the end"),
    "a tensor of 4 petabytes": (
        file_bytes({"a": entry(shape=[1 << 50], offsets=[0, 1 << 52])}), e.MalformedFile, "past the end",
    ),
    "truncated data": (SOUND[:-1], e.MalformedFile, "tensor 'b'"),
    "gap at the start": (file_bytes({"a": entry(offsets=[8, 32])}, 32), e.MalformedFile, "gap"),
    "gap in the middle": (
        file_bytes({"a": entry(), "b": entry("U8", [4], [28, 32])}, 32), e.MalformedFile, "'b': the tensor leaves",
    ),
    "overlap": (file_bytes({"a": entry(), "b": entry("U8", [4], [20, 24])}), e.MalformedFile, "overlaps"),
    "the same bytes twice": (file_bytes({"a": entry(), "b": entry()}), e.MalformedFile, "overlaps"),
    "bytes after the last tensor": (SOUND + b"PK", e.MalformedFile, "after the last tensor"),
    "a hidden archive and no tensors": (file_bytes({}, 100), e.MalformedFile, "after the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFETENSORS)
def test_corrupt_safetensors(tmp_path: Path, name: str) -> None:
    content, kind, fragment = SAFETENSORS[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, kind, fragment)
    assert_refused(tmp_path / "model.safetensors", kind, "model.safetensors")


# Index files

INDEXES: dict[str, Row] = {
    "not JSON": (b"weights", e.MalformedFile, "index.json"),
    "no weight_map": ({"metadata": {}}, e.MalformedFile, "'weight_map'"),
    "empty weight_map": ({"weight_map": {}}, e.MalformedFile, "'weight_map'"),
    "weight_map that is a list": ({"weight_map": ["a"]}, e.MalformedFile, "'weight_map'"),
    "a name twice": (b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', e.MalformedFile, "occurs twice"),
    "a file that is a number": (index(a=1), e.MalformedFile, "tensor 'a'"),
    "a path upwards": (index(a="../x.safetensors"), e.MalformedFile, "plain name"),
    "an absolute path": (index(a="/tmp/x.safetensors"), e.MalformedFile, "plain name"),
    "a path in a subfolder": (index(a="sub/x.safetensors"), e.MalformedFile, "plain name"),
    "a backslash": (index(a="..\\x.safetensors"), e.MalformedFile, "plain name"),
    "a NUL": (index(a="x\0.safetensors"), e.MalformedFile, "plain name"),
    "another kind of file": (index(a="config.json"), e.MalformedFile, "plain name"),
    "a file name too long for the file system": (index(a="x" * 5000 + ".safetensors"), e.CheckpointError, "too long"),
    "a file that does not exist": (index(a="z.safetensors"), e.MalformedFile, "z.safetensors"),
    "a link out of the folder": (index(a="out.safetensors"), e.MalformedFile, "points outside"),
    "a link that dangles": (index(a="dangling.safetensors"), e.MalformedFile, "does not exist"),
    "a tensor no file has": (index(e="y.safetensors"), e.MissingTensor, "'e'"),
    "a tensor in the other file": (
        index(a="y.safetensors"),
        e.MissingTensor,
        "expected y.safetensors; got x.safetensors",
    ),
    "two tensors no file has": (index(e="y.safetensors", f="y.safetensors"), e.CheckpointProblems, "2 problems"),
    "a tensor in two files": (index(q="w.safetensors"), e.DuplicateTensor, "w.safetensors and x.safetensors"),
    "a broken shard": (index(a="broken.safetensors"), e.MalformedFile, "broken.safetensors"),
    "a pipe for a shard": (index(a="pipe.safetensors"), e.CheckpointError, "not a regular file"),
    "a folder for a shard": (index(a="folder.safetensors"), e.CheckpointError, "not a regular file"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_corrupt_index(tmp_path: Path, name: str) -> None:
    content, kind, fragment = INDEXES[name]
    folder = make_folder(tmp_path)
    (folder / INDEX).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert_refused(folder, kind, fragment)


# JSON configs

CONFIGS: dict[str, tuple[str, bytes, type[e.LancebillError], str]] = {
    "empty": ("config.json", b"", e.MalformedFile, "config.json"),
    "a list": ("config.json", b"[]", e.MalformedFile, "not an object"),
    "null": ("config.json", b"null", e.MalformedFile, "not an object"),
    "UTF-16": ("config.json", "{}".encode("utf-16"), e.MalformedFile, "UTF-8"),
    "byte order mark": ("config.json", b"\xef\xbb\xbf{}", e.MalformedFile, "BOM"),
    "a key twice": ("config.json", b'{"a":1,"a":2}', e.MalformedFile, "'a' occurs twice"),
    "a nested key twice": ("config.json", b'{"q":{"bits":4,"bits":8}}', e.MalformedFile, "'bits' occurs twice"),
    "NaN": ("config.json", b'{"a":NaN}', e.MalformedFile, "NaN"),
    "minus infinity": ("config.json", b'{"a":-Infinity}', e.MalformedFile, "-Infinity"),
    "nesting bomb": ("config.json", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, e.MalformedFile, "nested too deeply"),
    "huge number": ("config.json", b'{"a":' + b"1" * 5000 + b"}", e.MalformedFile, "5000 digits"),
    "lone surrogate": ("config.json", b'{"a":"\\udc80"}', e.MalformedFile, "UTF-8"),
    "trailing comma": ("config.json", b'{"a":1,}', e.MalformedFile, "not valid JSON"),
    "section that is a list": ("config.json", b'{"quantization_config":[1]}', e.MalformedFile, "'quantization_config'"),
    "text_config that is text": ("config.json", b'{"text_config":"x"}', e.MalformedFile, "'text_config'"),
    "method that is a number": (
        "config.json", b'{"quantization_config":{"quant_method":4}}', e.UnsupportedFormat, "'quant_method'",
    ),
    "method that is empty": (
        "config.json", b'{"quantization_config":{"quant_method":" "}}', e.UnsupportedFormat, "'quant_method'",
    ),
    "no method and no known keys": (
        "config.json", b'{"quantization_config":{"colour":4}}', e.UnsupportedFormat, "keys ['colour']",
    ),
    "modelopt section that is text": (
        "hf_quant_config.json", b'{"quantization":"FP8"}', e.MalformedFile, "'quantization'",
    ),
    "broken hf_quant_config": ("hf_quant_config.json", b"{", e.MalformedFile, "hf_quant_config.json"),
    "broken quantize_config": ("quantize_config.json", b"{", e.MalformedFile, "quantize_config.json"),
    "broken quant_config": ("quant_config.json", b"\0", e.MalformedFile, "quant_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_corrupt_config(tmp_path: Path, name: str) -> None:
    file, content, kind, fragment = CONFIGS[name]
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    (tmp_path / file).write_bytes(content)
    assert_refused(tmp_path, kind, fragment)


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)  # a sparse file: takes no space
    tracemalloc.start()
    with pytest.raises(e.MalformedFile, match="too large"):
        Checkpoint.open(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < SLACK
    tracemalloc.stop()


# Folders


def _write(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(gguf_bytes() if name.endswith(".gguf") else SOUND)

    return make


def test_a_link_of_a_split_model_leads_to_a_gguf_file(tmp_path: Path) -> None:
    """Also where one of the files is named, not the folder: `save_pretrained` copies all of them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "private").write_bytes(gguf_bytes())
    (folder / "m-00001-of-00002.gguf").write_bytes(gguf_bytes())
    (folder / "m-00002-of-00002.gguf").symlink_to("../private")
    for path in (folder, folder / "m-00001-of-00002.gguf"):
        with pytest.raises(e.MalformedFile, match="points outside"):
            Checkpoint.open(path)


def _split_count(folder: Path) -> None:
    for i in (1, 2):
        pairs = (ARCH, string_bytes("split.count") + value_bytes(3))
        (folder / f"m-{i:05d}-of-00002.gguf").write_bytes(gguf_bytes(pairs, (info(b"t%d" % i),)))


FOLDERS: dict[str, Row] = {
    "nothing": (_write(), e.CheckpointError, "holds no tensors"),
    "pickles only": (_write("pytorch_model.bin"), e.CheckpointError, "never read"),
    "two models": (_write("a.gguf", "b.gguf"), e.CheckpointError, "a.gguf, b.gguf"),
    "a split without its sibling": (_write("m-00001-of-00002.gguf"), e.CheckpointError, "m-00002-of-00002.gguf"),
    "split 3 of 2": (_write("m-00003-of-00002.gguf"), e.CheckpointError, "out of range"),
    "splits of another count": (_split_count, e.MalformedFile, "split.count"),
    "the same tensors in two files": (_write("a.safetensors", "b.safetensors"), e.CheckpointProblems, "3 problems"),
    "a link to itself": (
        lambda folder: (folder / "a.safetensors").symlink_to("a.safetensors"), e.MalformedFile, "points to itself",
    ),
    "a config that is a dangling link": (
        lambda folder: (_write("a.safetensors")(folder), (folder / "config.json").symlink_to("absent")),
        e.CheckpointError, "config.json",
    ),
    "a link to outside": (
        lambda folder: (folder / "a.safetensors").symlink_to("/dev/zero"), e.MalformedFile, "points outside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_corrupt_folder(tmp_path: Path, name: str) -> None:
    make, kind, fragment = FOLDERS[name]
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    make(folder)
    assert_refused(folder, kind, fragment)


@pytest.mark.parametrize("name", ["absent", "absent\0", "x" * 5000])
def test_a_path_that_does_not_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(e.CheckpointError):
        Checkpoint.open(tmp_path / name)


def test_a_file_with_an_unknown_suffix(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(SOUND)
    with pytest.raises(e.CheckpointError, match=r"\.safetensors file"):
        Checkpoint.open(tmp_path / "model.bin")


def test_the_uncorrupted_files_open(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / INDEX).write_text(json.dumps(index()))
    assert set(Checkpoint.open(folder).tensors) == set(PLACES)
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    assert len(Checkpoint.open(tmp_path / "model.safetensors").tensors) == 3
    (tmp_path / "x.gguf").write_bytes(gguf_bytes())
    assert Checkpoint.open(tmp_path / "x.gguf").read("t").shape == (2, 4)
    assert info() == info_bytes("t", "F32", torch.zeros(2, 4), 0)
    for pairs in (pair("k", nested(3)), pair("k", array(STRING, 2, string_bytes("a") * 2)), pair("k", U32(7) + b"\1")):
        (tmp_path / "x.gguf").write_bytes(gguf_bytes(pairs))
        Checkpoint.open(tmp_path / "x.gguf")
