"""Captured decode steps give the tokens of transformers' own `generate`, with a tape in the place of CUDA graphs."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from lancebill.backends.gpu import decode_attention
from lancebill.integrations.transformers import decode_cache, fused_modules, step_modules
from lancebill.integrations.transformers.decode_graphs import no_garbage
from lancebill.integrations.transformers.graphed_generation import Decoding, use_graphs
from lancebill.testing.recorders import PlainRecorder, TapeRecorder

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "num_hidden_layers": 2, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=32),
    # A window in every other layer, sinks, its own attention.
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=4, intermediate_size=32, sliding_window=5
    ),
    # Keys and values of different widths.
    "deepseek": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 8}, n_routed_experts=4, moe_intermediate_size=32,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, n_group=1,
        topk_group=1, first_k_dense_replace=1, intermediate_size=64,
    ),
}  # fmt: skip
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few tokens need several graphs, and the cache has to grow."""
    monkeypatch.setattr(decode_cache, "LEAST_SPAN", 8)


def make_model(family: str = "qwen3", recorder: Any = TapeRecorder) -> Any:
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), experts_implementation="batched_mm").eval()
    use_graphs(plain, recorder)
    return plain


def prompts(batch: int) -> dict[str, Tensor]:
    """The first of several prompts is padded."""
    ids = torch.randint(1, 300, (batch, 7), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :3] = ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, batch: int = 1, tokens: int = 14, **options: Any) -> Tensor:
    torch.manual_seed(1)
    found: Tensor = model.generate(**prompts(batch), max_new_tokens=tokens, **{**GREEDY, **options})
    return found


def check_equal(model: Any, batch: int = 1, **options: Any) -> None:
    found = generate(model, batch, **options)
    assert model.lancebill_decoding.reason is None
    assert torch.equal(found, generate(model, batch, disable_compile=True, **options))


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_are_those_of_transformers(family: str) -> None:
    """Greedy and sampled, alone and beside a padded prompt, with new graphs and with those of the call before."""
    model = make_model(family)
    for batch in (1, 3):
        for how in (GREEDY, SAMPLED):
            check_equal(model, batch, **how)
    spans = [
        sorted(kind.graphs) for graphs in model.lancebill_decoding._kept.values() for kind in graphs.kinds.values()
    ]
    assert spans == [[8, 16, 32]] * 2


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_steps_with_modules_of_fewer_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch in the place of the kernels, which have a test of their own: the same tokens, the model unchanged."""
    monkeypatch.setattr(step_modules, "_DEVICES", {"cpu"})
    monkeypatch.setattr(decode_attention, "_DIMENSIONS", (16,))
    monkeypatch.setitem(decode_attention._ELEMENTS, torch.float32, "fp32")
    monkeypatch.setattr(step_modules, "rotate_and_store", rotate_and_store)
    monkeypatch.setattr(step_modules, "attend", attend)
    model = make_model(family)
    before = [type(module) for module in model.modules()]
    for batch in (1, 3):
        check_equal(model, batch)
    (swaps, _) = (graphs.swaps for graphs in model.lancebill_decoding._kept.values())
    replaced = Counter(type(swap.faster).__name__ for swap in swaps or ())
    assert replaced["StepAttention"] == 2 and replaced["FusedNorm"] >= 5
    assert [type(module) for module in model.modules()] == before


def rotate_and_store(heads: Any, rows: Any, norms: Any, angles: Any, position: Tensor, cache: Any) -> Tensor:
    q, k, v = (row.view(row.shape[0], -1, heads.dim) for row in rows)
    if norms is not None:
        q, k = (F.rms_norm(row, weight.shape, weight, heads.eps) for row, weight in zip((q, k), norms))
    q, k = (fused_modules.rotate(row.unsqueeze(1), *angles).squeeze(1) for row in (q, k))
    for stored, row in zip(cache, (k, v)):
        stored.index_copy_(2, position, row.unsqueeze(2))
    return q


def attend(heads: Any, rotated: Tensor, cache: Any, mask: Tensor, position: Tensor) -> Tensor:
    keys, values = (tensor[:, :, : mask.shape[-1]] for tensor in cache)
    queries = rotated.unsqueeze(2)
    return F.scaled_dot_product_attention(queries, keys, values, mask, scale=heads.scaling, enable_gqa=True)


def test_a_second_call_captures_nothing() -> None:
    model = make_model(recorder=PlainRecorder)
    recorded = []
    model.lancebill_decoding = Decoding(lambda device: Counting(recorded))
    generate(model)
    first = len(recorded)
    assert torch.equal(generate(model), generate(model, disable_compile=True)) and len(recorded) == first
    model.lm_head.weight.data = model.lm_head.weight.data.clone()  # a graph would read the old memory
    check_equal(model)
    assert len(recorded) == 2 * first


class Counting(TapeRecorder):
    def __init__(self, recorded: list[Any]) -> None:
        self.recorded = recorded

    def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded.append(call)
        return super().record(call)


def test_inference_mode_before_and_after() -> None:
    model = make_model()
    with torch.inference_mode():
        inside = generate(model)
    assert torch.equal(inside, generate(model))


def test_copies_have_graphs_of_their_own() -> None:
    model = make_model()
    generate(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.neg_()
    check_equal(copied)
    check_equal(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam"),
        ({"return_dict_in_generate": True}, "returns the cache"),
        ({"use_cache": False}, "use_cache"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values"),
    ],
)
def test_what_the_caller_asks_for_is_done_by_transformers(options: dict[str, Any], reason: str) -> None:
    model = make_model()
    generate(model, tokens=4, **options)
    assert reason in str(model.lancebill_decoding.reason) and model.lancebill_decoding.reason.code == "asked"


def test_models_that_cannot_be_captured_say_why() -> None:
    model = make_model()
    for register in (model.lm_head.register_forward_hook, register_module_forward_hook):
        model.lancebill_decoding.reason = None
        handle = register(lambda *_: None)
        try:
            generate(model, tokens=4)
        finally:
            handle.remove()
        assert model.lancebill_decoding.reason.code == "hooks"
    model.train()
    generate(model, tokens=4)
    assert model.lancebill_decoding.reason.code == "training"
    model.eval()
    model.config._attn_implementation = "flash_attention_2"
    model.lancebill_decoding.reason = None
    with pytest.raises((ImportError, KeyError, ValueError, RuntimeError)):  # not installed here
        generate(model, tokens=4)
    assert model.lancebill_decoding.reason.code == "attention"
    recurrent = transformers.Qwen3NextConfig(num_hidden_layers=4, layer_types=["linear_attention"] * 4)
    assert not decode_cache.keeps_keys_and_values(recurrent)


def test_a_failed_capture_leaves_the_tokens_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(PlainRecorder):
        def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
            call()
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = make_model(recorder=Failing)
    found = generate(model)
    reason = model.lancebill_decoding.reason
    assert reason.code == "capture" and "not permitted" in str(reason) and "and more" not in str(reason)
    assert "without CUDA graphs" in caplog.text
    assert torch.equal(found, generate(model, disable_compile=True))
    assert torch.equal(found, generate(model)) and model.lancebill_decoding.reason == reason  # it is not tried again


def test_python_that_depends_on_the_position_is_found_out() -> None:
    """A tape, like a graph, repeats what Python computed while recording."""
    model = make_model()
    original, calls = model.model.norm.forward, []

    def stateful(x: Tensor) -> Tensor:
        calls.append(1)
        return original(x) * (1 if len(calls) % 2 else -1)

    model.model.norm.forward = stateful
    generate(model)
    assert "other logits" in str(model.lancebill_decoding.reason)


def test_a_busy_cache_is_not_shared() -> None:
    model = make_model()
    decoding = model.lancebill_decoding
    with decoding.call():
        assert isinstance(decoding.begin(model, 1, 20), decode_cache.DecodeCache)
        busy = decoding.begin(model, 1, 20)
        assert not isinstance(busy, decode_cache.DecodeCache) and busy.code == "busy"
    check_equal(model)


def test_a_streamer_may_generate_too() -> None:
    """In the same thread, with another batch size: both calls have graphs."""
    model = make_model()
    expected, inner = generate(model), list[Tensor]()

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            inner.append(generate(model, 2, tokens=3))

        def end(self) -> None:
            pass

    assert torch.equal(generate(model, streamer=Streamer()), expected)
    assert model.lancebill_decoding.reason is None
    assert all(torch.equal(found, generate(model, 2, tokens=3, disable_compile=True)) for found in inner)


def test_few_batch_sizes_are_kept() -> None:
    model = make_model()
    for batch in range(1, 7):
        check_equal(model, batch, tokens=2)
    use_graphs(model, TapeRecorder)  # again: the class is the same, the graphs are new
    assert str(model.lancebill_decoding) == "0 CUDA graphs"
    for batch in range(1, 7):
        generate(model, batch, tokens=2)
    assert str(model.lancebill_decoding) == "4 CUDA graphs" and list(model.lancebill_decoding._kept) == [3, 4, 5, 6]


def test_a_model_with_an_encoder_keeps_its_own_cache() -> None:
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    use_graphs(model, TapeRecorder)
    ids = torch.tensor([[5, 6, 7]])
    found = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert "a cache of its own" in str(model.lancebill_decoding)
    assert torch.equal(found, model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, disable_compile=True))


def test_nothing_is_collected_during_a_capture() -> None:
    for enabled in (True, False):
        gc.enable() if enabled else gc.disable()
        try:
            with pytest.raises(RuntimeError), no_garbage():
                assert not gc.isenabled()
                raise RuntimeError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
