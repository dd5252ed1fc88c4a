"""All tensors of a checkpoint that belong to no expert, read lazily.

Quantised modules are dequantised, so transformers sees ordinary matrices and needs no support for the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from lancebill.checkpoint.load.load_experts import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.other_modules import OtherModule, quantized_modules, row_chunks
from lancebill.numbers.codec import dequantize

WEIGHT, BIAS = ".weight", ".bias"


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read by `lazy[...]`: transformers indexes safetensors slices this way."""

    read: Callable[[], Tensor]

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self.read()


def lazy_tensors(checkpoint: Checkpoint, manifest: Manifest, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Tensors by their names in the checkpoint; quantised modules are dequantised to `dtype`."""
    modules = quantized_modules(manifest, checkpoint.headers, checkpoint.read)
    parts = {source.tensor for module in modules for source in module.sources.values()}
    tensors = {
        name: LazyTensor(lambda name=name: checkpoint.read(name))  # type: ignore[misc]
        for name in checkpoint.headers
        if name not in manifest.expert_tensors and name not in parts
    }
    for module in modules:
        tensors[module.module + WEIGHT] = LazyTensor(lambda module=module: _dequantized(checkpoint, module, dtype))  # type: ignore[misc]
        bias = module.sources.get("bias")
        if bias is not None:
            tensors[module.module + BIAS] = LazyTensor(lambda bias=bias: checkpoint.read(bias.tensor))  # type: ignore[misc]
    return tensors


def _dequantized(checkpoint: Checkpoint, module: OtherModule, dtype: torch.dtype) -> Tensor:
    """The matrix of a quantised module, computed in row chunks to keep the fp32 intermediates small."""
    out = torch.empty(module.n, module.k, dtype=dtype)
    for first, part in row_chunks(module):
        weight = load_projection(checkpoint.read, part)
        values = dequantize(weight)
        factor = weight.inputs.get("pre_quant_scale")
        out[first : first + part.n] = values if factor is None else values * factor.float().reshape(1, -1)
    return out
