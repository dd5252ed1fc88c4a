"""Quantised modules outside the experts: as plain matrices that still know the numbers they stand for.

A module's tensors are held until the last of them has come; then vLLM gets one dequantised matrix. vLLM's loader
carries it to its layer. There `LinearMethod` may compute with the stored numbers instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lancebill.checkpoint.load.dequantized import dequantized_module
from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.other_modules import OtherModule, quantized_modules
from lancebill.numbers.weight import LogicalWeight

WEIGHT, BIAS = ".weight", ".bias"


class DequantizedTensor(Tensor):
    """A plain matrix that knows the quantised one it was made from. What torch computes with it is a plain tensor."""

    stored: LogicalWeight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, values: Tensor, stored: LogicalWeight) -> DequantizedTensor:
        made = values.as_subclass(cls)
        made.stored = stored
        return made


class OtherWeights:
    """Replaces the tensors of quantised modules in a stream by one matrix for each module."""

    def __init__(
        self,
        manifest: Manifest,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        keep: bool = False,
        copies: bool = False,
    ) -> None:
        """`keep`: the matrices are `DequantizedTensor`s. `copies`: the loader reuses the memory of its tensors."""
        self.dtype, self.keep, self.copies = dtype, keep, copies
        self.modules = quantized_modules(manifest, checkpoint.headers, checkpoint.read)
        self._owners = {source.tensor: module for module in self.modules for source in module.sources.values()}

    def owns(self, name: str) -> bool:
        """Whether the tensor is a quantised module's."""
        return name in self._owners

    def plain(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream with every quantised module dequantised."""
        held: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            module = self._owners.get(name)
            if module is None:
                yield name, tensor
                continue
            tensors = held.setdefault(module.module, {})
            tensors[name] = tensor.clone() if self.copies else tensor
            if len(tensors) == len(module.sources):
                yield from self._dequantized(module, held.pop(module.module))

    def _dequantized(self, module: OtherModule, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        def read(name: str, index: tuple[int | slice, ...]) -> Tensor:
            return tensors[name][index] if index else tensors[name]

        values = dequantized_module(read, module, self.dtype)
        if self.keep:
            values = DequantizedTensor.of(values, replace(load_projection(read, module), bias=None))
        yield module.module + WEIGHT, values
        bias = module.sources.get("bias")
        if bias is not None:
            yield module.module + BIAS, tensors[bias.tensor]
