"""Loads GGUF files as transformers models: the config from the metadata, and transformers' names for the tensors.

Only for architectures whose other tensors are stored as transformers holds them. Where llama.cpp permutes, shifts or
splits tensors, renaming them would not be enough.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.ggml_types import TYPE_IDS, TYPES
from lancebill.errors import CannotEncode, UnexpectedTensor, UnsupportedProblem
from lancebill.formats import detect
from lancebill.formats.base import Module
from lancebill.integrations.transformers.other_tensors import LazyTensor
from lancebill.integrations.transformers.stored_matrix import StoredMatrix
from lancebill.numbers.codec import dequantize
from lancebill.numbers.weight import LogicalWeight

ARCHITECTURES = ("qwen2moe", "qwen3moe", "minimax-m2")
SUFFIX = ".gguf"
_SHARED = "blk.0.ffn_gate_shexp.weight"
_GATE_OF_SHARED = ".ffn_gate_inp_shexp.weight"  # a matrix of one row, stored as a vector


def config_of(checkpoint: Checkpoint) -> PretrainedConfig:
    """The model's config as transformers reads it from the file's metadata."""
    file = checkpoint.path
    architecture = checkpoint.config.model.get("architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedProblem(
            "whole models of this GGUF architecture are not supported",
            where=str(file),
            expected=" or ".join(ARCHITECTURES),
            got=architecture,
            hint="`RoutedExperts.from_checkpoint` reads the experts of any architecture, layer by layer",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError:
        raise UnsupportedProblem(
            "transformers needs the package gguf to read GGUF metadata", hint="pip install gguf"
        ) from None
    config.update(_intermediate_sizes(checkpoint))
    return config


def _intermediate_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Sizes that transformers does not read from the metadata and leaves at its defaults."""
    sizes = {"moe_intermediate_size": checkpoint.config.model.get("moe_intermediate_size")}
    shared = checkpoint.tensors.get(_SHARED)
    sizes["shared_expert_intermediate_size"] = None if shared is None else shared.stored.shape[0]
    return {name: size for name, size in sizes.items() if size is not None}


def lazy_tensors(
    checkpoint: Checkpoint, experts: Container[str], model: nn.Module, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """All tensors but those of `experts`, under the names of `model`, which may be on the meta device."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS[checkpoint.config.model["architecture"]](config=model.config)
    names = get_gguf_hf_weights_map(model, processor)
    others = [name for name in checkpoint.tensors if name not in experts]
    for name in others:
        if name not in names:
            raise UnexpectedTensor("the model has no such tensor", where=name)
    return {names[name]: LazyTensor(lambda name=name: _read(checkpoint, name, dtype)) for name in others}  # type: ignore[misc]


def _read(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor in the shape that transformers expects; quantised matrices keep their blocks."""
    stored = _read_blocks(checkpoint, name)
    if isinstance(stored, LogicalWeight):
        return StoredMatrix(stored, dtype)
    tensor = stored.to(dtype)
    return tensor.unsqueeze(0) if name.endswith(_GATE_OF_SHARED) and tensor.ndim == 1 else tensor


def read_dequantized(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a GGUF file in `dtype`; our own decoder dequantises its blocks."""
    stored = _read_blocks(checkpoint, name)
    return (dequantize(stored) if isinstance(stored, LogicalWeight) else stored).to(dtype)


def _read_blocks(checkpoint: Checkpoint, name: str) -> LogicalWeight | Tensor:
    """A tensor as it is stored: a matrix of blocks in canonical form, or plain floats."""
    stored = checkpoint.tensors[name].stored
    tensor = checkpoint.read(name)
    if stored.dtype != "U8":
        return tensor
    kind = TYPES[TYPE_IDS[checkpoint.config.quant["types"][name]]]
    n, k = stored.shape[0], stored.shape[1] * kind.elements
    module = Module(name.removesuffix(".weight"), {".weight": stored})
    scheme = detect(checkpoint.config).scheme(checkpoint.config, module)
    return scheme.decode({"codes": tensor}, n, k)


def check_savable(checkpoint: Checkpoint) -> None:
    if checkpoint.path.is_file():
        raise CannotEncode("a model that was loaded from GGUF cannot be saved as a transformers checkpoint")
