"""GGUF files as models of transformers: the config it reads from their metadata, its names for their tensors.

Only architectures whose other tensors are stored as transformers holds them: where llama.cpp turned, shifted or
split them, names alone would give other numbers.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.gguf import TYPE_IDS, TYPES
from lancebill.errors import CannotEncode, UnexpectedTensor, UnsupportedProblem
from lancebill.formats import detect
from lancebill.formats.base import Module
from lancebill.integrations.transformers.other_tensors import Lazy
from lancebill.numbers.codec import dequantize

ARCHITECTURES = ("qwen2moe", "qwen3moe")
SUFFIX = ".gguf"
_SHARED = "blk.0.ffn_gate_shexp.weight"
_GATE_OF_SHARED = ".ffn_gate_inp_shexp.weight"  # one row, stored as a vector


def config_of(checkpoint: Checkpoint) -> PretrainedConfig:
    """The model's config as transformers reads it from the file's metadata."""
    file = checkpoint.path
    found = checkpoint.config.model.get("architecture")
    if found not in ARCHITECTURES:
        raise UnsupportedProblem(
            "whole models are read from GGUF for few architectures",
            where=str(file),
            expected=" or ".join(ARCHITECTURES),
            got=found,
            hint="`RoutedExperts.from_checkpoint` reads the experts of any, layer by layer",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError:
        raise UnsupportedProblem(
            "transformers reads the metadata of GGUF with the package gguf", hint="pip install gguf"
        ) from None
    config.update(_widths(checkpoint))
    return config


def _widths(checkpoint: Checkpoint) -> dict[str, int]:
    """Those that transformers leaves at its defaults."""
    found = {"moe_intermediate_size": checkpoint.config.model.get("moe_intermediate_size")}
    shared = checkpoint.tensors.get(_SHARED)
    found["shared_expert_intermediate_size"] = None if shared is None else shared.stored.shape[0]
    return {name: width for name, width in found.items() if width is not None}


def rest_of(checkpoint: Checkpoint, experts: Container[str], model: nn.Module, dtype: torch.dtype) -> dict[str, Lazy]:
    """Every tensor but those of `experts`, under the names of `model`, an instance that needs no memory."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS[checkpoint.config.model["architecture"]](config=model.config)  # type: ignore[no-untyped-call]
    names = get_gguf_hf_weights_map(model, processor)
    rest = [name for name in checkpoint.tensors if name not in experts]
    for name in rest:
        if name not in names:
            raise UnexpectedTensor("the model has no place for this tensor", where=name)
    return {names[name]: Lazy(lambda name=name: _shaped(checkpoint, name, dtype)) for name in rest}  # type: ignore[misc]


def _shaped(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    tensor = plain(checkpoint, name, dtype)
    return tensor.unsqueeze(0) if name.endswith(_GATE_OF_SHARED) and tensor.ndim == 1 else tensor


def plain(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a GGUF file in `dtype`, through our own reader of its blocks."""
    stored = checkpoint.tensors[name].stored
    tensor = checkpoint.read(name)
    if stored.dtype != "U8":
        return tensor.to(dtype)
    kind = TYPES[TYPE_IDS[checkpoint.config.quant["types"][name]]]
    n, k = stored.shape[0], stored.shape[1] * kind.elements
    module = Module(name.removesuffix(".weight"), {".weight": stored})
    scheme = detect(checkpoint.config).scheme(checkpoint.config, module)
    return dequantize(scheme.decode({"codes": tensor}, n, k)).to(dtype)


def check_savable(checkpoint: Checkpoint) -> None:
    if checkpoint.path.is_file():
        raise CannotEncode("a model read from GGUF has no checkpoint of transformers to be saved as")
