"""`generate` of whole models on a GPU: decode steps in CUDA graphs, with plain and with packed other matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.recipe import LoadOptions
from lancebill.numbers.codec import quantize
from lancebill.numbers.spec_names import parse_spec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "num_hidden_layers": 3, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = ("qwen3", "gpt-oss")
TOKENS = 300  # more than the columns that the first graph sees
NEAR = 0.1  # of the spread of the logits, a few steps of bf16: so close, rounding decides


def config(family: str) -> Any:
    if family == "gpt-oss":
        return transformers.GptOssConfig(**SIZES, num_local_experts=8, intermediate_size=256, sliding_window=64)
    return transformers.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=256)


def make_model(family: str, rest: str | None = None) -> Any:
    from lancebill.integrations.transformers.pack_in_memory import pack_experts
    from lancebill.integrations.transformers.packed_rest import RestRules, pack_rest

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config(family), dtype=torch.bfloat16).eval()
    pack_experts(model, weights="mxfp4")
    if rest is not None:
        report = pack_rest(model, LoadOptions("cuda"), RestRules(rest))
        assert len(report.packed) == 4 * 3 + 1 and not report.dequantized
    return model


def generate(model: Any, batch: int, **options: Any) -> torch.Tensor:
    ids = torch.randint(1, 1000, (batch, 40), generator=torch.Generator().manual_seed(batch)).cuda()
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :9] = ids[0, :9] = 0
    torch.manual_seed(1)
    found: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, **options)
    return found


def check_same_or_near(model: Any, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The first token that differs is one of two between which transformers itself hardly decides."""
    for mine, other in zip(ours, theirs):
        if torch.equal(mine, other):
            continue
        at = int((mine != other).nonzero()[0])
        row = other[int((other != 0).nonzero()[0]) : at].unsqueeze(0)
        logits = model(row).logits[0, -1].float()
        assert (logits[mine[at]] - logits[other[at]]).abs() <= NEAR * logits.std(), at


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rest", [None, "int8", "mxfp4"])
def test_graphs_give_the_tokens_of_uncaptured_steps(family: str, rest: str | None) -> None:
    """Bit for bit those of the same steps without graphs; and transformers' own tokens, up to rounding."""
    from lancebill.integrations.transformers.graphed_generation import Decoding
    from lancebill.integrations.transformers.step_modules import StepAttention
    from lancebill.testing.recorders import PlainRecorder

    if family == "gpt-oss" and rest is not None:
        pytest.skip("covered by the other family")
    model = make_model(family, rest)
    for batch in (1, 3):
        for how in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 50}):
            captured = [generate(model, batch, **how) for _ in range(2)]
            assert model.lancebill_decoding.reason is None, model.lancebill_decoding.reason
            assert torch.equal(*captured)
            swaps = model.lancebill_decoding._kept[batch].swaps
            ours = [swap for swap in swaps if isinstance(swap.faster, StepAttention)]
            assert len(ours) == (3 if family == "qwen3" else 0)  # gpt-oss has sinks
            graphs, model.lancebill_decoding = model.lancebill_decoding, Decoding(PlainRecorder)
            assert torch.equal(generate(model, batch, **how), captured[0])
            model.lancebill_decoding = graphs
            if not how["do_sample"]:
                check_same_or_near(model, captured[0], generate(model, batch, disable_compile=True, **how))


@pytest.mark.parametrize("rows", [1, 5, 16, 100])
def test_a_repeated_linear_call_is_the_first_one(rows: int) -> None:
    """The fast call of eager code, in other memory, on another stream, and in a graph beside it."""
    weight = quantize(torch.randn(768, 512, device="cuda"), parse_spec("mxfp4"))
    layer = QuantizedLinear.from_weight(weight, device="cuda")
    x = torch.randn(2, rows, 512, device="cuda").bfloat16()
    first = layer(x)
    assert layer.executor.fast_linears
    assert torch.equal(layer(x), first) and torch.equal(layer(x.clone()), first)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        assert torch.equal(layer(x), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, first)
