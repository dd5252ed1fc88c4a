"""Packing of codes by a kernel, where the weights are on a GPU. Optional: `fragment_order` defines the result."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.fragment_order import thread_fields, words_of_thread
from lancebill.backends.gpu.kernels.weight_form import WeightForm
from lancebill.backends.gpu.target import compile_target
from lancebill.errors import CompileError
from lancebill.jit.compile import KernelSource
from lancebill.jit.driver import use_context
from lancebill.jit.load import prepare_launch
from lancebill.moe.problem import parse_device

MODULE = "lancebill.backends.gpu.kernels.pack_codes"
_THREADS = 256  # fragment threads of a unit

Part = tuple[int, int]  # bits of a byte, as a mask, and their distance to the left
Moves = tuple[tuple[tuple[int, int, tuple[Part, ...]], ...], ...]  # by word: (n3, byte of the thread's row, parts)


def pack_on_gpu(form: WeightForm, rows: Tensor, out: Tensor, padded: tuple[int, int], *, gated: bool) -> bool:
    """Pack rows of bytes [..., n, bytes] into words [..., words]; False if this machine cannot run the kernel.

    4-bit codes are two per byte, all others one.
    """
    if rows.device.type != "cuda" or out.device != rows.device or not out.is_contiguous():
        return False
    rows, units, slices = rows.contiguous(), padded[0] // f.ROWS, padded[1] // form.slice_columns
    experts = rows.shape[0] if rows.dim() == 3 else 1
    values = {
        "codes": rows.data_ptr(),
        "out": out.data_ptr(),
        "rows": rows.shape[-2],
        "row_bytes": rows.shape[-1],
        "units": units,
        "slices": slices,
    }
    device = rows.device.index or 0
    stream = torch.cuda.current_stream(rows.device).cuda_stream
    use_context(device)
    arch = compile_target(parse_device(f"cuda:{device}").arch)
    try:
        launch = prepare_launch(source(form, gated, arch), device, stream, values, dependent=False)
    except CompileError:  # there is no compiler and no compiled kernel: torch does it
        return False
    launch.grid(experts * units * slices)
    launch(stream)
    return True


@lru_cache(maxsize=64)
def source(form: WeightForm, gated: bool, arch: int = 90) -> KernelSource:
    """The kernel of a form. Forms whose codes have the same bit positions share it."""
    arguments = {"codes": "*u8", "out": "*i32", "rows": "i32", "row_bytes": "i32", "units": "i32", "slices": "i32"}
    lane_columns = 32 if form.byte_inputs else 2
    stored = _stored_bits(form)
    constants = {
        "GATED": gated,
        "SLICE_BYTES": form.slice_columns * stored // 8,
        "LANE_BYTES": lane_columns * stored // 8,
        "WORDS": words_of_thread(form),
        "MOVES": moves(form),
    }
    options = (("num_warps", 4),)
    names, values = tuple(arguments.items()), tuple(constants.items())
    return KernelSource(MODULE, "pack_codes", names, values, ("out",), options, arch)


@lru_cache(maxsize=64)
def moves(form: WeightForm) -> Moves:
    """Where the bits of each word come from, from the table of bit positions."""
    words: list[dict[tuple[int, int], dict[int, int]]] = [{} for _ in range(words_of_thread(form))]
    for n3, column, bits in thread_fields(form):
        byte, start = divmod(column * _stored_bits(form), 8)
        for bit, word, position in bits:
            parts = words[word].setdefault((n3, byte), {})
            shift = position - (start + bit)
            parts[shift] = parts.get(shift, 0) | 1 << (start + bit)
    return tuple(
        tuple((n3, byte, tuple((mask, shift) for shift, mask in sorted(parts.items())))
              for (n3, byte), parts in sorted(word.items()))
        for word in words
    )  # fmt: skip


def _stored_bits(form: WeightForm) -> int:
    """Bits of a code in the rows that are packed."""
    return 4 if form.bits == 4 else 8
