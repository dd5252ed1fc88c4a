"""Packing by kernels, where the weights are on a GPU: two launches for a matrix of many experts.

Optional: `fragment_order` and `layout` define the result in torch, and do what the kernels cannot.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.fragment_order import thread_fields, words_of_thread
from lancebill.backends.gpu.kernels.unpack_codes import MAGIC
from lancebill.backends.gpu.kernels.unpack_scales import row_shift, scale_rotation
from lancebill.backends.gpu.kernels.weight_form import WeightForm
from lancebill.backends.gpu.scale_rules import EXPONENT_RANGE, base_rule, units
from lancebill.backends.gpu.target import compile_target
from lancebill.errors import CompileError
from lancebill.jit.address import address_on
from lancebill.jit.compile import KernelSource
from lancebill.jit.driver import Launch, in_context
from lancebill.jit.load import prepare_launch
from lancebill.moe.device import parse_device

_KERNELS = "lancebill.backends.gpu.kernels"
_SLICES = 4  # of one program: together they read 128 bytes of a row of 4-bit codes
_CHUNK = 32  # words or groups of a row that a program handles together
_VECTOR = 16  # bytes of the widest read
VECTORS, WORDS, COLUMNS = "vectors", "words", "columns"  # how codes are read: see `kernels.pack_codes`
_SCALE_TYPES = {f.E8M0_G32: "*u8", f.E4M3_G16: "*u8", f.BF16_GROUP: "*i16", f.F16_GROUP: "*i16", f.F32_GROUP: "*i32"}

Move = tuple[int, int, int, int]  # n3, word of the thread's row, bits of that word as a mask, their way to the left
Moves = tuple[tuple[Move, ...], ...]  # by packed word
Values = Mapping[str, Tensor | int | None]  # arguments of a kernel; None: a pointer that is not used
Make = Callable[..., KernelSource]


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """What belongs to the codes of several experts. None: the matrix has none."""

    scales: Tensor | None  # [experts, rows of scales, groups]
    zero: Tensor | None  # int16, alike
    block_rows: int  # rows of the matrix that share a row of scales
    outer: Tensor | None  # fp32 [experts, rows]: the product of all scales that cover K
    bias: Tensor | None  # fp32 [experts, rows]


def pack_codes(
    form: WeightForm, words: Tensor, out: Tensor, padded: tuple[int, int], *, gated: bool, by_columns: bool = False,
    addresses: Sequence[int] = (),
) -> bool:  # fmt: skip
    """Pack codes into `out`; False if this machine cannot run the kernel. `padded`: rows and columns.

    `words` are int32 [experts, parts, rows, words], at any strides: two parts, gate and up, if gated, else one. 4-bit
    codes are eight to a word, all others four. `by_columns`: [experts, parts, rows / 8, K], as `Nibbles.columns` are.
    `addresses` of each expert or each part, if they are apart and `words` are those of the first one.
    """
    experts, _, rows, row_words = words.shape
    rows = 8 * rows if by_columns else rows
    read = COLUMNS if by_columns else VECTORS if _reads_vectors(words, addresses) else WORDS
    places = distances(addresses, words.shape[0] * words.shape[1])
    strides: Values = dict(zip(("expert_stride", "part_stride", "row_stride", "word_stride"), words.stride()))
    blocks, slices = padded[0] // f.ROWS, padded[1] // form.slice_columns
    values: Values = {
        "codes": words,
        "places": _table(places, out.device) if places else None,
        "out": out,
        "rows": rows,
        "row_words": row_words,
        "units": blocks,
        "slices": slices,
        "apart": int(bool(places)),
    }
    programs = experts * blocks * -(-slices // _SLICES)
    return launch(code_source, (form, gated, read), {**values, **strides}, programs, out.device)


def _table(numbers: list[int], device: torch.device) -> Tensor:
    """int64 on the device; torch would take longer to read a list than to copy it."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).to(device, non_blocking=True)


def distances(addresses: Sequence[int], parts: int) -> list[int]:
    """How many words each part is behind the first address; with fewer addresses than parts, each is that of two."""
    words = [(address - addresses[0]) // 4 for address in addresses]
    return words if len(words) in (0, parts) else [each for each in words for _ in range(parts // len(words))]


def aligned(size: int, numbers: Iterable[int]) -> bool:
    """Whether all are multiples of `size`, a power of two."""
    return reduce(or_, numbers, 0) % size == 0


def _reads_vectors(words: Tensor, addresses: Sequence[int]) -> bool:
    """Whether four neighbouring words can be read at once."""
    *outer, last = words.stride()
    sizes = (4 * size for size in (words.shape[-1], *outer))
    return last == 1 and aligned(_VECTOR, (words.data_ptr(), *addresses, *sizes))


def pack_scales(
    form: WeightForm, numbers: RowNumbers, out: Mapping[str, Tensor], shape: tuple[int, int], padded: tuple[int, int],
    *, gated: bool,
) -> Tensor | None:  # fmt: skip
    """Write scales, zero points, factors and biases; None if this machine cannot run the kernel.

    The result is not zero for units with groups of e8m0 scales whose codes must be rounded again.
    """
    blocks, experts, device = padded[0] // f.ROWS, out["factors"].shape[0], out["factors"].device
    unusual = torch.empty(experts * blocks if form.scale == f.E8M0_G32 else 0, dtype=torch.int32, device=device)
    held = numbers.zero if numbers.scales is None else numbers.scales
    values: Values = {
        "scales": numbers.scales,
        "zeros": numbers.zero,
        "outer": numbers.outer,
        "bias": numbers.bias,
        "out": out.get("scales"),
        "factors": out["factors"],
        "bias_out": out.get("bias"),
        "unusual": unusual,
        "rows": shape[0] // 2 if gated else shape[0],
        "block_rows": numbers.block_rows,
        "scale_rows": 1 if held is None else held.shape[-2],
        "groups": 1 if held is None else held.shape[-1],
        "padded_groups": padded[1] // form.group if form.group else 1,
        "units": blocks,
    }
    key = form, gated, numbers.outer is not None, numbers.bias is not None
    return unusual if launch(scale_source, key, values, experts * blocks, device) else None


# ---------------------------------------------------------------- launches


class _Prepared(threading.local):
    """A thread's launches with the places of their arguments: preparing one takes far longer than changing it."""

    def __init__(self) -> None:
        self.launches: dict[object, tuple[Launch, dict[str, ctypes.c_uint64 | ctypes.c_int32]]] = {}


_prepared = _Prepared()


def launch(make: Make, key: tuple[object, ...], values: Values, programs: int, device: torch.device) -> bool:
    """Launch the kernel `make(*key)` on the current stream; False if it is not compiled and cannot be."""
    index = device.index or 0
    arguments = {name: _argument(name, value, device) for name, value in values.items()}
    stream = torch.cuda.current_stream(device).cuda_stream
    with in_context(index):
        held = _prepared.launches.get((make, key, index))
        if held is None:
            source = make(*key, _target(index))
            try:
                made = prepare_launch(source, index, stream, arguments, dependent=False)
            except CompileError:  # there is no compiler and no compiled kernel: torch does it
                return False
            held = _prepared.launches[make, key, index] = made, _slots(source, made)
        prepared, slots = held
        for name, slot in slots.items():
            slot.value = arguments[name]
        prepared.grid(programs)
        prepared(stream)
    return True


def _argument(name: str, value: Tensor | int | None, device: torch.device) -> int:
    return address_on(value, device, name) if isinstance(value, Tensor) else value or 0


def _slots(source: KernelSource, launch: Launch) -> dict[str, ctypes.c_uint64 | ctypes.c_int32]:
    """Where the driver reads each argument."""
    return {
        name: ctypes.c_uint64.from_address(launch.address(name))
        if str(kind).startswith("*")
        else launch.integer_slot(name)
        for name, kind in source.arguments
    }


@lru_cache(maxsize=16)
def _target(device: int) -> int:
    """The compute capability that kernels for this GPU are compiled for."""
    return compile_target(parse_device(f"cuda:{device}").arch)


# ---------------------------------------------------------------- kernels


@lru_cache(maxsize=256)
def code_source(form: WeightForm, gated: bool, read: str = VECTORS, arch: int = 90) -> KernelSource:
    """The kernel that packs codes. Forms whose codes have the same bit positions share it."""
    strides = ["expert_stride", "part_stride", "row_stride", "word_stride"]
    integers = ["rows", "row_words", *strides, "units", "slices", "apart"]
    arguments = (("codes", "*i32"), ("places", "*i64"), ("out", "*i32"), *((name, "i32") for name in integers))
    constants = {
        "GATED": gated,
        "BITS": _stored_bits(form),
        "BYTE_INPUTS": form.byte_inputs,
        "SLICES": _SLICES,
        "READ": read,
        "WORDS": words_of_thread(form),
        "MOVES": moves(form),
    }
    options = (("num_warps", 4),)
    return KernelSource(
        f"{_KERNELS}.pack_codes", "pack_codes", arguments, tuple(constants.items()), ("out",), options, arch
    )


@lru_cache(maxsize=64)
def moves(form: WeightForm) -> Moves:
    """Where the bits of each packed word come from, from the table of bit positions."""
    stored = _stored_bits(form)
    step = 64 if stored == 8 and not form.byte_inputs else 32  # bits of a row between a lane's words
    words: list[dict[tuple[int, int, int], int]] = [{} for _ in range(words_of_thread(form))]
    for n3, column, bits in thread_fields(form):
        word, start = divmod(column * stored, step)
        for bit, target, position in bits:
            move = n3, word, position - (start + bit)
            words[target][move] = words[target].get(move, 0) | 1 << (start + bit)
    return tuple(tuple((n3, word, mask, left) for (n3, word, left), mask in sorted(held.items())) for held in words)


def _stored_bits(form: WeightForm) -> int:
    """Bits of a code in the rows that are packed."""
    return 4 if form.bits == 4 else 8


@lru_cache(maxsize=256)
def scale_source(form: WeightForm, gated: bool, outer: bool, bias: bool, arch: int = 90) -> KernelSource:
    """The kernel that packs everything but codes."""
    pointers = {"scales": _SCALE_TYPES.get(form.scale, "*i32"), "zeros": "*i16", "outer": "*fp32", "bias": "*i32"}
    pointers |= dict.fromkeys(("out", "factors", "bias_out", "unusual"), "*i32")
    integers = ["rows", "block_rows", "scale_rows", "groups", "padded_groups", "units"]
    arguments = (*pointers.items(), *((name, "i32") for name in integers))
    limits, base, (low, high) = EXPONENT_RANGE.get((form.code, form.activations)), base_rule(form), units(form)
    e8m0 = form.scale == f.E8M0_G32
    constants = {
        "GATED": gated,
        "KIND": form.scale,
        "PROMOTED": form.promoted,
        "ZERO": form.zero,
        "OUTER": outer,
        "BIAS": bias,
        "ROW_SHIFT": row_shift(form),
        "BASED": base is not None,
        "BASE_SHIFT": base.shift - (127 if e8m0 else 0) if base else 0,
        "CLAMP": base is not None and base.clamp,
        "BOTTOM": limits.bottom if limits and e8m0 else 0,
        "OFFSET": limits.offset if limits and e8m0 else 0,
        "LEFT": scale_rotation(form),
        "MAGIC": MAGIC.get(form.activations, 0) if form.zero else 0,
        "LOW_UNIT": low,
        "HIGH_UNIT": high,
        "PARTS": 2 * form.scale_words if form.scale in (f.E8M0_G32, f.E4M3_G16) else 1 + form.fine,
        "WORDS": form.scale_words,
        "CHUNK": _CHUNK,
    }
    options = (("num_warps", 8),)
    return KernelSource(
        f"{_KERNELS}.pack_scales", "pack_scales", arguments, tuple(constants.items()), ("out",), options, arch
    )
