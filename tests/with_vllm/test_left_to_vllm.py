"""What lancebill does not take is vLLM's as it is without the plugin: its config of the checkpoint, its errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import engine
import models


def quantised_attention(folder: Path) -> Path:
    """A model of which only the attention is quantised, in a form that vLLM's CPU build computes in bf16."""
    import tiny

    from lancebill.formats import registry

    made = folder / "quantised-attention"
    if not made.exists():
        examples = registry()["compressed-tensors"].examples()
        example = next(each for each in examples if str(each.scheme.spec) == "int4-g64:fp16")
        quant = {**example.config.quant, "ignore": ["lm_head", "re:.*gate$", "re:.*experts.*"]}
        source = models.plain_model("qwen3_moe", folder)
        tiny.quantized_copy(source, made, folder / "plain", quant, example.scheme, lambda name: ".self_attn." in name)
    return made


def config_of(llm: Any) -> tuple[str, str]:
    config = llm.llm_engine.vllm_config
    return type(config.quant_config).__name__, config.model_config.quantization


def test_quantised_dense_layers_without_a_takeover(folder: Path) -> None:
    """With the mode off, and where lancebill cannot read the checkpoint."""
    model = quantised_attention(folder)
    unreadable = folder / "unreadable"
    shutil.copytree(model, unreadable)
    shutil.copy(model / "model.safetensors", unreadable / "consolidated.safetensors")  # every tensor twice
    with engine.engine(model, {}, dtype="bfloat16") as llm:
        assert config_of(llm) == ("DequantizedConfig", "lancebill")
        want = engine.ask(llm)
    for path, settings in ((model, {"mode": "off"}), (unreadable, {})):
        with engine.engine(path, settings, dtype="bfloat16") as llm:
            assert engine.takeover_of(llm) is None
            assert config_of(llm) == ("CompressedTensorsConfig", "compressed-tensors")
            assert engine.ask(llm).tokens == want.tokens


def test_experts_that_are_left_have_the_config_that_vllm_chooses(folder: Path) -> None:
    """ModelOpt's formats share one name. vLLM's config of the name itself refuses NVFP4."""
    from lancebill.integrations.vllm import dense_config

    model = models.quantised_everywhere("glm4_moe", "nvfp4", folder)
    chosen: list[str] = []

    def noted(vllm_config: Any, ours: Any) -> Any:
        chosen.append(type(made(vllm_config, ours)[1]).__name__)
        raise LookupError  # its CPU build has no kernels for these experts

    made, dense_config.stock_config = dense_config.stock_config, noted
    try:
        with pytest.raises(LookupError), engine.engine(model, {"weights": [["7", None]]}, dtype="bfloat16"):
            pass
    finally:
        dense_config.stock_config = made
    assert chosen == ["ModelOptNvFp4Config"]


FAILS = """
import vllm.engine.arg_utils as arguments
from vllm import ModelRegistry
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.model_executor.model_loader.reload import layerwise
from lancebill.integrations.vllm import dense_config, plugin

def state():
    replaced = [(arguments.EngineArgs, "create_engine_config"), (CpuCommunicator, "all_gatherv")]
    replaced += [(layerwise, "finalize_layerwise_processing"), (ShardedStateLoader, "save_model")]
    functions = [getattr(owner, name) for owner, name in replaced]
    return dict(ModelRegistry.models), dict(op_registry_oot), list(QUANTIZATION_METHODS), functions

def fail(name):
    raise RuntimeError("boom")

before = state()
dense_config.register_quantization_config = fail
plugin.register()
assert all(a == b for a, b in zip(state(), before))
"""


def test_a_registration_that_fails_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "lancebill is not used: RuntimeError: boom" in done.stderr + done.stdout
