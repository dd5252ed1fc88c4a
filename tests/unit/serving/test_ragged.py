"""Sequences of different lengths in one call of a model: attention, keys and values, and which way is taken."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from lancebill.serving import choose_runner  # noqa: E402
from lancebill.serving.choose_runner import runner  # noqa: E402
from lancebill.serving.ragged import (  # noqa: E402
    FIRST_CAPACITY,
    KeysValues,
    RaggedModel,
    SeparateModel,
    attention,
    room,
)
from lancebill.serving.start import end_tokens, start  # noqa: E402
from lancebill.serving.whole_prompts import pieces_differ, varying_angles  # noqa: E402

SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 48, "max_position_embeddings": 32,
}  # fmt: skip


def defined(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """One number of attention after the other, in float64."""
    heads, new, total = query.shape[1], query.shape[2], keys.shape[2]
    out = torch.zeros(1, heads, new, values.shape[3], dtype=torch.float64)
    for head in range(heads):
        shared = head * keys.shape[1] // heads
        for token in range(new):
            end = total - new + token + 1
            seen = range(max(0, end - window), end)
            scores = [float(query[0, head, token].double() @ keys[0, shared, i].double()) * scale for i in seen]
            if softcap is not None:
                scores = [softcap * float(torch.tanh(torch.tensor(score / softcap))) for score in scores]
            taken = [] if sinks is None else [float(sinks[head])]
            shares = torch.tensor([*scores, *taken], dtype=torch.float64).softmax(0)
            out[0, head, token] = sum(shares[j] * values[0, shared, i].double() for j, i in enumerate(seen))
    return out


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_the_defined_one(new: int, window: int | None, softcap: float | None, with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(new)
    query, keys, values = (torch.randn(1, *size, 8, generator=generator) for size in ((4, new), (2, 7), (2, 7)))
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    found = attention(query, keys, values, scaling=None, window=window, sinks=sinks, softcap=softcap)
    expected = defined(query, keys, values, 8**-0.5, window or 7, sinks, softcap)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_keys_and_values_are_kept_when_there_must_be_more_room() -> None:
    sequence, pieces = KeysValues(), [torch.randn(1, 2, count, 4) for count in (FIRST_CAPACITY - 1, 3, FIRST_CAPACITY)]
    for piece in pieces:
        keys, values = sequence.append(0, piece, -piece)
        sequence.length += piece.shape[2]
    assert torch.equal(keys, torch.cat(pieces, dim=2)) and torch.equal(values, -keys)


def test_memory_for_more_tokens() -> None:
    assert [room(tokens) for tokens in (1, 64, 65, 1000, 1024)] == [64, 64, 128, 1024, 1024]
    assert [room(tokens) for tokens in (1025, 2048, 2049, 30000)] == [2048, 2048, 3072, 30720]


class OneLayer(NamedTuple):
    """The size of the keys that the steps are given room for."""

    layer: int = 0
    heads: int = 1
    dim: int = 8


class Steps:
    """Small steps that give a vocabulary of zeros, whatever the tokens; or the logits of a model without attention."""

    most_tokens, cache_type, caches = 64, torch.float32, (OneLayer(),)

    def __init__(self, vocabulary: int, model: Any = None) -> None:
        self.vocabulary, self.model, self.changed = vocabulary, model, False

    def step(self, ids: Sequence[int], positions: Any, capacities: Any, caches: Any, picks: Sequence[int]) -> Tensor:
        if self.model is None:
            return torch.zeros(len(picks), self.vocabulary)
        logits: Tensor = self.model(torch.tensor([[ids[i]] for i in picks]), use_cache=False).logits[:, 0]
        return logits

    def current(self) -> bool:
        return not self.changed

    def settle(self, own_seconds: float, small_seconds: float) -> None:
        assert own_seconds >= 0 <= small_seconds


class Mixing(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model that mixes the tokens of a call outside its attention."""

    def forward(self, input_ids: Tensor, **given: Any) -> Any:
        found = super().forward(input_ids, **given)
        found.logits = found.logits + input_ids.float().mean()
        return found


def tiny(kind: Any = transformers.LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SMALL)).eval()


def test_a_model_that_mixes_sequences_runs_them_in_turns() -> None:
    model = tiny(Mixing)
    before = model.config._attn_implementation
    assert type(runner(model)) is SeparateModel
    assert model.config._attn_implementation == before


LINEAR = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4, "block_size": 16,
    "layer_types": ["full_attention", "linear_attention"],
}  # fmt: skip


def test_a_state_beside_the_layers_of_a_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**LINEAR)).eval()
    assert type(runner(model)) is SeparateModel
    # In 16 bits, and also if its cache were of the usual class, by its logits.
    monkeypatch.setattr(choose_runner, "DynamicCache", type(model(torch.tensor([[1]])).past_key_values))
    for dtype in (torch.float32, torch.bfloat16):
        assert type(runner(model.to(dtype))) is SeparateModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_run_in_turns(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 12, "max_position_embeddings": 1 << 17})
    assert type(runner(transformers.LlamaForCausalLM(config).eval().to(dtype))) is RaggedModel


HALF = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
LONG = {
    "rope_type": "longrope", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * HALF, "long_factor": [4.0] * HALF,
}  # fmt: skip


@pytest.mark.parametrize("rotary", [DYNAMIC, LONG], ids=lambda rotary: rotary["rope_type"])
def test_long_sequences_do_not_turn_short_ones(rotary: dict[str, Any]) -> None:
    """Not beside them, and not after them."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=rotary)).eval()
    assert type(runner(model, context=32)) is RaggedModel, "no sequence is long"
    model.set_attn_implementation("sdpa")
    found = runner(model)
    assert type(found) is SeparateModel and found.whole_prompts
    long, short = [i % 48 for i in range(50)], [i % 48 for i in range(3, 43)]
    with torch.inference_mode():
        expected = found.step([found.new_sequence()], [short])
        beside = found.step([found.new_sequence(), found.new_sequence()], [long, short])
    assert torch.equal(beside[1:], expected)


def test_models_that_read_whole_prompts() -> None:
    nested = {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}
    for values, context, varying in (
        ({}, None, False), ({"rope_parameters": None}, None, False), ({"rope_parameters": YARN}, None, False),
        ({"rope_parameters": LONG}, 33, True), ({"rope_parameters": LONG}, 32, False),
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, 64, False),
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, 65, True),
        ({"rope_parameters": nested}, 33, True), ({"rope_parameters": {"full_attention": YARN}}, None, False),
    ):  # fmt: skip
        assert varying_angles(Config(**values), context) is varying, (values, context)
    assert pieces_differ(Config(index_topk=2048), 64) and not pieces_differ(Config(), 64)


YARN = {"rope_type": "yarn", "factor": 4.0}


class Config(SimpleNamespace):
    """Of a model that is only text."""

    def get_text_config(self) -> Config:
        return self

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


@pytest.mark.parametrize("vocabulary", [SMALL["vocab_size"], SMALL["vocab_size"] - 1], ids=["values", "shape"])
def test_small_steps_with_other_logits_are_not_taken(vocabulary: int) -> None:
    found = runner(tiny(), Steps(vocabulary))
    assert isinstance(found, RaggedModel) and found.small is None


@pytest.mark.parametrize(("kind", "how"), [(transformers.LlamaForCausalLM, "batched"), (Mixing, "in turns")])
def test_a_server_says_how_requests_run_and_samples_as_recommended(kind: Any, how: str) -> None:
    model = tiny(kind)
    model.generation_config.update(do_sample=True, temperature=0.5, top_p=None, top_k=7, eos_token_id=[3, 4])
    app, line = start("tiny", model, SimpleNamespace(eos_token_id=4), context=100)
    assert app.engine.stop(10)
    assert line.startswith(f"context 32 tokens; requests run {how}")
    defaults = app.served.defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.5, 1.0, 7)
    assert end_tokens(model, SimpleNamespace(eos_token_id=None)) == {3, 4}


def test_small_steps_end_when_the_model_changes() -> None:
    """Without attention, what came before a token does not matter: the steps need only the token."""
    model = tiny()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    alone = tiny()  # `model` itself gets another attention function
    alone.load_state_dict(model.state_dict())
    steps = Steps(SMALL["vocab_size"], alone)
    found = runner(model, steps)
    assert isinstance(found, RaggedModel) and found.small is steps
    first = found.step([found.new_sequence()], [[5]])
    steps.changed = True
    second = found.step([found.new_sequence()], [[5]])
    assert found.small is None
    torch.testing.assert_close(first, second)
