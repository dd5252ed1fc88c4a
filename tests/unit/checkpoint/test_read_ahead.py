"""What is read ahead for a GPU is exactly what a load reads; it is read once, into few buffers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.load import slice_sizes, staging
from lancebill.checkpoint.load.layer_plan import LayerPlan, plan_layer
from lancebill.checkpoint.load.load_experts import load_experts, reads_of_experts
from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.load.staging import DeviceReader, Fetched, TensorSource, source_of
from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.slices import Index, Reader
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import LancebillError, MalformedFile
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.moe.placement import Placement
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import same_bits
from lancebill.testing.checkpoints import Generated, Geometry, generate, save

EXPERTS = 2
FAMILIES = ("qwen3_moe", "gpt_oss")
ALL_FORMS = ("gptq",)  # formats; the others are tried in the first form of each family
CPU = torch.device("cpu")


def recording(read: Reader, seen: list[tuple[str, Index]]) -> Reader:
    def recorded(name: str, index: Index) -> Tensor:
        seen.append((name, index))
        return read(name, index)

    return recorded


def plans(fmt: str, example: Example) -> list[tuple[Generated, LayerPlan]]:
    """The example in several families, whole and as the second half."""
    found = []
    for model in {example.config.model.get("model_type", FAMILIES[0]), FAMILIES[1]}:
        family = names.find_family({"model_type": model})
        for form in family.forms if fmt in ALL_FORMS else family.forms[:1]:
            try:
                generated = generate(example, family, form, Geometry(EXPERTS, 256, 256))
                layer = manifests.build(generated.config, generated.headers).layers.get(0)
                ranks = [Placement(), Placement(tp_rank=1, tp_size=2)]
                found += [(generated, plan_layer(layer, rank)) for rank in ranks if layer is not None]
            except LancebillError:  # the family does not store this format so
                continue
    return found


@pytest.mark.parametrize("fmt", sorted(registry()))
def test_reads_are_known_before(fmt: str) -> None:
    example = next(iter(registry()[fmt].examples()))
    tried = plans(fmt, example)
    assert tried
    for generated, plan in tried:
        seen: list[tuple[str, Index]] = []
        load_experts(recording(generated.read, seen), plan, range(EXPERTS))
        assert list(map(repr, reads_of_experts(plan, range(EXPERTS)))) == list(map(repr, seen))


def test_tensors_of_several_experts_are_read_into_one(tmp_path: Path) -> None:
    generated, recipe = gptq_layer("int4-g64:fp16-gptq", EXPERTS)
    checkpoint = Checkpoint.open(save(generated, tmp_path))
    reads = list(reads_of_experts(recipe.plan, range(EXPERTS)))
    reader = DeviceReader(checkpoint.read, CPU)
    for suffix in ("up_proj.qweight", "down_proj.scales"):
        alike = [read for read in reads if read[0].endswith(suffix)]
        found = reader.all(alike)
        assert isinstance(found, Tensor) and same_bits(found, torch.stack([generated.read(*r) for r in alike]))
    assert isinstance(reader.all(reads), list)  # of several shapes
    assert isinstance(DeviceReader(generated.read, CPU).all(reads[:1]), list)  # in memory already


def test_what_is_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans("fp8", next(iter(registry()["fp8"].examples())))[0][1]
    monkeypatch.setattr(slice_sizes, "SLICE_BYTES", {"cpu": 64 << 20})
    for size, ahead in ((13 << 20, 4), (30 << 20, 6), (1 << 30, 3)):
        monkeypatch.setattr(slice_sizes, "_packed_bytes", lambda plan, size=size: size)
        assert slice_sizes.read_step(plan, CPU) == (3 if size == 13 << 20 else 1)
        assert slice_sizes.read_ahead(plan, CPU) == ahead
        buffers = -(-slice_sizes.read_step(plan, CPU) * size // staging.BUFFER_BYTES)
        if size < 1 << 30:
            assert (ahead * buffers + slice_sizes.COPIED) * staging.BUFFER_BYTES <= slice_sizes.READ_BYTES


def gptq_layer(name: str, experts: int) -> tuple[Generated, Recipe]:
    example = next(e for e in registry()["gptq"].examples() if e.name == name)
    family = names.find_family({"model_type": "qwen3_moe"})
    generated = generate(example, family, family.forms[0], Geometry(experts, 256, 128))
    return generated, Recipe.make(manifests.build(generated.config, generated.headers), 0, LoadOptions())


@pytest.fixture(name="stored")
def stored_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpoint, Recipe]:
    """A layer in a file, loaded as to a GPU, in slices of one expert."""
    generated, recipe = gptq_layer("int4-g64:fp16-gptq", EXPERTS)
    checkpoint = Checkpoint.open(save(generated, tmp_path))
    monkeypatch.setattr(DeviceReader, "asynchronous", True)
    monkeypatch.setattr(slice_sizes, "SLICE_BYTES", {"cpu": 1})
    return checkpoint, recipe


@pytest.mark.parametrize("size", [1, 30_000, 16 << 20])
def test_each_tensor_is_read_once(
    stored: tuple[Checkpoint, Recipe], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", size)
    checkpoint, recipe = stored
    seen: list[tuple[str, Index]] = []
    got = load_layer(recording(checkpoint.read, seen), recipe.plan, recipe.layout, out=recipe.allocate())
    assert sorted(name for name, _ in seen) == sorted(name for name in checkpoint.tensors if ".experts." in name)
    monkeypatch.setattr(DeviceReader, "asynchronous", False)
    want = load_layer(checkpoint.read, recipe.plan, recipe.layout, out=recipe.allocate())
    assert all(same_bits(got[m][name], want[m][name]) for m in want for name in want[m])


def test_several_threads_read_one_slice(stored: tuple[Checkpoint, Recipe]) -> None:
    """The first slice is complete soon, while later ones are read: no thread waits until all of them are."""
    checkpoint, recipe = stored
    lock, first, second = threading.Lock(), [True], threading.Event()
    together: list[bool] = []

    def read(name: str, index: Index) -> Tensor:
        with lock:
            is_first, first[0] = first[0], False
        if is_first:
            together.append(second.wait(timeout=20))
        elif ".experts.0." in name:
            second.set()
        return checkpoint.read(name, index)

    load_layer(read, recipe.plan, recipe.layout, out=recipe.allocate())
    assert together == [True]


@pytest.mark.parametrize("example", ["int4-g64:fp16-gptq", "int8-g64:fp16-zp-gptq_v2"])
def test_few_slices_wait_to_be_packed(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = 12
    generated, recipe = gptq_layer(example, experts)
    monkeypatch.setattr(DeviceReader, "asynchronous", True)
    monkeypatch.setattr(slice_sizes, "SLICE_BYTES", {"cpu": 1})
    monkeypatch.setattr(slice_sizes, "READ_BYTES", 0)
    begun, packed, waiting = set[str](), [0], [0]

    def read(name: str, index: Index) -> Tensor:
        begun.add(name.split(".experts.")[1].split(".")[0])
        waiting.append(len(begun) - packed[0])
        return generated.read(name, index)

    def count(slots: int) -> None:
        time.sleep(0.01)  # so that the threads read what they may
        packed[0] += slots

    load_layer(read, recipe.plan, recipe.layout, out=recipe.allocate(), progress=count)
    assert packed == [experts] and max(waiting) <= slice_sizes.FEWEST_AHEAD


def test_pinned_tensors_of_a_part_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceReader, "asynchronous", True)
    tensors = {str(i): torch.full((2, 3), i) for i in range(4)} | {"other": torch.ones(1)}
    reader = DeviceReader(lambda name, index: tensors[name], CPU, pinned=True)
    found = reader.all([(str(i), ()) for i in range(4)])
    assert isinstance(found, Tensor) and same_bits(found, torch.stack([tensors[str(i)] for i in range(4)]))
    apart = reader.all([("0", ()), ("other", ())])
    assert isinstance(apart, list) and [each.shape for each in apart] == [(2, 3), (1,)]


def test_no_thread_reads_what_is_in_pinned_memory(stored: tuple[Checkpoint, Recipe]) -> None:
    checkpoint, recipe = stored
    threads: dict[TensorSource, set[int]] = {source: set() for source in TensorSource}
    for source, seen in threads.items():

        def read(name: str, index: Index, seen: set[int] = seen) -> Tensor:
            seen.add(threading.get_ident())
            return checkpoint.read(name, index)

        load_layer(read, recipe.plan, recipe.layout, out=recipe.allocate(), source=source)
    assert threads[TensorSource.PINNED] == threads[TensorSource.DEVICE] == {threading.get_ident()}
    assert threading.get_ident() not in threads[TensorSource.FILES]


def test_where_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    host, device, gpu = torch.empty(1), torch.empty(1, device="meta"), torch.device("cuda")
    assert source_of([host, device], gpu) is TensorSource.FILES
    assert source_of([device], gpu) is TensorSource.DEVICE
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    assert source_of([host, device], gpu) is TensorSource.PINNED
    assert source_of([host], CPU) is TensorSource.FILES


def test_tensors_of_files_are_read_into_the_buffers(stored: tuple[Checkpoint, Recipe]) -> None:
    checkpoint, recipe = stored
    reads = list(reads_of_experts(recipe.plan, [0]))
    reader = DeviceReader(checkpoint.read, CPU)
    fetched = Fetched(CPU)
    reader.fetch(reads, fetched)
    with reader.using(fetched):
        tensors = [reader(name, index) for name, index in reads]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(same_bits(tensor, checkpoint.read(name, index)) for tensor, (name, index) in zip(tensors, reads))


def test_an_error_of_a_thread_that_reads_names_the_expert(stored: tuple[Checkpoint, Recipe]) -> None:
    checkpoint, recipe = stored
    file = checkpoint.files[0]
    last = max((info.start, name) for name, info in checkpoint.tensors.items() if ".experts.1." in name)[1]
    with file.open("r+b") as opened:
        opened.truncate(checkpoint.tensors[last].start + 1)
    with pytest.raises(MalformedFile, match=r"expert 1"):
        load_layer(checkpoint.read, recipe.plan, recipe.layout, out=recipe.allocate())


@pytest.mark.parametrize(("experts", "hidden", "inner"), [(32, 2880, 2880), (128, 2048, 768), (256, 4096, 2048)])
def test_slices_for_a_gpu_fit_its_buffers_and_are_few(experts: int, hidden: int, inner: int) -> None:
    """Of layers of any size: the host takes a few milliseconds for each."""
    config = {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_experts_per_tok": 2,
    }
    options = LoadOptions(weights=parse_spec("mxfp4"), router=False)
    plan = Recipe.expected(config_of_model(config), 0, options).plan
    step, each = slice_sizes.read_step(plan, torch.device("cuda")), 3 * hidden * inner * 17 // 32
    assert step * each <= slice_sizes.SLICE_BYTES["cuda"]
    assert (step + 1) * each > 40 << 20, (step, each)
