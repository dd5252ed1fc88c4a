"""Modules with fewer kernels in the place of transformers' own, only while a decode step is captured.

The model itself stays as it is: prompts, and calls without graphs, are computed by transformers' modules. Nothing is
known about a module but the names of its children, so every replacement is compared with the original on random rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lancebill.backends.gpu.decode_attention import Heads, attend, rotate_and_store
from lancebill.integrations.transformers.compare_modules import UNSUITABLE, is_close, random_rows, rotary_angles
from lancebill.integrations.transformers.decode_cache import DecodeCache
from lancebill.integrations.transformers.fused_modules import fused_norm

PROBE_TOKENS = 5
_DEVICES = {"cuda"}  # kernels exist for these
_SDPA = "sdpa"  # has boolean masks
_UNKNOWN = ("softcap", "s_aux", "position_bias")  # arguments of attention functions that our kernels lack


@dataclass(frozen=True)
class Swap:
    """A module and what takes its place."""

    parent: nn.Module
    name: str
    own: nn.Module
    faster: nn.Module


@contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """The model has the faster modules inside."""
    for swap in swaps:
        swap.parent._modules[swap.name] = swap.faster
    try:
        yield
    finally:
        for swap in swaps:
            swap.parent._modules[swap.name] = swap.own


def find_swaps(model: Any) -> list[Swap]:
    """Everything in a model that can be replaced."""
    found = []
    angles = rotary_angles(model)
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, own in parent.named_children():
                if "forward" in vars(own):  # somebody has replaced it already
                    continue
                faster = fused_norm(own) or _attention(own, angles, model.dtype)
                if faster is not None:
                    found.append(Swap(parent, name, own, faster))
    return found


class StepAttention(nn.Module):
    """Grouped-query attention with rotary positions, for single new tokens; anything else is left to the original."""

    def __init__(self, own: Any, heads: Heads) -> None:
        super().__init__()
        children = dict(own.named_children())
        self.own, self.heads, self.layer_idx = own, heads, own.layer_idx
        norms = children.get("q_norm"), children.get("k_norm")
        self.norms = None if heads.eps is None else (norms[0].weight.data, norms[1].weight.data)  # type: ignore[union-attr]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        own, heads, cache = self.own, self.heads, past_key_values
        stepping = isinstance(cache, DecodeCache) and cache.is_compileable and hidden_states.shape[1] == 1
        if not stepping or attention_mask is None or attention_mask.dtype != torch.bool:
            given = {"attention_mask": attention_mask, "past_key_values": past_key_values}
            result: tuple[Tensor, Tensor | None] = own(
                hidden_states=hidden_states, position_embeddings=position_embeddings, **given, **options
            )
            return result
        rows = own.q_proj(hidden_states), own.k_proj(hidden_states), own.v_proj(hidden_states)
        layer, at = cache.layers[self.layer_idx], cache.place.index
        stored = layer.keys, layer.values
        rotated = rotate_and_store(heads, rows, self.norms, position_embeddings, at, stored)
        out = attend(heads, rotated, stored, attention_mask, at)
        return own.o_proj(out.view(*hidden_states.shape[:2], -1)), None


def _attention(own: Any, angles: Any, dtype: torch.dtype) -> StepAttention | None:
    children = dict(own.named_children())
    if not {"q_proj", "k_proj", "v_proj", "o_proj"} <= set(children) or angles is None:
        return None
    try:
        heads = _heads(own, children, dtype)
        if heads is None or not heads.supported or next(own.parameters()).device.type not in _DEVICES:
            return None
        faster = StepAttention(own, heads)
        return faster if _same_attention(own, faster, angles, dtype) else None
    except UNSUITABLE:
        return None


def _heads(own: Any, children: dict[str, Any], dtype: torch.dtype) -> Heads | None:
    """What an attention computes, as far as its attributes say."""
    config, dim = own.config, own.head_dim
    if config._attn_implementation != _SDPA or any(vars(own).get(name) is not None for name in _UNKNOWN):
        return None
    norms = [children[name] for name in ("q_norm", "k_norm") if name in children]
    eps = {norm.variance_epsilon for norm in norms}
    if len(norms) == 1 or len(eps) > 1 or any(norm.weight.shape != (dim,) for norm in norms):
        return None
    queries, keys = children["q_proj"].out_features // dim, children["k_proj"].out_features // dim
    return Heads(queries, keys, dim, dtype, float(own.scaling), eps.pop() if eps else None)


def _same_attention(own: Any, faster: StepAttention, angles: Any, dtype: torch.dtype) -> bool:
    """Whether both give the same for a token after a few others, and leave the same in the cache."""
    device, layer = next(own.parameters()).device, own.layer_idx
    rows = random_rows(1, PROBE_TOKENS + 1, own.q_proj.in_features, dtype=dtype, device=device)
    positions = torch.arange(PROBE_TOKENS + 1, device=device).unsqueeze(0) * 7
    cos, sin = angles(rows, positions)
    results, stored = [], []
    for module in (own, faster):
        cache = DecodeCache(layer + 1, 0, device)
        cache.grow(256)
        before = slice(0, PROBE_TOKENS)
        own(
            hidden_states=rows[:, before], position_embeddings=(cos[:, before], sin[:, before]), attention_mask=None,
            past_key_values=cache,
        )  # fmt: skip
        span = cache.capacity
        mask = (torch.arange(span, device=device) <= PROBE_TOKENS).view(1, 1, 1, span)
        mask[..., 1] = False
        cache.point()
        with cache.step(span):
            last = slice(PROBE_TOKENS, None)
            results.append(
                module(
                    hidden_states=rows[:, last], position_embeddings=(cos[:, last], sin[:, last]), attention_mask=mask,
                    past_key_values=cache,
                )[0]
            )  # fmt: skip
        stored.append(torch.cat([cache.layers[layer].keys, cache.layers[layer].values], -1))
    return is_close(*results) and is_close(*stored)
