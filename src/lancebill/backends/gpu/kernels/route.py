"""From router logits to ids and weights in one launch, in plain Triton. `lancebill.moe.routing` is the definition.

The scores of a token stay in registers as [groups, experts of a group]. Without groups there is one group, and one warp
routes the token. With groups each group has a warp (see `route_step`), so that a thread computes one score. Each group
lists its best experts in order: a round per slot finds the largest value, then the lowest index that has it. Both are
integer reductions of a warp, one instruction each: floats are compared as integers of the same order, and numbers are
picked out of a warp as their bits. Rounds across warps would need barriers, so warps meet only after the last round: to
choose groups, whose strengths are the first entries of the lists, and to merge the lists. Merging takes no rounds: an
expert's place is the number of listed experts ahead of it.

Scores are computed in double and rounded once, as in the definition: Hopper computes doubles at half the rate of
floats, and with floats alone the difference of two logits would already lose the last bits of a score. The functions
below have no branches, because a thread may compute several scores at once.

This is a launch of its own. The dispatch needs the ids of all tokens, so a joint kernel would route every token in
every block or wait at a barrier across the grid. With few tokens there is no dispatch, and the first GEMM would route
in each of its blocks. Both cost more than a launch whose successor is already waiting on the SMs (see
`dispatch_combine` on dependent launches).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the most negative finite float, for -inf
NO_KEY = tl.constexpr(-(1 << 31))  # below the key of every float
NO_INDEX = tl.constexpr(1 << 30)


@triton.jit
def _key(values):
    """Integers in the order of these floats; equal for 0.0 and -0.0. A NaN without sign is above all."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float with this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _pick(values, here):
    """The one float of each row where `here` is true; 0 if there is none."""
    bits = tl.where(here, values.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x):
    """e^x in double for |x| <= 700, to 14 digits: 2^n times a polynomial of the rest, which is below ln(2) / 2.

    `tl.exp` has a branch for large arguments, after which the next number of a thread has to wait for this one.
    """
    shifted = x * 1.4426950408889634 + 6755399441055744.0  # 1.5 * 2^52: leaves no fraction, and n in the low bits
    n = shifted - 6755399441055744.0
    r = x - n * 0.6931471803691238 - n * 1.9082149292705877e-10  # ln(2) in two parts; n times the first is exact
    r2 = r * r
    r4 = r2 * r2
    low = (r * 0.16666666666666666 + 0.5) * r2 + (r + 1.0)  # the coefficients are 1 / n!
    middle = (r * 0.0001984126984126984 + 0.001388888888888889) * r2 + (r * 0.008333333333333333 + 0.041666666666666664)
    high = (r * 2.505210838544172e-08 + 2.755731922398589e-07) * r2 + (
        r * 2.7557319223985893e-06 + 2.48015873015873e-05
    )
    p = (high * r4 + middle) * r4 + low  # a chain of four; coefficient by coefficient it would be eleven
    return p * ((shifted.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _reciprocal(x):
    """1 / x in double, for x in the range of normal floats: Newton's method from a float. Division has a branch."""
    y = (1.0 / x.to(tl.float32)).to(tl.float64)
    y += y * (1.0 - x * y)
    return y + y * (1.0 - x * y)


@triton.jit
def _log(u):
    """ln(u) in double for u >= 1, to 15 digits: u = 2^k * m with m near 1, and a series in (m - 1) / (m + 1)."""
    bits = u.to(tl.int64, bitcast=True)
    k = ((bits >> 52) - 1023).to(tl.int32)
    m = ((bits & 0xFFFFFFFFFFFFF) | (1023 << 52)).to(tl.float64, bitcast=True)
    large = m > 1.4142135
    m = tl.where(large, 0.5 * m, m)
    f = (m - 1.0) * _reciprocal(m + 1.0)
    g = f * f
    p = g * 0.10526315789473684 + 0.11764705882352941  # 2 / 19, 2 / 17
    p = p * g + 0.13333333333333333
    p = p * g + 0.15384615384615385
    p = p * g + 0.18181818181818182
    p = p * g + 0.2222222222222222
    p = p * g + 0.2857142857142857
    p = p * g + 0.4
    p = p * g + 0.6666666666666666
    p = p * g + 2.0
    return tl.where(large, k + 1, k).to(tl.float64) * 0.6931471805599453 + f * p


@triton.jit
def _scores(values, SCORING: tl.constexpr):
    """Scores of floats; NaN, if there is one, has no sign. Padding is -inf."""
    x = values.to(tl.float64)
    if SCORING == "softmax":
        largest = _value(tl.max(_key(values)))
        e = _exp(tl.maximum(x - largest.to(tl.float64), -700.0))
        x = e * _reciprocal(tl.sum(e))
        x = tl.where(tl.abs(largest) < float("inf"), x, float("nan"))
    elif SCORING == "sigmoid":
        e = _exp(-tl.minimum(tl.abs(x), 700.0))
        x = tl.where(x < 0, e, 1.0) * _reciprocal(1.0 + e)
    elif SCORING == "sqrtsoftplus":
        e = _exp(tl.minimum(tl.maximum(x, -700.0), 20.0))
        u = 1.0 + e
        log1p = _log(u) + (e - (u - 1.0)) * _reciprocal(u)  # the second term is what rounding took from u
        x = tl.sqrt(tl.where(x > 20.0, x, log1p))
    return tl.where(values == values, x.to(tl.float32), float("nan"))  # minimum and maximum return the other number


@triton.jit
def _lists(key, scores, index, slot, rounds, G: tl.constexpr, K: tl.constexpr):
    """The best experts of each group in order, as [G, K]: keys, indices and scores."""
    keys, found = tl.full([G, K], NO_KEY, tl.int32), tl.full([G, K], NO_INDEX, tl.int32)
    taken = tl.full([G, K], float("nan"), tl.float32)
    for s in range(rounds):
        largest = tl.max(key, 1, keep_dims=True)
        best = tl.min(tl.where(key == largest, index, NO_INDEX), 1, keep_dims=True)
        here = index == best
        key = tl.where(here, NO_KEY, key)
        keys, found = tl.where(slot == s, largest, keys), tl.where(slot == s, best, found)
        taken = tl.where(slot == s, _pick(scores, here), taken)
    return keys, found, taken


@triton.jit
def _chosen_groups(keys, slot, topk_group, G: tl.constexpr, CORRECTED: tl.constexpr):
    """Which groups may be selected from, as [G, 1]. A group is as strong as its largest value, or two if CORRECTED."""
    strength = tl.max(keys, 1, keep_dims=True)
    if CORRECTED:
        second = tl.max(tl.where(slot == 1, keys, NO_KEY), 1, keep_dims=True)
        strength = tl.where(strength == NO_KEY, NO_KEY, _key(_value(strength) + _value(second)))
    mine, number = tl.trans(strength), tl.arange(0, G)  # a column is a warp, so the sum below stays inside warps
    ahead = (strength > mine) | ((strength == mine) & (number[:, None] < number[None, :]))
    return tl.trans(tl.sum(ahead.to(tl.int32), 0, keep_dims=True) < topk_group)


@triton.jit
def _starts(lists, C: tl.constexpr):
    """The first C of each row, one row after the other. What follows in a row must be smaller."""
    blocks = tl.reshape(lists, [lists.shape[0], lists.shape[1] // C, C])
    return tl.reshape(tl.max(blocks, 1), [lists.shape[0] * C])


@triton.jit
def _merged(keys, found, taken, slot, C: tl.constexpr):
    """The groups' lists as one, [1, K]. Index and score travel as one integer: one exchange between warps, not two.

    Equal keys are in index order: lists are, and so are groups.
    """
    score = taken.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True)
    experts = _starts(tl.where(slot < C, (found.to(tl.int64) << 32) | score.to(tl.int64), -1), C)[:, None]
    keys = _starts(keys, C)
    mine, others, order = keys[:, None], keys[None, :], tl.arange(0, keys.shape[0])
    ahead = (others > mine) | ((others == mine) & (order[None, :] < order[:, None]))
    place = tl.sum(ahead.to(tl.int32), 1, keep_dims=True)
    experts = tl.sum(tl.where(place == slot, experts, 0), 0, keep_dims=True)
    return (experts >> 32).to(tl.int32), experts.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _total(weights, slot, top_k):
    """The sum in slot order, as the definition adds."""
    total = tl.zeros([1, 1], tl.float32)
    for s in range(top_k):
        total += _pick(weights, slot == s)
    return total


@triton.jit
def _normalized(weights, slot, top_k, renormalize, epsilon):
    """Weights divided by their sum, or by 1 if it is not above 0."""
    total = tl.zeros([1, 1], tl.float32)
    if renormalize:
        total = _total(weights, slot, top_k) + epsilon
    return tl.div_rn(weights, tl.where(total <= 0, 1.0, total))


@triton.jit
def route_tokens(
    logits, bias, correction, table, input_ids, ids, weights, identity, stride, experts, size, topk_group, top_k,
    vocabulary, first_zero, renormalize, epsilon, scale, SCORING: tl.constexpr, AFTER: tl.constexpr,
    HASHED: tl.constexpr, BIASED: tl.constexpr, CORRECTED: tl.constexpr, ZEROS: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Route the token of this program. `size`: experts of a group. `first_zero`: the first zero expert (ZEROS).

    AFTER selects by logits and scores only the selected. HASHED reads the experts from `table` [vocabulary, top_k], and
    has one group. K: slots of a list. C: how many experts of a group can be selected.
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
    corrections = tl.zeros([G, S], tl.float32)
    if CORRECTED:  # loaded before the scores are computed: their instructions hide the latency
        corrections = tl.load(correction + index, mask=inside, other=0.0)
    slot = tl.arange(0, K)[None, :]
    if HASHED:
        row = tl.load(input_ids + token).to(tl.int64)
        entry = tl.load(table + row * top_k + slot, mask=(slot < top_k) & (row >= 0) & (row < vocabulary), other=-1)
        found = tl.where((entry >= 0) & (entry < experts), entry, -1).to(tl.int32)
    scores = tl.where(values == values, values, float("nan"))
    if not AFTER:
        scores = _scores(scores, SCORING)
    selection = scores
    if CORRECTED:
        selection += corrections
    known = selection == selection
    selection = tl.where(known, tl.maximum(selection, LOWEST), float("nan"))
    key = tl.where(inside, _key(selection), NO_KEY)
    scores = tl.where(known, scores, float("nan"))
    if HASHED:
        weight = tl.full([1, K], float("nan"), tl.float32)
        for s in range(top_k):
            best = tl.sum(tl.where(slot == s, found, 0), 1, keep_dims=True)
            weight = tl.where((slot == s) & (best >= 0), _pick(scores, index == best), weight)
    else:
        rounds = tl.maximum(top_k, 2) if G > 1 else top_k  # a group's strength may need two
        keys, found, weight = _lists(key, scores, index, slot, rounds, G, K)
        if G > 1:
            keys = tl.where(_chosen_groups(keys, slot, topk_group, G, CORRECTED), keys, NO_KEY)
            found, weight = _merged(keys, found, weight, slot, C)
    taken = (slot < top_k) & (found >= 0)
    if AFTER:
        weight = _scores(tl.where(taken, weight, -float("inf")), SCORING)
    weight = _normalized(tl.where(taken, weight, 0.0), slot, top_k, renormalize, epsilon) * scale
    if ZEROS:
        is_zero = found >= first_zero
        tl.store(identity + token + tl.zeros([1, 1], tl.int32), _total(tl.where(is_zero, weight, 0.0), slot, top_k))
        found, weight = tl.where(is_zero, -1, found), tl.where(is_zero, 0.0, weight)
    tl.store(ids + token * top_k + slot, found, mask=slot < top_k)
    tl.store(weights + token * top_k + slot, weight, mask=slot < top_k)
