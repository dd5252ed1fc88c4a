"""The vLLM plugin without vLLM: settings, placement, hooks against recorded signatures, what is taken of a stream."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs

from lancebill import Placement
from lancebill.backends.base import Reason
from lancebill.errors import CheckpointProblems, LaunchError, NotEnoughMemory, SpecError, UnsupportedProblem
from lancebill.integrations.vllm import hooks
from lancebill.integrations.vllm import takeover as takeover_module
from lancebill.integrations.vllm.placement import (
    dispatch_reason,
    dispatched_form,
    experts_of,
    placement_of,
    slots_of,
)
from lancebill.integrations.vllm.settings import Settings, parse_settings
from lancebill.integrations.vllm.takeover import Source, Takeover
from lancebill.layer import model_experts
from lancebill.layer.recipe import LoadOptions
from lancebill.moe.problem import CONTIGUOUS
from lancebill.split import host_threads
from lancebill.split import moves as moving
from lancebill.testing.checkpoints import Generated

SIGNATURES = json.loads(Path(__file__).with_name("vllm_signatures.json").read_text(encoding="utf-8"))


def settings(**section: Any) -> Settings:
    return parse_settings({"lancebill": section})


def test_settings() -> None:
    assert parse_settings({}) == parse_settings(None) == parse_settings({"other": 1}) == Settings()
    assert settings(mode="off").takes_any is False
    rules = settings(weights=[["0-3", "int4-g128"], ["7", None]], activations="fp8")
    assert [rules.names(layer) for layer in (0, 3, 4, 7)] == [True] * 4  # activations are about all layers
    rules = settings(weights=[["0-3", "int4-g128"], ["7", None]])
    assert [rules.names(layer) for layer in (0, 3, 4, 7)] == [True, True, False, True]
    assert parse_settings({}, batch_invariant=True).order == "batch-invariant"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mod": "offer"}, "'mod'"),
        ({"mode": "always"}, "lancebill.mode: .*offer or require or off.*'always'"),
        ({"mode": None}, "lancebill.mode"),
        ({"backend": "nope"}, "lancebill.backend: .*hopper"),
        ({"weights": "int5000"}, "lancebill.weights"),
        ({"weights": [["0-x", "mxfp4"]]}, "lancebill.weights.*0-x"),
        ({"weights": [["0", "mxfp4", 1]]}, "lancebill.weights"),
        ({"activations": 4}, "lancebill.activations"),
        ({"weights": []}, "lancebill.weights"),
        ({"weights": [["5-3", "mxfp4"]]}, "lancebill.weights.*'5-3' matches no layer.*3-5"),
        ({"gpu_memory": "much"}, "lancebill, gpu_memory.*20GiB"),
        ({"gpu_memory": True}, "lancebill, gpu_memory"),
        ({"gpu_memory": "24"}, "lancebill, gpu_memory.*needs a unit.*24GiB"),
        ({"gpu_experts": -1}, "lancebill, gpu_experts"),
        ({"gpu_experts": True}, "lancebill, gpu_experts"),
        ({"gpu_experts": 1, "cpu_threads": 0}, "lancebill, cpu_threads"),
        ({"cpu_threads": 1}, "lancebill, cpu_threads.*no layer is split"),
        ({"moves": "recency"}, "lancebill, moves.*only where layers are split"),
        ({"moves": "recency", "gpu_experts": 1, "order": "batch-invariant"}, "not batch-invariant"),
        ({"moves": "always"}, "lancebill.moves.*off or recency"),
        ({"gpu_experts": 1, "gpu_memory": "1GiB"}, "gpu_experts and gpu_memory"),
        ([], "not an object"),
    ],
)
def test_wrong_settings_are_refused(section: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_settings({"lancebill": section})


def test_batch_invariance_must_agree() -> None:
    with pytest.raises(SpecError, match="batch-invariant"):
        parse_settings({"lancebill": {"order": "fast"}}, batch_invariant=True)


@dataclass(frozen=True)
class FakeParallel:
    tp_rank: int = 1
    tp_size: int = 2
    ep_rank: int = 3
    ep_size: int = 4
    use_ep: bool = False
    all2all_backend: str = "allgather_reducescatter"
    use_all2all_kernels: bool = False


def test_placement() -> None:
    tensor = placement_of(FakeParallel(), "linear", 0)
    assert (tensor.tp_rank, tensor.tp_size, tensor.ep_size) == (1, 2, 1)
    expert = placement_of(FakeParallel(0, 1, use_ep=True), "round_robin", 2)
    assert expert == Placement(0, 1, 3, 4, "round_robin", 2)


def test_forms_of_all_to_all_backends() -> None:
    def backend(name: str) -> FakeParallel:
        return FakeParallel(use_all2all_kernels=True, all2all_backend=name)

    for name, form in (("naive", None), ("deepep_low_latency", "batched"), ("deepep_high_throughput", "indexed")):
        assert dispatch_reason(backend(name)) is None and dispatched_form(backend(name)) == form
    assert dispatched_form(FakeParallel(all2all_backend="deepep_low_latency")) is None  # one data-parallel rank
    refused = dispatch_reason(backend("moonep"))
    assert refused is not None and "moonep" in refused.text


@pytest.mark.parametrize("version", SIGNATURES)
def test_hooks_exist_in_every_tested_version(version: str) -> None:
    for hook in (*hooks.HOOKS, *hooks.BALANCING_HOOKS):
        recorded = SIGNATURES[version][str(hook)]
        assert recorded is not None, hook
        assert set(hook.arguments) <= set(recorded), hook
    assert hooks.version_warning(version) is None


def test_missing_hooks_and_untested_versions_are_named() -> None:
    with pytest.raises(UnsupportedProblem, match=r"json\.dumper"):
        hooks.check_hooks((hooks.Hook("json", "dumper"),))
    assert "json.dumper" in (hooks.missing_hook((hooks.Hook("json", "dumper"),)) or "")
    with pytest.raises(UnsupportedProblem, match="no colour"):
        hooks.check_hooks((hooks.Hook("json", "dumps", ("colour",)),))
    hooks.check_hooks((hooks.Hook("json", "JSONEncoder.default", ("o",)),))
    for version in ("0.25.1", "0.40.0rc1", "1.0", "dev"):
        assert "0.26 to 0.32" in (hooks.version_warning(version) or "")


def test_registration_without_vllm_is_one_warning() -> None:
    code = "from lancebill.integrations.vllm.plugin import register; import sys; sys.modules['vllm'] = None; register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "lancebill is not used" in done.stderr
    code = code.replace("; register()", "; import os; os.environ['LANCEBILL_VLLM'] = 'off'; register()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code.replace("'off'", "'require'")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr, "what requires it does not start without"


OPTIONS = LoadOptions(top_k=2, activation="silu")


def take(made: Generated, chosen: Settings, layers: int = 2, **flags: bool) -> Takeover:
    source = Source("model", made.config, made.headers)
    takeover = Takeover(chosen, source, **{"random": False, "copies": False, **flags})
    for layer in range(layers):
        takeover.decide(layer, OPTIONS, ())
    return takeover


def stream(made: Generated, *more: str) -> list[tuple[str, torch.Tensor]]:
    return [*made.tensors.items(), *((name, torch.zeros(1)) for name in more)]


OTHERS = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.shared_expert.up_proj.weight",
)


def test_only_taken_experts_leave_the_stream() -> None:
    made = make_checkpoint(layers=3)
    takeover = take(made, settings(weights=[["1-2", None]]), layers=2)  # layer 2 is another pipeline stage's
    assert [takeover.decisions[layer].taken for layer in (0, 1)] == [False, True]
    left = [name for name, _ in takeover.divert(stream(made, *OTHERS))]
    assert set(left) == {name for name in made.tensors if ".layers.0." in name} | set(OTHERS)
    layer = takeover.finish(1)
    x, ids, weights = make_inputs()
    assert layer(x, topk_ids=ids, topk_weights=weights).isfinite().all()
    assert takeover.summary().startswith("layers 0: vLLM (no rule names them); layers 1: lancebill's ")
    with pytest.raises(CheckpointProblems, match="never pushed"):
        take(made, Settings()).finish(0)


@pytest.mark.parametrize("moves", ["off", "recency"])
@pytest.mark.parametrize("random", [False, True], ids=["loaded", "random"])
def test_experts_may_stay_in_host_memory(random: bool, moves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU as the device of both parts. `gpu_memory` is about GPUs: on a CPU it changes nothing."""
    monkeypatch.setattr(moving, "break_even", lambda share, rates: 0.0)
    made, other = make_checkpoint(layers=2), make_checkpoint(layers=2, seed=1)
    takeover = take(made, settings(gpu_experts=1, moves=moves), random=random)
    whole = take(made, settings(gpu_memory="1 B"), random=random)
    x, ids, weights = make_inputs()

    def check() -> None:
        for index in (0, 1):
            split, layer = takeover.finish(index), whole.finish(index)
            assert split.is_split and not layer.is_split and split.problem.experts == 1
            got, want = (part(x, topk_ids=ids, topk_weights=weights).float() for part in (split, layer))
            assert torch.allclose(got, want, atol=2e-2 * float(want.abs().max()))

    for each in (takeover, whole):
        list(each.divert([] if random else stream(made)))
    check()
    for index in (0, 1):
        layer = takeover.finish(index)
        assert (layer.moves is not None) == (moves == "recency")
        if layer.moves is not None:  # another expert than at first, when vLLM wakes from sleep and refits
            for _ in range(200):  # the thread that moves experts may be in the middle of a look of its own
                layer(x, topk_ids=torch.full_like(ids, 3), topk_weights=weights)
                layer.moves.step()
                if layer.moves.held.experts == (3,):
                    break
                time.sleep(0.01)
            assert layer.moves.held.experts == (3,)
    assert takeover.reserve(64) == whole.reserve(64)
    assert "experts in host memory" in takeover.summary()
    for each in (takeover, whole):
        list(each.divert(stream(other)))
        each.end_stream()
    check()
    with pytest.raises(LaunchError, match="split"):
        takeover.movable(0)
    refused = take(made, settings(gpu_experts=1), layers=0)
    assert not refused.decide(0, OPTIONS, (), CONTIGUOUS).taken


def test_refits_are_exact_and_may_come_in_pieces() -> None:
    made, other = make_checkpoint(layers=2), make_checkpoint(layers=2, seed=1)
    takeover = take(made, Settings())
    list(takeover.divert(stream(made)))
    layer, _ = takeover.finish(0), takeover.finish(1)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for source in (other, made):
        pairs = stream(source)
        for first in range(0, len(pairs), 5):  # pieces cut experts apart
            list(takeover.divert(pairs[first : first + 5]))
            takeover.end_stream()
        same = all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
        assert same == (source is made)


def test_a_reload_restores_what_sleep_mode_dropped() -> None:
    made = make_checkpoint(layers=1)
    options = replace(OPTIONS, placement=Placement(ep_rank=1, ep_size=2))
    takeover = Takeover(Settings(), Source("model", made.config, made.headers), random=False, copies=False)
    takeover.decide(0, options, ())
    list(takeover.divert(stream(made)))
    layer = takeover.finish(0)
    before = {name: tensor.clone() for name, tensor in layer.named_parameters()}
    assert layer.expert_map is not None
    expected = layer.expert_map.tolist()
    for tensor in (*layer.parameters(), layer.expert_map):
        tensor.data.zero_()
    list(takeover.divert(stream(made)))
    takeover.end_stream()
    assert layer.expert_map.tolist() == expected == [-1, -1, 0, 1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.named_parameters())


def on_ranks(made: Generated, redundant: int) -> list[Takeover]:
    """One layer on two ranks, loaded."""
    ranks = []
    for rank in range(2):
        takeover = Takeover(Settings(), Source("model", made.config, made.headers), random=False, copies=False)
        takeover.decide(0, replace(OPTIONS, placement=Placement(0, 1, rank, 2, redundant=redundant)), ())
        list(takeover.divert(stream(made)))
        takeover.finish(0)
        ranks.append(takeover)
    return ranks


def whole(made: Generated) -> Takeover:
    """The layer on one rank."""
    takeover = take(made, Settings(), 1)
    list(takeover.divert(stream(made)))
    takeover.finish(0)
    return takeover


def holds(takeover: Takeover, rows: list[torch.Tensor], experts: tuple[int, ...]) -> bool:
    return all(torch.equal(mine, row[list(experts)]) for mine, row in zip(takeover.movable(0), rows, strict=True))


def test_refits_follow_experts_that_vllm_moved() -> None:
    made, other = make_checkpoint(layers=1), make_checkpoint(layers=1, seed=1)
    first, second = on_ranks(made, redundant=2)  # physical ids 0 1 2 | 3 0 1
    copies = [[3, -1], [0, 5], [1, -1], [2, 4]]  # after a move: experts 1 2 3 | 0 3 1
    rows = whole(made).movable(0)
    for takeover, before, after in ((first, (0, 1, 2), (1, 2, 3)), (second, (3, 0, 1), (0, 3, 1))):
        assert holds(takeover, rows, before) and takeover.layers[0].held_experts == before
        for mine, row in zip(takeover.movable(0), rows, strict=True):
            mine.copy_(row[list(after)])  # vLLM moves bytes in place
        held = experts_of(copies, slots_of(takeover.layers[0].expert_map.tolist()))  # type: ignore[union-attr]
        assert held == after
        takeover.hold(0, held)
        for weights in (other, made):
            list(takeover.divert(stream(weights)))
            takeover.end_stream()
            assert holds(takeover, whole(weights).movable(0), after)


def test_moves_and_refits_do_not_overlap() -> None:
    first, _ = on_ranks(make_checkpoint(layers=1), redundant=0)
    with pytest.raises(LaunchError, match=r"slots \[1\]"):
        experts_of([[0], [2]], [0, 1])
    list(first.divert(stream(make_checkpoint(layers=1))[:1]))
    with pytest.raises(LaunchError, match="being refitted"):
        first.hold(0, (1, 0))


def test_another_number_of_ranks() -> None:
    """Elastic expert parallelism: two slots stay, first as half of four experts, then as the half of two copies."""
    made = make_checkpoint(layers=1)
    takeover, _ = on_ranks(made, redundant=0)
    layer, rows = takeover.layers[0], takeover.movable(0)
    x, ids, weights = make_inputs()
    for expert_map in ([-1, -1, -1, -1, 0, 1], [0, 1]):
        addresses = [row.data_ptr() for row in rows]
        takeover.place(0, expert_map)
        assert [row.data_ptr() for row in takeover.movable(0)] == addresses
        assert layer.problem.global_experts == len(expert_map)
        slots = torch.tensor(slots_of(expert_map))
        assert layer.expert_map is not None and layer.expert_map.tolist() == expert_map
        got = layer(x, topk_ids=slots[ids % 2], topk_weights=weights)
        want = whole(made).layers[0](x, topk_ids=ids % 2, topk_weights=weights)
        assert torch.equal(got, want)


def test_layers_that_differ_cannot_be_balanced() -> None:
    made = make_checkpoint(layers=2)
    for rules, words in (([["0", None]], "layers 1 are vLLM's"), ([["0", None], ["1", "int8"]], "first layer's")):
        takeover = take(made, settings(weights=rules))
        list(takeover.divert(stream(made)))
        taken = [index for index, decision in takeover.decisions.items() if decision.taken]
        for index in taken:
            takeover.finish(index)
        with pytest.raises(UnsupportedProblem, match=words):
            takeover.movable(taken[-1])


def test_loaders_may_reuse_memory() -> None:
    made = make_checkpoint(layers=1)
    expected = take(made, Settings(), 1)
    list(expected.divert(stream(made)))
    takeover = take(made, Settings(), 1, copies=True)
    for name, tensor in stream(made):
        reused = tensor.clone()
        list(takeover.divert([(name, reused)]))
        reused.zero_()
    want = expected.finish(0).state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in takeover.finish(0).state_dict().items())


def test_random_weights() -> None:
    made = make_checkpoint(layers=2)
    with_headers = take(made, Settings(), random=True)
    layer = with_headers.finish(1)
    x, ids, weights = make_inputs()
    assert layer(x, topk_ids=ids, topk_weights=weights).std() > 1e-3


def test_captured_calls_share_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved when the last layer is loaded, and once."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(takeover_module, "reserve", lambda layers, tokens: calls.append((len(layers), tokens)) or 7)
    made = make_checkpoint(layers=2)
    takeover = take(made, settings())
    list(takeover.divert(stream(made)))
    reserved = [takeover.finish(0) and takeover.reserve(64), takeover.finish(1) and takeover.reserve(64)]
    assert reserved == [0, 7] and takeover.reserve(64) == 0 and calls == [(2, 64)]


def test_defaults_of_torch_do_not_matter() -> None:
    """vLLM loads with another default dtype and device."""
    made = make_checkpoint(layers=1)
    expected = take(made, Settings(), 1)
    list(expected.divert(stream(made)))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            takeover = take(made, Settings(), 1)
        list(takeover.divert(stream(made)))
        layer = takeover.finish(0)
    finally:
        torch.set_default_dtype(torch.float32)
    want = expected.finish(0).state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in layer.state_dict().items())


def test_require_refuses_before_anything_is_read() -> None:
    made = make_checkpoint(layers=1)
    source = Source("model", made.config, made.headers)
    for options, refusals, words in (
        (replace(OPTIONS, top_k=3), (), "another number of experts"),
        (OPTIONS, (Reason("lora", "LoRA adapters"),), "LoRA adapters"),
    ):
        offered = Takeover(Settings(), source, random=False, copies=False)
        assert not offered.decide(0, options, refusals).taken and words in offered.summary()
        with pytest.raises(UnsupportedProblem, match=words):
            Takeover(settings(mode="require"), source, random=False, copies=False).decide(0, options, refusals)


def test_a_layer_without_a_number_is_left_with_a_word_or_refused() -> None:
    """Its tensors may be any that no other layer takes."""
    made, name = make_checkpoint(layers=2), "model.blocks.mlp.experts"
    offered = take(made, Settings(), layers=1)
    offered.leave(name, "cuda")
    assert f"; {name}: vLLM (the name of these experts" in offered.summary()
    assert {left for left, _ in offered.divert(stream(made))} == {each for each in made.tensors if ".layers.1." in each}
    for chosen, device, why in (
        ({"mode": "require"}, "cpu", "mode: require"),
        ({"gpu_experts": 1}, "cuda", "on the GPU"),
    ):
        with pytest.raises(UnsupportedProblem, match=f"{name}: .*exactly one number.*{why}"):
            Takeover(settings(**chosen), source_of(made), random=False, copies=False).leave(name, device)


def test_the_reference_is_taken_only_on_request() -> None:
    made = make_checkpoint(layers=1)
    source = Source("model", made.config, made.headers)
    slow = replace(OPTIONS, device="sm_100")  # no kernels of ours: only the reference computes there
    decision = Takeover(Settings(), source, random=False, copies=False).decide(0, slow, ())
    assert not decision.taken and "no fast backend" in decision.text
    asked = Takeover(settings(backend="reference"), source, random=False, copies=False)
    assert asked.decide(0, OPTIONS, ()).taken


GPU = replace(OPTIONS, device="sm_90")


@pytest.mark.parametrize(
    ("chosen", "refusals", "words"),
    [
        ({"gpu_experts": 1}, [Reason("lora", "no adapters")], "no adapters.*vLLM would put every expert on the GPU"),
        ({"gpu_memory": "100GiB"}, [], "less free memory"),
        ({"gpu_experts": 1, "weights": [["7", None]]}, [], "no rule names them"),
        ({"gpu_experts": 1, "backend": "cpu"}, [], "runs on CPUs only"),
        ({"mode": "require"}, [Reason("lora", "no adapters")], "no adapters.*mode: require"),
    ],
)
def test_a_limit_of_the_gpus_memory_that_cannot_be_kept_is_an_error(
    chosen: Any, refusals: list[Reason], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to vLLM, all experts would be on the GPU. Without a limit, the reason is in the summary."""
    monkeypatch.setattr(model_experts, "check_room", no_room)
    made = make_checkpoint()
    with pytest.raises(UnsupportedProblem, match=f"(?s)model, layer 0: .*{words}"):
        Takeover(settings(**chosen), source_of(made), random=False, copies=False).decide(0, GPU, refusals)
    offered = {key: value for key, value in chosen.items() if key in ("weights", "backend")}
    takeover = Takeover(settings(**offered), source_of(made), random=False, copies=False)
    assert takeover.decide(0, GPU, refusals).taken == (not refusals and not offered)


def no_room(needed: int, device: object) -> None:
    raise NotEnoughMemory("the GPU has less free memory than its experts need")


def source_of(made: Generated) -> Source:
    return Source("model", made.config, made.headers)


def test_ranks_of_a_machine_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_threads, "_allowed", lambda: range(16))
    monkeypatch.setattr(host_threads, "physical_cores", lambda topology, allowed: tuple(allowed))
    monkeypatch.setattr(host_threads, "allowed_by_quota", lambda path: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert takeover_module.shared_threads(Placement()) is None
    assert takeover_module.shared_threads(Placement(tp_size=2)) == 7
    assert takeover_module.shared_threads(Placement(ep_size=8)) == 7, "of two machines or more"
    made = make_checkpoint()
    for chosen, threads in (({}, 7), ({"cpu_threads": 3}, 3)):
        takeover = Takeover(settings(gpu_experts=1, **chosen), source_of(made), random=False, copies=False)
        takeover.decide(0, replace(GPU, placement=Placement(tp_size=2)), ())
        assert takeover.experts().options.cpu_threads == threads


def test_random_weights_without_headers_cannot_be_split_by_memory() -> None:
    source = Source("model", make_checkpoint().config, None)
    with pytest.raises(UnsupportedProblem, match="not known without the headers"):
        Takeover(settings(gpu_memory="1GiB"), source, random=True, copies=False).decide(0, GPU, ())
