"""Steps of `generate` on a CPU: the native decoder computes them, and prompts that are short enough to gain by it.

A model's first decode step is computed by both ways. Native ones are used from then on if they give the model's own
logits; how long both took says which prompts are short enough (`native_limit`).
"""

from __future__ import annotations

import ctypes
import time
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
from lancebill.native.address import host_address

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

    def prove(self, found: Tensor, expected: Tensor, seconds: float, own_seconds: float) -> Reason | None:
        """Compare the logits of a native step with the model's own, and the time."""
        difference = float((found - expected).norm() / expected.norm())
        self.proven = difference <= MOST_DIFFERENCE
        if not self.proven:
            self._refused = Reason("native", f"a native step gives other logits ({difference:.0%} off)")
        elif self.decoder is not None:
            self.decoder.settle(own_seconds, seconds)
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
            arrays.append((ctypes.c_void_p * len(own))(*map(host_address, own)))
        return cls(cache.moves, padding, arrays)


class NativeSteps:
    """The steps of one call of `generate`. `refused` says why transformers computes them instead."""

    busy = True

    def __init__(self, cache: DecodeCache, shared: SharedDecoder) -> None:
        self.cache, self.shared = cache, shared
        self.refused: Reason | None = None
        self._rows: CacheRows | None = None

    def run(self, model: Any, given: Mapping[str, Any]) -> Any:
        """One call of the model: native if it appends few tokens to the sequences."""
        tokens = given.get("input_ids")
        if self.refused is not None or tokens is None or not self._is_small(tokens):
            return model(**given)
        new = tokens.shape[1]
        self.cache.grow(span_of(self.cache.length + new))
        with self.shared.lock:
            self.refused = self._unsuitable(given)
            start = time.thread_time()
            logits = None if self.refused is not None else self._step(tokens.tolist())
            seconds = time.thread_time() - start
        if logits is None:
            return model(**given)
        if self.shared.proven:
            self.cache.advance(new)
            return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)
        start = time.thread_time()
        result = model(**given)  # it stores its own keys and values over those of the native step
        own_seconds = time.thread_time() - start
        self.refused = self.shared.prove(logits, result.logits.float(), seconds, own_seconds)
        return result

    def _is_small(self, tokens: Tensor) -> bool:
        """Whether a call is a decode step, or a prompt short enough for native steps to be faster."""
        if tokens.shape[1] == 1 and self.cache.length > 0:
            return True
        decoder = self.shared.decoder
        return decoder is not None and self.shared.proven and tokens.numel() <= decoder.most_tokens

    def _step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of each sequence, `[sequences, 1, vocabulary]`."""
        decoder, rows, length = self.shared.decoder, self._rows, self.cache.length
        assert decoder is not None and rows is not None
        ids, positions, caches, last = list[int](), list[int](), list[int](), list[int]()
        for own, hidden, array in zip(tokens, rows.padding, rows.arrays):
            shown = own[max(0, hidden - length) :]
            end = length + len(own) - hidden
            ids += shown
            positions += range(end - len(shown), end)
            caches += [ctypes.addressof(array)] * len(shown)
            last.append(len(ids) - 1)
        return decoder.step(ids, positions, [self.cache.capacity] * len(ids), caches, last).unsqueeze(1)

    def _unsuitable(self, given: Mapping[str, Any]) -> Reason | None:
        """Why a call cannot be native; the first of `generate` also finds the rows of its sequences."""
        decoder, (batch, new) = self.shared.decoder, given["input_ids"].shape
        if decoder is None:
            return Reason("native", "the model has changed")
        if self._rows is None:
            unknown = [name for name, value in given.items() if value is not None and name not in _FOLLOWED]
            if unknown:
                return Reason("native", f"the model takes {', '.join(unknown)}")
            if batch > decoder.most_tokens:
                return Reason("native", f"more than {decoder.most_tokens} sequences")
        if self._rows is None or self._rows.moves != self.cache.moves:
            padding = _padding(given.get(MASK), batch)
            if padding is None:
                return Reason("native", "a mask that hides more than padding before the prompt")
            if max(padding) >= self.cache.length + new:
                return Reason("native", "a mask that hides a whole prompt")
            _allocate(self.cache, decoder, batch)
            if _kinds(self.cache) != [(s.layer, s.heads, s.dim, decoder.cache_type) for s in decoder.caches]:
                return Reason("native", "keys and values of other sizes or types than the steps have")
            self._rows = CacheRows.of(self.cache, padding)
        if not _count_tokens(given.get("position_ids"), self.cache.length, new, self._rows.padding):
            return Reason("native", "positions that do not count the tokens")
        return None


def _allocate(cache: DecodeCache, decoder: NativeDecoder, batch: int) -> None:
    """Memory of the layers that the model itself has not written to yet."""
    for shape in decoder.caches:
        layer = cache.layers[shape.layer]
        if not layer.is_initialized:
            like = torch.empty(batch, shape.heads, 0, shape.dim, dtype=decoder.cache_type, device="cpu")
            layer.lazy_initialization(like, like)


def _kinds(cache: DecodeCache) -> list[tuple[int, int, int, torch.dtype]]:
    return [
        (index, layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype)
        for index, layer in enumerate(cache.layers)
        if layer.keys.shape == layer.values.shape and layer.keys.dtype == layer.values.dtype
    ]


def _padding(mask: Tensor | None, rows: int) -> Sequence[int] | None:
    """Hidden columns at the start of each row; None if others are hidden."""
    if mask is None:
        return [0] * rows
    if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()) or bool((mask.long().diff(dim=1) < 0).any()):
        return None
    hidden: list[int] = (mask == 0).sum(dim=1).tolist()
    return hidden


def _count_tokens(positions: Tensor | None, length: int, new: int, padding: Sequence[int]) -> bool:
    """Whether each new token's position equals the number of unpadded tokens before it."""
    if positions is None:
        return False
    for row, hidden in zip(positions.expand(len(padding), -1).tolist(), padding):
        first = max(length, hidden)  # columns before are padding, whatever their positions
        if row[first - length :] != list(range(first - hidden, length + new - hidden)):
            return False
    return True
