"""The bit packings that checkpoints use, each with its inverse.

Unpacked codes take one byte each. `pack_bits` writes the dense little-endian bit stream of most
formats: element i occupies bits [i*b, (i+1)*b), so 3-, 5-, 6- and 7-bit codes straddle words and 32
codes always fill b 32-bit words. Codes must have no bits set above b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lancebill.numbers import native

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble j of a word holds column AWQ_ORDER[j]
_LOW = 0x0F0F0F0F  # the low nibbles of a word's bytes


@dataclass(frozen=True, eq=False)
class Turn:
    """How 4-bit codes [N, K] are made from tensors that have them in another order. Leading axes are experts."""

    apply: Callable[[Tensor], Tensor]  # the source to uint8 [..., N, K / 2]
    n: int
    k: int
    words: Callable[[Tensor], Tensor] | None = None  # the source as a view, as `Nibbles.words` describes it
    columns: Callable[[Tensor], Tensor] | None = None  # the source as a view, as `Nibbles.columns` describes it
    axes: int = 2  # of the source, for one matrix


@dataclass(frozen=True, eq=False)
class Nibbles:
    """4-bit codes [..., N, K], two per byte: even columns in the low nibble. K is even.

    Checkpoints store two codes per byte, and kernels read two codes per byte in another order. Moving whole bytes
    takes a fraction of the memory traffic of one byte per code. The methods mirror a tensor of codes, as views or
    copies of the bytes; columns are cut in pairs, and only rows can be selected.

    With a `turn`, the codes are stored in another order, and turned when they are first needed: `verify` only asks
    which codes occur, and for that any order will do, and the kernels that pack read most orders as they are.

    Matrices may also be `apart`, each in memory of its own. Then `source` is the first one, expanded: its strides say
    how to read each of them. Kernels that pack find the others by their addresses; `together` copies them.
    """

    source: Tensor  # the bytes of `data`, or a tensor with exactly its nibbles
    turn: Turn | None = None
    apart: tuple[Tensor, ...] = ()  # contiguous tensors of one shape and dtype; `source` is a view of the first

    dtype = torch.uint8  # of the codes, as a tensor has it

    @cached_property
    def data(self) -> Tensor:
        """uint8 [..., N, K / 2]."""
        return self.together if self.turn is None else self.turn.apply(self.together)

    @property
    def together(self) -> Tensor:
        """The source, with all matrices in one tensor."""
        return self._joined(self.device) if self.apart else self.source

    def _joined(self, device: torch.device) -> Tensor:
        """`together` on this device, wherever each matrix is."""
        if not self.apart:
            return self.source.to(device)
        return torch.stack([self._view_of(tensor).to(device) for tensor in self.apart]).view(self.source.shape)

    def _view_of(self, tensor: Tensor) -> Tensor:
        """One of the tensors that are apart, as `source` is a view of the first."""
        shape, strides = self.source.shape, self.source.stride()
        axes = next(i for i in range(1, len(shape)) if math.prod(shape[:i]) == len(self.apart))
        flat = tensor.view(-1).view(self.source.dtype)
        return flat.as_strided(shape[axes:], strides[axes:], flat.storage_offset())

    @property
    def words(self) -> Tensor:
        """int32 [..., parts, N / parts, K / 8] at any strides: eight neighbouring columns of a row in each word.

        The parts' rows follow each other. K is a multiple of 8. Of matrices that are apart, those of the first one.
        """
        if self.turn is not None and self.turn.words is not None:
            return self.turn.words(self.source)
        return _view_last(self.data if self.turn else self.source, torch.int32).unsqueeze(-3)

    @property
    def columns(self) -> Tensor | None:
        """int32 [..., parts, N / parts / 8, K] at any strides, if that is how the codes are stored: a word has eight
        rows of a column in the order `AWQ_ORDER`."""
        return None if self.turn is None or self.turn.columns is None else self.turn.columns(self.source)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.turn is not None:
            return *self.source.shape[: -self.turn.axes], self.turn.n, self.turn.k
        return *self.source.shape[:-1], 2 * self.source.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.source.device

    def unpack(self) -> Tensor:
        """One byte per code."""
        return unpack_bits(self.data, 4, self.shape[-1])

    def __getitem__(self, expert: int | slice) -> Nibbles:
        if self.apart and isinstance(expert, slice):
            first, last, _ = expert.indices(len(self.source))
            each = len(self.apart) // len(self.source)
            rest = self.apart[first * each : last * each]
            source = self._view_of(rest[0]).expand(last - first, *self.source.shape[1:]) if rest else self.source[:0]
            return Nibbles(source, self.turn, rest)
        return Nibbles(self.together[expert], self.turn)

    def to(self, device: torch.device) -> Nibbles:
        """On this device; itself if it is there, so that matrices that are apart are not copied."""
        if all(tensor.device == device for tensor in (self.source, *self.apart)):
            return self
        return Nibbles(self._joined(device), self.turn)

    def unsqueeze(self, axis: int) -> Nibbles:
        return Nibbles(self.data.unsqueeze(axis))

    def index_select(self, axis: int, index: Tensor) -> Nibbles:
        return Nibbles(self.data.index_select(axis, index))

    def narrow(self, axis: int, start: int, length: int) -> Nibbles:
        step = 2 if axis == -1 else 1
        return Nibbles(self.data.narrow(axis, start // step, length // step))

    def contiguous(self) -> Nibbles:
        return Nibbles(self.data.contiguous())

    def join_rows(self, count: int) -> Nibbles:
        """Each `count` matrices as one of all their rows."""
        source, turn = self.source.unflatten(0, (-1, count)), self.turn
        if turn is None and self.apart:
            return Nibbles(source, self._turn_of_parts(count), self.apart)
        if turn is None:
            return Nibbles(source.flatten(1, 2))
        words, columns = (
            None if view is None else (lambda source, view=view: view(source).squeeze(-3))
            for view in (turn.words, turn.columns)
        )
        apply = turn.apply
        joined = Turn(
            lambda source: apply(source).flatten(-3, -2), count * turn.n, turn.k, words, columns, 1 + turn.axes
        )
        return Nibbles(source, joined, self.apart)

    def split_rows(self, step: int) -> Nibbles:
        """Rows 0, step, 2 * step ..., then rows 1, 1 + step ...: they alternate between several matrices."""
        return Nibbles(self.data.unflatten(-2, (-1, step)).transpose(-3, -2), self._turn_of_parts(1))

    def _turn_of_parts(self, count: int) -> Turn:
        """For a source that has the rows of several matrices in parts; `count` of them are as large as this one."""
        n, k = self.shape[-2:]
        turned = Turn(
            lambda source: source.flatten(-3, -2), count * n, k, lambda source: source.view(torch.int32), axes=3
        )
        return turned if k % 8 == 0 else replace(turned, words=None)


def stream_codes(words: Tensor, bits: int, count: int) -> Tensor | Nibbles:
    """The codes of a bit stream along the last axis: without unpacking them where they are whole bytes of nibbles."""
    if bits == 4 and count % 2 == 0:
        return Nibbles(as_bytes(words)[..., : count // 2])
    return unpack_bits(words, bits, count)


def turned_stream_codes(words: Tensor, bits: int, count: int) -> Tensor | Nibbles:
    """The codes [..., N, count] of bit streams along the last axis but one."""
    if bits == 4 and count == words.shape[-2] * words.dtype.itemsize * 2:
        turn = Turn(lambda words: as_bytes(transposed(words)), words.shape[-1], count, _turned_words)
        return Nibbles(words, turn if words.dtype == torch.int32 else replace(turn, words=None))
    return stream_codes(transposed(words), bits, count)


def _turned_words(words: Tensor) -> Tensor:
    return words.mT.unsqueeze(-3)


def pack_bits(codes: Tensor, bits: int, word: torch.dtype) -> Tensor:
    """Codes along the last axis to a dense bit stream in words of type `word`, zero-padded at the end."""
    if 8 % bits:
        return _pack_straddling(codes, bits, word)
    packed = _pad_last(codes, 8 // bits * word.itemsize)
    while bits < 8:  # each pass merges pairs of bytes
        pairs = _view_last(packed, torch.int16)
        packed = (pairs | pairs >> (8 - bits)).to(torch.uint8)
        bits *= 2
    return _view_last(packed, word)


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of the bit stream along the last axis."""
    data = as_bytes(words)
    if bits == 8:
        return data[..., :count].contiguous()
    codes = native.unpack_bits(data, bits)
    return _unpack_bits(data, bits, count) if codes is None else codes[..., :count].contiguous()


def _unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    """The definition of `unpack_bits` for less than eight bits."""
    if 8 % bits:
        return _unpack_straddling(data, bits, count)
    width = 8
    while width > bits:  # each pass splits every byte into two
        width //= 2
        pairs = data.to(torch.int16)
        pairs |= pairs << (8 - width)
        pairs &= ((1 << width) - 1) * 0x0101
        data = as_bytes(pairs)
    return data[..., :count].contiguous()


def _pack_straddling(codes: Tensor, bits: int, word: torch.dtype) -> Tensor:
    """Eight codes fill `bits` bytes: build each byte from the codes that overlap it."""
    count = codes.shape[-1]
    groups = _pad_last(codes, 8).unflatten(-1, (-1, 8)).to(torch.int16)
    rows = []
    for byte in range(bits):
        acc = torch.zeros_like(groups[..., 0])
        for j in range(8):
            shift = j * bits - byte * 8
            if -bits < shift < 8:
                acc |= groups[..., j] << shift if shift >= 0 else groups[..., j] >> -shift
        rows.append((acc & 0xFF).to(torch.uint8))
    length = -(-count * bits // (8 * word.itemsize)) * word.itemsize
    data = torch.stack(rows, dim=-1).flatten(-2)
    data = _pad_last(data, word.itemsize) if data.shape[-1] < length else data[..., :length]
    return _view_last(data.contiguous(), word)


def _unpack_straddling(data: Tensor, bits: int, count: int) -> Tensor:
    mask = (1 << bits) - 1
    groups = _pad_last(data, bits).unflatten(-1, (-1, bits)).to(torch.int16)
    codes = []
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        value = groups[..., byte] >> shift
        if shift + bits > 8:
            value = value | (groups[..., byte + 1] << (8 - shift))
        codes.append((value & mask).to(torch.uint8))
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count].contiguous()


def pack_padded(codes: Tensor, bits: int) -> Tensor:
    """32//bits codes per int32, top bits unused: how old writers stored 3, 5, 6 and 7 bits."""
    per = 32 // bits
    fields = _pad_last(codes, per).unflatten(-1, (-1, per)).to(torch.int64)
    shifts = torch.arange(per, device=codes.device) * bits
    words: Tensor = (fields << shifts).sum(-1)
    return words.to(torch.int32)


def unpack_padded(words: Tensor, bits: int, count: int) -> Tensor:
    per = 32 // bits
    shifts = torch.arange(per, device=words.device, dtype=torch.int32) * bits
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.flatten(-2)[..., :count].to(torch.uint8).contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """Eight 4-bit columns per int32 in AWQ's interleaved order, zero-padded at the end."""
    order = torch.tensor(AWQ_ORDER, dtype=torch.int64, device=codes.device)
    grouped = _pad_last(codes, 8).unflatten(-1, (-1, 8)).index_select(-1, order)
    return pack_bits(grouped.flatten(-2), 4, torch.int32)


def transposed(matrices: Tensor) -> Tensor:
    """[..., N, K] as [..., K, N], contiguous."""
    turned = native.transpose(matrices)
    return matrices.mT.contiguous() if turned is None else turned


def turn_awq(words: Tensor, n: int) -> Tensor | Nibbles:
    """AWQ's words [..., K, N / 8] as codes [..., N, K]."""
    if words.shape[-2] % 2:
        return transposed(unpack_awq(words)[..., :n])
    if n == 8 * words.shape[-1]:
        return Nibbles(words, Turn(_turn_nibbles, n, words.shape[-2], columns=_turned_words))
    return Nibbles(_turn_nibbles(words)[..., :n, :])


def _turn_nibbles(words: Tensor) -> Tensor:
    turned = native.turn_nibbles(words, AWQ_ORDER)
    return _turn_awq(words) if turned is None else turned


def _turn_awq(words: Tensor) -> Tensor:
    """The nibbles of `turn_awq` by torch."""
    even, odd = words[..., 0::2, :], words[..., 1::2, :]
    low = (odd & _LOW) << 4
    low |= even & _LOW  # in each byte, the low nibbles of the same byte of two neighbouring columns
    high = (even >> 4).bitwise_and_(_LOW)
    high |= odd & ~_LOW
    rows = torch.empty(*words.mT.shape[:-1], 8, even.shape[-2], dtype=torch.uint8, device=words.device)
    for first, half in enumerate((low.mT.contiguous(), high.mT.contiguous())):
        for byte in range(4):
            rows[..., AWQ_ORDER[2 * byte + first], :] = half >> 8 * byte  # keeps the lowest byte
    return rows.flatten(-3, -2)


def unpack_awq(words: Tensor) -> Tensor:
    inverse = torch.tensor(sorted(range(8), key=AWQ_ORDER.__getitem__), dtype=torch.int64, device=words.device)
    codes = unpack_bits(words, 4, words.shape[-1] * 8)
    columns: Tensor = codes.unflatten(-1, (-1, 8)).index_select(-1, inverse)
    return columns.flatten(-2)


def as_bytes(tensor: Tensor) -> Tensor:
    """The little-endian bytes of a tensor along its last axis."""
    return _view_last(tensor, torch.uint8)


def _view_last(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as another dtype. Goes through a flat view because torch cannot view an empty last axis."""
    if tensor.dim() > 1 and len(tensor) > 1 and tensor.stride(0) == 0:  # stays expanded
        return _view_last(tensor[0], dtype).expand(len(tensor), *[-1] * (tensor.dim() - 1))
    tensor = tensor.contiguous()
    last = tensor.shape[-1] * tensor.dtype.itemsize // dtype.itemsize
    return tensor.view(-1).view(dtype).view(*tensor.shape[:-1], last)


def _pad_last(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
