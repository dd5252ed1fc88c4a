"""Interprets inline PTX on arrays of registers, so that unpacking is tested bit for bit without a GPU.

It has only the instructions that our generators emit, as the PTX manual defines them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Register = NDArray[np.uint32]


def interpret(text: str, outputs: int, inputs: Sequence[Register]) -> list[Register]:
    """Run the statements; operands $0, $1, ... are the outputs, then the inputs. Returns the outputs."""
    state: dict[str, Register] = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for statement in re.sub(r"\.reg[^;]*;", "", text.strip().strip("{}")).split(";"):
        if statement.strip():
            _step(statement.strip(), state)
    return [state[f"${i}"] for i in range(outputs)]


def _step(statement: str, state: dict[str, Register]) -> None:
    operation, arguments = statement.split(None, 1)
    pair = re.match(r"\{(\w+), (\w+)\}, (\S+)", arguments)
    if pair:
        word = state[pair[3]]
        state[pair[1]], state[pair[2]] = word & np.uint32(0xFFFF), word >> np.uint32(16)
        return
    packed = re.match(r"(\S+), \{(\w+), (\w+)\}", arguments)
    if packed:
        state[packed[1]] = state[packed[2]] | state[packed[3]] << np.uint32(16)
        return
    target, *operands = [part.strip() for part in arguments.split(",")]
    state[target] = _OPERATIONS[operation](*(_value(operand, state) for operand in operands))


def _value(operand: str, state: dict[str, Register]) -> Register:
    if operand in state:
        return state[operand]
    if operand == "%ctaid.z":
        return np.zeros(1, dtype=np.uint32)
    number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
    return np.array([number & 0xFFFFFFFF], dtype=np.uint32)


def _permute(a: Register, b: Register, selector: Register) -> Register:
    source = [((a if i < 4 else b) >> np.uint32(8 * (i % 4))) & np.uint32(255) for i in range(8)]
    shape = np.broadcast_shapes(a.shape, b.shape, selector.shape)
    out = np.zeros(shape, dtype=np.uint32)
    for i in range(4):
        nibble = np.broadcast_to((selector >> np.uint32(4 * i)) & np.uint32(15), shape)
        byte = np.choose(nibble & 7, [np.broadcast_to(s, shape) for s in source]).astype(np.uint32)
        sign = np.where(byte & 128, 255, 0).astype(np.uint32)  # used where the selector's top bit is set
        out |= np.where(nibble & 8, sign, byte) << np.uint32(8 * i)
    return out


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), dtype=np.uint32)
    for i in range(8):
        if int(table.item()) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _halves(dtype: torch.dtype, combine: Callable[..., torch.Tensor]) -> Callable[..., Register]:
    """An operation on both 16-bit halves, computed exactly and then rounded once."""

    def apply(*registers: Register) -> Register:
        out = np.zeros(np.broadcast_shapes(*(r.shape for r in registers)), dtype=np.uint32)
        for shift in (0, 16):
            values = [_as(dtype, (r >> np.uint32(shift)) & np.uint32(0xFFFF)) for r in registers]
            out |= _bits(rounded(combine(*values), dtype)) << np.uint32(shift)
        return out

    return apply


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 to a 16-bit dtype once. Torch rounds to fp32 first, so that step must round to odd here."""
    near, exact = values.float(), values.double()
    bits = near.view(torch.int32) - (near.double().abs() > exact.abs()).int()
    return torch.where(near.double() == exact, bits, bits | 1).view(torch.float32).to(dtype)


def _as(dtype: torch.dtype, half: Register) -> torch.Tensor:
    return torch.from_numpy(half.astype(np.uint16).view(np.int16)).view(dtype).float()


def _bits(values: torch.Tensor) -> Register:
    return values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def _float(register: Register) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(register).view(np.float32))


def _convert_pair(dtype: torch.dtype) -> Callable[[Register, Register], Register]:
    """cvt.rn.*x2.f32 d, a, b: a becomes the upper half."""
    return lambda a, b: _bits(_float(a).to(dtype)) << np.uint32(16) | _bits(_float(b).to(dtype))


def _to_e4m3_pair(register: Register) -> Register:
    """cvt.rn.satfinite.e4m3x2.f16x2: each half becomes a byte."""
    out = np.zeros(register.shape, dtype=np.uint32)
    for place in range(2):
        value = _as(torch.float16, (register >> np.uint32(16 * place)) & np.uint32(0xFFFF)).clamp(-448, 448)
        out |= value.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32) << np.uint32(8 * place)
    return out


def _extract(word: Register, start: Register, length: Register) -> Register:
    assert length.item() == 8
    byte = ((word >> start) & np.uint32(255)).astype(np.uint8)
    signed: Register = byte.view(np.int8).astype(np.int32).view(np.uint32)
    return signed


_OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "or.b32": lambda a, b: a | b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: (a.astype(np.uint64) * b).astype(np.uint32),
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": lambda low, high, n: high << n | low >> (np.uint32(32) - n),
    "prmt.b32": _permute,
    "lop3.b32": _lop3,
    "bfe.s32": _extract,
    "mad.lo.s32": lambda a, b, c: (a.astype(np.uint64) * b + c).astype(np.uint32),
    "mul.rn.bf16x2": _halves(torch.bfloat16, lambda a, b: a * b),
    "mul.rn.f16x2": _halves(torch.float16, lambda a, b: a * b),
    "fma.rn.bf16x2": _halves(torch.bfloat16, lambda a, b, c: a.double() * b + c),
    "fma.rn.f16x2": _halves(torch.float16, lambda a, b, c: a.double() * b + c),
    "sub.rn.bf16x2": _halves(torch.bfloat16, lambda a, b: a - b),
    "sub.rn.f16x2": _halves(torch.float16, lambda a, b: a - b),
    "sub.rn.f32": lambda a, b: (_float(a) - _float(b)).numpy().view(np.uint32),
    "cvt.f32.f16": lambda a: _as(torch.float16, a).numpy().view(np.uint32),
    "cvt.rn.satfinite.e4m3x2.f16x2": _to_e4m3_pair,
    "cvt.rn.bf16x2.f32": _convert_pair(torch.bfloat16),
    "cvt.rn.f16x2.f32": _convert_pair(torch.float16),
}
