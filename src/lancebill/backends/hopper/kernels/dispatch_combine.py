"""Rows around the products, in plain Triton: dispatch, permutation, quantisation, combine.

Dispatch turns ids into lists of tiles on the device. Rows of an expert lie together and in slot
order (slot = token * top_k + choice), so equal inputs give equal places. Full tiles have T0 rows; what
remains of an expert goes to the smallest class that holds it, one list a class. Ids that are no expert's here (other
ranks', padding) get no place.

Every kernel waits for its predecessor before it touches memory and lets its successor start at
once: programmatic dependent launch, a no-op where the launch does not ask for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _write_tiles(total, start, tiles, counts, E: tl.constexpr, CAPACITY, T0: tl.constexpr, T1: tl.constexpr,
                 T2: tl.constexpr, T3: tl.constexpr):  # fmt: skip
    """The lists: T0 > T1 > T2 > T3, 0 = no such class. Class c's list starts at CAPACITY + (c - 1) * E.

    T3 > T0 is another thing: what little remains of an expert joins its last full tile, so that its weights
    are not read once more for a few rows.

    A record is (expert, first row, rows, nothing). `counts` are four numbers a class: its tiles, and how many of them
    the products have taken so far.
    """
    e = tl.arange(0, E)
    full = total // T0
    rest = total - full * T0
    kind = tl.zeros([E], tl.int32)
    if T3 > T0:
        joined = (rest > 0) & (rest <= T3 - T0) & (full > 0)
        full = tl.where(joined, full - 1, full)
        rest = tl.where(joined, rest + T0, rest)
    if T1 > 0:
        kind = tl.where(rest <= T1, 1, kind)
    if T2 > 0:
        kind = tl.where(rest <= T2, 2, kind)
    if T3 > T0:
        kind = tl.where(rest > T0, 3, kind)
    elif T3 > 0:
        kind = tl.where(rest <= T3, 3, kind)
    kind = tl.where(rest == 0, -1, kind)
    n = full + (kind == 0).to(tl.int32)
    first = tl.cumsum(n, 0) - n
    number = tl.arange(0, 16)
    tl.store(counts + number, 0, mask=number % 4 > 0)
    tl.store(counts, tl.sum(n, 0))
    for i in range(tl.max(n, 0)):
        record = tiles + (first + i) * 4
        mine = i < n
        tl.store(record, e, mask=mine)
        tl.store(record + 1, start + i * T0, mask=mine)
        tl.store(record + 2, tl.minimum(T0, total - i * T0), mask=mine)
    for c in tl.static_range(1, 4):
        if (T1 if c == 1 else (T2 if c == 2 else T3)) > 0:
            mine = kind == c
            first = tl.cumsum(mine.to(tl.int32), 0) - mine.to(tl.int32)
            record = tiles + (CAPACITY + (c - 1) * E + first) * 4
            tl.store(counts + 4 * c, tl.sum(mine.to(tl.int32), 0))
            tl.store(record, e, mask=mine)
            tl.store(record + 1, start + full * T0, mask=mine)
            tl.store(record + 2, rest, mask=mine)


@triton.jit
def _owners(edges, owners, row0, rows, each, experts, P: tl.constexpr, E: tl.constexpr, BATCHED: tl.constexpr):
    """Whose rows row0 .. row0 + P are; -1 where they are nobody's."""
    r = row0 + tl.arange(0, P)
    if BATCHED:
        e = r // each
        mine = r - e * each < tl.load(edges + e, mask=r < rows, other=0)
    else:
        e = tl.zeros([P], tl.int32)  # the last expert that starts at or before the row, by halves
        for i in tl.static_range(1, 12):
            if (E >> i) > 0:
                further = e + (E >> i)
                edge = tl.load(edges + further, mask=further < experts, other=1 << 40)
                e = tl.where(edge <= r, further, e)
        mine = (r >= tl.load(edges)) & (r < tl.load(edges + experts))
    tl.store(owners + r, tl.where(mine, e, -1), mask=r < rows)


@triton.jit
def list_tiles(
    edges, owners, tiles, counts, rows, each, experts, capacity, P: tl.constexpr, E: tl.constexpr, FORM: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
):  # fmt: skip
    """The lists of work that comes dispatched: rows lie by expert already and stay where they are.

    `edges` are each expert's first row and the end of the last ("contiguous"), or how many of its `each` rows
    are real ("batched"); "single": all rows are expert 0's. Edges past the rows are cut off. The last program writes
    the lists, the others, if there are any, who owns P rows.
    """
    gdc_wait()
    gdc_launch_dependents()
    b = tl.program_id(0)
    if b < tl.num_programs(0) - 1:
        _owners(edges, owners, b * P, rows, each, experts, P, E, FORM == "batched")
    else:
        e = tl.arange(0, E)
        if FORM == "contiguous":
            start = tl.load(edges + e, mask=e < experts, other=0)
            end = tl.load(edges + e + 1, mask=e < experts, other=0)
            start = tl.minimum(tl.maximum(start, 0), rows).to(tl.int32)
            total = tl.maximum(tl.minimum(end, rows).to(tl.int32) - start, 0)
        elif FORM == "batched":
            start = e * each
            total = tl.load(edges + e, mask=e < experts, other=0)
            total = tl.minimum(tl.maximum(total, 0), each)
        else:
            start = tl.zeros([E], tl.int32)
            total = tl.where(e == 0, rows, 0)
        _write_tiles(total, start, tiles, counts, E, capacity, T0, T1, T2, T3)


@triton.jit
def _load_ids(ids, at, inside, experts):
    """Ids that are no expert's here, padding of any kind, come as -1."""
    v = tl.load(ids + at, mask=inside, other=-1)
    return tl.where((v >= 0) & (v < experts), v, -1)


@triton.jit
def _place(ids, slot0, n, base, slots, places, experts, P: tl.constexpr, E: tl.constexpr):
    """Places of slots slot0 .. slot0 + n (n <= P), given each expert's next free one; counts them."""
    i = tl.arange(0, P)
    mine = _load_ids(ids, slot0 + i, i < n, experts)
    j = tl.arange(0, P)
    other = _load_ids(ids, slot0 + j, j < n, experts)
    before = tl.sum(((mine[:, None] == other[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    placed = mine >= 0
    place = tl.where(placed, before + tl.gather(base, tl.maximum(mine, 0), 0), -1)
    tl.store(slots + place, slot0 + i, mask=placed)
    tl.store(places + slot0 + i, place, mask=i < n)
    return tl.histogram(tl.maximum(mine, 0), E, mask=placed)


@triton.jit
def column_at(place):
    """The column that lies at a place of an fp8 row: in each slice, bits k4 k3 k2 k6 k5 k1 k0 say the place."""
    return (place & -128) | (place & 3) | ((place & 12) << 3) | ((place & 112) >> 2)


@triton.jit
def _columns(width, W: tl.constexpr, NARROW: tl.constexpr):
    """(column, place, length) of a row as it is stored: narrow ones are in the order of their slices, whole slices."""
    place = tl.arange(0, W)
    if NARROW:
        k = (place & -128) + column_at(place & 127)  # what is said of a sum holds; of a call it would be forgotten
        k = tl.max_contiguous(tl.multiple_of(k, 4), 4)
        return k, place, (width + 127) // 128 * 128
    else:
        return place, place, width


@triton.jit
def _divided(x, by):
    """x / by, rounded once: a reciprocal, and what it misses put right twice, in half the time that divisions take.

    The reciprocal is the nearest number; then the first correction ends at a neighbour of x / by at most, and the
    second at the nearest (Markstein's theorem), as long as nothing of what is missed is too small a number. For x that
    are no larger than `by` times e4m3's largest: nothing overflows. Zeros lose their sign.
    """
    if (by > 2.0**-60) & (by < 2.0**60):
        reciprocal = tl.div_rn(1.0, by)
        q = x * reciprocal
        q = tl.fma(tl.fma(-q, by, x), reciprocal, q)
        q = tl.fma(tl.fma(-q, by, x), reciprocal, q)
    else:
        q = tl.div_rn(x, by)
    return q


@triton.jit
def _prepared(source, e, weight, perm, pre_scale, given, k, inside, width, NARROW: tl.constexpr, WEIGHTED: tl.constexpr,
              ORDERED: tl.constexpr, SCALED: tl.constexpr, STATIC: tl.constexpr):  # fmt: skip
    """A row as expert e takes it, and the scale of a narrow one.

    ORDERED: columns in the order of the expert's weights (act-order). SCALED: times the expert's vector.
    WEIGHTED: times the routing weight. NARROW: as e4m3 (448 is its largest number) with the row's own scale, or
    the expert's where it is STATIC. Rounded once, when it is stored.
    """
    where = k
    if ORDERED:
        where = tl.load(perm + e.to(tl.int64) * width + k, mask=inside, other=0)
    row = tl.load(source + where, mask=inside, other=0.0)
    if WEIGHTED:
        row = row.to(tl.float32) * weight
    if SCALED:
        row = row.to(tl.float32) * tl.load(pre_scale + e.to(tl.int64) * width + where, mask=inside, other=0.0)
    scale = 1.0
    if NARROW:
        value = row.to(tl.float32)
        if STATIC:
            scale = tl.load(given + e)
            row = tl.div_rn(value, scale)
        else:
            scale = tl.div_rn(tl.max(tl.abs(value), 0), 448.0)
            scale = tl.where(scale > 0, scale, 1.0)
            row = _divided(value, scale)
    return row, scale


@triton.jit
def _send_row(x, weights, perm, pre_scale, given, ids, places, owners, out, scales, token, hidden, H: tl.constexpr,
              TOP_K: tl.constexpr, NARROW: tl.constexpr, WEIGHTED: tl.constexpr, ORDERED: tl.constexpr,
              SCALED: tl.constexpr, STATIC: tl.constexpr, OWNED: tl.constexpr):  # fmt: skip
    """A token's row to each of its places. OWNED: beside each place, the expert it belongs to."""
    k, at, length = _columns(hidden, H, NARROW)
    inside = k < hidden
    source = x + token.to(tl.int64) * hidden
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + token)  # top-1: a slot is a token
    ALIKE: tl.constexpr = not (ORDERED or SCALED or STATIC)
    if ALIKE:
        row, scale = _prepared(source, token, weight, perm, pre_scale, given, k, inside, hidden, NARROW, WEIGHTED,
                               ORDERED, SCALED, STATIC)  # fmt: skip
        row = row.to(out.dtype.element_ty)
    found = ()
    for choice in tl.static_range(TOP_K):  # all asked for before any is needed
        found += (tl.load(places + token * TOP_K + choice),)
    for choice in tl.static_range(TOP_K):
        slot, place = token * TOP_K + choice, found[choice]
        if place >= 0:
            target = out + place.to(tl.int64) * length + at
            if ALIKE:
                tl.store(target, row, mask=at < length)
                if NARROW:
                    tl.store(scales + place, scale)
            else:
                own, own_scale = _prepared(source, tl.load(ids + slot), weight, perm, pre_scale, given, k, inside,
                                           hidden, NARROW, WEIGHTED, ORDERED, SCALED, STATIC)  # fmt: skip
                tl.store(target, own.to(out.dtype.element_ty), mask=at < length)
                if NARROW:
                    tl.store(scales + place, own_scale)
            if OWNED:
                tl.store(owners + place, tl.load(ids + slot))


@triton.jit
def dispatch_small(
    ids, x, weights, perm, pre_scale, given, slots, places, owners, out, scales, tiles, counts, tokens, hidden,
    capacity, experts, R: tl.constexpr, P: tl.constexpr, E: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, NARROW: tl.constexpr,
    WEIGHTED: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, STATIC: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """One launch for few tokens: every program counts all ids and sends one row; the last writes the lists."""
    gdc_wait()
    gdc_launch_dependents()
    b = tl.program_id(0)
    total_slots = tokens * TOP_K
    o = tl.arange(0, R)
    v = _load_ids(ids, o, o < total_slots, experts)
    total = tl.histogram(tl.maximum(v, 0), E, mask=v >= 0)
    start = tl.cumsum(total, 0) - total
    if b == tl.num_programs(0) - 1:
        _write_tiles(total, start, tiles, counts, E, capacity, T0, T1, T2, T3)
    else:
        slot0 = b * TOP_K
        before = tl.histogram(tl.maximum(v, 0), E, mask=(v >= 0) & (o < slot0))
        _place(ids, slot0, TOP_K, start + before, slots, places, experts, P, E)
        tl.debug_barrier()
        _send_row(x, weights, perm, pre_scale, given, ids, places, owners, out, scales, b, hidden, H, TOP_K, NARROW,
                  WEIGHTED, ORDERED, SCALED, STATIC, OWNED)  # fmt: skip


@triton.jit
def count_ids(ids, counted, total_slots, experts, CHUNK: tl.constexpr, E: tl.constexpr):
    """Many tokens, first of three: how often each expert occurs in each chunk of slots."""
    gdc_wait()
    gdc_launch_dependents()
    b = tl.program_id(0)
    o = b * CHUNK + tl.arange(0, CHUNK)
    v = _load_ids(ids, o, o < total_slots, experts)
    tl.store(counted + b * E + tl.arange(0, E), tl.histogram(tl.maximum(v, 0), E, mask=v >= 0))


@triton.jit
def place_ids(
    ids, counted, slots, places, tiles, counts, total_slots, capacity, experts, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, P: tl.constexpr, E: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    T3: tl.constexpr,
):  # fmt: skip
    """Second: places for a chunk of slots, from the counts of all; the last program writes the lists."""
    gdc_wait()
    gdc_launch_dependents()
    b = tl.program_id(0)
    chunks = tl.num_programs(0) - 1
    total = tl.zeros([E], tl.int32)
    earlier = tl.zeros([E], tl.int32)
    for c0 in range(0, chunks, CHUNKS):
        c = c0 + tl.arange(0, CHUNKS)
        h = tl.load(counted + c[:, None] * E + tl.arange(0, E)[None, :], mask=(c < chunks)[:, None], other=0)
        total += tl.sum(h, 0)
        earlier += tl.sum(tl.where((c < b)[:, None], h, 0), 0)
    start = tl.cumsum(total, 0) - total
    if b == chunks:
        _write_tiles(total, start, tiles, counts, E, capacity, T0, T1, T2, T3)
    else:
        base = start + earlier
        for slot0 in range(b * CHUNK, tl.minimum(b * CHUNK + CHUNK, total_slots), P):
            base += _place(ids, slot0, tl.minimum(total_slots - slot0, P), base, slots, places, experts, P, E)


@triton.jit
def send_rows(
    x, weights, perm, pre_scale, given, ids, places, owners, out, scales, hidden, H: tl.constexpr, TOP_K: tl.constexpr,
    NARROW: tl.constexpr, WEIGHTED: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, STATIC: tl.constexpr,
    OWNED: tl.constexpr,
):  # fmt: skip
    """Third: one token a program, its row to all its places."""
    gdc_wait()
    gdc_launch_dependents()
    _send_row(x, weights, perm, pre_scale, given, ids, places, owners, out, scales, tl.program_id(0), hidden, H, TOP_K,
              NARROW, WEIGHTED, ORDERED, SCALED, STATIC, OWNED)  # fmt: skip


@triton.jit
def prepare_rows(
    x, owners, perm, pre_scale, given, out, scales, width, W: tl.constexpr, NARROW: tl.constexpr,
    ORDERED: tl.constexpr, SCALED: tl.constexpr, STATIC: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """Rows that stay where they are, as the next product takes them: a row a program, but for those that are nobody's.

    OWNED: `owners` says whose a row is; it is the only expert's otherwise, or it does not matter.
    """
    gdc_wait()
    gdc_launch_dependents()
    r = tl.program_id(0).to(tl.int64)
    k, at, length = _columns(width, W, NARROW)
    inside = k < width
    e = tl.zeros([], tl.int32)
    if OWNED:
        e = tl.load(owners + r)
    if e >= 0:
        row, scale = _prepared(x + r * width, e, 1.0, perm, pre_scale, given, k, inside, width, NARROW, False, ORDERED,
                               SCALED, STATIC)  # fmt: skip
        tl.store(out + r * length + at, row.to(out.dtype.element_ty), mask=at < length)
        if NARROW:
            tl.store(scales + r, scale)


@triton.jit
def combine_rows(y, weights, ids, out, hidden, experts, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
                 WEIGHTED: tl.constexpr):  # fmt: skip
    """A token's rows lie together: their weighted sum in fp32, in slot order, rounded once."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        e = tl.load(ids + slot)
        mine = (e >= 0) & (e < experts)
        row = tl.load(y + slot * hidden + c, mask=inside & mine, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + slot, mask=mine, other=0.0)  # a slot of no expert may have any weight
        total += row
    tl.store(out + token * hidden + c, total.to(out.dtype.element_ty), mask=inside)
