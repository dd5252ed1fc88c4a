"""Unpacking by a kernel, where packed experts were copied to a GPU.

Optional: `layout` defines the result in torch, and does what the kernel cannot.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lancebill.backends.gpu import pack_on_gpu
from lancebill.jit.compile import KernelSource

_WORDS = 32  # of each row of a strip that a program writes: 128 bytes
_COLUMNS = 8  # of a word


def unpack_nibbles(packed: Tensor, n: int, k: int, *, gated: bool) -> Tensor | None:
    """4-bit codes [experts, strips, bytes] as rows of bytes [experts, n, k / 2]; None if no kernel can."""
    if packed.dim() != 3 or not packed.is_contiguous() or k % _COLUMNS or packed.data_ptr() % 16:
        return None
    experts, strips, strip_bytes = packed.shape
    rows = torch.empty(experts, n, k // _COLUMNS, dtype=torch.int32, device=packed.device)
    values: pack_on_gpu.Values = {
        "codes": packed.view(torch.int32), "out": rows, "strips": strips, "strip_words": strip_bytes // 4, "rows": n,
        "part_rows": n // 2 if gated else n, "row_words": k // _COLUMNS,
    }  # fmt: skip
    programs = experts * strips * -(-k // (_COLUMNS * _WORDS))
    done = pack_on_gpu.launch(nibble_source, (gated,), values, programs, packed.device)
    return rows.view(torch.uint8) if done else None


@lru_cache(maxsize=16)
def nibble_source(gated: bool, arch: int = 90) -> KernelSource:
    """The kernel that unpacks 4-bit codes."""
    integers = ("strips", "strip_words", "rows", "part_rows", "row_words")
    arguments = (("codes", "*i32"), ("out", "*i32"), *((name, "i32") for name in integers))
    constants = (("GATED", gated), ("WORDS", _WORDS))
    return KernelSource(
        "lancebill.backends.cpu.unpack_kernel", "unpack_nibbles", arguments, constants, ("codes", "out"),
        (("num_warps", 4),), arch,
    )  # fmt: skip
