"""A cache of keys and values whose memory stays where it is, so that a decode step can be captured in a CUDA graph.

Called as usual, it behaves like transformers' dynamic cache: layers see exactly the tokens so far. In a step (`step`)
the position is a tensor, and layers see `span` columns, of which the model's mask hides those that are not filled yet.
A step changes nothing but the column at its position, so it can be repeated; `advance` completes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

LEAST_SPAN = 256
_KEEP_KEYS_AND_VALUES = {DynamicLayer, DynamicSlidingWindowLayer}


def span_of(tokens: int) -> int:
    """The columns that a step with this many tokens sees: powers of two, so that there are few graphs."""
    return max(LEAST_SPAN, 1 << (tokens - 1).bit_length())


def keeps_keys_and_values(config: Any) -> bool:
    """Whether a model's whole state is keys and values; other states are recurrent, compressed or indexed."""
    return all(type(layer) in _KEEP_KEYS_AND_VALUES for layer in DynamicCache(config=config).layers)


class _Place:
    """Where the step of a cache is; shared by its layers."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = self.index[0]  # the same memory
        self.span = 0  # columns that layers see; 0: not in a step
        self.moves = 0  # how often the memory of a layer was allocated: graphs hold addresses


class DecodeLayer(CacheLayerMixin):
    """Keys and values of one layer, `[batch, heads, capacity, dim]`. A window, if the layer has one, is masked."""

    is_sliding = False

    def __init__(self, place: _Place, capacity: int) -> None:
        super().__init__()
        self.place, self.capacity, self.length = place, capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = _columns(key_states, self.capacity)
        self.values = _columns(value_states, self.capacity)
        self.is_initialized = True
        self.place.moves += 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.place.span:
            self.keys.index_copy_(2, self.place.index, key_states)
            self.values.index_copy_(2, self.place.index, value_states)
            return self.keys[:, :, : self.place.span], self.values[:, :, : self.place.span]
        start, end = self.length, self.length + key_states.shape[-2]
        self.grow(span_of(end))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def grow(self, capacity: int) -> None:
        """Make room for this many columns; the memory moves if there was less."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        if self.is_initialized:
            self.place.moves += 1
            self.keys, self.values = self._larger(self.keys), self._larger(self.values)

    def _larger(self, old: Tensor) -> Tensor:
        made = _columns(old, self.capacity)
        made[:, :, : self.length] = old[:, :, : self.length]
        return made

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.span or self.length + query_length, 0

    def get_seq_length(self) -> Any:
        return self.place.position if self.place.span else self.length

    def get_max_length(self) -> int:
        return self.capacity


class DecodeCache(Cache):
    """The cache of one batch of sequences."""

    def __init__(self, layers: int, capacity: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.place = _Place(device)
        super().__init__(layers=[DecodeLayer(self.place, capacity) for _ in range(layers)])

    @property
    def is_compileable(self) -> bool:
        """transformers then makes a mask for every step, and not only where a plain cache needs one."""
        return bool(self.place.span)

    @property
    def length(self) -> int:
        return max(layer.length for layer in self.layers)

    @property
    def capacity(self) -> int:
        return min(layer.capacity for layer in self.layers)

    def grow(self, capacity: int) -> None:
        for layer in self.layers:
            layer.grow(capacity)

    @property
    def moves(self) -> int:
        """Changes when memory moves; a graph that was captured before is then of no use."""
        return self.place.moves

    @contextmanager
    def step(self, span: int) -> Iterator[None]:
        """Calls of the model inside are steps at the position of the next token."""
        self.place.span = span
        try:
            yield
        finally:
            self.place.span = 0

    def point(self) -> None:
        """Store the position of the next token where steps read it."""
        self.place.index.fill_(self.length)

    def advance(self, by: int = 1) -> None:
        """A step is complete; a negative number takes tokens back."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.length += by

    def restart(self) -> None:
        """Forget all tokens and keep the memory. Zeroed: a hidden column that is not finite would not stay hidden."""
        used = [layer for layer in self.layers if layer.is_initialized]
        for layer in used:
            layer.length = 0
        if used:
            with torch.no_grad():
                torch._foreach_zero_([tensor for layer in used for tensor in (layer.keys, layer.values)])


def _columns(like: Tensor, capacity: int) -> Tensor:
    """Zeros, in a tensor that later calls may write to in any mode."""
    with torch.inference_mode(False):
        return torch.zeros(*like.shape[:2], capacity, like.shape[3], dtype=like.dtype, device=like.device)
