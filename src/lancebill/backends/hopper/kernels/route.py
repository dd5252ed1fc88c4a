"""From router logits to ids and weights in one launch, in plain Triton. `lancebill.moe.routing` is the definition.

One warp routes one token. Its scores stay in registers as [groups, experts of a group]; without groups there is one
group. Top-k takes one round per slot: the largest value, then the lowest index that has it. Both are integer reductions
of a warp, one instruction each: floats are compared as integers of the same order, and numbers are picked out of a warp
as their bits. Scores are computed in double and rounded once, as in the definition: Hopper computes doubles at half the
rate of floats, and with floats alone the difference of two logits would already lose the last bits of a score.

This is a launch of its own. The dispatch needs the ids of all tokens, so a joint kernel would route every token in
every block or wait at a barrier across the grid. With few tokens there is no dispatch, and the first GEMM would route
in each of its blocks. Both cost more than a launch whose successor is already waiting on the SMs (see
`dispatch_combine` on dependent launches).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the most negative finite float: experts with NaN, and -inf
NO_KEY = tl.constexpr(-(1 << 31))  # below the key of every float
NO_INDEX = tl.constexpr(1 << 30)


@triton.jit
def _key(values):
    """Integers in the order of these floats; equal for 0.0 and -0.0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float with this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _pick(values, here):
    """The one float where `here` is true; 0 if there is none."""
    return tl.sum(tl.where(here, values.to(tl.int32, bitcast=True), 0)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(values, SCORING: tl.constexpr):
    """Scores of finite or infinite floats, without NaN. Padding is -inf."""
    x = values.to(tl.float64)
    if SCORING == "softmax":
        e = tl.exp(x - _value(tl.max(_key(values))).to(tl.float64))
        x = e * (1.0 / tl.sum(e))
    elif SCORING == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif SCORING == "sqrtsoftplus":
        e = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + e  # log(1 + e) without the rounding error of the sum
        log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        x = tl.sqrt(tl.where(x > 20.0, x, log1p))
    scores = x.to(tl.float32)
    return tl.where(scores == scores, scores, 0.0)


@triton.jit
def _chosen_groups(key, group, member, topk_group, G: tl.constexpr, CORRECTED: tl.constexpr):
    """Which groups may be selected from, as [G, 1]. A group is as strong as its largest value, or two if CORRECTED."""
    strength = tl.max(key, 1, keep_dims=True)
    if CORRECTED:
        first = tl.min(tl.where(key == strength, member, NO_INDEX), 1, keep_dims=True)
        second = tl.max(tl.where(member == first, NO_KEY, key), 1, keep_dims=True)
        strength = tl.where(strength == NO_KEY, NO_KEY, _key(_value(strength) + _value(second)))
    others, number = tl.trans(strength), tl.arange(0, G)[None, :]
    ahead = (others > strength) | ((others == strength) & (number < group))
    return tl.sum(ahead.to(tl.int32), 1, keep_dims=True) < topk_group


@triton.jit
def _total(weights, slot, top_k):
    """The sum in slot order, as the definition adds."""
    total = 0.0
    for s in range(top_k):
        total += _pick(weights, slot == s)
    return total


@triton.jit
def route_tokens(
    logits, bias, correction, table, input_ids, ids, weights, identity, stride, experts, size, topk_group, top_k,
    vocabulary, first_zero, renormalize, epsilon, scale, SCORING: tl.constexpr, AFTER: tl.constexpr,
    HASHED: tl.constexpr, BIASED: tl.constexpr, CORRECTED: tl.constexpr, ZEROS: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Route the token of this program. `size`: experts of a group. `first_zero`: the first zero expert (ZEROS).

    AFTER selects by logits and scores only the selected. HASHED reads the experts from `table` [vocabulary, top_k].
    """
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G)[:, None], tl.arange(0, S)[None, :]
    index = group * size + member
    inside = (member < size) & (index < experts)
    values = tl.load(logits + token * stride + index, mask=inside, other=-float("inf")).to(tl.float32)
    if BIASED:
        values += tl.load(bias + index, mask=inside, other=0.0)
    known = values == values
    scores = tl.where(known, values, -float("inf"))
    if not AFTER:
        scores = _scores(scores, SCORING)
    selection = scores
    if CORRECTED:
        selection += tl.load(correction + index, mask=inside, other=0.0)
    selection = tl.where(known & (selection == selection), tl.maximum(selection, LOWEST), LOWEST)
    key = tl.where(inside, _key(selection), NO_KEY)
    if G > 1:
        key = tl.where(_chosen_groups(key, group, member, topk_group, G, CORRECTED), key, NO_KEY)
    scores = tl.where(known, scores, float("nan"))  # until the weights are taken, which are 0 for them
    slot = tl.arange(0, K)
    found, weight = tl.full([K], -1, tl.int32), tl.full([K], float("nan"), tl.float32)
    row = tl.zeros([], tl.int64)
    if HASHED:
        row = tl.load(input_ids + token).to(tl.int64)
    for s in range(top_k):
        if HASHED:
            inside_table = (row >= 0) & (row < vocabulary)
            entry = tl.load(table + tl.where(inside_table, row, 0) * top_k + s)
            best = tl.where(inside_table & (entry >= 0) & (entry < experts), entry, -1).to(tl.int32)
        else:
            best = tl.min(tl.where(key == tl.max(key), index, NO_INDEX))
        key = tl.where(index == best, NO_KEY, key)
        found = tl.where(slot == s, best, found)
        weight = tl.where((slot == s) & (best >= 0), _pick(scores, inside & (index == best)), weight)
    taken = weight == weight
    if AFTER:
        weight = _scores(tl.where(taken, weight, -float("inf")), SCORING)
    weight = tl.where(taken, weight, 0.0)
    if renormalize:
        total = _total(weight, slot, top_k) + epsilon
        weight = tl.div_rn(weight, tl.where(total > 0, total, 1.0))
    weight *= scale
    if ZEROS:
        is_zero = found >= first_zero
        tl.store(identity + token, _total(tl.where(is_zero, weight, 0.0), slot, top_k))
        found, weight = tl.where(is_zero, -1, found), tl.where(is_zero, 0.0, weight)
    tl.store(ids + token * top_k + slot, found, mask=slot < top_k)
    tl.store(weights + token * top_k + slot, weight, mask=slot < top_k)
