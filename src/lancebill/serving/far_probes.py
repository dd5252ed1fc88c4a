"""Whether attention computes in a batch what the model does at the end of the longest sequence.

Some attention changes with a token's position: only the tokens of the same chunk are seen, or queries are scaled from
some position on. Real prompts of that length would take minutes. So each attention is tried alone, on a few tokens
behind made-up keys and values: it gets the same rows in a batch as in the model's own call, where transformers builds
the masks and a cache tells the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lancebill.serving.ragged import ATTENTION, KeysValues, RaggedModel

BY_DEFINITION = "lancebill_by_definition"
NEAR = 1  # made-up tokens of the call in which the model's attentions are found
# Of the norm of an attention's output, whose inputs are equal. Rounding alone gave 2e-6 in fp32 and 3e-2 in 16 bits;
# queries that are scaled otherwise 0.15, a mask that is missing 0.3 and more.
MOST_FAR = {torch.float32: 1e-3}
MOST_FAR_16 = 0.08
PERIOD = 1021  # made-up numbers repeat with another factor: making them takes the time of a copy
MOST_FACTOR = 1e3  # of made-up keys, which fp16 must hold
SCORES = 1.5  # the spread of scores with made-up keys: attention that follows the query, and not a single key


class Past:
    """Keys and values of `length` tokens that no model has seen, the same for everyone who asks for a layer's."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.factors: dict[int, float] = {}  # of each layer's keys

    def before(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """`keys` and `values` of new tokens, `[1, heads, tokens, dim]`, behind the made-up ones."""
        return self._behind(keys, 2 * layer, self.factors[layer]), self._behind(values, 2 * layer + 1, 1.0)

    def scale_keys(self, layer: int, query: Tensor, scaling: float) -> None:
        """Let the scores of this layer's first queries have the usual spread."""
        if layer not in self.factors:
            usual = float(query.float().norm(dim=-1).mean() * scaling)
            self.factors[layer] = min(SCORES / max(usual, 1e-6), MOST_FACTOR)

    def _behind(self, new: Tensor, seed: int, factor: float) -> Tensor:
        _, heads, count, dim = new.shape
        source, at, wide = torch.Generator(new.device).manual_seed(seed), new.device, torch.float32
        period = torch.randn(heads, 1, PERIOD, dim, generator=source, device=at, dtype=wide) * factor
        positions = torch.arange(-(-(self.length + count) // PERIOD) * PERIOD, device=at, dtype=wide)
        growth = (0.5 + positions / self.length).view(-1, PERIOD, 1)
        rows = (period.to(new.dtype) * growth.to(new.dtype)).view(1, heads, -1, dim)
        rows[:, :, self.length : self.length + count] = new
        return rows[:, :, : self.length + count]


class FarKeysValues(KeysValues):
    """A sequence behind a past."""

    def __init__(self, past: Past) -> None:
        super().__init__()
        self.past, self.length = past, past.length

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.past.before(layer, keys, values)


class FarLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a cache that says how long the past is. The attention adds the past itself."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class FarCall:
    """One call of a model behind a past, and the attentions that it calls, by layer."""

    def __init__(self, past: Past) -> None:
        self.past, self.modules = past, dict[int, nn.Module]()


def attend_by_definition(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    *,
    far: FarCall,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' signature of an attention function: in fp32, with the mask that transformers has built."""
    far.modules[module.layer_idx] = module
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    far.past.scale_keys(module.layer_idx, query, scaling)
    keys, values = (each.float() for each in far.past.before(module.layer_idx, key, value))
    heads, new, repeat = query.shape[1], query.shape[2], query.shape[1] // keys.shape[1]
    grouped = query.float().reshape(1, keys.shape[1], repeat * new, -1)
    scores = (grouped @ keys.transpose(2, 3) * scaling).view(1, heads, new, -1)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(keys.shape[2] - new)
    if attention_mask is not None:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float().reshape(1, -1, 1, 1).expand(1, heads, new, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].view(1, keys.shape[1], repeat * new, -1)
    out = (weights @ values).view(1, heads, new, -1)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _whole_mask(**given: Any) -> Any:
    return sdpa_mask(**{**given, "allow_is_causal_skip": False})


AttentionInterface.register(BY_DEFINITION, attend_by_definition)
AttentionMaskInterface.register(BY_DEFINITION, _whole_mask)


@dataclass(frozen=True)
class Rows:
    """What each attention is given for the tokens of one sequence, and what it returns, `[1, tokens, width]`."""

    given: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)


@torch.inference_mode()
def same_at_end(model: Any, layers: int, end: int, probes: Sequence[Sequence[int]]) -> bool:
    """Whether every attention gives the same in a batch as in the model's own call, for the tokens before `end`.

    The model computes its steps with `ATTENTION` afterwards. `layers` is the number of layers of its own cache.
    """
    piece, single = probes[1], probes[0][:1]
    length = end - len(piece)
    if length < 1:
        return True
    past = Past(length)
    model.set_attn_implementation(BY_DEFINITION)
    modules = _own_call(model, layers, Past(NEAR), single, {})[0]
    expected = [_own_call(model, layers, past, tokens, modules)[1] for tokens in (piece, single)]
    model.set_attn_implementation(ATTENTION)
    found = _batched_call(model, past, [probes[2], piece, single], modules, expected)
    most = MOST_FAR.get(model.dtype, MOST_FAR_16)
    return all(
        _is_close(rows.made[layer], wanted.made[layer], most)
        for rows, wanted in zip(found, expected)
        for layer in modules
    )


def _is_close(found: Tensor, expected: Tensor, most: float) -> bool:
    """Every row; numbers that are not finite are not close."""
    found, expected = found.float(), expected.float()
    return bool(((found - expected).norm(dim=-1) <= most * expected.norm(dim=-1)).all())


def _own_call(
    model: Any, layers: int, past: Past, tokens: Sequence[int], modules: Mapping[int, nn.Module]
) -> tuple[dict[int, nn.Module], Rows]:
    """A call of the model as `generate` makes it; the rows of `modules`."""
    cache, rows, call = DynamicCache(), Rows(), FarCall(past)
    cache.layers = [FarLayer(past.length) for _ in range(layers)]
    with ExitStack() as hooks:
        for layer, module in modules.items():
            _watch(hooks, module, partial(rows.given.__setitem__, layer), partial(rows.made.__setitem__, layer))
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, far=call)
    return call.modules, rows


def _batched_call(
    model: Any,
    past: Past,
    tokens: Sequence[Sequence[int]],
    modules: Mapping[int, nn.Module],
    expected: Sequence[Rows],
) -> list[Rows]:
    """A step of several sequences; the first one begins, the others are behind the past."""
    runner = RaggedModel(model)
    ends = list(accumulate(len(each) for each in tokens))
    spans = [slice(first, last) for first, last in pairwise(ends)]
    found = [Rows() for _ in spans]

    def replaced(layer: int, given: Tensor) -> Tensor:
        given = given.clone()
        for span, rows in zip(spans, expected):
            given[:, span] = rows.given[layer]
        return given

    def keep(layer: int, made: Tensor) -> None:
        for span, rows in zip(spans, found):
            rows.made[layer] = made[:, span]

    with ExitStack() as hooks:
        for layer, module in modules.items():
            _watch(hooks, module, partial(replaced, layer), partial(keep, layer))
        runner.step([runner.new_sequence(), *(FarKeysValues(past) for _ in spans)], tokens)
    return found


def _watch(
    hooks: ExitStack, module: nn.Module, see: Callable[[Tensor], Tensor | None], made: Callable[[Tensor], None]
) -> None:
    """Call `see` with what the module is given, which it may replace, and `made` with what the module returns."""

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (_or_same(see(given[0]), given[0]), *given[1:]), named
        rows = named["hidden_states"]
        return given, {**named, "hidden_states": _or_same(see(rows), rows)}

    def after(_: nn.Module, given: Any, out: Any) -> None:
        made(out[0] if isinstance(out, tuple) else out)

    hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    hooks.callback(module.register_forward_hook(after).remove)


def _or_same(new: Tensor | None, old: Tensor) -> Tensor:
    return old if new is None else new
