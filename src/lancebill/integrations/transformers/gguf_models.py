"""Loads GGUF files as transformers models: the config from the metadata, and transformers' names for the tensors.

`gguf_rows.py` says for each architecture what llama.cpp names, orders and splits differently.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.ggml_types import TYPE_IDS, TYPES
from lancebill.errors import UnexpectedTensor, WrongShape
from lancebill.formats import detect
from lancebill.formats.base import Module
from lancebill.integrations.transformers.gguf_changes import Order
from lancebill.integrations.transformers.gguf_config import row_of
from lancebill.integrations.transformers.gguf_row import NAMES, WHOLE, GgufRow
from lancebill.integrations.transformers.other_tensors import WEIGHT, LazyTensor
from lancebill.integrations.transformers.stored_matrix import MixedRows, StoredMatrix, StoredMixture
from lancebill.numbers.codec import dequantize
from lancebill.numbers.weight import LogicalWeight, stack

SUFFIX = ".gguf"
_SUFFIXES = (".weight", ".bias")
# The same in the model; a parameter that is in no module of its own has none.
_PAIRS = (*((suffix, suffix) for suffix in _SUFFIXES), (_SUFFIXES[0], ""))

Read = Callable[[], Tensor]
Stored = LogicalWeight | Tensor


def lazy_tensors(
    checkpoint: Checkpoint, experts: Container[str], model: nn.Module, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """All tensors but those of `experts`, under the names of `model`, which may be on the meta device."""
    row, expected = row_of(checkpoint), model.state_dict()
    layers = checkpoint.config.model["num_hidden_layers"]
    further = tuple(f"blk.{layers + i}." for i in range(checkpoint.config.model.get("num_nextn_predict_layers", 0)))
    others = {name for name in checkpoint.tensors if name not in experts and not name.startswith(further)}
    tensors: dict[str, LazyTensor] = {}
    used = set[str]() if row.factors is None else {row.factors.short, row.factors.long}  # which the config has
    for stored, name, read in _plan(checkpoint, row, layers, model, dtype):
        if others.issuperset(stored) and name in expected and name not in tensors:
            used.update(stored)
            quantized = any(_is_quantized(checkpoint, each) for each in stored)
            module = name.removesuffix(WEIGHT) if quantized else None
            tensors[name] = LazyTensor(partial(_shaped, read, expected[name].shape), module)
    for name in (name for name in expected if name.endswith(row.zeros)):
        tensors[name] = LazyTensor(partial(torch.zeros, expected[name].shape))
    if others - used:
        raise UnexpectedTensor("the model has no such tensor", where=min(others - used))
    return tensors


def _shaped(read: Read, shape: torch.Size) -> Tensor:
    """A plain tensor in the model's shape: GGUF leaves out dimensions of 1."""
    tensor = read()
    if isinstance(tensor, StoredMatrix) or tensor.shape == shape or tensor.numel() != shape.numel():
        return tensor
    return tensor.reshape(shape)


def _plan(
    checkpoint: Checkpoint, row: GgufRow, layers: int, model: nn.Module, dtype: torch.dtype
) -> Iterator[tuple[tuple[str, ...], str, Read]]:
    """(stored names, name in the model, how to read it) of every tensor that a model of this architecture may have."""
    file = _Tensors(checkpoint, row, model.config, dtype)
    for stem, module in {**WHOLE, **row.outside}.items():
        for stored, suffix in _PAIRS:
            yield (stem + stored,), module + suffix, partial(file.read, stem + stored, stem)
    for layer in range(layers):
        block, prefix = f"blk.{layer}.", f"{row.layers}.{layer}."
        for stem, module in {**NAMES, **row.names}.items():
            for stored, suffix in _PAIRS:
                name = block + stem + stored
                yield (name,), prefix + module + suffix, partial(file.read, name, stem)
        for stored, name in row.whole.items():
            yield (block + stored,), prefix + name, partial(file.read, block + stored, stored)
        for stem, modules in row.divided.items():
            for module, order in modules.items():
                for suffix in _SUFFIXES:
                    name = block + stem + suffix
                    yield (name,), prefix + module + suffix, partial(file.read, name, stem, order)
        for module, stems in row.joined.items():
            names = tuple(f"{block}{stem}{_SUFFIXES[0]}" for stem in stems)
            join = partial(_join_latent, checkpoint, names, dtype) if row.latent else partial(file.join, names, module)
            yield names, prefix + module + _SUFFIXES[0], join


@dataclass(frozen=True)
class _Tensors:
    """Reads tensors of a file as its architecture has them; quantised matrices keep their blocks."""

    checkpoint: Checkpoint
    row: GgufRow
    config: Any
    dtype: torch.dtype

    def read(self, name: str, stem: str, order: Order | None = None) -> Tensor:
        """A tensor of the file; the row says by `stem` in which order its rows are stored, and how its values.

        Numbers keep their dtype here: the model rounds those that it does not keep in fp32.
        """
        stored = self._ordered(_read_blocks(self.checkpoint, name), name, order or self.row.orders.get(stem))
        stored = self._with_columns(stored, name, self.row.columns.get(stem))
        if isinstance(stored, LogicalWeight):
            return dequantize(stored) if stem in self.row.plain else StoredMatrix(stored, self.dtype)
        change = self.row.values.get(stem)
        return stored if change is None else change(stored.float(), name)

    def join(self, names: tuple[str, ...], module: str) -> Tensor:
        """Matrices over each other; they keep their blocks, of one type or of several."""
        parts = [_read_blocks(self.checkpoint, name) for name in names]
        blocks = [part for part in parts if isinstance(part, LogicalWeight)]
        order = self.row.orders.get(module)
        if len(blocks) == len(parts) and len({part.spec for part in blocks}) > 1:
            index = None if order is None else self._index(order, names[0], sum(part.n for part in blocks))
            return StoredMixture(MixedRows(tuple(blocks), index), self.dtype)
        dense = [read_dequantized(self.checkpoint, name, self.dtype) for name in names if len(blocks) < len(parts)]
        joined = self._ordered(torch.cat(dense) if dense else stack(blocks), names[0], order)
        return StoredMatrix(joined, self.dtype) if isinstance(joined, LogicalWeight) else joined

    def _ordered(self, stored: Stored, name: str, order: Order | None) -> Stored:
        if order is None:
            return stored
        if isinstance(stored, LogicalWeight):
            return stored.rows(self._index(order, name, stored.n))
        return stored[self._index(order, name, stored.shape[0])]

    def _with_columns(self, stored: Stored, name: str, order: Order | None) -> Stored:
        """Columns in the model's order; blocks stay where they are and say by an act-order which columns they hold."""
        if order is None:
            return stored
        index = self._index(order, name, stored.k if isinstance(stored, LogicalWeight) else stored.shape[1])
        if isinstance(stored, LogicalWeight):
            return replace(stored, perm=torch.argsort(index).to(torch.int32))
        return stored[:, index]

    def _index(self, order: Order, name: str, size: int) -> Tensor:
        try:
            return order(self.config, size)
        except (RuntimeError, ZeroDivisionError) as error:
            what = "this tensor cannot be divided by the heads that the metadata state"
            raise WrongShape(what, where=name, got=f"{size} rows or columns") from error


def _join_latent(checkpoint: Checkpoint, names: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    """Keys over values of each head. llama.cpp stores the keys' matrices transposed, so that no block can be kept."""
    keys, values = (_per_head(checkpoint, name, dtype) for name in names)
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _per_head(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    heads = checkpoint.tensors[name].stored.shape[0]
    matrix = read_dequantized(checkpoint, name, dtype)
    return matrix.view(heads, -1, matrix.shape[-1])


def read_dequantized(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a GGUF file in `dtype`; our own decoder dequantises its blocks."""
    stored = _read_blocks(checkpoint, name)
    return (dequantize(stored) if isinstance(stored, LogicalWeight) else stored).to(dtype)


def _is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return checkpoint.tensors[name].stored.dtype == "U8"


def _read_blocks(checkpoint: Checkpoint, name: str) -> LogicalWeight | Tensor:
    """A tensor as it is stored: a matrix of blocks in canonical form, or plain floats."""
    stored = checkpoint.tensors[name].stored
    tensor = checkpoint.read(name)
    if not _is_quantized(checkpoint, name):
        return tensor
    kind = TYPES[TYPE_IDS[checkpoint.config.quant["types"][name]]]
    tensor = tensor.flatten(0, -3)  # matrices of several heads over each other
    n, k = tensor.shape[0], tensor.shape[1] * kind.elements
    module = Module(name.removesuffix(".weight"), {".weight": stored})
    scheme = detect(checkpoint.config).scheme(checkpoint.config, module)
    return scheme.decode({"codes": tensor}, n, k)
