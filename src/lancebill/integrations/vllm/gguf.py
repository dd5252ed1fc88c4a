"""GGUF files as models of vLLM, which has not read them itself since 0.24.

vLLM reads config.json before it asks any parser or loader that a plugin can register. So a .gguf file is given to it as
a temporary folder: the config and the tokenizer from the file's metadata, and links to its tensors. The tensors come
from a loader of ours: experts as they are stored, for lancebill, and all others dequantised, under transformers' names.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from lancebill.backends.slow_choice import is_new
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.errors import CheckpointError, UnsupportedProblem
from lancebill.integrations.transformers import gguf_models
from lancebill.integrations.transformers.gguf_config import config_of
from lancebill.integrations.transformers.loaders import load_tokenizer, model_of
from lancebill.integrations.vllm.takeover import Takeover
from lancebill.layer.model_experts import ModelExperts
from lancebill.numbers.torch_defaults import torch_defaults

logger = init_logger("vllm.lancebill")

NAME = "gguf"  # of --load-format
CONFIG = "config.json"
ARCHITECTURES = ("qwen2moe", "qwen3moe", "minimax-m2")


class GgufModelLoader(BaseModelLoader):
    """Streams the tensors of a .gguf file into a model."""

    def download_model(self, model_config: Any) -> None:
        """The file is here: vLLM was given its path."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        model.load_weights(self.get_all_weights(model_config, model))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """For loading and for vLLM's `reload_weights`."""
        takeover: Takeover | None = model.lancebill_takeover
        if takeover is None or not all(decision.taken for decision in takeover.decisions.values()):
            why = "lancebill is off" if takeover is None else takeover.summary()
            raise UnsupportedProblem("vLLM cannot read the experts of a .gguf file itself", got=why)
        with Checkpoint.open(gguf_file(Path(model_config.model))) as checkpoint:
            yield from _tensors(checkpoint, Path(model_config.model), model_config.dtype)


def _tensors(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    with torch_defaults():
        experts = ModelExperts.from_checkpoint(checkpoint).manifest().expert_tensors
        with torch.device("meta"):
            model = model_of(folder)
        others = gguf_models.lazy_tensors(checkpoint, experts, model, dtype)
    plain = sum(lazy.quantized is not None for lazy in others.values())
    if plain and is_new(("dense layers of a GGUF file", str(checkpoint.path))):
        logger.warning("dense layers: %d quantised matrices of the file become plain ones of vLLM's", plain)
    for name in checkpoint.tensors:
        if name in experts:
            yield name, checkpoint.read(name)
    for name, lazy in others.items():
        with torch_defaults():
            tensor = lazy[...]
        yield name, tensor


def gguf_file(path: Path) -> Path:
    """The .gguf file at `path`: itself, or the only one (the first of a split model) in a folder."""
    if path.is_file():
        return path
    files = sorted(path.glob(f"*{gguf_models.SUFFIX}"))
    if not files or len(Checkpoint.open(files[0]).files) != len(files):
        raise CheckpointError("not one model", where=str(path), expected="one .gguf file", got=f"{len(files)} files")
    return files[0]


def is_gguf(path: Path) -> bool:
    """A .gguf file, or a folder that has one and no other tensors."""
    if path.is_dir():
        return any(path.glob(f"*{gguf_models.SUFFIX}")) and not any(path.glob("*.safetensors"))
    return path.suffix == gguf_models.SUFFIX and path.is_file()


def as_folder(path: Path) -> Path:
    """A folder that vLLM can read; `path` itself if it is one. A temporary folder is removed when the process ends."""
    if (path / CONFIG).exists():
        return path
    file = gguf_file(path)
    folder = Path(tempfile.mkdtemp(prefix="lancebill-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with Checkpoint.open(file) as checkpoint:
        _check_architecture(checkpoint)
        config = config_of(checkpoint)
        parts = checkpoint.files
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = config.dtype or torch.bfloat16
    config.save_pretrained(folder)
    load_tokenizer(file.parent, gguf_file=file.name).save_pretrained(folder)
    for part in parts:
        (folder / part.name).symlink_to(part.resolve())
    return folder


def _check_architecture(checkpoint: Checkpoint) -> None:
    """vLLM names tensors as published checkpoints do: only where these are the names of transformers' models."""
    architecture = checkpoint.config.model["architecture"]
    if architecture not in ARCHITECTURES:
        raise UnsupportedProblem(
            "vLLM does not serve this GGUF architecture with lancebill",
            where=str(checkpoint.path),
            expected=" or ".join(ARCHITECTURES),
            got=architecture,
            hint="`lancebill serve` without vLLM reads more of them",
        )


def point_to_folder(arguments: Any) -> None:
    """Let vLLM's arguments name a folder and our loader, if their model is a .gguf file."""
    path = Path(arguments.model)
    if is_gguf(path) and arguments.load_format == "auto":
        folder = as_folder(path)
        arguments.served_model_name = arguments.served_model_name or arguments.model
        arguments.tokenizer = None if arguments.tokenizer == arguments.model else arguments.tokenizer
        arguments.model, arguments.load_format = str(folder), NAME


def register_gguf() -> None:
    register_model_loader(NAME)(GgufModelLoader)
    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        point_to_folder(self)
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config
