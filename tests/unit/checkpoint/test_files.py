"""Reading files, compared with the safetensors and gguf libraries."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from samples import every_dtype, random_bytes, same, stored
from torch import Tensor

from lancebill.checkpoint.read import file_bytes as raw
from lancebill.checkpoint.read import slices
from lancebill.checkpoint.read.file_bytes import bytes_of
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.ggml_types import TYPES
from lancebill.checkpoint.read.gguf import _Reader
from lancebill.checkpoint.read.hub import INDEX, local_path
from lancebill.errors import (
    CheckpointError,
    MalformedFile,
    MissingTensor,
    UnexpectedTensor,
    WrongShape,
)
from lancebill.formats.stored import TORCH_DTYPES, Stored
from lancebill.testing.gguf import write_gguf

# Reading


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with Checkpoint.open(path) as checkpoint:
            assert {name: info.stored for name, info in checkpoint.tensors.items()} == stored(tensors)
            for name, tensor in tensors.items():
                got = checkpoint.read(name)
                assert same(got, tensor) and got.is_contiguous(), name


@pytest.mark.parametrize("chunk", [slices.CHUNK, 1000])  # one scratch read, and many
def test_a_slice_equals_the_slice_of_the_whole_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(slices, "CHUNK", chunk)
    tensors = {
        "wide": random_bytes(torch.float32, (3, 5, 3000)),  # row stride larger than a page
        "narrow": random_bytes(torch.uint8, (4, 40, 17)),
        "deep": random_bytes(torch.bfloat16, (2, 3, 65, 8)),
        "e8m0": random_bytes(torch.float8_e8m0fnu, (7, 9)),
        "scalar": torch.tensor(2.0),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    rng = random.Random(0)
    for _ in range(2000):
        name, tensor = rng.choice(list(tensors.items()))
        index = []
        for size in tensor.shape[: rng.randint(0, tensor.dim())]:
            low, high = sorted((rng.randint(0, size), rng.randint(0, size)))
            index.append(rng.choice([rng.randrange(size), slice(low, high), slice(None), slice(low, None)]))
        whole = np.frombuffer(bytes_of(tensor), np.uint8).reshape(*tensor.shape, tensor.itemsize)
        got = checkpoint.read(name, tuple(index))
        assert bytes_of(got) == whole[tuple(index)].tobytes(), (name, index)
        assert got.dtype == tensor.dtype and got.shape == whole[tuple(index)].shape[:-1]


def test_an_index_out_of_range_is_an_error(tmp_path: Path) -> None:
    """Also with asserts disabled: reading past an axis would return bytes of another tensor."""
    save_file({"a": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for index in ((3,), (-1,), (0, 0, 0), (slice(0, 3, 2),)):
        with pytest.raises(WrongShape, match=r"safetensors: a: the index does not fit .* \[3, 4\]"):
            checkpoint.read("a", index)


def test_only_the_bytes_of_the_slice_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": random_bytes(torch.uint8, (8, 16, 10_000))}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    counts: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(preadv(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(raw.os, "preadv", counted)
    for index, reads, expected in (
        ((3,), 1, 160_000),
        ((3, slice(2, 5)), 1, 30_000),
        ((slice(1, 3), 4), 2, 20_000),
        ((3, slice(None), slice(5000, None)), 16, 16 * 5000),
        ((3, slice(None), slice(None, 9000)), 1, 15 * 10_000 + 9000),  # gaps smaller than a page are read through
    ):
        counts.clear()
        checkpoint.read("w", index)
        assert (len(counts), sum(counts)) == (reads, expected), index


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + bytes_of(values))
    assert same(Checkpoint.open(path).read("b"), values)
    assert same(Checkpoint.open(path).read("b", (slice(1, 3),)), values[1:])


def sharded(folder: Path) -> dict[str, Tensor]:
    tensors = {f"t{i}": random_bytes(torch.float16, (i + 1, 6), i) for i in range(6)}
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        save_file({n: t for n, t in tensors.items() if int(n[1:]) % 3 == shard}, folder / file)
        weight_map |= {n: file for n in tensors if int(n[1:]) % 3 == shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tensors


def test_shards_with_and_without_an_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    for _ in range(2):
        with Checkpoint.open(tmp_path) as checkpoint:
            assert set(checkpoint.tensors) == set(tensors) and len(checkpoint.files) == 3 and not checkpoint.problems
            assert all(same(checkpoint.read(name), tensor) for name, tensor in tensors.items())
        (tmp_path / INDEX).unlink(missing_ok=True)


def test_one_shard_is_no_checkpoint(tmp_path: Path) -> None:
    sharded(tmp_path)
    with pytest.raises(CheckpointError, match="one of 3 of a checkpoint"):
        Checkpoint.open(tmp_path / "model-00002-of-00003.safetensors")
    (tmp_path / INDEX).unlink()
    assert set(Checkpoint.open(tmp_path / "model-00002-of-00003.safetensors").tensors) == {"t1", "t4"}


def test_a_tensor_missing_from_the_index_is_reported(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["t4"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint.open(tmp_path)
    assert [type(p) for p in checkpoint.problems] == [UnexpectedTensor] and "t4" in str(checkpoint.problems[0])
    assert "t4" in checkpoint.tensors


def test_reading_from_many_threads(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    names = list(tensors) * 50
    with ThreadPoolExecutor(8) as pool:
        for name, got in zip(names, pool.map(checkpoint.read, names)):
            assert same(got, tensors[name])


def test_read_returns_a_copy(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.read("w").zero_()
    assert checkpoint.read("w").sum() == 4


def test_a_file_truncated_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": random_bytes(torch.uint8, (100_000,))}, path)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.read("w", (slice(0, 10),))
    os.truncate(path, 50_000)
    with pytest.raises(MalformedFile, match="truncated after it was opened"):
        checkpoint.read("w")


def test_errors_of_the_disk_are_reported() -> None:
    """Memory of this process at address 0 cannot be read; a full device cannot be written."""
    memory, full = Path("/proc/self/mem"), Path("/dev/full")
    with pytest.raises(CheckpointError, match="cannot read the file: Input/output error"), raw.opened(memory) as opened:
        opened[0].read(8)
    descriptors = os.open(memory, os.O_RDONLY), os.open(full, os.O_WRONLY)
    try:
        with pytest.raises(CheckpointError, match="cannot read the file: Input/output error"):
            raw.read_exactly(descriptors[0], torch.empty(8), 0, memory)
        with pytest.raises(CheckpointError, match="cannot write the file: No space left"):
            raw.write_exactly(descriptors[1], torch.zeros(8), 0, full)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_the_name_of_a_model_is_no_path() -> None:
    with pytest.raises(CheckpointError, match="`hf download nobody/nothing` prints the folder"):
        Checkpoint.open("nobody/nothing")


def test_a_gguf_file_that_shrinks_while_it_is_read() -> None:
    with pytest.raises(MalformedFile, match="truncated while it was read"):
        _Reader(io.BytesIO(b"GGUF"), 100, "x.gguf").take(8, "the version")


def test_paths_that_neither_exist_nor_name_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="a/b/c: no such file or folder"):
        local_path("a/b/c")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        local_path("nobody/nothing")


def test_an_unknown_tensor_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match="'v'"):
        Checkpoint.open(tmp_path).read("v")


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    tensors = sharded(blobs)
    for file in list(blobs.iterdir()):
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (blobs / "tok").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/tok")
    checkpoint = Checkpoint.open(snapshot)
    assert all(same(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert [f.name for f in checkpoint.other_files()] == ["tokenizer.json"]
    snapshot.parent.rename(snapshot.parent.parent / "others")  # the same links, in no cache of the hub
    with pytest.raises(MalformedFile, match="points outside"):
        Checkpoint.open(tmp_path / "models--x" / "others" / "abc")


def test_links_to_shards_elsewhere_are_followed(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    tensors = sharded(shared)
    for file in shared.glob("*.safetensors"):
        (own / file.name).symlink_to(file)
    (own / INDEX).write_bytes((shared / INDEX).read_bytes())
    checkpoint = Checkpoint.open(own)
    assert all(same(checkpoint.read(name), tensor) for name, tensor in tensors.items())


def test_other_files_excludes_tensors_and_configs(tmp_path: Path) -> None:
    sharded(tmp_path)
    for name in (
        "config.json",
        "quantize_config.json",
        "tokenizer.json",
        "generation_config.json",
        "pytorch_model.bin",
    ):
        (tmp_path / name).write_text("{}")
    (tmp_path / "assets").mkdir()
    assert [f.name for f in Checkpoint.open(tmp_path).other_files()] == ["generation_config.json", "tokenizer.json"]
    (tmp_path / INDEX).unlink()
    one = next(tmp_path.glob("*.safetensors"))
    assert not Checkpoint.open(one).other_files()  # what lies beside a file is not its own


# GGUF

GGUF_META = {"general.architecture": "qwen3moe", "qwen3moe.block_count": 2, "qwen3moe.expert_count": 4}


def test_block_sizes_equal_those_of_the_gguf_library() -> None:
    assert len(TYPES) >= 30
    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.elements, kind.size)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


def gguf_tensors() -> dict[str, tuple[str, Tensor]]:
    blocks = {
        kind.name: (kind.name, random_bytes(torch.uint8, (3, 4, 2, kind.size), number))
        for number, kind in TYPES.items()
        if kind.dtype is None
    }
    plain = {
        kind.name: (kind.name, random_bytes(TORCH_DTYPES[kind.dtype], (3, 5), number))
        for number, kind in TYPES.items()
        if kind.dtype is not None
    }
    return blocks | plain


@pytest.mark.parametrize(("further", "layers"), [(1, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}), (3, {})])
def test_layers_that_predict_further_tokens_are_counted_apart(
    further: int, layers: dict[str, int], tmp_path: Path
) -> None:
    metadata = {**GGUF_META, "qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": further}
    write_gguf(tmp_path / "x.gguf", metadata, gguf_tensors())
    model = Checkpoint.open(tmp_path / "x.gguf").config.model
    assert model["num_hidden_layers"] == layers.get("num_hidden_layers", 3)
    assert model.get("num_nextn_predict_layers") == layers.get("num_nextn_predict_layers")


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_written_gguf_files_are_read_by_the_library_and_by_us(tmp_path: Path, alignment: int | None) -> None:
    tensors, path = gguf_tensors(), tmp_path / "x.gguf"
    metadata: dict[str, Any] = {
        **GGUF_META, "a.text": "é", "a.flag": True, "a.minus": -3, "a.big": 1 << 40, "a.float": 2.5,
        "a.list": [1, 2, 3], "a.long": [*range(2000)], "tokenizer.ggml.tokens": ["a", "bé", ""] * 1000,
    }  # fmt: skip
    if alignment is not None:
        metadata["general.alignment"] = alignment
    write_gguf(path, metadata, tensors)
    library = gguf.GGUFReader(path)
    assert {key: library.fields[key].contents() for key in metadata} == metadata
    checkpoint = Checkpoint.open(path)
    assert [t.name for t in library.tensors] == list(tensors)
    for theirs in library.tensors:
        kind, tensor = tensors[theirs.name]
        assert theirs.tensor_type.name == kind == checkpoint.config.quant["types"][theirs.name]
        assert theirs.data.tobytes() == bytes_of(tensor)
        assert same(checkpoint.read(theirs.name), tensor)
        assert same(checkpoint.read(theirs.name, (1, slice(2, 4))), tensor[1, 2:4].contiguous())
    assert checkpoint.config.method == "gguf" and checkpoint.config.source == "x.gguf"
    assert checkpoint.config.model == {
        "model_type": "gguf", "architecture": "qwen3moe", "num_hidden_layers": 2, "num_experts": 4, "vocab_size": 3000,
    }  # fmt: skip


def test_files_of_the_gguf_library_are_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 6, 64), dtype=np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(str(tmp_path / "w.gguf"), "mixtral")
    writer.add_block_count(7)
    writer.add_expert_count(4)
    writer.add_token_list(["t"] * 3000)
    writer.add_tensor("plain", values)
    writer.add_tensor("quantised", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors["quantised"].stored == Stored("U8", (4, 6, 2, 34))
    assert checkpoint.read("quantised").numpy().tobytes() == blocks.tobytes()
    assert np.array_equal(checkpoint.read("plain").numpy(), values)
    assert checkpoint.config.model["num_hidden_layers"] == 7 and checkpoint.config.model["vocab_size"] == 3000


def test_a_split_gguf_is_one_checkpoint(tmp_path: Path) -> None:
    tensors = {f"t{i}": ("F32", torch.full((2, 2), float(i))) for i in range(3)}
    for i, (name, tensor) in enumerate(tensors.items()):
        metadata: dict[str, Any] = {"split.no": i, "split.count": 3} | (GGUF_META if i == 0 else {})
        write_gguf(tmp_path / f"m-{i + 1:05d}-of-00003.gguf", metadata, {name: tensor})
    for path in (tmp_path, tmp_path / "m-00002-of-00003.gguf"):
        checkpoint = Checkpoint.open(path)
        assert len(checkpoint.files) == 3 and checkpoint.config.model["num_experts"] == 4
        assert all(same(checkpoint.read(name), tensor) for name, (_, tensor) in tensors.items())
