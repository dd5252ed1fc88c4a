"""The vLLM plugin without vLLM: which layers are taken, and what is taken of a stream."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs
from takeovers import OPTIONS, settings, source_of, stream, take

from lancebill import Placement
from lancebill.backends.base import Reason
from lancebill.errors import CheckpointProblems, LaunchError, NotEnoughMemory, UnsupportedProblem
from lancebill.formats.stored import Config
from lancebill.integrations.vllm import takeover as takeover_module
from lancebill.integrations.vllm.settings import Settings
from lancebill.integrations.vllm.takeover import Decision, Source, Takeover
from lancebill.layer import model_experts
from lancebill.moe.problem import CONTIGUOUS
from lancebill.split import host_threads
from lancebill.split import moves as moving

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


def test_the_router_stays_vllms() -> None:
    made = make_checkpoint("dense", "bf16", "glm4_moe", layers=1)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    made = replace(made, tensors={**made.tensors, name: torch.zeros(4)})
    takeover = take(made, Settings(mode="require"), 1)
    assert [left for left, _ in takeover.divert(stream(made))] == [name]
    assert takeover.finish(0).routing is None


@pytest.mark.parametrize("moves", ["off", "recency"])
@pytest.mark.parametrize("random", [False, True], ids=["loaded", "random"])
def test_experts_may_stay_in_host_memory(random: bool, moves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU as the device of both parts, which vLLM does not do."""
    monkeypatch.setattr(moving, "break_even", lambda share, rates: 0.0)
    made, other = make_checkpoint(layers=2), make_checkpoint(layers=2, seed=1)
    whole = take(made, Settings(), random=random)
    monkeypatch.setattr(takeover_module, "may_split", lambda options: True)
    takeover = take(made, settings(gpu_experts=1, moves=moves), random=random)
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
        each.end_stream(more=False)
    check()
    with pytest.raises(LaunchError, match="split"):
        takeover.movable(0)
    refused = take(made, settings(gpu_experts=1), layers=0)
    assert not refused.decide(0, OPTIONS, (), CONTIGUOUS).taken


@pytest.mark.parametrize("limit", [{"gpu_memory": "1 B"}, {"gpu_experts": 1, "moves": "recency", "cpu_threads": 1}])
def test_limits_of_a_gpu_are_ignored_on_a_cpu_with_a_word(limit: Any) -> None:
    takeover = take(make_checkpoint(), settings(**limit))
    assert takeover.experts().options.whole() == takeover.experts().options
    assert takeover.summary().endswith(f"; {next(iter(limit))} is ignored: a CPU computes all experts")
    assert "ignored" not in take(make_checkpoint(), Settings()).summary()


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
    assert offered.leaves(name, "cuda") and not offered.leaves("model.layers.0.mlp.experts", "cuda")
    assert f"; {name}: vLLM (the name of these experts" in offered.summary()
    assert {left for left, _ in offered.divert(stream(made))} == {each for each in made.tensors if ".layers.1." in each}
    for chosen, device, why in (
        ({"mode": "require"}, "cpu", "mode: require"),
        ({"gpu_experts": 1}, "cuda", "on the GPU"),
    ):
        with pytest.raises(UnsupportedProblem, match=f"{name}: .*exactly one number.*{why}"):
            Takeover(settings(**chosen), source_of(made), random=False, copies=False).leaves(name, device)


def test_experts_that_draft_are_left_with_their_tensors() -> None:
    """Their block has numbers of its own: `mtp.layers.0` is not layer 0, whose tensors are in the same files."""
    made, module = make_checkpoint(layers=1), "mtp.layers.0.mlp.experts"
    drafts = {f"mtp.{name.removeprefix('model.')}": tensor for name, tensor in made.tensors.items()}
    both = replace(made, tensors=made.tensors | drafts)
    draft = take(both, Settings(), layers=0)
    assert draft.leaves(module, "cpu") and not draft.decisions
    assert f"{module}: vLLM (experts beside the model's layers" in draft.summary()
    assert [name for name, _ in draft.divert(stream(both))] == list(both.tensors), "as in a model of none of ours"
    target = take(both, Settings(), layers=1)
    assert [name for name, _ in target.divert(stream(both))] == list(drafts)
    with pytest.raises(UnsupportedProblem, match=f"{module}: .*draft tokens.*mode: require"):
        take(both, settings(mode="require"), layers=0).leaves(module, "cpu")


def test_the_reference_is_taken_only_on_request() -> None:
    made = make_checkpoint(layers=1)
    source = Source("model", made.config, made.headers)
    slow = replace(OPTIONS, device="sm_100")  # no kernels of ours: only the reference computes there
    decision = Takeover(Settings(), source, random=False, copies=False).decide(0, slow, ())
    assert not decision.taken and "no fast backend" in decision.text
    asked = Takeover(settings(backend="reference"), source, random=False, copies=False)
    assert asked.decide(0, OPTIONS, ()).taken


def test_plain_weights_are_taken_only_on_request_where_vllm_is_faster() -> None:
    """On a CPU. In a checkpoint with a section about quantisation vLLM may be unable to compute even plain experts."""
    made = make_checkpoint("dense")

    def offered(config: Config, **section: Any) -> Decision:
        takeover = Takeover(settings(**section), Source("model", config, made.headers), random=False, copies=False)
        return takeover.decide(0, OPTIONS, ())

    left = offered(made.config)
    assert not left.taken and "torch-cpu is slower than vLLM" in left.text
    for chosen in ({"mode": "require"}, {"backend": "torch-cpu"}, {"weights": "int8-channel"}):
        assert offered(made.config, **chosen).taken, chosen
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert offered(replace(made.config, method="bitsandbytes", quant=section)).taken, "only dense layers are quantised"
    assert not offered(made.config, backend="cpu").taken, "the native kernels read quantised weights only"


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
