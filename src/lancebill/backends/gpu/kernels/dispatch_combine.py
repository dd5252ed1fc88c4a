"""The kernels around the GEMMs, in plain Triton: dispatch, permutation, row quantisation, combine.

Dispatch turns ids into tile lists on the device. The rows of an expert are contiguous and in slot order
(slot = token * top_k + choice), so equal inputs give equal places. The remainder of an expert after its full tiles
becomes one tile of the smallest size that holds it. So tiles follow the rows that each expert really gets, however
unevenly they are routed. Ids without a local expert (other ranks, padding) get no place.

Every kernel waits for its predecessor before it touches memory and lets its successor start at once (programmatic
dependent launch). Both are no-ops unless the launch enables them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lancebill.backends.gpu.kernels.convert_row import prepare_row, stored_columns
from lancebill.backends.gpu.kernels.limits import MOST_SIZES
from lancebill.backends.gpu.kernels.slots import load_experts, load_weights
from lancebill.backends.gpu.kernels.tile_sizes import launch_of, launches_padded, size_of

CLASSES = tl.constexpr(MOST_SIZES)


@triton.jit
def _write_tiles(total, start, tiles, counts, capacity, E: tl.constexpr, FULL: tl.constexpr, SIZES: tl.constexpr,
                 LAUNCHES: tl.constexpr):  # fmt: skip
    """Write a tile list for each launch: full tiles of FULL rows, and for the remainder of an expert the smallest size
    that holds it.

    SIZES decrease; LAUNCHES has the number of each size's launch, also a byte each. The list of launch n starts at
    n * capacity. A size above FULL is a special case: a small remainder joins the expert's last full tile, so that its
    weights are not read again for a few rows.

    A record is (expert, first row, rows, size). `counts` has four numbers per launch: the number of tiles, then the
    work counters of the first and second GEMM, which start at zero, and one unused.
    """
    e = tl.arange(0, E)
    full = total // FULL
    rest = total - full * FULL
    for c in tl.static_range(CLASSES):
        if size_of(SIZES, c) > FULL:
            joined = (rest > 0) & (rest <= size_of(SIZES, c) - FULL) & (full > 0)
            full = tl.where(joined, full - 1, full)
            rest = tl.where(joined, rest + FULL, rest)
    size = tl.zeros([E], tl.int32)
    launch = tl.full([E], -1, tl.int32)
    for c in tl.static_range(CLASSES):
        if size_of(SIZES, c) > 0:
            fits = (rest > 0) & (rest <= size_of(SIZES, c))
            size = tl.where(fits, size_of(SIZES, c), size)
            launch = tl.where(fits, size_of(LAUNCHES, c), launch)
    number = tl.arange(0, 4 * CLASSES)
    tl.store(counts + number, 0, mask=number % 4 > 0)
    numbers = tl.arange(0, launches_padded(LAUNCHES))
    c = numbers[:, None]  # launches, all at once: each scan waits several times for all threads
    mine = (launch[None, :] == c).to(tl.int32)
    before = tl.where(c == launch_of(SIZES, LAUNCHES, FULL), full[None, :], 0)
    n = before + mine
    tl.store(counts + 4 * numbers, tl.sum(n, 1))
    first = c * capacity + tl.cumsum(n, 1) - n
    full_at = tl.sum(tl.where(c == launch_of(SIZES, LAUNCHES, FULL), first, 0), 0)
    rest_at = tl.sum(tl.where(mine > 0, first + before, 0), 0)
    for i in range(tl.max(full, 0)):
        _write_record(tiles + (full_at + i) * 4, e, start + i * FULL, FULL, FULL, i < full)
    _write_record(tiles + rest_at * 4, e, start + full * FULL, rest, size, launch >= 0)


@triton.jit
def _write_record(record, e, row, rows, size, mask):
    tl.store(record, e, mask=mask)
    tl.store(record + 1, row, mask=mask)
    tl.store(record + 2, rows, mask=mask)
    tl.store(record + 3, size, mask=mask)


@triton.jit
def _owners(edges, owners, row0, rows, each, experts, P: tl.constexpr, E: tl.constexpr, BATCHED: tl.constexpr):
    """Write the expert of rows row0 .. row0 + P; -1 for rows without an expert."""
    r = row0 + tl.arange(0, P)
    if BATCHED:
        e = r // each
        mine = r - e * each < tl.load(edges + e, mask=r < rows, other=0)
    else:
        e = tl.zeros([P], tl.int32)  # binary search: the last expert that starts at or before the row
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
    FULL: tl.constexpr, SIZES: tl.constexpr, LAUNCHES: tl.constexpr,
):  # fmt: skip
    """Tile lists for rows that are already grouped by expert and stay in place.

    `edges` holds each expert's first row and the end of the last one ("contiguous"), or how many of an expert's `each`
    rows are valid ("batched"). "single": all rows belong to expert 0. Edges are clamped to the number of rows. The last
    program writes the lists; the others, if any, write the owners of P rows each.
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
        _write_tiles(total, start, tiles, counts, capacity, E, FULL, SIZES, LAUNCHES)


@triton.jit
def _place(mine, slot0, n, base, slots, places, owners, P: tl.constexpr, E: tl.constexpr):
    """Assign places to slots slot0 .. slot0 + n (n <= P) of the experts `mine`, from each expert's next free place
    (`base`). Returns the number of slots per expert.
    """
    i = tl.arange(0, P)
    before = tl.sum(((mine[:, None] == mine[None, :]) & (i[:, None] < i[None, :])).to(tl.int32), 0)
    placed = mine >= 0
    place = tl.where(placed, before + tl.gather(base, tl.maximum(mine, 0), 0), -1)
    tl.store(slots + place, slot0 + i, mask=placed)
    tl.store(owners + place, mine, mask=placed)
    tl.store(places + slot0 + i, place, mask=i < n)
    return tl.histogram(tl.maximum(mine, 0), E, mask=placed)


@triton.jit
def _load_slots(ids, top_k, slot, inside):
    """The experts of slots (slot = token * top_k + choice)."""
    token = slot // top_k
    return load_experts(ids, token, slot - token * top_k, inside)


@triton.jit
def _copy_row(x, weights, perm, pre_scale, given, places, owners, out, scales, token, hidden, H: tl.constexpr,
              TOP_K: tl.constexpr, QUANTISED: tl.constexpr, WEIGHTED: tl.constexpr, ORDERED: tl.constexpr,
              SCALED: tl.constexpr, STATIC: tl.constexpr, ROTATION: tl.constexpr):  # fmt: skip
    """Copy a token's row to each of its places."""
    k, at, length = stored_columns(hidden, H, QUANTISED, ROTATION)
    inside = k < hidden
    source = x + token.to(tl.int64) * hidden
    weight = 1.0
    if WEIGHTED:
        weight = load_weights(weights, token, 0, True)  # only with top_k = 1
    TYPE: tl.constexpr = out.dtype.element_ty
    SAME_FOR_ALL: tl.constexpr = not (ORDERED or SCALED or STATIC)
    if SAME_FOR_ALL:
        row, scale = prepare_row(source, token, weight, perm, pre_scale, given, k, inside, hidden, TYPE,
                                 QUANTISED, WEIGHTED, ORDERED, SCALED, STATIC, ROTATION)  # fmt: skip
        row = row.to(TYPE)
    targets = ()
    for choice in tl.static_range(TOP_K):  # all loads are issued before the first use
        targets += (tl.load(places + token * TOP_K + choice),)
    for choice in tl.static_range(TOP_K):
        place = targets[choice]
        if SAME_FOR_ALL:  # stores are masked: in a branch each, codes would be packed again for each place
            tl.store(out + place.to(tl.int64) * length + at, row, mask=(at < length) & (place >= 0))
            if QUANTISED:
                tl.store(scales + place, scale, mask=place >= 0)
        elif place >= 0:
            expert = tl.load(owners + place)
            converted, own_scale = prepare_row(source, expert, weight, perm, pre_scale, given, k, inside, hidden, TYPE,
                                               QUANTISED, WEIGHTED, ORDERED, SCALED, STATIC, ROTATION)  # fmt: skip
            tl.store(out + place.to(tl.int64) * length + at, converted.to(TYPE), mask=at < length)
            if QUANTISED:
                tl.store(scales + place, own_scale)


@triton.jit
def dispatch_small(
    ids, id_words, id_row, id_column, expert_map, mapped, experts, weights, weight_kind, weight_row, weight_column, x,
    perm, pre_scale, given, slots, places, owners, out, scales, tiles, counts, tokens, hidden, capacity,
    R: tl.constexpr, P: tl.constexpr, E: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr, FULL: tl.constexpr,
    SIZES: tl.constexpr, LAUNCHES: tl.constexpr, QUANTISED: tl.constexpr, WEIGHTED: tl.constexpr, ORDERED: tl.constexpr,
    SCALED: tl.constexpr, STATIC: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """One launch for few tokens. Every program counts all ids and copies one row; the last one writes the lists."""
    gdc_wait()
    gdc_launch_dependents()
    b = tl.program_id(0)
    total_slots = tokens * TOP_K
    ids = (ids, id_words, id_row, id_column, expert_map, mapped, experts)
    weights = (weights, weight_kind, weight_row, weight_column)
    o = tl.arange(0, R)
    v = _load_slots(ids, TOP_K, o, o < total_slots)
    total = tl.histogram(tl.maximum(v, 0), E, mask=v >= 0)
    start = tl.cumsum(total, 0) - total
    if b == tl.num_programs(0) - 1:
        _write_tiles(total, start, tiles, counts, capacity, E, FULL, SIZES, LAUNCHES)
    else:
        slot0 = b * TOP_K
        before = tl.histogram(tl.maximum(v, 0), E, mask=(v >= 0) & (o < slot0))
        i = tl.arange(0, P)
        mine = _load_slots(ids, TOP_K, slot0 + i, i < TOP_K)
        _place(mine, slot0, TOP_K, start + before, slots, places, owners, P, E)
        tl.debug_barrier()
        _copy_row(x, weights, perm, pre_scale, given, places, owners, out, scales, b, hidden, H, TOP_K, QUANTISED,
                  WEIGHTED, ORDERED, SCALED, STATIC, ROTATION)  # fmt: skip


@triton.jit
def count_ids(ids, id_words, id_row, id_column, expert_map, mapped, experts, counted, top_k, total_slots,
              CHUNK: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """Many tokens, launch 1 of 3: count each expert's slots in each chunk of slots."""
    gdc_wait()
    gdc_launch_dependents()
    b = tl.program_id(0)
    ids = (ids, id_words, id_row, id_column, expert_map, mapped, experts)
    o = b * CHUNK + tl.arange(0, CHUNK)
    v = _load_slots(ids, top_k, o, o < total_slots)
    tl.store(counted + b * E + tl.arange(0, E), tl.histogram(tl.maximum(v, 0), E, mask=v >= 0))


@triton.jit
def place_ids(
    ids, id_words, id_row, id_column, expert_map, mapped, experts, counted, slots, places, owners, tiles, counts, top_k,
    total_slots, capacity, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, E: tl.constexpr,
    FULL: tl.constexpr, SIZES: tl.constexpr, LAUNCHES: tl.constexpr,
):  # fmt: skip
    """Launch 2 of 3: assign places to one chunk of slots from all counts. The last program writes the lists."""
    gdc_wait()
    gdc_launch_dependents()
    b = tl.program_id(0)
    ids = (ids, id_words, id_row, id_column, expert_map, mapped, experts)
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
        _write_tiles(total, start, tiles, counts, capacity, E, FULL, SIZES, LAUNCHES)
    else:
        base = start + earlier
        i = tl.arange(0, P)
        end = tl.minimum(b * CHUNK + CHUNK, total_slots)
        mine = _load_slots(ids, top_k, b * CHUNK + i, b * CHUNK + i < end)
        for slot0 in range(b * CHUNK, end, P):
            following = _load_slots(ids, top_k, slot0 + P + i, slot0 + P + i < end)  # while `mine` is placed
            base += _place(mine, slot0, end - slot0, base, slots, places, owners, P, E)
            mine = following


@triton.jit
def send_rows(
    weights, weight_kind, weight_row, weight_column, x, perm, pre_scale, given, places, owners, out, scales, hidden,
    H: tl.constexpr, TOP_K: tl.constexpr, QUANTISED: tl.constexpr, WEIGHTED: tl.constexpr, ORDERED: tl.constexpr,
    SCALED: tl.constexpr, STATIC: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Launch 3 of 3: each program copies one token's row to all its places."""
    gdc_wait()
    gdc_launch_dependents()
    weights = (weights, weight_kind, weight_row, weight_column)
    _copy_row(x, weights, perm, pre_scale, given, places, owners, out, scales, tl.program_id(0), hidden, H, TOP_K,
              QUANTISED, WEIGHTED, ORDERED, SCALED, STATIC, ROTATION)  # fmt: skip


@triton.jit
def _prepare_row(
    i, x, places, owners, perm, pre_scale, given, out, scales, width, W: tl.constexpr, QUANTISED: tl.constexpr,
    ORDERED: tl.constexpr, SCALED: tl.constexpr, STATIC: tl.constexpr, ROTATION: tl.constexpr, PLACED: tl.constexpr,
    OWNED: tl.constexpr,
):  # fmt: skip
    """Convert row i, or the row of slot i. Skips rows without an expert."""
    r = i.to(tl.int64)
    if PLACED:
        r = tl.load(places + r).to(tl.int64)
    k, at, length = stored_columns(width, W, QUANTISED, ROTATION)
    inside = k < width
    TYPE: tl.constexpr = out.dtype.element_ty
    e = tl.where(r < 0, -1, 0)
    if OWNED:
        e = tl.load(owners + r, mask=r >= 0, other=-1)
    if e >= 0:
        row, scale = prepare_row(x + r * width, e, 1.0, perm, pre_scale, given, k, inside, width, TYPE, QUANTISED,
                                 False, ORDERED, SCALED, STATIC, ROTATION)  # fmt: skip
        tl.store(out + r * length + at, row.to(TYPE), mask=at < length)
        if QUANTISED:
            tl.store(scales + r, scale)


@triton.jit
def prepare_rows(
    x, places, owners, perm, pre_scale, given, out, scales, rows, width, R: tl.constexpr, W: tl.constexpr,
    QUANTISED: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, STATIC: tl.constexpr, ROTATION: tl.constexpr,
    PLACED: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """Convert rows to the input of the next GEMM, R rows per program.

    PLACED: a program takes the rows of its slots from `places`; nothing has written the rows after those of all slots.
    OWNED: read each row's expert from `owners`. Otherwise there is one expert, or the conversion does not depend on it.
    """
    gdc_wait()
    gdc_launch_dependents()
    if R == 1:
        _prepare_row(tl.program_id(0), x, places, owners, perm, pre_scale, given, out, scales, width, W, QUANTISED,
                     ORDERED, SCALED, STATIC, ROTATION, PLACED, OWNED)  # fmt: skip
    else:
        first = tl.program_id(0) * R
        for i in range(first, tl.minimum(first + R, rows)):
            _prepare_row(i, x, places, owners, perm, pre_scale, given, out, scales, width, W, QUANTISED, ORDERED,
                         SCALED, STATIC, ROTATION, PLACED, OWNED)  # fmt: skip


@triton.jit
def combine_rows(y, weights, weight_kind, weight_row, weight_column, places, out, hidden, BLOCK: tl.constexpr,
                 TOP_K: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    """The weighted sum of a token's rows, which are contiguous: in fp32, in slot order, rounded once.

    Slots without an expert have no place; their rows and weights may be NaN.
    """
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    weights = (weights, weight_kind, weight_row, weight_column)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        placed = tl.load(places + slot) >= 0
        row = tl.load(y + slot * hidden + c, mask=inside & placed, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= load_weights(weights, token, choice, placed)
        total += row
    tl.store(out + token * hidden + c, total.to(out.dtype.element_ty), mask=inside)
