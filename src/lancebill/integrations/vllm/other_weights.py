"""Quantised modules outside the experts, dequantised while they are loaded.

For checkpoints whose dense layers vLLM cannot read on this platform. A module's tensors are held until the last of
them has come; then vLLM gets one plain matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lancebill.checkpoint.load.dequantized import dequantized_module
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.other_modules import OtherModule, quantized_modules

WEIGHT, BIAS = ".weight", ".bias"


class OtherWeights:
    """Replaces the tensors of quantised modules in a stream by one matrix for each module."""

    def __init__(self, manifest: Manifest, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.modules = quantized_modules(manifest, checkpoint.headers, checkpoint.read)
        self._owners = {source.tensor: module for module in self.modules for source in module.sources.values()}

    def plain(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream with every quantised module dequantised."""
        held: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            module = self._owners.get(name)
            if module is None:
                yield name, tensor
                continue
            tensors = held.setdefault(module.module, {})
            tensors[name] = tensor
            if len(tensors) == len(module.sources):
                yield from self._dequantized(module, held.pop(module.module))

    def _dequantized(self, module: OtherModule, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        def read(name: str, index: tuple[int | slice, ...]) -> Tensor:
            return tensors[name][index] if index else tensors[name]

        yield module.module + WEIGHT, dequantized_module(read, module, self.dtype)
        bias = module.sources.get("bias")
        if bias is not None:
            yield module.module + BIAS, tensors[bias.tensor]
