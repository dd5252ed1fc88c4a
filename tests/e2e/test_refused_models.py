"""Models that are changed, or made differently, than we expect: each is refused with its reason."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversion import find_example, find_row
from torch import nn

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

import lancebill  # noqa: E402
from lancebill.backends.cpu.native import library  # noqa: E402
from lancebill.checkpoint.read.files import Checkpoint  # noqa: E402
from lancebill.cli.convert import run_conversion, target_of  # noqa: E402
from lancebill.errors import (  # noqa: E402
    CannotEncode,
    CheckpointProblems,
    LaunchError,
    MissingTensor,
    SpecError,
    UnsupportedFormat,
    UnsupportedProblem,
)
from lancebill.formats import registry  # noqa: E402
from lancebill.integrations.transformers.experts_interface import ModuleExperts, problem_of  # noqa: E402
from lancebill.integrations.transformers.fused_modules import FusedAttention  # noqa: E402
from lancebill.integrations.transformers.native_decoder import native_decoder  # noqa: E402
from lancebill.integrations.transformers.pack_in_memory import pack_experts  # noqa: E402
from lancebill.integrations.transformers.packed_experts import (  # noqa: E402
    PackedExperts,
    expert_modules,
    replace_experts,
    set_activations,
)
from lancebill.integrations.transformers.packed_rest import RestReport  # noqa: E402
from lancebill.integrations.transformers.pretrained import class_of, reload_experts  # noqa: E402
from lancebill.integrations.transformers.saved_modules import rest_modules  # noqa: E402
from lancebill.numbers.spec import MXFP4  # noqa: E402
from lancebill.testing.checkpoints import Geometry, generate  # noqa: E402

HIDDEN, EXPERTS = 64, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("refused") / "model"
    assert tiny.save_model(transformers, "qwen3_moe", made)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    kinds = {"experts": "fp32", "rest": "fp32"}
    weights = {"experts": "int8", "rest": "int8"}
    return lancebill.from_pretrained(folder, weights=weights, activations=kinds, dtype="float32").eval()


@pytest.fixture
def ours(loaded: Any) -> Any:
    return copy.deepcopy(loaded)


@pytest.fixture
def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


# ---- Experts as transformers has them


def test_experts_that_are_not_replaced(theirs: Any) -> None:
    _, _, module = next(expert_modules(theirs))
    source = ModuleExperts.of(module)
    with pytest.raises(UnsupportedProblem, match="contradict its config"):
        problem_of(replace(source, gated=False), 2, 0)
    with pytest.raises(UnsupportedProblem, match="experts interface"):
        ModuleExperts.of(nn.Linear(2, 2))
    with pytest.raises(UnsupportedProblem, match="not where dbrx has them"):
        replace_experts(theirs, {"model_type": "dbrx"})
    with pytest.raises(UnsupportedProblem, match="the layer of these experts"):
        list(expert_modules(nn.ModuleList([theirs])))
    module._is_expert_parallel = True
    with pytest.raises(UnsupportedProblem, match="expert parallelism"):
        ModuleExperts.of(module)
    module.has_post_expert_norm = True
    with pytest.raises(UnsupportedProblem, match="a norm after each expert"):
        list(expert_modules(theirs))


def test_a_config_must_say_how_many_experts_a_token_has(theirs: Any) -> None:
    for _, _, module in expert_modules(theirs):
        module.config = transformers.PretrainedConfig()
    with pytest.raises(UnsupportedFormat, match="how many experts"):
        pack_experts(theirs, weights="int8")


def test_a_config_without_a_language_model() -> None:
    with pytest.raises(UnsupportedProblem, match="no causal language model"):
        class_of(transformers.CLIPVisionConfig())


# ---- Packed experts


def test_experts_that_are_not_loaded(ours: Any) -> None:
    place = PackedExperts(0)
    rows, ids = torch.ones(1, HIDDEN), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(LaunchError, match="not loaded yet"):
        place(rows, ids, torch.ones(1, 2))
    with pytest.raises(LaunchError, match="not loaded yet"):
        set_activations(nn.ModuleList([place]), "int8", torch.float32)
    next(m for m in ours.modules() if isinstance(m, PackedExperts)).index = 9
    with pytest.raises(MissingTensor, match="no experts for this layer"):
        reload_experts(ours)


def test_activations_that_cannot_be_changed(ours: Any) -> None:
    with pytest.raises(UnsupportedProblem, match="another layout"):
        set_activations(ours, "nvfp4", torch.float32)
    reload_experts(ours, gpu_experts=2)
    with pytest.raises(UnsupportedProblem, match="host memory"):
        set_activations(ours, "int8", torch.float32)


def test_activations_can_be_changed_where_the_layout_stays(ours: Any) -> None:
    fresh, ids = copy.deepcopy(ours), torch.tensor([[3, 1, 4]])
    reload_experts(ours, backend="reference")
    set_activations(ours, "int8", torch.float32)
    reload_experts(fresh, backend="reference", activations="int8")
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, fresh(ids).logits)


def test_experts_that_do_nothing_return_their_input() -> None:
    row = find_row("longcat_flash")
    made = generate(find_example("dense", "bf16"), row, row.forms[0], Geometry(4, HIDDEN, HIDDEN, layers=1))
    config = replace(made.config, model={**made.config.model, "zero_expert_num": 2})
    place = PackedExperts(0)
    place.experts = lancebill.RoutedExperts.random(config, 0, dtype=torch.float32)
    x, ids = torch.randn(5, HIDDEN), torch.tensor([[0, 4], [5, 1], [4, 5], [2, 3], [1, 4]])
    weights = torch.rand(5, 2)
    real = ids < 4
    expected = place.experts(x, topk_ids=ids.where(real, -1), topk_weights=weights)
    expected = expected + x * (weights * ~real).sum(1, keepdim=True)
    torch.testing.assert_close(place(x, ids, weights), expected)


def test_a_model_that_does_not_generate_is_packed(theirs: Any) -> None:
    """And matrices without a rule stay as they are."""
    ids = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        expected = theirs.model(ids).last_hidden_state
        pack_experts(theirs.model, weights={"w2": "int8"})
        found = theirs.model(ids).last_hidden_state
    place = next(module for module in theirs.modules() if isinstance(module, PackedExperts))
    assert place.experts is not None and place.experts.problem.w2 is not None
    assert str(place.experts.problem.w2.spec).startswith("int8") and not place.experts.problem.w13.spec.quantized
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.02


def test_tensors_that_do_not_fit_the_config_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "vocab_size": 120}))
    with pytest.raises(CheckpointProblems, match=r"lm_head\.weight: the tensor has a wrong shape for the model"):
        lancebill.from_pretrained(tmp_path / "other")


def test_fused_attention_has_no_eager_form(ours: Any) -> None:
    assert any(isinstance(module, FusedAttention) for module in ours.modules())
    ours.config._attn_implementation = "eager"
    with pytest.raises(LaunchError, match="no eager form"), torch.no_grad():
        ours(torch.ones(1, 3, dtype=torch.int64))


# ---- Saving


def test_models_that_cannot_be_saved(folder: Path, ours: Any, tmp_path: Path) -> None:
    report = RestReport(specs={"unheard_of": MXFP4}, requantized=("unheard_of",))
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CannotEncode, match="another name for this module"):
        list(rest_modules(ours, checkpoint, report, torch.bfloat16))
    ours.lancebill_origin = None
    with pytest.raises(CannotEncode, match=r"not loaded by lancebill\.from_pretrained"):
        ours.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_write_that_torch_does_not_count_is_noticed(folder: Path, tmp_path: Path) -> None:
    """As tools that merge adapters do it. Saving would write the old numbers."""
    model = lancebill.from_pretrained(folder)
    model.save_pretrained(tmp_path / "unchanged")
    model.model.layers[1].self_attn.q_proj.weight.data += 0.25
    with pytest.raises(CannotEncode, match=r"layers\.1\.self_attn\.q_proj\.weight: the model was changed"):
        model.save_pretrained(tmp_path / "changed")


def test_experts_that_keep_numbers_which_the_format_would_change(folder: Path, tmp_path: Path) -> None:
    example = next(e for e in registry()["gptq"].examples() if "actorder" in e.name)
    quant = {**example.config.quant, "modules_in_block_to_quantize": [["mlp.experts"]]}
    tiny.quantized_copy(folder, tmp_path / "ordered", tmp_path / "plain", quant, example.scheme, _is_expert)
    run_conversion(folder, tmp_path / "wide", target_of("int4-g32:fp32", "compressed-tensors"), {})
    for source, fmt, message in (
        ("ordered", None, "can only be saved as they are stored"),
        ("wide", "gptq", "would round"),
    ):
        model = lancebill.from_pretrained(tmp_path / source, weights={"rest": "int8"})
        with pytest.raises(CannotEncode, match=message):
            model.save_pretrained(tmp_path / "out", format=fmt)


def _is_expert(module: str) -> bool:
    return ".experts." in module


def _dequantised(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning of a load about matrices that are plain now."""
    said = [text for text in caplog.messages if "outside the experts are computed as plain ones" in text]
    caplog.clear()
    assert len(said) == 1
    return said[0]


def test_what_no_fast_backend_computes_is_dequantised(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = {"rest": {"lm_head": "mxfp6-e3m2"}}
    model = lancebill.from_pretrained(folder, weights=rules, activations={"rest": "nvfp4"})
    assert "\n  lm_head:\n    no kernels for mxfp6-e3m2 x nvfp4 on cpu" in _dequantised(caplog)
    assert "no kernels for mxfp6-e3m2 x nvfp4 on cpu" in model.lancebill_rest.dequantized["lm_head"]


def test_stored_matrices_that_no_fast_backend_computes_are_dequantised(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    example = next(e for e in registry()["quark"].examples() if e.name == "mxfp6-e3m2")
    quant = {**example.config.quant, "exclude": ["*mlp*", "lm_head"]}
    tiny.quantized_copy(folder, tmp_path / "q", tmp_path / "plain", quant, example.scheme, _is_attention)
    options = {"activations": {"rest": "nvfp4"}, "dtype": "float32"}
    found = lancebill.from_pretrained(tmp_path / "q", **options).eval()
    said = _dequantised(caplog)
    assert said.startswith("8 quantised matrices") and "2 x model.layers.*.self_attn.q_proj" in said
    assert "hopper: needs an sm_90 GPU, not cpu\n" in said
    assert "cpu: nvfp4 activations (" in said and 'what would help: activations={"rest": "fp32"} (cpu)' in said
    lancebill.from_pretrained(tmp_path / "q", **options, backend="reference")
    assert "plain ones" not in caplog.text  # packed, as asked
    expected = lancebill.from_pretrained(tmp_path / "plain", dtype="float32").eval()
    assert all("no kernels for mxfp6-e3m2 x nvfp4" in why for why in found.lancebill_rest.dequantized.values())
    assert len(found.lancebill_rest.dequantized) == 8
    ids = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("rules", ["int8", {"*.q_proj": "int8"}])
def test_inputs_of_what_is_not_quantised_are_refused(folder: Path, rules: Any) -> None:
    with pytest.raises(SpecError, match="has quantised weights: int8 inputs need them"):
        lancebill.from_pretrained(folder, weights={"rest": {"lm_head": None}}, activations={"rest": rules})
    lancebill.from_pretrained(folder, activations={"rest": "fp32"})
    lancebill.from_pretrained(folder, weights={"rest": {"*.q_proj": "int8"}}, activations={"rest": rules})


def _is_attention(module: str) -> bool:
    return ".self_attn." in module


def test_projections_with_different_inputs_are_not_joined(folder: Path) -> None:
    kinds = {"rest": {"*.q_proj": "int8", "*": "fp32"}}
    model = lancebill.from_pretrained(folder, weights={"rest": "int8"}, activations=kinds, dtype="float32")
    assert not any(isinstance(module, FusedAttention) for module in model.modules())


# ---- Native decode steps


def _mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


def _attention(model: Any) -> Any:
    return model.model.layers[0].self_attn


def _gated() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN) for name in ("gate_proj", "up_proj", "down_proj")})


CHANGES: dict[str, Callable[[Any], object]] = {
    "no list of layers": lambda model: model.model.register_module("more", nn.ModuleList([nn.Linear(1, 1)])),
    "without rotary positions": lambda model: model.model.register_module("rotary_emb", nn.Identity()),
    "more than a scale and a window": lambda model: _attention(model).how.update(softcap=30.0),
    "norms of queries and keys": lambda model: setattr(_attention(model), "k_norm", None),
    "more than one set of experts": lambda model: _mlp(model).register_module("more", PackedExperts(0)),
    "more than one shared expert": lambda model: [_mlp(model).register_module(n, _gated()) for n in ("a", "b")],
    "without gate, up and down": lambda model: model.model.layers[0].register_module("mlp", nn.Linear(HIDDEN, HIDDEN)),
    "without one router": lambda model: _mlp(model).register_module("more", nn.Linear(HIDDEN, EXPERTS)),
    "do not read": lambda model: model.set_output_embeddings(nn.Bilinear(HIDDEN, HIDDEN, 128)),
}


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("reason", CHANGES)
def test_why_a_changed_model_has_no_native_steps(reason: str, ours: Any) -> None:
    assert not isinstance(native_decoder(ours), str)
    CHANGES[reason](ours)
    assert reason in str(native_decoder(ours))


def test_without_kernels_there_are_no_native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lancebill.integrations.transformers.native_decoder.library", lambda: None)
    assert native_decoder(SimpleNamespace()) == "the CPU kernels are not built"
