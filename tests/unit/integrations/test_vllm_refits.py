"""The vLLM plugin without vLLM: layers that are refitted, and experts that vLLM moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs
from takeovers import OPTIONS, settings, stream, take

from lancebill import Placement
from lancebill.errors import CheckpointProblems, LaunchError, UnsupportedProblem
from lancebill.integrations.vllm.placement import (
    experts_of,
    slots_of,
)
from lancebill.integrations.vllm.settings import Settings
from lancebill.integrations.vllm.takeover import Source, Takeover
from lancebill.testing.checkpoints import Generated


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
            takeover.end_stream(more=False)
        same = all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
        assert same == (source is made)


def loaded(made: Generated) -> Takeover:
    takeover = take(made, Settings())
    list(takeover.divert(stream(made)))
    for layer in (0, 1):
        takeover.finish(layer)
    return takeover


def bits(takeover: Takeover) -> dict[str, torch.Tensor]:
    layers = takeover.layers.items()
    return {f"{index}.{name}": t.clone() for index, layer in layers for name, t in layer.state_dict().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
def test_a_reload_that_is_wrong_is_named_and_the_next_starts_anew(fault: str) -> None:
    """At the end of vLLM's reload, or of a stream that is no part of one. The other layer is reloaded."""
    made, other = make_checkpoint(layers=2), make_checkpoint(layers=2, seed=1)
    takeover = loaded(made)
    before, wanted = bits(takeover), bits(loaded(other))
    name = next(name for name in reversed(other.tensors) if ".layers.1." in name and ".experts." in name)
    pairs = dict(stream(other))
    changed = pairs.pop(name)
    if fault == "shape":
        pairs = {name: changed[:1], **pairs}
    elif fault == "unknown":
        pairs = {f"{name}_of_another_format": changed, **pairs}
    left = [each for each, _ in takeover.divert([*pairs.items(), ("model.norm.weight", changed)])]
    assert left[-1] == "model.norm.weight", "vLLM's own tensors are loaded first"
    takeover.end_stream(more=True)
    with pytest.raises(CheckpointProblems, match=f"(?s)the reload is not complete.*{name}"):
        takeover.end_reload()
    x, ids, weights = make_inputs()
    for layer in takeover.layers.values():
        assert layer(x, topk_ids=ids, topk_weights=weights).isfinite().all()
    now = bits(takeover)
    assert equal({key: now[key] for key in now if key[0] == "0"}, {k: wanted[k] for k in wanted if k[0] == "0"})
    for source, want in ((other, wanted), (made, before)):
        list(takeover.divert(stream(source)))
        takeover.end_stream(more=True)
        takeover.end_reload()
        assert equal(bits(takeover), want)
    if fault != "missing":
        list(takeover.divert(pairs.items()))
        with pytest.raises(CheckpointProblems, match=name):
            takeover.end_stream(more=False)


def test_a_stream_that_breaks_off_may_be_sent_again() -> None:
    made, other = make_checkpoint(layers=2), make_checkpoint(layers=2, seed=1)
    takeover = loaded(made)
    list(takeover.divert(stream(other)[:4]))
    assert not takeover.layers[0].settled
    takeover.drop_refits()
    assert takeover.layers[0].settled
    list(takeover.divert(stream(other)))
    takeover.end_stream(more=False)
    assert equal(bits(takeover), bits(loaded(other)))


def test_which_tensors_are_taken() -> None:
    made = make_checkpoint(layers=2)
    takeover = take(made, settings(weights=[["1", None]]))
    experts = [name for name in made.tensors if takeover.takes(name)]
    assert experts and all(".layers.1." in name and ".experts." in name for name in experts)
    assert not takeover.takes("model.embed_tokens.weight") and takeover.holds_weights
    assert not take(made, settings(mode="off")).holds_weights


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
    takeover.end_stream(more=False)
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
            takeover.end_stream(more=False)
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


def test_a_layer_without_a_number_cannot_be_balanced() -> None:
    made = make_checkpoint(layers=1)
    takeover = take(made, settings(), layers=1)
    assert takeover.leaves("model.blocks.mlp.experts", "cuda")
    list(takeover.divert(stream(made)))
    takeover.finish(0)
    with pytest.raises(UnsupportedProblem, match=r"model\.blocks\.mlp\.experts are vLLM's"):
        takeover.movable(0)
