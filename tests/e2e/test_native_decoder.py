"""Native decode steps give the logits of the model itself, in every kind of step, for every family that has them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

from lancebill import from_pretrained  # noqa: E402
from lancebill.backends.cpu.native import library  # noqa: E402
from lancebill.cli.answering import Answering, AnswerOptions  # noqa: E402
from lancebill.integrations.transformers import native_decoder as native_decoders  # noqa: E402
from lancebill.integrations.transformers.native_decoder import NativeDecoder, native_decoder  # noqa: E402
from lancebill.serving.choose_runner import runner  # noqa: E402
from lancebill.serving.ragged import RaggedModel  # noqa: E402

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")

# Families with native steps, and the settings that change what a step computes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"num_key_value_heads": 2, "num_attention_heads": 6}),  # norms of queries and keys
    "mixtral": ("mixtral", {}),
    "window": ("mixtral", {"sliding_window": 6, "num_key_value_heads": 1}),
    "tied": ("mixtral", {"tie_word_embeddings": True, "head_dim": 12}),  # heads that are no whole vectors
    "glm4_moe": ("glm4_moe", {"partial_rotary_factor": 0.5}),  # a dense layer, shared experts, half the columns rotated
}
OTHERS = {"gpt_oss": "sinks", "deepseek_v3": "compressed keys"}
PROMPT, OTHER = list(range(20, 50)), [5, 9, 1]


def load(family: str, more: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    monkeypatch.setitem(tiny.FAMILIES, family, tiny.FAMILIES[family] | more)
    assert tiny.save_model(transformers, family, folder)
    return from_pretrained(folder, weights="int8", activations="fp32", dtype="float32", **how).eval()


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """The judge: one call of the model without any cache."""
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return result


@pytest.mark.parametrize("rest", ["dense", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_step_gives_the_logits_of_the_model(
    name: str, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, more = FAMILIES[name]
    model = load(family, more, tmp_path, monkeypatch)
    if rest == "packed":
        rules = {"experts": "int8", "rest": "int8"}
        model = from_pretrained(
            tmp_path, weights=rules, activations={"experts": "fp32", "rest": "fp32"}, dtype="float32"
        ).eval()
    steps = [([PROMPT, OTHER], [0, 1]), ([[7], [8, 9]], [0, 1]), ([[3], [2]], [1, 0]), ([[4] * 40, [6]], [0, 1])]
    said: list[list[int]] = [[], []]
    expected = []
    for tokens, order in steps:
        for new, which in zip(tokens, order):
            said[which] = said[which] + new
        expected.append(torch.stack([logits_of(model, said[which]) for which in order]))
    decoder = native_decoder(model)
    assert isinstance(decoder, NativeDecoder), decoder
    chosen = runner(model, decoder)
    assert isinstance(chosen, RaggedModel) and chosen.small is decoder
    sequences = [chosen.new_sequence(), chosen.new_sequence()]
    for (tokens, order), want in zip(steps, expected):
        got = chosen.step([sequences[which] for which in order], tokens)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-4 * float(want.abs().max()))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}  # other angles for all positions of a long sequence


@pytest.mark.parametrize("rotary", [{"rope_type": "default"}, YARN, DYNAMIC], ids=lambda rotary: rotary["rope_type"])
def test_angles_are_those_of_the_model(rotary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decoders, "FIRST_ANGLES", 4)
    model = load("mixtral", {"rope_parameters": {"rope_theta": 100.0, **rotary}}, tmp_path, monkeypatch)
    decoder = native_decoder(model)
    assert isinstance(decoder, NativeDecoder) and decoder.current()
    for positions in ([0], [3, 1, 2], [4], [200, 7], [199, 255], [256, 0]):
        want = decoder.angles(decoder.x, torch.tensor([positions]))
        for found, expected in zip(decoder._rotation(positions), want):
            torch.testing.assert_close(found, expected[0].float(), rtol=1e-6, atol=1e-6)
    if rotary is not DYNAMIC:
        decoder.angles.register_buffer("inv_freq", 2 * decoder.angles.inv_freq, persistent=False)
        assert not decoder.current(), "the table is of the old ones"


def test_angles_of_a_call_in_parts_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decoders, "MOST_ROWS", 8)
    model = load(
        "mixtral",
        {"max_position_embeddings": 12, "rope_parameters": {**DYNAMIC, "rope_theta": 100.0}},
        tmp_path,
        monkeypatch,
    )
    decoder = native_decoder(model)
    assert isinstance(decoder, NativeDecoder)
    want = logits_of(model, PROMPT)
    chosen = RaggedModel(model, decoder)
    torch.testing.assert_close(chosen.step([chosen.new_sequence()], [PROMPT])[0], want, rtol=2e-3, atol=2e-4)


def test_longer_steps_are_computed_by_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways share the keys and values of a sequence."""
    model = load("mixtral", {}, tmp_path, monkeypatch)
    decoder = native_decoder(model)
    assert isinstance(decoder, NativeDecoder)
    chosen, native, step = runner(model, decoder), list[int](), decoder.step
    monkeypatch.setattr(decoder, "step", lambda ids, *rows: native.append(len(ids)) or step(ids, *rows))
    decoder.most_tokens = 20
    sequence, said = chosen.new_sequence(), list[int]()
    for new in (PROMPT[:20], PROMPT[:21], [7]):
        said += new
        before, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
        want = logits_of(model, said)
        model.config._attn_implementation = before
        torch.testing.assert_close(chosen.step([sequence], [new])[0], want, rtol=2e-3, atol=2e-4)
    assert native == [20, 1]


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_without_native_steps_says_why(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(family, {}, tmp_path, monkeypatch)
    assert isinstance(native_decoder(model), str)


def test_a_decoder_of_a_changed_model_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("mixtral", {}, tmp_path, monkeypatch)
    chosen = runner(model, models := native_decoder(model))  # type: ignore[arg-type]
    assert isinstance(chosen, RaggedModel) and chosen.small is models
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert chosen.step([chosen.new_sequence()], [PROMPT]).shape == (1, 128)
    assert chosen.small is None


@pytest.mark.parametrize("change", [lambda x: x.roll(1, -1), lambda x: 2 * x], ids=["order", "size"])
def test_wrong_steps_are_noticed(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is connected in another way than a decoder assumes gets no native steps."""
    model = load("mixtral", {}, tmp_path, monkeypatch)
    decoder = native_decoder(model)
    assert isinstance(decoder, NativeDecoder)
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda x: change(head(x)))
    chosen = runner(model, decoder)
    assert isinstance(chosen, RaggedModel) and chosen.small is None


def test_commands_draw_with_the_recommended_min_p(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 only the most likely token is left."""
    model = load("qwen3_moe", {}, tmp_path, monkeypatch)
    answering = Answering(model, SimpleNamespace(eos_token_id=None), 3)
    assert answering.runner is not None
    likely = list(answering._tokens(PROMPT, AnswerOptions(12, 0.0, 1.0, 0)))
    drawn = AnswerOptions(12, 2.0, 1.0, 0)
    assert list(answering._tokens(PROMPT, drawn)) != likely
    model.generation_config.min_p = 1.0
    assert list(answering._tokens(PROMPT, drawn)) == likely
