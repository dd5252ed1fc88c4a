"""Decode steps of `generate` on a CPU: the native decoder computes them, in the cache of the prompt.

A model's first step is computed by both, and the native ones are used if they give the model's own logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from lancebill.backends.base import Reason
from lancebill.integrations.transformers.decode_cache import DecodeCache, span_of
from lancebill.integrations.transformers.decode_graphs import CACHE, MASK
from lancebill.integrations.transformers.native_decoder import NativeDecoder, native_decoder

MOST_DIFFERENCE = 0.2  # of the norm of the logits: 16-bit models differ a little, wrong steps much more
# Arguments of a model that steps follow; `cache_position` says again what the cache knows.
_FOLLOWED = {"input_ids", MASK, "position_ids", "cache_position", CACHE, "use_cache", "return_dict", "logits_to_keep"}


class SharedDecoder:
    """The native decoder of a model, for all calls of `generate`; made again when the model has changed."""

    def __init__(self) -> None:
        self.lock = Lock()  # steps share buffers
        self.decoder: NativeDecoder | None = None
        self.proven = False
        self._refused: Reason | None = None
        self._stamp: Hashable = None

    def refresh(self, model: Any, stamp: Hashable) -> Reason | None:
        """Why this model has none."""
        with self.lock:
            if stamp == self._stamp and (self.decoder is None or self.decoder.current()):
                return self._refused
            found = native_decoder(model)
            self.decoder = found if isinstance(found, NativeDecoder) else None
            self._refused = Reason("native", found) if isinstance(found, str) else None
            self.proven, self._stamp = False, stamp
            return self._refused

    def prove(self, found: Tensor, expected: Tensor) -> Reason | None:
        """Compare the logits of a native step with the model's own."""
        difference = float((found - expected).norm() / expected.norm())
        self.proven = difference <= MOST_DIFFERENCE
        if not self.proven:
            self._refused = Reason("native", f"a native step gives other logits ({difference:.0%} off)")
        return self._refused


@dataclass(frozen=True)
class CacheRows:
    """Where the keys and values of each row of a batch begin: after its padding."""

    moves: int  # of the cache, when the addresses were taken
    padding: Sequence[int]  # columns before the first token
    arrays: Sequence[Any]  # for each row, addresses of the keys and values of each layer

    @classmethod
    def of(cls, cache: DecodeCache, padding: Sequence[int]) -> CacheRows:
        arrays = []
        for row, hidden in enumerate(padding):
            own = [tensor[row, 0, hidden] for layer in cache.layers for tensor in (layer.keys, layer.values)]
            arrays.append((ctypes.c_void_p * len(own))(*(tensor.data_ptr() for tensor in own)))
        return cls(cache.moves, padding, arrays)


class NativeSteps:
    """The steps of one call of `generate`. `refused` says why transformers computes them instead."""

    busy = True

    def __init__(self, cache: DecodeCache, shared: SharedDecoder) -> None:
        self.cache, self.shared = cache, shared
        self.refused: Reason | None = None
        self._rows: CacheRows | None = None

    def run(self, model: Any, given: Mapping[str, Any]) -> Any:
        """One call of the model: a native step if it continues every sequence by one token."""
        tokens = given.get("input_ids")
        if self.refused is not None or tokens is None or tokens.shape[1] != 1:
            return model(**given)
        self.cache.grow(span_of(self.cache.length + 1))
        with self.shared.lock:
            self.refused = self._unsuitable(given)
            logits = None if self.refused is not None else self._step(tokens[:, 0].tolist())
        if logits is None:
            return model(**given)
        if self.shared.proven:
            self.cache.advance()
            return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)
        result = model(**given)  # it stores its own keys and values over those of the native step
        self.refused = self.shared.prove(logits, result.logits.float())
        return result

    def _step(self, tokens: Sequence[int]) -> Tensor:
        decoder, rows, count = self.shared.decoder, self._rows, len(tokens)
        assert decoder is not None and rows is not None
        positions = [self.cache.length - hidden for hidden in rows.padding]
        addresses = [ctypes.addressof(array) for array in rows.arrays]
        return decoder.step(tokens, positions, [self.cache.capacity] * count, addresses, range(count)).unsqueeze(1)

    def _unsuitable(self, given: Mapping[str, Any]) -> Reason | None:
        """Why a step cannot be native; the first step of a call also finds the rows of its sequences."""
        decoder = self.shared.decoder
        if decoder is None:
            return Reason("native", "the model has changed")
        if self._rows is None:
            unknown = [name for name, value in given.items() if value is not None and name not in _FOLLOWED]
            if unknown:
                return Reason("native", f"the model takes {', '.join(unknown)}")
            if len(given["input_ids"]) > decoder.most_rows:
                return Reason("native", f"more than {decoder.most_rows} sequences")
            if _kinds(self.cache) != [(s.layer, s.heads, s.dim, decoder.cache_type) for s in decoder.caches]:
                return Reason("native", "keys and values of other sizes or types than the steps have")
        if self._rows is None or self._rows.moves != self.cache.moves:
            padding = _padding(given.get(MASK), len(given["input_ids"]))
            if padding is None:
                return Reason("native", "a mask that hides more than padding before the prompt")
            self._rows = CacheRows.of(self.cache, padding)
        positions = given.get("position_ids")
        expected = [[self.cache.length - hidden] for hidden in self._rows.padding]
        if positions is None or positions.expand(len(expected), -1).tolist() != expected:
            return Reason("native", "positions that do not count the tokens")
        return None


def _kinds(cache: DecodeCache) -> list[tuple[int, int, int, torch.dtype]]:
    return [
        (index, layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype)
        for index, layer in enumerate(cache.layers)
        if layer.keys.shape == layer.values.shape
    ]


def _padding(mask: Tensor | None, rows: int) -> Sequence[int] | None:
    """Hidden columns at the start of each row; None if others are hidden."""
    if mask is None:
        return [0] * rows
    if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()) or bool((mask.long().diff(dim=1) < 0).any()):
        return None
    hidden: list[int] = (mask == 0).sum(dim=1).tolist()
    return hidden
