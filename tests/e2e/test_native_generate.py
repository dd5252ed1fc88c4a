"""`generate` on a CPU computes native steps, of short prompts too, and gives the tokens of transformers' own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

from lancebill import from_pretrained  # noqa: E402
from lancebill.backends.cpu.native import library  # noqa: E402
from lancebill.integrations.transformers import decode_cache, native_decoder  # noqa: E402
from lancebill.integrations.transformers.decode_cache import DecodeCache  # noqa: E402
from lancebill.integrations.transformers.native_decoder import NativeDecoder  # noqa: E402
from lancebill.integrations.transformers.native_steps import NativeSteps, SharedDecoder  # noqa: E402
from lancebill.integrations.transformers.packed_experts import packed_experts  # noqa: E402
from lancebill.integrations.transformers.pretrained import reload_experts  # noqa: E402

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
TOKENS = 14
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each native step. The cache has to grow while it is used."""
    monkeypatch.setattr(decode_cache, "LEAST_SPAN", 8)
    made: list[int] = []
    step = NativeDecoder.step

    def counted(self: NativeDecoder, ids: Any, *args: Any) -> Tensor:
        made.append(len(ids))
        return step(self, ids, *args)

    monkeypatch.setattr(NativeDecoder, "step", counted)
    return made


def load(family: str, folder: Path) -> Any:
    assert tiny.save_model(transformers, family, folder)
    model = from_pretrained(folder, weights="int8", activations="fp32", dtype="float32").eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def generate(model: Any, batch: int = 1, length: int = 7, **options: Any) -> Tensor:
    """The first of several prompts is padded."""
    torch.manual_seed(1)
    ids = torch.randint(1, 100, (batch, length), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :3] = ids[0, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": TOKENS, **GREEDY, **options}
    found: Tensor = model.generate(**given)
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path, steps: list[int]) -> None:
    model = load(family, tmp_path)
    generate(model)
    assert steps == [1] * (TOKENS - 1)  # nothing is native before its logits are compared
    for batch, prompts in ((1, 7), (3, 4 + 7 + 7)):
        for how in (GREEDY, SAMPLED):
            steps.clear()
            found, made = generate(model, batch, **how), list(steps)
            assert made == [prompts] + [batch] * (TOKENS - 1)
            assert model.lancebill_decoding.reason is None and str(model.lancebill_decoding) == "native steps"
            assert torch.equal(found, generate(model, batch, disable_compile=True, **how)) and steps == made


@pytest.mark.parametrize("limit", [24, 200])
def test_prompts_around_the_limit(
    limit: int, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 tokens take several calls of the library, whose buffers hold fewer."""
    monkeypatch.setattr(native_decoder, "MOST_ROWS", 64)
    monkeypatch.setitem(tiny.FAMILIES, "mixtral", tiny.FAMILIES["mixtral"] | {"sliding_window": 6})
    model = load("mixtral", tmp_path)
    generate(model)
    model.lancebill_decoding.native.decoder.most_tokens = limit
    sizes = [(1, 1), *((batch, limit // batch + more) for batch in (1, 4) for more in (-1, 0, 1))]
    for batch, length in sizes:
        steps.clear()
        found = generate(model, batch, length, max_new_tokens=3)
        prompts = [batch * length - 3 * (batch > 1)] * (batch * length <= limit)  # without the padding
        assert steps == prompts + [batch] * 2
        assert torch.equal(found, generate(model, batch, length, max_new_tokens=3, disable_compile=True))


def test_more_sequences_than_the_limit(tmp_path: Path, steps: list[int]) -> None:
    model = load("mixtral", tmp_path)
    generate(model)
    steps.clear()
    most = model.lancebill_decoding.native.decoder.most_tokens = 64
    found = generate(model, most + 1, max_new_tokens=3)
    assert not steps and "more than 64 sequences" in str(model.lancebill_decoding)
    assert torch.equal(found, generate(model, most + 1, max_new_tokens=3, disable_compile=True))


def test_a_prompt_that_is_hidden_whole(tmp_path: Path) -> None:
    model, hidden = load("mixtral", tmp_path), torch.tensor([[1] * 7, [0] * 7])
    generate(model)
    found = generate(model, 2, attention_mask=hidden)
    assert "hides a whole prompt" in str(model.lancebill_decoding)
    assert torch.equal(found, generate(model, 2, attention_mask=hidden, disable_compile=True))


def test_streamers_and_stopping_criteria(tmp_path: Path, steps: list[int]) -> None:
    model = load("mixtral", tmp_path)
    seen: list[int] = []

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            seen.extend(tokens.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    found = generate(model, streamer=Streamer())
    assert seen == [*found[0].tolist(), -1]
    stop = [lambda ids, scores: torch.tensor([ids.shape[1] >= 12])]
    assert torch.equal(generate(model, stopping_criteria=stop)[0], found[0, :12])
    end = int(found[0, 10])
    assert torch.equal(generate(model, eos_token_id=end), generate(model, eos_token_id=end, disable_compile=True))
    assert len(steps) > TOKENS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam"),
        ({"return_dict_in_generate": True}, "returns the cache"),
        ({"use_cache": False}, "use_cache"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}, "mask"),
        ({"output_router_logits": True}, "the model takes output_router_logits"),
        ({"position_ids": torch.arange(3, 10).unsqueeze(0)}, "positions that do not count the tokens"),
    ],
)
def test_what_steps_do_not_serve_is_done_by_transformers(
    options: dict[str, Any], reason: str, tmp_path: Path, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = load("mixtral", tmp_path)
    found = generate(model, **options)
    assert not steps and reason in str(model.lancebill_decoding)
    expected = generate(model, disable_compile=True, **options)
    assert torch.equal(*(f if isinstance(f, Tensor) else f.sequences for f in (found, expected)))
    assert not caplog.records


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_models_without_native_steps(family: str, tmp_path: Path, steps: list[int]) -> None:
    model = load(family, tmp_path)
    generate(model)
    assert not steps and str(model.lancebill_decoding).startswith("without native steps: ")


def test_a_changed_model_gets_new_steps(tmp_path: Path, steps: list[int]) -> None:
    model = load("mixtral", tmp_path)
    generate(model)

    def experts_of(model: Any) -> list[Any]:
        return [place.experts for _, place in packed_experts(model)]

    changes = [
        lambda: [layer.adopt(layer.choice, layer.packed) for layer in experts_of(model)],
        lambda: reload_experts(model, weights="int4-g32"),
        lambda: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.roll(1, 0)),
    ]
    for change in changes:
        before = model.lancebill_decoding.native.decoder
        change()
        steps.clear()
        assert torch.equal(generate(model), generate(model, disable_compile=True)) and steps == [1] * (TOKENS - 1)
        assert model.lancebill_decoding.native.decoder is not before


def test_wrong_steps_are_noticed(tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled logits point in the same direction and sample other tokens."""
    model = load("mixtral", tmp_path)
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda x: head(x) * 2)
    found = generate(model, **SAMPLED)
    assert len(steps) == 1 and "other logits" in str(model.lancebill_decoding)
    assert torch.equal(found, generate(model, disable_compile=True, **SAMPLED))


def test_a_cache_of_another_type_is_left_to_transformers(tmp_path: Path, steps: list[int]) -> None:
    model = load("mixtral", tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model)
        assert not steps and "keys and values of other sizes or types" in str(model.lancebill_decoding)
        assert torch.equal(found, generate(model, disable_compile=True))


def test_a_model_that_changes_while_it_generates(tmp_path: Path, steps: list[int]) -> None:
    """Its other backend has no native steps; another call of `generate` notices that."""
    model = load("mixtral", tmp_path)
    expected = generate(model)

    def change(ids: Tensor, scores: Any) -> Tensor:
        if ids.shape[1] == 10:
            reload_experts(model, backend="torch-cpu")
            steps.clear()
            assert torch.equal(generate(model, max_new_tokens=3), expected[:, :10])
        return torch.tensor([False])

    assert torch.equal(generate(model, stopping_criteria=[change]), expected)
    assert not steps and "the model has changed" in str(model.lancebill_decoding)


def test_steps_without_positions_are_the_models_own(tmp_path: Path, steps: list[int]) -> None:
    model = load("mixtral", tmp_path)
    generate(model)
    steps.clear()
    cache, ids = DecodeCache(2, 8, model.device), torch.tensor([[5, 6, 7]])
    native = NativeSteps(cache, model.lancebill_decoding.native)
    found = native.run(model, {"input_ids": ids, "past_key_values": cache, "use_cache": True})
    assert not steps and native.refused is not None and "positions" in native.refused.text
    torch.testing.assert_close(found.logits, model(ids).logits)


def test_right_steps_are_proven_though_the_decoder_is_gone() -> None:
    shared, logits = SharedDecoder(), torch.randn(1, 9)
    assert shared.prove(logits, logits, 1.0, 1.0) is None and shared.proven
