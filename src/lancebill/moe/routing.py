"""From router logits to experts and weights: one algorithm whose settings cover every routing method.

Scores are computed from the logits. Selection uses the scores plus a correction bias, optional groups
and top-k. The weights are the unbiased scores of the selected experts, normalised and scaled. Ties go
to the lowest expert index. A row's result does not depend on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from lancebill.errors import LaunchError, SpecError
from lancebill.moe.simulation import Simulation

SOFTMAX, SIGMOID, SQRTSOFTPLUS, NONE = "softmax", "sigmoid", "sqrtsoftplus", "none"

# f(hidden [M, H] or None, logits [M, E], top_k, renormalize) -> (weights [M, k], ids [M, k])
Custom = Callable[[Tensor | None, Tensor, int, bool], tuple[Tensor, Tensor]]

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    SOFTMAX: lambda x: torch.softmax(x, dim=-1),
    SIGMOID: torch.sigmoid,
    SQRTSOFTPLUS: lambda x: F.softplus(x).sqrt(),  # torch's softplus(x) is x above 20
    NONE: lambda x: x,
}
_LOWEST = torch.finfo(torch.float32).min  # not above any finite score, but above -inf, which marks excluded groups


class Method(IntEnum):
    """Routing methods that kernels can implement. Numbers up to 9 are FlashInfer's."""

    DEFAULT = 0
    RENORMALIZE = 1
    DEEPSEEK_V3 = 2
    LLAMA4 = 3
    RENORMALIZE_NAIVE = 4
    TOP_K = 5
    SIGMOID_RENORM = 6
    MINIMAX2 = 7
    SIGMOID = 8
    UNSPECIFIED = 9
    DEEPSEEK_V4 = 100
    CUSTOM = 101
    SIMULATED = 102


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts.

    `after_top_k` selects by raw logits (plus a correction) and scores only the selected experts: a
    softmax over the k (gpt-oss, Granite), or Llama-4's sigmoid, which would produce ties among
    saturated logits if it came first. `correction` makes the correction bias mandatory; a bias that is passed is always
    used. `n_group` 0 means that the model has no groups. The scaling factor is folded into the
    weights unless `apply_scale_to_output` leaves it to the caller. With `zero_experts` the last
    columns of the logits are experts that return their input.
    """

    top_k: int
    scoring: str = SOFTMAX
    renormalize: bool = False
    epsilon: float = 0.0  # added to the divisor of the renormalisation
    after_top_k: bool = False
    correction: bool = False
    n_group: int = 0
    topk_group: int = 0
    routed_scaling_factor: float = 1.0
    apply_scale_to_output: bool = False
    weight_on_input: bool = False
    zero_experts: int = 0
    expert_scale: bool = False  # the caller multiplies each weight by a stored factor of its expert
    hashed: bool = False  # experts come from a table indexed by token id, weights from the scores
    custom: Custom | None = None
    simulated: Simulation | None = None

    def __post_init__(self) -> None:
        if self.scoring not in _SCORES:
            raise SpecError(f"unknown scoring '{self.scoring}'", expected=f"one of {', '.join(_SCORES)}")
        if self.top_k < 1:
            raise SpecError("top_k must be positive", expected=">= 1", got=self.top_k)
        if self.weight_on_input and self.top_k != 1:
            raise SpecError("routing weights can scale the input only with top-1 routing", got=f"top_k {self.top_k}")
        if not 0 <= self.topk_group <= self.n_group or (self.n_group and not self.topk_group):
            raise SpecError(
                "invalid expert groups",
                expected="1 <= topk_group <= n_group",
                got=f"topk_group {self.topk_group}, n_group {self.n_group}",
            )
        selections = {
            "groups": self.grouped,
            "hashed": self.hashed,
            "custom": self.custom is not None,
            "after_top_k": self.after_top_k,
        }
        clashes = [name for name, on in selections.items() if on]
        if len(clashes) > 1:
            raise SpecError("these settings exclude each other", got=" and ".join(clashes))

    @property
    def grouped(self) -> bool:
        """Whether groups exclude any expert."""
        return self.topk_group < self.n_group

    @property
    def method(self) -> Method:
        """The method that a kernel with built-in routing would have to support."""
        if self.simulated is not None:
            return Method.SIMULATED
        if self.custom is not None:
            return Method.CUSTOM
        if self.zero_experts or self.expert_scale:
            return Method.UNSPECIFIED
        if self.scoring == SQRTSOFTPLUS:
            return Method.DEEPSEEK_V4 if self.renormalize and not self.grouped else Method.UNSPECIFIED
        if self.correction:
            return self._corrected_method
        if self.grouped or self.hashed or self.folded_scale != 1.0:
            return Method.UNSPECIFIED
        if self.after_top_k:
            return _AFTER_TOP_K.get((self.scoring, self.top_k == 1 and not self.renormalize), Method.UNSPECIFIED)
        return _PLAIN.get((self.scoring, self.renormalize), Method.UNSPECIFIED)

    @property
    def _corrected_method(self) -> Method:
        if self.scoring != SIGMOID or not self.renormalize or self.hashed or self.after_top_k:
            return Method.UNSPECIFIED
        if self.n_group:
            return Method.DEEPSEEK_V3
        return Method.MINIMAX2 if self.folded_scale == 1.0 else Method.UNSPECIFIED

    @property
    def folded_scale(self) -> float:
        """The factor on the routing weights."""
        return 1.0 if self.apply_scale_to_output else self.routed_scaling_factor

    def check(self, experts: int, biased: bool) -> None:
        """Raise if this routing is impossible with this many experts (columns of the logits)."""
        if self.top_k > experts:
            raise SpecError("top_k is larger than the number of experts", expected=f"<= {experts}", got=self.top_k)
        if not self.grouped:
            return
        if experts % self.n_group:
            raise SpecError(
                "the groups do not divide the experts", expected=f"a divisor of {experts}", got=self.n_group
            )
        size = experts // self.n_group
        if self.top_k > self.topk_group * size:
            raise SpecError(
                "top_k is larger than the number of experts in the chosen groups",
                expected=f"<= {self.topk_group} groups of {size}",
                got=self.top_k,
            )
        if biased and size < 2:
            raise SpecError(
                "a group's score is the sum of its two largest biased scores", expected="2 experts per group", got=size
            )


# By scoring and renormalisation.
_PLAIN = {
    (SOFTMAX, False): Method.DEFAULT,
    (SOFTMAX, True): Method.RENORMALIZE_NAIVE,
    (SIGMOID, False): Method.SIGMOID,
    (SIGMOID, True): Method.SIGMOID_RENORM,
    (NONE, False): Method.TOP_K,
}
# By scoring and whether it is top-1 without renormalisation. A softmax over the k is already normalised.
_AFTER_TOP_K = {
    (SOFTMAX, False): Method.RENORMALIZE,
    (SOFTMAX, True): Method.RENORMALIZE,
    (SIGMOID, True): Method.LLAMA4,
}


@dataclass(frozen=True)
class Routed:
    """The experts of each token. Slots without an expert (padding, zero experts) are -1 with weight 0.

    `identity_weight` is the total weight of the zero experts. The caller adds it times the hidden
    state to the routed output, before any output scale and on one rank only.
    """

    ids: Tensor  # [M, k] int32
    weights: Tensor  # [M, k] fp32
    identity_weight: Tensor | None = None  # [M] fp32


def route(
    routing: Routing,
    logits: Tensor,
    *,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    table: Tensor | None = None,
    input_ids: Tensor | None = None,
) -> Routed:
    """Choose experts for each row of `logits` [M, E], to which the router's own `bias` [E] is added first.

    Hash routing looks up experts in `table` [vocabulary, k] by `input_ids` [M]; negative ids are padding.
    """
    check_inputs(routing, logits, hidden, bias, correction_bias)
    tokens, experts = logits.shape
    logits = logits if bias is None else logits.float() + bias.float()
    if routing.simulated is not None:
        ids, weights = routing.simulated.draw(tokens, experts, routing.top_k, logits.device)
    elif routing.custom is not None:
        ids, weights = _custom(routing, routing.custom, hidden, logits)
    else:
        values = logits.float()
        scores = values if routing.after_top_k else _score(routing.scoring, values)
        if routing.hashed:
            ids = _look_up(routing, table, input_ids, logits)
        else:
            biased = scores if correction_bias is None else scores + correction_bias.float()
            scores = torch.where(biased.isnan(), torch.nan, scores)
            ids = first_largest(_selection(routing, biased, correction_bias is not None), routing.top_k)
        weights = _weights(routing, scores, ids)
    return _finish(routing, ids, weights * routing.folded_scale, experts)


def first_largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values of each row, largest first; equal values in index order, NaN before all.

    `torch.topk` does not define the order of equal values. Adding 0.0 turns -0.0 into 0.0.
    """
    return torch.sort(values + 0.0, dim=-1, descending=True, stable=True).indices[..., :count]


def _score(scoring: str, values: Tensor) -> Tensor:
    """Scores in fp32.

    Computed in double and rounded once. On CPUs exp and log differ in the last bit between the vector
    loop and its scalar remainder, so in fp32 a score would depend on its position in the batch.
    """
    return _SCORES[scoring](values.double()).float()


def _selection(routing: Routing, biased: Tensor, corrected: bool) -> Tensor:
    """The values that top-k compares: biased scores, -inf outside the chosen groups."""
    biased = biased.clamp(min=_LOWEST)
    if not routing.grouped:
        return biased
    by_group = biased.unflatten(1, (routing.n_group, -1))
    if not corrected:
        strength = by_group.amax(dim=-1)
    else:
        largest = by_group.topk(2, dim=-1).values
        strength = largest[..., 0] + largest[..., 1]
    chosen = torch.zeros_like(strength, dtype=torch.bool)
    chosen.scatter_(1, first_largest(strength, routing.topk_group), True)
    # -inf instead of 0: biased scores can be negative and would lose to 0.
    return torch.where(chosen.unsqueeze(-1), by_group, -torch.inf).flatten(1)


def _weights(routing: Routing, scores: Tensor, ids: Tensor) -> Tensor:
    weights = torch.where(ids < 0, -torch.inf, scores.gather(1, ids.clamp(min=0)))
    if routing.after_top_k:
        weights = _score(routing.scoring, weights)
    weights = torch.where(ids < 0, 0.0, weights)
    return _normalized(weights, routing.epsilon) if routing.renormalize else weights


def _normalized(weights: Tensor, epsilon: float) -> Tensor:
    """`weights` divided by their sum, or by 1 if the sum is not positive."""
    total = _total(weights) + epsilon
    return weights / torch.where(total <= 0, 1.0, total).unsqueeze(-1)


def _total(weights: Tensor) -> Tensor:
    """The sum of each row in slot order, so that the result does not depend on the number of rows."""
    total = torch.zeros_like(weights[:, 0])
    for slot in range(weights.shape[1]):
        total = total + weights[:, slot]
    return total


def check_lookup(
    routing: Routing, tokens: int, table: Tensor | None, input_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The table and the flat token ids of hash routing; raises if they are missing or do not fit."""
    if table is None or input_ids is None:
        missing = "a table of experts by token id" if table is None else "input_ids"
        raise LaunchError(f"hash routing needs {missing}")
    if table.dim() != 2 or table.shape[1] != routing.top_k:
        raise LaunchError(
            "wrong shape of the hash table", expected=f"[vocabulary, {routing.top_k}]", got=list(table.shape)
        )
    if input_ids.numel() != tokens:
        raise LaunchError("input_ids do not match the logits", expected=tokens, got=input_ids.numel())
    return table, input_ids.reshape(-1)


def token_outside(table: Tensor, input_ids: Tensor) -> LaunchError:
    """The error of a token id that the table does not have."""
    return LaunchError("a token id is outside the table", expected=f"< {table.shape[0]}", got=int(input_ids.max()))


def _look_up(routing: Routing, table: Tensor | None, input_ids: Tensor | None, logits: Tensor) -> Tensor:
    """Experts by token id. Padding (negative ids) and table entries that are not an expert become -1."""
    table, input_ids = check_lookup(routing, logits.shape[0], table, input_ids)
    tokens = input_ids.long()
    in_table = tokens < table.shape[0]
    # On a GPU this check would synchronise the stream; there such a row becomes padding.
    if tokens.device.type == "cpu" and not bool(in_table.all()):
        raise token_outside(table, tokens)
    in_table &= tokens >= 0
    ids = table[torch.where(in_table, tokens, 0)].long()
    legal = in_table.unsqueeze(-1) & (ids >= 0) & (ids < logits.shape[1])
    return torch.where(legal, ids, -1)


def _custom(routing: Routing, function: Custom, hidden: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = function(hidden, logits, routing.top_k, routing.renormalize)
    expected = (logits.shape[0], routing.top_k)
    for name, tensor in (("weights", weights), ("ids", ids)):
        if tuple(tensor.shape) != expected:
            raise LaunchError(
                f"the custom routing function returned {name} of the wrong shape",
                expected=list(expected),
                got=list(tensor.shape),
            )
    return ids.long(), weights.float()


def _finish(routing: Routing, ids: Tensor, weights: Tensor, experts: int) -> Routed:
    identity = None
    if routing.zero_experts:
        is_zero_expert = ids >= experts - routing.zero_experts
        identity = _total(torch.where(is_zero_expert, weights, 0.0))
        ids, weights = torch.where(is_zero_expert, -1, ids), torch.where(is_zero_expert, 0.0, weights)
    return Routed(ids.to(torch.int32).contiguous(), weights.contiguous(), identity)


def check_inputs(
    routing: Routing, logits: Tensor, hidden: Tensor | None, bias: Tensor | None, correction_bias: Tensor | None
) -> None:
    """Raise if these tensors do not fit each other or the routing."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise LaunchError("router logits are not a float matrix", expected="[tokens, experts]", got=list(logits.shape))
    tokens, experts = logits.shape
    if hidden is not None and hidden.shape[0] != tokens:
        raise LaunchError("hidden states do not match the logits", expected=tokens, got=hidden.shape[0])
    if routing.zero_experts >= experts:
        raise LaunchError("all experts are zero experts", expected=f"> {routing.zero_experts} columns")
    for name, vector in (("router's bias", bias), ("correction bias", correction_bias)):
        if vector is not None and tuple(vector.shape) != (experts,):
            raise LaunchError(f"wrong shape of the {name}", expected=[experts], got=list(vector.shape))
    if correction_bias is None and routing.correction and routing.simulated is None:
        raise LaunchError("this routing needs a correction bias")
    routing.check(experts, biased=correction_bias is not None)


@dataclass(frozen=True)
class SparseMixer:
    """Phi-3.5-MoE's two rounds of top-1 as a custom function, in its inference form.

    Each round selects the largest logit. Its weight is a softmax over the logits within a relative
    distance of 2 * jitter. The second round excludes the expert of the first.
    """

    jitter: float = 0.01

    def __call__(self, hidden: Tensor | None, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        values = logits.float()
        remaining, ids, weights = values, [], []
        for _ in range(top_k):
            best = first_largest(remaining, 1)
            ids.append(best)
            weights.append(_score(SOFTMAX, self._near(values, remaining, best)).gather(1, best))
            remaining = remaining.scatter(1, best, -torch.inf)
        chosen = torch.cat(weights, dim=-1)
        return _normalized(chosen, 0.0) if renormalize else chosen, torch.cat(ids, dim=-1)

    def _near(self, values: Tensor, remaining: Tensor, best: Tensor) -> Tensor:
        """The remaining logits close to the largest one, -inf for the others."""
        largest = remaining.gather(1, best)
        distance = (largest - values) / torch.maximum(values.abs(), largest)
        return torch.where(distance > 2 * self.jitter, -torch.inf, remaining)
