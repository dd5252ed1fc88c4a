"""A layer split between a device and host memory, with the CPU as both: it must be the whole layer, however loaded."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layer_checkpoints import SIZE, make_checkpoint, make_inputs

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.errors import CheckpointProblems, LaunchError, NotEnoughMemory, SpecError, UnsupportedProblem
from lancebill.layer import gpu_room, model_experts
from lancebill.layer.model_experts import ModelExperts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Contiguous, Indexed
from lancebill.moe.placement import ROUND_ROBIN, Placement
from lancebill.split import host_calls
from lancebill.split.host_threads import HostThreads
from lancebill.testing.checkpoints import save


def _difference(split: RoutedExperts, whole: RoutedExperts, seed: int = 0) -> float:
    """The largest difference for inputs with padding and foreign ids, relative to the largest output."""
    x, ids, weights = make_inputs(seed=seed)
    ids[0, 1], ids[1, 0] = -1, SIZE.experts + 7
    x = x.float()
    got, want = (layer(x, topk_ids=ids, topk_weights=weights) for layer in (split, whole))
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("on_device", [0, 1, 3, 4])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_split_layer_computes_the_whole_layer(on_device: int, backend: str, tmp_path: Path) -> None:
    folder = save(make_checkpoint("gptq", "actorder"), tmp_path / "m")
    whole = RoutedExperts.from_checkpoint(folder, 1, dtype=torch.float32)
    split = RoutedExperts.from_checkpoint(folder, 1, dtype=torch.float32, gpu_experts=on_device, backend=backend)
    assert _difference(split, whole) < 2e-5
    assert split.problem.experts == on_device
    if on_device == SIZE.experts:
        assert split.host_experts is None, "all fits: nothing changes"
        return
    assert split.host_experts is not None and split.host_experts.problem.experts == SIZE.experts - on_device
    if backend == "auto":
        for name, tensor in whole.state_dict().items():
            held = split.state_dict()
            assert torch.equal(torch.cat([held[name], held[f"host_experts.{name}"]]), tensor)


@pytest.mark.parametrize("with_headers", [True, False], ids=["headers-known", "headers-unknown"])
@pytest.mark.parametrize("form", [0, 1], ids=["per-expert", "stacked"])
def test_push_and_refit_fill_both_parts(form: int, with_headers: bool, tmp_path: Path) -> None:
    made, other = (make_checkpoint("dense", "bf16", form=form, seed=seed) for seed in (0, 1))
    folder = save(made, tmp_path / "m")
    pulled = RoutedExperts.from_checkpoint(folder, 0, gpu_experts=form)
    headers = made.headers if with_headers else None
    loader = RoutedExperts.from_config(Checkpoint.open(folder).config.model, 0, tensors=headers, gpu_experts=form)
    pairs = [(n, t) for n, t in made.tensors.items() if ".layers.0." in n]
    random.Random(1).shuffle(pairs)
    held_back = [pair for pair in pairs if "down" in pair[0]]
    loader.load_weights(pair for pair in pairs if "down" not in pair[0])
    with pytest.raises(CheckpointProblems) as caught:
        loader.finish()
    assert all(name in str(caught.value) for name, _ in held_back), "of both parts"
    loader.load_weights(held_back)
    pushed = loader.finish()
    assert pushed.state_dict().keys() == pulled.state_dict().keys()
    assert all(torch.equal(t, pulled.state_dict()[n]) for n, t in pushed.state_dict().items())
    pushed.load_weights((n, t) for n, t in other.tensors.items() if ".layers.0." in n)
    pushed.finish()
    refitted = RoutedExperts.from_checkpoint(save(other, tmp_path / "o"), 0)
    assert _difference(pushed, refitted, seed=2) < 2e-5


def test_copies_saving_and_moving_keep_both_parts(tmp_path: Path) -> None:
    split = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=2)
    assert _difference(copy.deepcopy(split), split) == 0
    assert _difference(split.to(torch.float16).to("cpu"), split) == 0
    empty = RoutedExperts.from_checkpoint(save(make_checkpoint(seed=5), tmp_path / "n"), 0, gpu_experts=2)
    empty.load_state_dict(split.state_dict())
    assert _difference(empty, split) == 0
    assert "in host memory" in str(split.report) and split.report is not None
    assert split.host_experts is not None and split.host_experts.report is not None


def test_an_expert_parallel_rank_can_be_split(tmp_path: Path) -> None:
    folder = save(make_checkpoint(), tmp_path / "m")
    for rank in range(2):
        placement = Placement(ep_rank=rank, ep_size=2, strategy=ROUND_ROBIN)
        whole = RoutedExperts.from_checkpoint(folder, 0, placement=placement)
        split = RoutedExperts.from_checkpoint(folder, 0, placement=placement, gpu_experts=1)
        assert _difference(split, whole) < 2e-5


def test_a_budget_in_bytes_is_shared_by_the_layers(tmp_path: Path) -> None:
    folder = save(make_checkpoint(), tmp_path / "m")
    each = RoutedExperts.from_checkpoint(folder, 0).report.bytes // SIZE.experts  # type: ignore[union-attr]
    model = ModelExperts.from_checkpoint(folder, gpu_memory=5 * each)
    assert [model.layer(i).problem.experts for i in model.layers] == [3, 2]
    assert RoutedExperts.from_checkpoint(folder, 0, gpu_memory=f"{2.5 * each} B").problem.experts == 2
    with pytest.raises(SpecError, match="20GiB"):
        RoutedExperts.from_checkpoint(folder, 0, gpu_memory="much")
    with pytest.raises(SpecError, match="gpu_experts and gpu_memory"):
        RoutedExperts.from_checkpoint(folder, 0, gpu_memory="1GiB", gpu_experts=2)
    with pytest.raises(SpecError, match="gpu_experts and gpu_memory"):
        ModelExperts.from_checkpoint(folder, gpu_memory=5 * each, gpu_experts=2)
    with pytest.raises(SpecError, match="headers"):
        ModelExperts(Checkpoint.open(folder).config, gpu_memory="1GiB").push("model.layers.0.mlp.x", torch.zeros(1))


def test_a_gpu_that_is_too_small_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_checkpoint(), tmp_path / "m")
    each = RoutedExperts.from_checkpoint(folder, 0).report.bytes // SIZE.experts  # type: ignore[union-attr]
    gpu = SimpleNamespace(kind="cuda", torch=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_room, "free_bytes", lambda device: 3 * each)
    gpu_room.check_room(3 * each, gpu)  # type: ignore[arg-type]
    with pytest.raises(NotEnoughMemory, match=f"gpu_memory: .*at most {3 * each:,} bytes; got {3 * each + 1:,} bytes"):
        gpu_room.check_room(3 * each + 1, gpu)  # type: ignore[arg-type]
    asked: list[int] = []
    monkeypatch.setattr(model_experts, "check_room", lambda needed, device: asked.append(needed))
    assert ModelExperts.from_checkpoint(folder, gpu_memory=5 * each + 1).recipe(0).host is not None
    assert asked == [5 * each], "the experts of all layers that are to be there, once"


def test_a_full_gpu_names_the_layer_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recipe = ModelExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m")).recipe(1)
    monkeypatch.setattr(type(recipe.layout), "allocate", full)
    monkeypatch.setattr(gpu_room, "free_bytes", lambda device: 17)
    with pytest.raises(NotEnoughMemory, match=r"layer 1, w13: .*got 17 bytes that are free \(gpu_memory= "):
        recipe.allocate()


def test_what_a_split_layer_cannot_do_is_refused(tmp_path: Path) -> None:
    split = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=2)
    x, ids, weights = make_inputs()
    for call in (
        split.expert_weights,
        lambda: split.hold([0, 1]),
        lambda: split.run_local(x, Indexed(ids, weights), x.clone()),
        lambda: split.executor.run(x, Contiguous(torch.zeros(5, dtype=torch.int64)), x.clone()),
    ):
        with pytest.raises(LaunchError, match="split"):
            call()


def test_experts_that_the_cpu_cannot_compute_beside_a_gpu_are_refused_before_loading() -> None:
    """torch computes unquantised experts on a CPU, but a GPU's queue cannot call it."""
    made, options = make_checkpoint("dense"), {"device": "sm_90", "gpu_experts": 3}
    with pytest.raises(UnsupportedProblem, match=r"layer 0: .*need the CPU kernels; got bf16 .*weights= quantises"):
        ModelExperts(made.config, tensors=made.headers, **options).recipe(0)
    recipe = ModelExperts(made.config, tensors=made.headers, weights="int8", **options).recipe(0)
    assert recipe.host is not None and recipe.host.choice.backend.name == "cpu"


def test_options_that_need_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_checkpoint(), tmp_path / "m")
    for options in ({"moves": "recency"}, {"cpu_threads": 1}):
        with pytest.raises(SpecError, match=f"{next(iter(options))}: .*split.*by gpu_memory or gpu_experts"):
            RoutedExperts.from_checkpoint(folder, 0, **options)  # type: ignore[arg-type]
    for wrong in ("4", 2.5, True):
        with pytest.raises(SpecError, match="gpu_experts: not a number"):
            RoutedExperts.from_checkpoint(folder, 0, gpu_experts=wrong)
    for count in (0, 10_000, 1.5, True):
        with pytest.raises(SpecError, match=r"cpu_threads: .*expected 1 to "):
            RoutedExperts.from_checkpoint(folder, 0, gpu_experts=1, cpu_threads=count)
    monkeypatch.setattr(host_calls, "_THREADS", [HostThreads(7)])
    RoutedExperts.from_checkpoint(folder, 0, gpu_experts=4, cpu_threads=1)
    assert host_calls.host_threads().count == 7, "nothing is split"
    RoutedExperts.from_checkpoint(folder, 0, gpu_experts=1, cpu_threads=1)
    assert host_calls.host_threads() == HostThreads.choose(1)
    RoutedExperts.from_checkpoint(folder, 0, gpu_experts=1)
    assert host_calls.host_threads() == HostThreads.choose(1), "the last number counts"
