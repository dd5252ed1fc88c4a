"""`from_pretrained(path, device="cuda")` on a fake GPU: what is packed and bound there is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_launches import Given, given_to_kernels  # noqa: F401

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # noqa: E402
from tiny_gguf import write  # noqa: E402
from tiny_gguf_models import MODELS, reference_of  # noqa: E402

import lancebill  # noqa: E402
from lancebill.formats import registry  # noqa: E402
from lancebill.integrations.transformers.pretrained import reload_experts  # noqa: E402
from lancebill.layer.packed_module import PackedModule  # noqa: E402
from lancebill.layer.quantized_linear import QuantizedLinear  # noqa: E402

GPU = torch.device("cuda", 0)


def dense(folder: Path) -> tuple[Path, dict[str, Any]]:
    assert tiny.save_model(transformers, "qwen3_moe", folder / "dense")
    return folder / "dense", {"weights": {"experts": "mxfp4", "rest": "int8"}}


def gptq(folder: Path) -> tuple[Path, dict[str, Any]]:
    source, _ = dense(folder)
    example = next(e for e in registry()["gptq"].examples() if e.name == "int4-g64:fp16-gptq")
    quant = {**example.config.quant, "dynamic": {"-:.*lm_head.*": {}}}
    tiny.quantized_copy(
        source, folder / "packed", folder / "plain", quant, example.scheme,
        lambda module: ".experts." in module or ".self_attn." in module,
    )  # fmt: skip
    return folder / "packed", {}


def blocks(folder: Path) -> tuple[Path, dict[str, Any]]:
    architecture, family, more = next(each for each in MODELS if each[1] == "qwen3_moe")
    write(reference_of(architecture, family, more), architecture, folder / "model.gguf")
    return folder / "model.gguf", {}


@pytest.mark.parametrize("make", [dense, gptq, blocks], ids=["quantised while loading", "gptq", "gguf"])
def test_a_model_is_loaded_and_called(given: Given, make: Any, tmp_path: Path) -> None:
    path, options = make(tmp_path)
    model = lancebill.from_pretrained(path, device="cuda", dtype=torch.bfloat16, **options)
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    assert {module.choice.backend.name for module in packed} == {"hopper"}
    assert sum(isinstance(module, QuantizedLinear) for module in packed) >= 8
    assert {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} == {str(GPU)}
    assert given.packing and given.all_on(GPU)
    tokens = torch.ones(1, 5, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(2):
            assert model(tokens.to(GPU)).logits.device == GPU
    assert len(given.bound) >= len(packed) and given.all_on(GPU)
    given.packing.clear()
    reload_experts(model)
    assert given.packing and given.all_on(GPU)
