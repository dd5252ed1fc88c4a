"""What is said of a model that vLLM builds, and which loaders are left to vLLM. vLLM's modules are stand-ins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from layer_checkpoints import make_checkpoint

from lancebill.backends.base import Reason
from lancebill.errors import UnsupportedFormat
from lancebill.layer.recipe import LoadOptions
from lancebill.testing.checkpoints import save

OURS = "lancebill.integrations.vllm"
OPTIONS = LoadOptions(top_k=2, activation="silu")
LORA = (Reason("lora", "no adapters"),)


class Log:
    """vLLM's logger."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *values: object) -> None:
        self.lines.append(text % values)

    warning = info


class Ours:
    """Our quantisation config, in place of vLLM's."""


def leave_to_vllm(vllm_config: Any) -> None:
    vllm_config.quant_config = "vLLM's"


class Engine:
    """The plugin's part that builds models, and what vLLM tells it."""

    def __init__(self, building: Any, log: Log, folder: Path) -> None:
        self.building, self.log, self.folder = building, log, folder

    def build(
        self,
        refusals: tuple[Reason, ...] = (),
        load_format: str = "auto",
        device: str = "cpu",
        quant_config: Any = None,
        **section: Any,
    ) -> Any:
        """Builds a model of two layers; returns vLLM's quantisation config of the layers, and that of later."""
        vllm_config = SimpleNamespace(
            additional_config={"lancebill": section},
            load_config=SimpleNamespace(load_format=load_format),
            model_config=SimpleNamespace(model=str(self.folder), revision=None, dtype=torch.bfloat16),
            device_config=SimpleNamespace(device_type=device),
            quant_config=quant_config,
        )
        self.building.get_current_vllm_config = lambda: vllm_config
        with self.building.building():
            meanwhile = vllm_config.quant_config
            for layer in (0, 1):
                takeover = self.building.current_takeover()
                if takeover is not None:
                    takeover.decide(layer, OPTIONS, refusals)
        return meanwhile, vllm_config.quant_config


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    log = Log()
    stands: dict[str, dict[str, Any]] = {
        "vllm": {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        "vllm.config": {"get_current_vllm_config": None},
        "vllm.logger": {"init_logger": lambda name: log},
        f"{OURS}.dense_config": {"DequantizedConfig": Ours, "leave_to_vllm": leave_to_vllm, "offering_config": None},
        f"{OURS}.linear": {"LinearMethod": None},
        f"{OURS}.gguf": {"NAME": "gguf", "gguf_file": None},
    }
    for name, values in stands.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"{OURS}.building", raising=False)
    building = importlib.import_module(f"{OURS}.building")
    yield Engine(building, log, save(make_checkpoint(), tmp_path / "m"))
    monkeypatch.delitem(sys.modules, f"{OURS}.building")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "layers 0-1: lancebill's cpu"),
        ({"refusals": LORA}, "layers 0-1: vLLM (no adapters"),
        ({"weights": [["7", None]]}, "layers 0-1: vLLM (no rule names them)"),
        ({"weights": [["1", None]]}, "layers 0: vLLM (no rule names them); layers 1: lancebill's"),
        ({"backend": "hopper"}, "layers 0-1: vLLM (hopper on cpu: hopper does not compute this"),
        ({"load_format": "sharded_state"}, "leaves this model to vLLM: --load-format: this loader copies vLLM's own"),
    ],
)
def test_a_line_says_who_computes_the_experts(engine: Engine, given: dict[str, Any], words: str) -> None:
    engine.build(**given)
    assert len(engine.log.lines) == 1 and words in engine.log.lines[0]


def test_a_warning_says_that_quantised_dense_layers_become_plain(engine: Engine, tmp_path: Path) -> None:
    made = make_checkpoint()
    for name, tensor in list(made.tensors.items()):
        made.tensors[name.replace("mlp.experts.0.gate_proj", "self_attn.q_proj")] = tensor
    engine.folder = save(made, tmp_path / "attention")
    engine.build(quant_config=Ours())
    assert len(engine.log.lines) == 2 and "layers 0-1: lancebill's cpu" in engine.log.lines[1]
    assert engine.log.lines[0].startswith("dense layers: 2 quantised modules become plain ones of vLLM's")


def test_nothing_is_said_of_other_models(engine: Engine) -> None:
    engine.build(mode="off")
    with engine.building.building():
        pass
    assert not engine.log.lines


def test_a_checkpoint_of_which_nothing_is_taken_is_read_as_vllm_reads_it(engine: Engine) -> None:
    """Nobody would dequantise the dense layers that our config makes plain. It stays so after the model was built."""
    assert engine.build(quant_config="another", mode="off") == ("another", "another")
    assert engine.build(quant_config=Ours(), mode="off") == ("vLLM's", "vLLM's")
    assert engine.build(quant_config=Ours(), load_format="sharded_state") == ("vLLM's", "vLLM's")
    (engine.folder / "config.json").write_text("{}")
    assert engine.build(quant_config=Ours()) == ("vLLM's", "vLLM's")


def test_random_weights_without_tensors(engine: Engine) -> None:
    for file in engine.folder.glob("*.safetensors*"):
        file.unlink()
    engine.build(load_format="dummy", gpu_memory="1GiB")  # on a CPU there is nothing to limit
    assert "lancebill's cpu" in engine.log.lines[0]


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded", "tensorizer", "ipc_cache"])
def test_models_that_cannot_be_left_to_vllm(engine: Engine, load_format: str) -> None:
    """`require`, or a limit that vLLM does not know."""
    for section in ({"mode": "require"}, {"gpu_memory": "1GiB", "device": "cuda"}):
        with pytest.raises(UnsupportedFormat, match=f"no expert tensors to take; got {load_format}"):
            engine.build(load_format=load_format, **section)
