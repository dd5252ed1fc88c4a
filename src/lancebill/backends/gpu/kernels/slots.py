"""Reading what routers give: the expert and the weight of each slot (a token's choice), in plain Triton and Gluon.

Routers give int32 or int64 ids, weights in bf16, fp16 or fp32, and views with any strides. How to read them is passed
in runtime integers (see `RoutingLayout`), so that one kernel reads them all. A load that does not apply is masked off,
which costs an instruction and no memory access.

`ids` and `weights` are tuples of kernel arguments:
ids = (pointer to 32-bit words, words per id, row stride, column stride, expert map, its length, experts),
weights = (pointer, kind, row stride, column stride). Strides of ids count words.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_experts(ids, token, choice, inside):
    """The local expert of a slot; -1 for padding, for experts of other ranks, and where `inside` is false.

    An expert map of length 0 means none: ids are local already. An int64 id is an expert only if its high word is 0.
    """
    words, words_per_id, row, column, expert_map, mapped, experts = ids
    at = words + token * row + choice * column
    low = tl.load(at, mask=inside, other=-1)
    high = tl.load(at + 1, mask=inside & (words_per_id == 2), other=0)
    e = tl.where(high == 0, low, -1)
    local = tl.load(expert_map + e, mask=(e >= 0) & (e < mapped), other=-1)
    e = tl.where(mapped > 0, local, e)
    return tl.where((e >= 0) & (e < experts), e, -1)


@triton.jit
def load_weights(weights, token, choice, inside):
    """The routing weight of a slot in fp32; 0 where `inside` is false. Kinds: 0 bf16, 1 fp16, 2 fp32."""
    pointer, kind, row, column = weights
    at = token * row + choice * column
    as_bf16 = tl.load(pointer.to(tl.pointer_type(tl.bfloat16)) + at, mask=inside & (kind == 0), other=0.0)
    as_fp16 = tl.load(pointer.to(tl.pointer_type(tl.float16)) + at, mask=inside & (kind == 1), other=0.0)
    as_fp32 = tl.load(pointer.to(tl.pointer_type(tl.float32)) + at, mask=inside & (kind == 2), other=0.0)
    narrow = tl.where(kind == 0, as_bf16.to(tl.float32), as_fp16.to(tl.float32))
    return tl.where(kind == 2, as_fp32, narrow)
