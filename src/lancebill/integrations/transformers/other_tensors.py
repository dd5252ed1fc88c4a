"""All tensors of a checkpoint that belong to no expert, read lazily.

Quantised modules look like ordinary matrices (`StoredMatrix`), so transformers needs no support for the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import EllipsisType

import torch
from torch import Tensor

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.slices import reading_into
from lancebill.checkpoint.read.system_memory import large_from_system
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.other_modules import OtherModule, quantized_modules
from lancebill.integrations.transformers.stored_matrix import StoredMatrix

WEIGHT, BIAS = ".weight", ".bias"


class LazyTensor:
    """A tensor that is read by `lazy[...]`: transformers indexes safetensors slices this way."""

    def __init__(self, read: Callable[[], Tensor], quantized: str | None = None) -> None:
        """`quantized` is the name of the module whose matrix it is, if that is stored quantised."""
        self.read, self.quantized, self.is_read = read, quantized, False

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """Called by threads of transformers. What they allocate, they would not give back when it is converted."""
        with reading_into(large_from_system):
            tensor = self.read()
        self.is_read = True
        if isinstance(tensor, StoredMatrix):
            tensor.name = self.quantized
        return tensor


def read_quantized(tensors: Iterable[LazyTensor]) -> set[str]:
    """The quantised modules whose matrices were read."""
    return {tensor.quantized for tensor in tensors if tensor.is_read and tensor.quantized is not None}


def lazy_tensors(checkpoint: Checkpoint, manifest: Manifest, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Tensors by their names in the checkpoint; quantised modules are matrices that look like ones of `dtype`."""
    modules = quantized_modules(manifest, checkpoint.headers, checkpoint.read)
    parts = {source.tensor for module in modules for source in module.sources.values()}
    tensors = {
        name: LazyTensor(lambda name=name: checkpoint.read(name))  # type: ignore[misc]
        for name in checkpoint.headers
        if name not in manifest.expert_tensors and name not in parts
    }
    for module in modules:
        tensors[module.module + WEIGHT] = _lazily_read(checkpoint, module, dtype)
        bias = module.sources.get("bias")
        if bias is not None:
            tensors[module.module + BIAS] = LazyTensor(lambda bias=bias: checkpoint.read(bias.tensor))  # type: ignore[misc]
    return tensors


def _lazily_read(checkpoint: Checkpoint, module: OtherModule, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(
        lambda: StoredMatrix(replace(load_projection(checkpoint.read, module), bias=None), dtype), module.module
    )
