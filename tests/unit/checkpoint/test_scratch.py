"""What a slice reads from files is read over the slice before, where nothing needs that any more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.load import load_layer as loading
from lancebill.checkpoint.load import slice_sizes
from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.load.scratch import Scratch
from lancebill.checkpoint.load.slice_sizes import scratch_bytes
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.slices import Index, reading_into
from lancebill.checkpoint.read.system_memory import large_from_system
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.formats import registry
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.numbers.weight import same_bits
from lancebill.testing.checkpoints import Geometry, generate, save

EXPERTS = 6
# Halves of one tensor, tensors of their own, and rows that are copied when they are decoded.
STORED = [
    ("compressed-tensors", "pack-quantized-int4-g64:fp16", "qwen3_moe"),
    ("mxfp4", "gpt-oss", "gpt_oss"),
    ("fp8", "block-F32", "qwen3_moe"),
    ("gptq", "int4-g64:fp16-gptq", "qwen3_moe"),
]


@pytest.fixture(name="checkpoint")
def a_file(tmp_path: Path) -> Checkpoint:
    tensors = {"one": torch.arange(64, dtype=torch.int32), "two": torch.arange(32).to(torch.float16)}
    tensors |= {"large": torch.arange(400, dtype=torch.uint8), "none": torch.empty(0, 4)}
    return Checkpoint.open(save_plain(tmp_path / "model.safetensors", tensors))


def save_plain(path: Path, tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, path)
    return path


def test_memory_is_used_again(checkpoint: Checkpoint) -> None:
    scratch = Scratch(768)
    with scratch.used():
        first, second = checkpoint.read("one"), checkpoint.read("two")
        assert second.data_ptr() == first.data_ptr() + 256  # 64 numbers of four bytes
        large, none = checkpoint.read("large"), checkpoint.read("none")
        assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr(), "it does not fit"
        assert none.shape == (0, 4)
        assert first.tolist() == list(range(64)) and second.tolist() == list(range(32))
        scratch.clear()
        assert checkpoint.read("two").data_ptr() == first.data_ptr()
    assert checkpoint.read("one").untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_each_thread_has_memory_of_its_own() -> None:
    scratch = Scratch(1 << 10)
    storages: list[Tensor] = []

    def read() -> None:
        with scratch.used(), reading_into(lambda shape, dtype: torch.empty(shape, dtype=dtype)) as outer:
            storages.append(outer((16,), torch.uint8))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storages[0].data_ptr() != storages[1].data_ptr()


@pytest.mark.parametrize(("fmt", "example", "family"), STORED, ids=[f"{fmt}-{name}" for fmt, name, _ in STORED])
def test_slices_that_share_memory_are_packed_alike(
    fmt: str, example: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but what does not fit is read into one buffer for each thread, and nothing is overwritten too early."""
    form = next(f for f in names.find_family({"model_type": family}).forms if f.stacked == registry()[fmt].stacked)
    stored = next(e for e in registry()[fmt].examples() if e.name == example)
    generated = generate(stored, names.find_family({"model_type": family}), form, Geometry(EXPERTS, 256, 128))
    recipe = Recipe.make(manifests.build(generated.config, generated.headers), 0, LoadOptions())
    want = load_layer(generated.read, recipe.plan, recipe.layout, out=recipe.allocate())
    checkpoint = Checkpoint.open(save(generated, tmp_path))
    seen: list[tuple[int, int]] = []

    def read(name: str, index: Index) -> Tensor:
        tensor = checkpoint.read(name, index)
        seen.append((threading.get_ident(), tensor.untyped_storage().data_ptr()))
        return tensor

    monkeypatch.setattr(slice_sizes, "SLICE_BYTES", {"cpu": 1})  # slices of one expert
    monkeypatch.setattr(slice_sizes, "MOST_CPU_BYTES", 1)
    for size in (scratch_bytes(recipe.plan, torch.device("cpu")), 1 << 10):
        monkeypatch.setattr(loading, "scratch_bytes", lambda plan, device, size=size: size)
        seen.clear()
        got = load_layer(read, recipe.plan, recipe.layout, out=recipe.allocate())
        assert all(same_bits(got[m][name], want[m][name]) for m in want for name in want[m])
        if size > 1 << 10:
            assert len(seen) > len(set(seen)) == len({thread for thread, _ in seen}), "one buffer for each thread"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_memory_of_its_own_goes_back_at_once() -> None:
    """Also if a thread that has ended allocated it, and other memory is in use behind it."""
    made: list[Tensor] = []

    def allocate() -> None:
        for _ in range(16):
            made.append(large_from_system((2 << 20, 2), torch.bfloat16).fill_(1))
            made.append(large_from_system((16,), torch.bfloat16).fill_(1))  # small ones are on the heap

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    before = _resident()
    large, made[:] = made[::2], made[1::2]
    assert all(each.shape == (2 << 20, 2) and bool((each == 1).all()) for each in large)
    del large
    assert before - _resident() > 100 << 20


def _resident() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024
