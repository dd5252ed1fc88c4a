"""The rest of a model: every tensor that is no expert's, read when it is asked for.

Modules that a format quantised are given as the plain matrices they stand for, so that whoever
loads them needs to know nothing of formats.
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
class Lazy:
    """A tensor to be: `lazy[...]` reads it. What transformers does with a safetensors slice."""

    read: Callable[[], Tensor]

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self.read()


def rest_of(checkpoint: Checkpoint, manifest: Manifest, dtype: torch.dtype) -> dict[str, Lazy]:
    """Tensors by the names of the checkpoint; dequantised ones in `dtype`."""
    modules = quantized_modules(manifest, checkpoint.headers, checkpoint.read)
    spent = {source.tensor for module in modules for source in module.sources.values()}
    found = {
        name: Lazy(lambda name=name: checkpoint.read(name))  # type: ignore[misc]
        for name in checkpoint.headers
        if name not in manifest.expert_tensors and name not in spent
    }
    for module in modules:
        found[module.module + WEIGHT] = Lazy(lambda module=module: plain(checkpoint, module, dtype))  # type: ignore[misc]
        bias = module.sources.get("bias")
        if bias is not None:
            found[module.module + BIAS] = Lazy(lambda bias=bias: checkpoint.read(bias.tensor))  # type: ignore[misc]
    return found


def plain(checkpoint: Checkpoint, module: OtherModule, dtype: torch.dtype) -> Tensor:
    """The matrix of a quantised module, by rows so that fp32 copies stay small."""
    out = torch.empty(module.n, module.k, dtype=dtype)
    for first, part in row_chunks(module):
        weight = load_projection(checkpoint.read, part)
        values = dequantize(weight)
        factor = weight.inputs.get("pre_quant_scale")
        out[first : first + part.n] = values if factor is None else values * factor.float().reshape(1, -1)
    return out
