"""Runs a transformers model on tokens of several sequences at once.

`RaggedModel` lays the new tokens of all sequences in one row, prompts and single tokens alike, so that every matrix is
read once for all of them and without padding. Only attention depends on the boundaries of sequences: transformers
calls our attention function, which uses each sequence's own keys and values. Other models (recurrent layers, custom
attention, positions that depend on the longest sequence) run one sequence at a time (`SeparateModel`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from lancebill.serving.runners import KeysShape, SmallSteps
from lancebill.serving.whole_prompts import DynamicAngles

ATTENTION = "lancebill_ragged"
FIRST_CAPACITY = 64  # tokens; doubled whenever it is used up
MOST_UNUSED = 1024  # tokens that a sequence has memory for and does not hold


def room(tokens: int) -> int:
    """How many tokens a sequence of so many gets memory for."""
    doubled = 1 << (tokens - 1).bit_length()
    return max(FIRST_CAPACITY, min(doubled, -(-tokens // MOST_UNUSED) * MOST_UNUSED))


class KeysValues:
    """The keys and values of one sequence, for all layers of a model."""

    def __init__(self) -> None:
        self.length = 0  # tokens of completed steps
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._addresses: Any = None

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return next((int(keys.shape[2]) for keys, _ in self._layers.values()), 0)

    @torch.inference_mode()
    def beginning(self, count: int, capacity: int) -> KeysValues:
        """A copy of the first `count` tokens, with memory for `capacity`."""

        def copied(stored: Tensor) -> Tensor:
            own = stored.new_empty(1, stored.shape[1], capacity, stored.shape[3])
            own[:, :, :count] = stored[:, :, :count]
            return own

        copy = KeysValues()
        copy.length = count
        copy._layers = {layer: (copied(keys), copied(values)) for layer, (keys, values) in self._layers.items()}
        return copy

    def reserve(self, shapes: Sequence[KeysShape], dtype: torch.dtype, end: int) -> tuple[int, int]:
        """Make room for `end` tokens: the capacity, and the address of the array of all addresses."""
        last = self._layers.get(shapes[-1].layer)
        if last is None or last[0].shape[2] < end or self._addresses is None:
            for shape in shapes:
                like = torch.empty(1, shape.heads, 0, shape.dim, dtype=dtype, device="cpu")
                self._grow(shape.layer, like, like, end)
            pairs = [self._layers[layer] for layer in range(max(self._layers) + 1)]
            addresses = [tensor.data_ptr() for pair in pairs for tensor in pair]
            self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        return self._layers[shapes[0].layer][0].shape[2], ctypes.addressof(self._addresses)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store those of new tokens, `[1, heads, tokens, dim]`; all of the sequence so far."""
        end = self.length + keys.shape[2]
        stored = self._grow(layer, keys, values, end)
        stored[0][:, :, self.length : end] = keys
        stored[1][:, :, self.length : end] = values
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def _grow(self, layer: int, keys: Tensor, values: Tensor, end: int) -> tuple[Tensor, Tensor]:
        stored = self._layers.get(layer)
        if stored is None or stored[0].shape[2] < end:
            old = (None, None) if stored is None else stored
            stored = self._grown(old[0], keys, end), self._grown(old[1], values, end)
            self._layers[layer], self._addresses = stored, None
        return stored

    def _grown(self, old: Tensor | None, new: Tensor, end: int) -> Tensor:
        larger = new.new_empty(1, new.shape[1], room(end), new.shape[3])
        if old is not None:
            larger[:, :, : self.length] = old[:, :, : self.length]
        return larger


class Slices:
    """Which columns of a step belong to which sequence."""

    def __init__(self, sequences: Sequence[KeysValues], counts: Sequence[int]) -> None:
        self.sequences, self.counts = sequences, counts

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """Attention of each sequence to itself: `[1, heads, tokens, dim]`."""
        parts = zip(
            self.sequences,
            query.split(list(self.counts), dim=2),
            key.split(list(self.counts), dim=2),
            value.split(list(self.counts), dim=2),
        )
        return torch.cat([attention(q, *sequence.append(layer, k, v), **how) for sequence, q, k, v in parts], dim=2)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of the last tokens of one sequence to all its tokens."""
    new, total = query.shape[2], keys.shape[2]
    if window is not None and total > window + new - 1:  # keys that no new token sees
        keys, values = keys[:, :, total - window - new + 1 :], values[:, :, total - window - new + 1 :]
        total = keys.shape[2]
    mask = None
    if new > 1:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        if window is not None:
            mask = mask.triu(total - new - window + 1)
    if sinks is None and softcap is None:
        grouped = query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=grouped)
    repeat = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # a logit of each head that takes probability and gives no value
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)], dim=-1)
    return scores.float().softmax(-1)[..., :total].to(values.dtype) @ values


def _attention_of_transformers(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    *,
    ragged: Slices,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' signature of an attention function; `ragged` is passed through from the model's arguments."""
    how = {"scaling": scaling, "window": sliding_window, "sinks": s_aux, "softcap": softcap}
    return ragged.attend(module.layer_idx, query, key, value, **how).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention_of_transformers)


class RaggedModel:
    """All sequences of a step in one call of the model."""

    whole_prompts = False

    def __init__(self, model: Any, small: SmallSteps | None = None) -> None:
        self.model, self.small = model, small
        self._changes = 0

    def new_sequence(self) -> KeysValues:
        return KeysValues()

    def version(self) -> tuple[int, str]:
        """Changes when keys and values of earlier steps may not be those that the model would compute now.

        Changed weights are noticed as long as there are small steps, which then end.
        """
        if self.small is not None and not self.small.current():
            self.small, self._changes = None, self._changes + 1
        return self._changes, str(self.model.device)

    @torch.inference_mode()
    def step(self, sequences: Sequence[KeysValues], tokens: Sequence[Sequence[int]]) -> Tensor:
        if any(sequence.length == 0 for sequence in sequences):
            self.version()  # the model may have been moved or changed
        if self.small is not None and sum(map(len, tokens)) <= self.small.most_tokens:
            return self._small_step(self.small, sequences, tokens)
        device, counts = self.model.device, [len(each) for each in tokens]
        positions = [sequence.length + i for sequence, count in zip(sequences, counts) for i in range(count)]
        logits = self.model(
            torch.tensor([[token for each in tokens for token in each]], dtype=torch.int64, device=device),
            position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(counts, dtype=torch.int64, device=device).cumsum(0) - 1,
            ragged=Slices(sequences, counts),
        ).logits
        for sequence, count in zip(sequences, counts):
            sequence.length += count
        return logits[0]  # type: ignore[no-any-return]

    def _small_step(
        self, small: SmallSteps, sequences: Sequence[KeysValues], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        rows: list[tuple[int, int, int, int]] = []  # token, position, capacity and caches
        last: list[int] = []
        for sequence, new in zip(sequences, tokens):
            capacity, caches = sequence.reserve(small.caches, small.cache_type, sequence.length + len(new))
            rows += [(token, sequence.length + i, capacity, caches) for i, token in enumerate(new)]
            last.append(len(rows) - 1)
        ids, positions, capacities, addresses = zip(*rows)
        logits = small.step(ids, positions, capacities, addresses, last)
        for sequence, new in zip(sequences, tokens):
            sequence.length += len(new)
        return logits


class OwnCache:
    """The cache that the model made for a sequence."""

    def __init__(self) -> None:
        self.cache: Any = None


class SeparateModel:
    """One call of the model for each sequence, with the model's own cache. `why` says why not one for all."""

    def __init__(self, model: Any, whole_prompts: bool = False, why: str = "") -> None:
        self.model, self.whole_prompts, self.why = model, whole_prompts, why
        self._dynamic_angles = DynamicAngles(model)

    def new_sequence(self) -> OwnCache:
        return OwnCache()

    @torch.inference_mode()
    def step(self, sequences: Sequence[OwnCache], tokens: Sequence[Sequence[int]]) -> Tensor:
        rows = []
        for sequence, new in zip(sequences, tokens):
            self._dynamic_angles.forget()
            ids = torch.tensor([list(new)], dtype=torch.int64, device=self.model.device)
            result = self.model(ids, past_key_values=sequence.cache, use_cache=True, logits_to_keep=1)
            sequence.cache = result.past_key_values
            rows.append(result.logits[0, -1])
        return torch.stack(rows)
