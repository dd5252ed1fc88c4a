"""Modules with fewer operators in the place of transformers' own, for CPUs.

With one token a step, a model spends more time in the overhead of small operators than in its matrices. Norms become
one operator; the attention of a model with packed projections multiplies q, k and v at once and rotates q and k
together. Nothing is known about a module but the names of its children, so every replacement is compared with the
original on random rows, and is used only if it gives the same. What an attention passes on to transformers' attention
functions (scale, window) is recorded in that comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.integrations.transformers.compare_modules import UNSUITABLE, is_close, random_rows, rotary_angles
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.numbers.weight import stack

PROBE_TOKENS = 3
EAGER = "eager"  # the attention that each model defines for itself; all others are functions that we can call


class FusedNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Joined(nn.Module):
    """Matrices of one input that are not in one piece of memory: their results side by side."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class FusedAttention(nn.Module):
    """Grouped-query attention with rotary positions, q, k and v in one matrix.

    Has the attributes that transformers' attention functions read.
    """

    def __init__(self, source: Any, qkv: nn.Module, how: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = source.config, source.layer_idx, source.head_dim
        self.how, self.is_causal = how, True
        self.qkv, self.o_proj = qkv, source.o_proj
        children = dict(source.named_children())
        self.q_norm, self.k_norm = children.get("q_norm"), children.get("k_norm")
        self.queries = source.q_proj.out_features // self.head_dim
        self.keys = source.k_proj.out_features // self.head_dim
        self.num_key_value_groups = self.queries // self.keys

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = hidden_states.shape[:-1]
        heads = self.qkv(hidden_states).view(*shape, -1, self.head_dim)
        rotated, values = heads.split((self.queries + self.keys, self.keys), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = rotated.split((self.queries, self.keys), dim=-2)
            rotated = torch.cat([self.q_norm(queries), self.k_norm(keys)], dim=-2)
        queries, keys = rotate(rotated, *position_embeddings).split((self.queries, self.keys), dim=-2)
        queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        if self.config._attn_implementation == EAGER:
            hint = 'from_pretrained(..., attn_implementation="eager")'
            raise LaunchError("fused attention has no eager form", where=f"layer {self.layer_idx}", hint=hint)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(self, queries, keys, values, attention_mask, **{**self.how, **options})
        return self.o_proj(out.reshape(*shape, -1)), weights


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of `[batch, tokens, heads, dim]`: the first half is rotated with the second.

    Where there are fewer angles than columns, the columns behind them stay as they are.
    """
    if cos.shape[-1] < heads.shape[-1]:
        turned, kept = heads.split((cos.shape[-1], heads.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat([rotate(turned, cos, sin), kept], dim=-1)
    half = heads.shape[-1] // 2
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    return torch.addcmul(heads * cos.unsqueeze(-2), heads.roll(half, -1), signed.unsqueeze(-2))


def fuse(model: Any, dtype: torch.dtype) -> dict[str, int]:
    """Replace what can be replaced in a model on the CPU; the number of replacements of each kind."""
    done = {"norms": 0, "attentions": 0}
    with torch.no_grad():
        for name, module in list(model.named_modules()):
            norm = fused_norm(module, dtype)
            if norm is not None:
                model.set_submodule(name, norm)
                done["norms"] += 1
        for name, module in list(model.named_modules()):
            if not any(isinstance(child, QuantizedLinear) for child in module.children()):
                continue  # nothing to gain: dense matrices are not joined
            attention = fused_attention(model, module, dtype)
            if attention is not None and isinstance(attention.qkv, QuantizedLinear):
                model.set_submodule(name, attention)
                done["attentions"] += 1
    return done


def fused_norm(module: nn.Module, dtype: torch.dtype | None = None) -> FusedNorm | None:
    """A norm that gives the same as `module`, for inputs of a dtype (None: the weight's)."""
    parameters = dict(module.named_parameters())
    weight, eps = parameters.get("weight"), getattr(module, "variance_epsilon", None)
    if len(parameters) != 1 or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(signature(module.forward).parameters) != 1:
        return None  # such as norms with a gate
    fused = FusedNorm(weight, eps)
    rows = random_rows(PROBE_TOKENS, weight.shape[0], dtype=dtype or weight.dtype, device=weight.device)
    try:
        return fused if is_close(module(rows), fused(rows)) else None
    except UNSUITABLE:
        return None


def fused_attention(model: Any, module: Any, dtype: torch.dtype) -> FusedAttention | None:
    """An attention that gives the same as `module`, whose matrices it shares where they are not packed."""
    children = dict(module.named_children())
    linears = [children.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    found = [linear for linear in linears if isinstance(linear, (QuantizedLinear, nn.Linear))]
    angles = rotary_angles(model)
    if len(found) < len(linears) or angles is None or model.config._attn_implementation == EAGER:
        return None
    rows = random_rows(1, PROBE_TOKENS, found[0].in_features, dtype=dtype)
    try:
        positions = angles(rows, torch.arange(PROBE_TOKENS, device="cpu").unsqueeze(0) * 7)
        given: dict[str, Any] = {"position_embeddings": positions, "attention_mask": None}
        with _Recorder(module.config) as recorder:
            want = module(rows, **given)[0]
        if any(isinstance(value, Tensor) for value in recorder.how.values()):
            return None
        fused = FusedAttention(module, _joined(found[:3], dtype), recorder.how)
        got = fused(rows, **given)[0]
    except UNSUITABLE:
        return None
    return fused if is_close(want, got) else None


class _Recorder:
    """An attention function for a while: records what it is given besides tensors, and computes with sdpa."""

    NAME = "lancebill_recorded"

    def __init__(self, config: Any) -> None:
        self.config, self.before, self.how = config, config._attn_implementation, dict[str, Any]()

    def __enter__(self) -> _Recorder:
        ALL_ATTENTION_FUNCTIONS[self.NAME] = self._attend
        self.config._attn_implementation = self.NAME
        return self

    def __exit__(self, *_: object) -> None:
        self.config._attn_implementation = self.before
        del ALL_ATTENTION_FUNCTIONS[self.NAME]

    def _attend(self, module: nn.Module, *tensors: Any, **how: Any) -> Any:
        self.how = how
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors, **how)


def _joined(parts: Sequence[QuantizedLinear | nn.Linear], dtype: torch.dtype) -> nn.Module:
    """Packed matrices become one; others stay where they are."""
    packed = [part for part in parts if isinstance(part, QuantizedLinear)]
    if len(packed) < len(parts):
        return Joined(parts)
    first = packed[0]
    whole = stack([part.stored for part in packed])
    activations, order = first.problem.activations, first.problem.order
    if any((part.problem.activations, part.problem.pre_scale) != (activations, False) for part in packed):
        raise UnsupportedProblem("the projections have different inputs")
    return QuantizedLinear.from_weight(
        whole, backend=first.choice.requested, activations=activations, dtype=dtype, order=order
    )
