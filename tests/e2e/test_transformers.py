"""Whole models with packed experts, compared with transformers' eager experts on the same dequantised weights."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402

import lancebill  # noqa: E402
from lancebill.checkpoint.load.slice_sizes import SLICE_BYTES  # noqa: E402
from lancebill.checkpoint.read.files import Checkpoint  # noqa: E402
from lancebill.cli.convert import run_conversion, target_of  # noqa: E402
from lancebill.errors import CannotEncode, CheckpointProblems, LaunchError, SpecError, UnsupportedProblem  # noqa: E402
from lancebill.formats import registry  # noqa: E402
from lancebill.integrations.transformers.fused_modules import FusedAttention, FusedNorm  # noqa: E402
from lancebill.integrations.transformers.pack_in_memory import pack_experts  # noqa: E402
from lancebill.integrations.transformers.packed_experts import PackedExperts  # noqa: E402
from lancebill.integrations.transformers.pretrained import reload_experts  # noqa: E402

TOKENS = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))
# Written by our converter in the form that each format's own tools use.
FORMATS = [
    ("int4-g32", "compressed-tensors"),
    ("int4-g32-zp", "compressed-tensors"),
    ("fp8-channel", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("int4-g32", "gptq"),
    ("int4-g32-zp", "awq"),
    ("fp8-block", "fp8"),
    ("nvfp4", "modelopt"),
    ("nf4", "bitsandbytes"),
]
# The others have sinks, norms over all heads, or projections of another kind.
FUSED_ATTENTION = {"qwen3_moe", "mixtral", "glm4_moe"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives the folder of a saved model, which is created at its first use."""
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family) / "model"
            if not tiny.save_model(transformers, family, folders[family]):
                pytest.skip(f"transformers {transformers.__version__} has no {family}")
        return folders[family]

    return find


def convert(source: Path, folder: Path, spec: str, name: str | None = None, **options: Any) -> Path:
    run_conversion(source, folder, target_of(spec, name), options)
    return folder


def theirs(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], "transformers would fill the missing tensors with random values"
    return model.eval()


def check_equal(ours: Any, reference: Any) -> None:
    """Equal up to fp32 rounding, or up to the rounding of 16-bit inputs if the native CPU kernels were used."""
    native = any(m.experts.choice.backend.name == "cpu" for m in ours.modules() if isinstance(m, PackedExperts))
    bound = 5e-4 if native else 2e-6
    mask = torch.ones_like(TOKENS)
    with torch.no_grad():
        got, want = ours(TOKENS).logits, reference(TOKENS).logits
        error = (got - want).norm() / want.norm()
        assert error < bound, f"logits differ by {error:.1e}"
        generated = [
            m.generate(TOKENS, attention_mask=mask, max_new_tokens=8, do_sample=False) for m in (ours, reference)
        ]
    assert torch.equal(*generated)


def matrix_of(model: Any, name: str) -> torch.Tensor:
    """The matrix of a linear module, wherever it is now: q, k and v may be rows of one matrix."""
    parent, _, leaf = name.rpartition(".")
    block = model.get_submodule(parent)
    if not isinstance(block, FusedAttention) or leaf == "o_proj":
        return model.get_submodule(name).weight
    rows = [block.head_dim * heads for heads in (block.queries, block.keys, block.keys)]
    return block.qkv.weight.split(rows)[("q_proj", "k_proj", "v_proj").index(leaf)]


def attention_of(model: Any) -> set[str]:
    linears = {name for name, module in model.named_modules() if type(module).forward is torch.nn.Linear.forward}
    return {name for name in linears if ".self_attn." in name}


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_families_quantised(model_of: Any, family: str, tmp_path: Path) -> None:
    spec, name = ("mxfp4", "mxfp4") if family == "gpt_oss" else ("int4-g32", "compressed-tensors")
    packed = convert(model_of(family), tmp_path / "packed", spec, name)
    plain = theirs(convert(packed, tmp_path / "plain", "fp32"))
    ours = lancebill.from_pretrained(packed, backend="torch-cpu")
    check_equal(ours, plain)
    ours = lancebill.from_pretrained(packed, weights={"rest": "int8"})
    assert {r.kept["w2"] for r in ours.lancebill_reports()} == {spec}
    rest = ours.lancebill_rest
    assert {"lm_head", *attention_of(plain)} <= set(rest.packed) and not rest.dequantized
    with torch.no_grad():  # quantised while loading: the reference gets the same numbers
        for name in rest.packed:
            plain.get_submodule(name).weight.copy_(matrix_of(ours, name))
    check_equal(ours, plain)
    fused = {type(module) for module in ours.modules()} & {FusedAttention, FusedNorm}
    assert fused == ({FusedAttention, FusedNorm} if family in FUSED_ATTENTION else {FusedNorm})


@pytest.mark.parametrize(("spec", "name"), FORMATS, ids=lambda value: value)
def test_formats(model_of: Any, spec: str, name: str, tmp_path: Path) -> None:
    packed = convert(model_of("qwen3_moe"), tmp_path / "packed", spec, name)
    ours = lancebill.from_pretrained(packed)
    check_equal(ours, theirs(convert(packed, tmp_path / "plain", "fp32")))
    size = sum(t.nbytes for m in ours.modules() if isinstance(m, PackedExperts) for t in m.parameters())
    weights = 2 * 8 * 3 * 64 * 64
    assert size < weights * 1.6, "the experts were expanded"


@pytest.mark.parametrize("everything", [False, True], ids=["experts", "whole-model"])
@pytest.mark.parametrize("name", ["int4-g32:fp16-zp-gptq-actorder", "block-BF16"])
def test_other_modules_quantised_too(model_of: Any, name: str, everything: bool, tmp_path: Path) -> None:
    example = next(e for f in ("gptq", "fp8") for e in registry()[f].examples() if e.name == name)

    def is_quantised(module: str) -> bool:
        return ".experts." in module or (everything and ".self_attn." in module)

    packed, plain = tmp_path / "packed", tmp_path / "plain"
    skipped = ["lm_head", "gate", *([] if everything else ["self_attn"])]
    if "desc_act" in example.config.quant:
        ignore: dict[str, Any] = {"dynamic": {f"-:.*{name}.*": {} for name in skipped if name != "gate"}}
    else:
        ignore = {"modules_to_not_convert": skipped}
    source = model_of("qwen3_moe")
    tiny.quantized_copy(source, packed, plain, {**example.config.quant, **ignore}, example.scheme, is_quantised)
    ours = lancebill.from_pretrained(packed)
    check_equal(ours, theirs(plain))
    kept = {name.rpartition(".")[2] for name in ours.lancebill_rest.packed}
    assert kept == ({"q_proj", "k_proj", "v_proj", "o_proj"} if everything else set())


def test_quantised_while_loading_equals_quantised_on_disk(model_of: Any, tmp_path: Path) -> None:
    folder = model_of("mixtral")
    on_disk = lancebill.from_pretrained(convert(folder, tmp_path / "packed", "mxfp4", search=False))
    loading = lancebill.from_pretrained(folder, weights="mxfp4")
    with torch.no_grad():
        assert torch.equal(on_disk(TOKENS).logits, loading(TOKENS).logits)


def test_rules_and_activations(model_of: Any) -> None:
    ours = lancebill.from_pretrained(model_of("qwen3_moe"), weights=[("0", "int4-g32")], activations="int8")
    first, second = ours.lancebill_reports()
    assert (first.kept["w13"], second.kept["w13"]) == ("int4-g32", "fp32")
    assert first.activations["w2"] == "int8"
    with torch.no_grad():
        assert ours(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_experts_implementation(model_of: Any, family: str) -> None:
    import lancebill.integrations.transformers.pretrained  # noqa: F401

    folder = model_of(family)
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="lancebill"
    )
    check_equal(ours.eval(), theirs(folder))


def test_experts_implementation_sees_changed_weights(model_of: Any) -> None:
    import lancebill.integrations.transformers.pretrained  # noqa: F401

    ours = transformers.AutoModelForCausalLM.from_pretrained(
        model_of("gpt_oss"), dtype=torch.float32, experts_implementation="lancebill"
    )
    reference = theirs(model_of("gpt_oss"))
    with torch.no_grad():
        ours(TOKENS)
        for model in (ours, reference):
            model.model.layers[0].mlp.experts.down_proj.mul_(2)
    check_equal(ours, reference)


def test_saved_as_a_standard_checkpoint(model_of: Any, tmp_path: Path) -> None:
    folder = convert(model_of("qwen3_moe"), tmp_path / "packed", "int4-g32", "gptq")
    lancebill.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    with Checkpoint.open(folder) as before, Checkpoint.open(tmp_path / "saved") as after:
        assert vars(before.config) == vars(after.config)
        assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors)
    lancebill.from_pretrained(model_of("qwen3_moe"), weights="mxfp4").save_pretrained(tmp_path / "requantised")
    config = json.loads((tmp_path / "requantised" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


def test_keywords_are_used_or_refused(model_of: Any, tmp_path: Path) -> None:
    for name in ("torch_dtype", "device_map", "quantization_config"):
        with pytest.raises(SpecError, match=name):
            lancebill.from_pretrained(model_of("mixtral"), **{name: "auto"})
    model = lancebill.from_pretrained(model_of("mixtral"))
    with pytest.raises(SpecError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "never", push_to_hub=True)
    model.save_pretrained(tmp_path / "never", is_main_process=False)
    assert not (tmp_path / "never").exists()
    model.save_pretrained(tmp_path / "saved", safe_serialization=True, max_shard_size="5GB", push_to_hub=False)
    assert (tmp_path / "saved").exists()


def test_a_deep_copy_gives_the_same_result(model_of: Any) -> None:
    model, ids = lancebill.from_pretrained(model_of("mixtral"), weights="mxfp4"), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


def test_experts_in_host_memory(model_of: Any) -> None:
    """With the CPU as the device of both parts; where the device is a CPU, limits of a GPU change nothing."""
    folder = model_of("qwen3_moe")
    ours = lancebill.from_pretrained(folder, dtype=torch.float32, gpu_experts=1, moves="recency", cpu_threads=1)
    assert not any(report.host_bytes for report in ours.lancebill_reports())
    for wrong, words in (({"gpu_memory": "lots"}, "not an amount of memory"), ({"gpu_memory": 2.5}, "gpu_memory: "),
                         ({"gpu_experts": "4"}, "gpu_experts: "), ({"moves": "recency"}, "moves: ")):  # fmt: skip
        with pytest.raises(SpecError, match=words):
            lancebill.from_pretrained(folder, **wrong)
    reload_experts(ours, gpu_experts=2)
    assert all(report.host_bytes for report in ours.lancebill_reports())
    check_equal(ours, theirs(folder))
    reload_experts(ours, gpu_experts=2, moves="recency")
    assert "experts, which move" in str(ours.lancebill_reports()[0])
    check_equal(ours, theirs(folder))


def test_a_changed_model_is_not_saved(model_of: Any, tmp_path: Path) -> None:
    ours = lancebill.from_pretrained(model_of("qwen3_moe"))
    with torch.no_grad():
        ours.lm_head.weight.mul_(2)
    with pytest.raises(CannotEncode, match=r"lm_head\.weight: the model was changed"):
        ours.save_pretrained(tmp_path / "out")
    mixed = lancebill.from_pretrained(model_of("qwen3_moe"), weights={"w13": "int4-g32"})
    with pytest.raises(CannotEncode, match="one spec"):
        mixed.save_pretrained(tmp_path / "out")
    with pytest.raises(SpecError, match="w13"):
        lancebill.from_pretrained(model_of("qwen3_moe"), weights={"rest": "int8", "w13": "int8"})


def test_models_without_the_interface_are_refused(tmp_path: Path) -> None:
    from lancebill.integrations.transformers.pretrained import packed_class

    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=32)
    with torch.device("meta"), pytest.raises(UnsupportedProblem, match="experts interface"):
        packed_class(transformers.LlamaForCausalLM)(config)


@pytest.mark.parametrize("ours", [True, False])
def test_calls_with_autograd_enabled(model_of: Any, ours: bool) -> None:
    """The forward works; a backward through the experts raises instead of leaving gradients out."""
    folder, ids = model_of("mixtral"), torch.tensor([[1, 2, 3]])
    if ours:
        model = lancebill.from_pretrained(folder, weights="int4-g32")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="lancebill")
        for name, tensor in model.named_parameters():
            tensor.requires_grad_(".experts." in name)
    logits = model(ids).logits
    with torch.no_grad():
        assert torch.equal(logits, model(ids).logits)
    with pytest.raises(LaunchError, match="no gradient"):
        logits.sum().backward()


def test_a_missing_tensor_is_an_error(model_of: Any, tmp_path: Path) -> None:
    source = model_of("qwen3_moe")
    with Checkpoint.open(source) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors if name != "model.norm.weight"}
        tiny._write(tmp_path / "cut", tensors, dict(checkpoint.config.model))
    with pytest.raises(CheckpointProblems, match=r"model\.norm\.weight"):
        lancebill.from_pretrained(tmp_path / "cut")


@pytest.mark.parametrize(("family", "spec"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "nvfp4")])
def test_packed_in_memory_equals_quantised_while_loading(
    model_of: Any, family: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = theirs(model_of(family))
    experts = next(module for module in in_memory.modules() if hasattr(module, "down_proj"))
    monkeypatch.setitem(SLICE_BYTES, "cpu", 3 * (experts.gate_up_proj[0].numel() + experts.down_proj[0].numel()))
    pack_experts(in_memory, weights=spec, activations="int8")
    loading = lancebill.from_pretrained(model_of(family), weights=spec, activations="int8")
    with torch.no_grad():
        assert torch.equal(in_memory(TOKENS).logits, loading(TOKENS).logits)
