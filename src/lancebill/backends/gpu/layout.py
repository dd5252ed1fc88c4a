"""Weights as the GPU kernels read them: units of 128 features in fragment order.

A unit of a gated w13 is 64 gate rows followed by the 64 up rows of the same features, so that one thread has both.
Sizes are padded with zeros to whole units and slices; the factors of padding rows are zero too.

The kernels read `codes`, `scales` (in the main loop), `factors` (fp32, one per row: all scales that cover K, and powers
of two moved out of the loop's scales), `bias` and `perm`. `outer*` stores scales that cannot be recovered from the
factors; only `unpack` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from lancebill.backends.gpu import pack_on_gpu
from lancebill.backends.gpu.choose_form import kernel_form, outer_levels
from lancebill.backends.gpu.kernels import fragment_order as fragments
from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_codes import MAGIC
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import ZERO_BITS
from lancebill.backends.gpu.kernels.unpack_scales import row_shift
from lancebill.backends.gpu.kernels.weight_form import HALF, ROWS, WeightForm
from lancebill.backends.gpu.pack_on_gpu import RowNumbers
from lancebill.backends.gpu.scale_rules import EXPONENT_RANGE, BaseRule, base_rule, units
from lancebill.jit.address import address_on
from lancebill.moe.layout import Layout, MatrixShape, as_column, as_integer, bias_of, order_of
from lancebill.moe.problem import Problem
from lancebill.numbers.bit_packing import Nibbles, pack_bits
from lancebill.numbers.blocks import expand
from lancebill.numbers.spec import ALL, CHANNEL, DIV, QuantSpec, Scale
from lancebill.numbers.unusual import first_time, unusual
from lancebill.numbers.weight import LogicalWeight, stack_experts

_COUNTING = Lock()
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass
class Rerounded:
    """How many groups were rounded again, because their scale is too far below their row's largest scale."""

    groups: int = 0
    total: int = 0

    def add(self, groups: int, total: int) -> None:
        """Thread-safe: loaders pack experts in parallel. What is packed again is not counted twice."""
        with _COUNTING:
            self.groups, self.total = self.groups + groups, self.total + first_time() * total


@dataclass(frozen=True)
class FragmentLayout(Layout):
    """The layout of one problem's matrices."""

    problem: Problem
    rerounded: Rerounded = field(default_factory=Rerounded, compare=False)

    def notes(self) -> tuple[str, ...]:
        if not self.rerounded.groups:
            return ()
        return (
            f"{self.rerounded.groups} of {self.rerounded.total} groups have scales too far below their row's largest "
            "for fp8 arithmetic; their codes were rounded again",
        )

    def form(self, shape: MatrixShape) -> WeightForm:
        return kernel_form(shape, self.problem.inputs_of(shape.name))

    def padded(self, shape: MatrixShape) -> tuple[int, int]:
        """Rows and columns, padded to whole units and slices."""
        columns = self.form(shape).slice_columns
        rows = 2 * _round_up(shape.n // 2, HALF) if self.problem.is_gated(shape.name) else _round_up(shape.n, ROWS)
        return rows, _round_up(shape.k, columns)

    def storage(self, shape: MatrixShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        form, (n, k) = self.form(shape), self.padded(shape)
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((fragments.code_words(form, n, k),), torch.int32),
            "factors": ((n,), torch.int32),
        }
        if form.scale_words:
            tensors["scales"] = (fragments.scale_count(form, n, k),), torch.int32
        for i, level in enumerate(_stored_levels(shape.spec)):
            tensors[f"outer{i}"] = level.shape(shape.n, shape.k), _INTEGER[level.dtype.storage.itemsize]
        if shape.bias:
            tensors["bias"] = (n,), torch.int32
        if shape.act_order:
            tensors["perm"] = (shape.k,), torch.int32
        return tensors

    def _write(self, shape: MatrixShape, weight: LogicalWeight, out: Mapping[str, Tensor]) -> None:
        form = self.form(shape)
        if not self._pack_on_gpu(shape, form, weight, out):
            codes, scales, factors = self._scales(shape, form, weight)
            if not self._pack_codes_on_gpu(shape, form, codes, out["codes"]):
                single = codes.unpack() if isinstance(codes, Nibbles) else codes
                out["codes"].copy_(fragments.pack_codes(form, self._place(shape, single, self.padded(shape)[1])))
            if scales is not None:
                out["scales"].copy_(scales.view(out["scales"].shape))
            out["factors"].copy_(as_integer(self._place(shape, factors.float())).squeeze(-1))
            if shape.bias:
                out["bias"].copy_(as_integer(self._place(shape, bias_of(shape, weight))).squeeze(-1))
        levels = dict(zip(weight.spec.scales, weight.scales))
        for i, level in enumerate(_stored_levels(shape.spec)):
            out[f"outer{i}"].copy_(as_integer(levels[level]))
        if shape.act_order:
            out["perm"].copy_(order_of(shape, weight))

    def unpack(self, shape: MatrixShape, packed: Mapping[str, Tensor]) -> LogicalWeight:
        form, (n, k) = self.form(shape), self.padded(shape)
        codes = self._take(shape, fragments.unpack_codes(form, packed["codes"], n, k))[..., : shape.k].contiguous()
        factors = self._take(shape, as_column(packed["factors"]))
        levels: dict[Scale, Tensor] = {}
        for i, level in enumerate(_stored_levels(shape.spec)):
            levels[level] = packed[f"outer{i}"].view(level.dtype.storage)
        powers = factors / (_outer_factors(levels, shape.n, factors.device) * 2.0 ** row_shift(form))
        for level in shape.spec.scales:
            if level not in levels and level in outer_levels(shape.spec):
                levels[level] = factors.to(level.dtype.storage)
            elif level not in levels:
                levels[level] = self._unpack_level(shape, form, packed["scales"], powers)
        return LogicalWeight(
            shape.spec,
            codes,
            tuple(levels[level] for level in shape.spec.scales),
            self._unpack_zero(shape, form, packed["scales"]) if form.zero else None,
            bias=self._take(shape, as_column(packed["bias"])).squeeze(-1) if shape.bias else None,
            perm=packed["perm"] if shape.act_order else None,
        )

    # ------------------------------------------------------------ kernels

    def _pack_on_gpu(
        self, shape: MatrixShape, form: WeightForm, weight: LogicalWeight, out: Mapping[str, Tensor]
    ) -> bool:
        """Everything by kernels; False where torch must do it: elsewhere than on a GPU, or if codes must be rounded."""
        level = weight.spec.scales[0]
        if not on_gpu(out["codes"]) or (form.group and level.block[0] == ALL):
            return False
        if not weight.lead:
            rows = {name: tensor.unsqueeze(0) for name, tensor in out.items()}
            return self._pack_on_gpu(shape, form, stack_experts([weight]), rows)
        gated, padded = self.problem.is_gated(shape.name), self.padded(shape)
        rounded = pack_on_gpu.pack_scales(
            form, self._row_numbers(shape, form, weight), out, (shape.n, shape.k), padded, gated=gated
        )
        if rounded is None or (len(rounded) and unusual(rounded.any())):
            return False
        if form.scale == f.E8M0_G32:
            self.rerounded.add(0, weight.scales[0].numel())
        return self._pack_codes_on_gpu(shape, form, weight.stored, out["codes"])

    def _row_numbers(self, shape: MatrixShape, form: WeightForm, weight: LogicalWeight) -> RowNumbers:
        """What the kernel reads besides codes."""
        levels = dict(zip(weight.spec.scales, weight.scales))
        outer = {level: levels[level] for level in outer_levels(weight.spec)}
        scales = weight.scales[0] if form.scale != f.NO_SCALE else None
        zero, rows = weight.zero if form.zero else None, (*weight.lead, shape.n)
        return RowNumbers(
            None if scales is None else (scales.float() if form.promoted else scales).contiguous(),
            None if zero is None else zero.contiguous(),
            weight.spec.scales[0].block[0] or shape.n,
            _outer_factors(outer, shape.n, weight.device).squeeze(-1).expand(rows).contiguous() if outer else None,
            bias_of(shape, weight).squeeze(-1).contiguous() if shape.bias else None,
        )

    def _pack_codes_on_gpu(self, shape: MatrixShape, form: WeightForm, codes: Tensor | Nibbles, out: Tensor) -> bool:
        """Codes in fragment order by a kernel; False if there is none."""
        if not on_gpu(out):
            return False
        addresses = [address_on(tensor, out.device) for tensor in codes.apart] if isinstance(codes, Nibbles) else []
        if isinstance(codes, Nibbles) and addresses and not _found_by_address(codes, addresses):
            codes, addresses = Nibbles(codes.together, codes.turn), []
        gated = self.problem.is_gated(shape.name)
        columns = codes.columns if isinstance(codes, Nibbles) else None
        words = _by_part(code_words(codes, form.bits == 4) if columns is None else columns, gated)
        return pack_on_gpu.pack_codes(
            form,
            words,
            out.view(len(words), -1),
            self.padded(shape),
            gated=gated,
            by_columns=columns is not None,
            addresses=addresses,
        )

    # ------------------------------------------------------------ rows and columns

    def _place(self, shape: MatrixShape, rows: Tensor, columns: int | None = None) -> Tensor:
        """Rows [..., n, columns] reordered for the kernel and padded with zeros (to `columns` too, if given)."""
        n, _ = self.padded(shape)
        if columns is not None:
            rows = _pad(rows, -1, columns)
        if not self.problem.is_gated(shape.name):
            return _pad(rows, -2, n).contiguous()
        gate, up = (_pad(side, -2, n // 2).unflatten(-2, (-1, HALF)) for side in rows.chunk(2, -2))
        return torch.stack([gate, up], -3).flatten(-4, -2)

    def _take(self, shape: MatrixShape, rows: Tensor) -> Tensor:
        """The inverse of `_place` for rows: padding dropped, gate rows before up rows."""
        if not self.problem.is_gated(shape.name):
            return rows[..., : shape.n, :]
        gate, up = rows.unflatten(-2, (-1, 2, HALF)).unbind(-3)
        return torch.cat([side.flatten(-3, -2)[..., : shape.n // 2, :] for side in (gate, up)], -2)

    def _groups(self, shape: MatrixShape, form: WeightForm) -> int:
        """Groups along the padded K."""
        return self.padded(shape)[1] // form.group if form.group else 1

    # ------------------------------------------------------------ scales

    def _scales(
        self, shape: MatrixShape, form: WeightForm, weight: LogicalWeight
    ) -> tuple[Tensor | Nibbles, Tensor | None, Tensor]:
        """Codes (rounded again where necessary), the scale words of the loop, one factor per row [..., n, 1]."""
        n, k, codes = shape.n, shape.k, weight.stored
        levels = dict(zip(weight.spec.scales, weight.scales))
        outer = {level: levels[level] for level in outer_levels(weight.spec)}
        factors = _outer_factors(outer, n, codes.device) * 2.0 ** row_shift(form)
        if not form.scale_words:
            return codes, None, factors
        words: list[Tensor] = []
        if form.scale == f.E8M0_G32:
            codes, exponents, base = self._exponents(form, weight)
            return (
                codes,
                fragments.pack_bytes(form, self._meta(shape, form, exponents)),
                factors * _power_of_two(base).float(),
            )
        if form.scale == f.E4M3_G16:
            return codes, fragments.pack_bytes(form, self._meta(shape, form, weight.scales[0])), factors
        if form.scale != f.NO_SCALE:
            level = weight.spec.scales[0]
            each = expand(weight.scales[0], (level.block[0], 1), n, k)
            if form.promoted:
                bits = as_integer(self._meta(shape, form, each.float()))
                if form.zero and weight.zero is not None:
                    bits = bits | self._meta(shape, form, expand(weight.zero, (level.block[0], 1), n, k).int())
                return codes, fragments.pack_floats(form, bits), factors
            base = _row_base(each, base_rule(form))
            factors = factors * _power_of_two(base).float()
            placed = self._meta(shape, form, each.double() * _power_of_two(-base))
            placed = as_integer((placed * _units(form, placed.shape[-2], each.device)).to(each.dtype))
            pack = fragments.pack_floats if form.scale == f.F32_GROUP else fragments.pack_halves
            words.append(pack(form, placed))
        if form.zero and weight.zero is not None:
            each = expand(weight.zero, (weight.spec.scales[0].block[0], 1), n, k).int() + MAGIC[form.activations]
            words.append(fragments.pack_halves(form, self._meta(shape, form, each.to(torch.int16))))
        return codes, torch.cat(words, -1), factors

    def _meta(self, shape: MatrixShape, form: WeightForm, values: Tensor) -> Tensor:
        return self._place(shape, values, self._groups(shape, form))

    def _exponents(self, form: WeightForm, weight: LogicalWeight) -> tuple[Tensor | Nibbles, Tensor, Tensor]:
        """Codes, exponent bytes relative to each row's base, and the bases.

        A group below the exponent range is raised to its lowest exponent and its codes are rounded again.
        """
        limits, rule = EXPONENT_RANGE[form.code, form.activations], base_rule(form)
        assert rule is not None
        exponents = weight.scales[0].to(torch.int16) - 127
        base = exponents.amax(-1, keepdim=True) + rule.shift
        relative = exponents - (base := base.clamp(min=0) if rule.clamp else base)
        short = (limits.bottom - relative).clamp(min=0)
        codes, raised = weight.stored, int((short > 0).sum())
        self.rerounded.add(raised, relative.numel())
        if raised:
            number = weight.spec.dtype
            shift = _power_of_two(-short).float().repeat_interleave(32, -1)[..., : weight.k]
            codes = torch.where(shift < 1, number.encode(number.decode(weight.codes) * shift), weight.codes)
        return codes, (relative + short + limits.offset).to(torch.uint8), base.float()

    def _unpack_level(self, shape: MatrixShape, form: WeightForm, words: Tensor, powers: Tensor) -> Tensor:
        """The innermost scales as in the checkpoint; `powers` of two are in the rows' factors."""
        n, _ = self.padded(shape)
        groups = self._groups(shape, form)
        level = shape.spec.scales[0]
        rows, columns = level.shape(shape.n, shape.k)
        if form.scale in (f.E8M0_G32, f.E4M3_G16):
            values = self._take(shape, fragments.unpack_bytes(form, words, n, groups))
            if form.scale == f.E8M0_G32:
                offset = EXPONENT_RANGE[form.code, form.activations].offset
                values = values - (offset - 127) + torch.frexp(powers)[1] - 1
            return values[..., :columns].to(torch.uint8)
        scales = fragments.scale_pairs(form, words)[..., : form.scale_words - form.zero_words]
        if form.scale == f.F32_GROUP:
            bits = fragments.unpack_floats(form, scales, n, groups)
            values = (bits & ~ZERO_BITS if form.zero else bits).view(torch.float32)
        else:
            values = fragments.unpack_halves(form, scales, n, groups).view(level.dtype.storage)
        values = self._take(shape, values.double() / _units(form, n, values.device)) * powers.double()
        return values[..., :: level.block[0], :][..., :rows, :columns].to(level.dtype.storage).contiguous()

    def _unpack_zero(self, shape: MatrixShape, form: WeightForm, words: Tensor) -> Tensor:
        n, _ = self.padded(shape)
        assert shape.spec.zero is not None
        rows, columns = shape.spec.zero.shape(shape.n, shape.k)
        pairs = fragments.scale_pairs(form, words)
        groups = self._groups(shape, form)
        if form.promoted:
            values = self._take(shape, fragments.unpack_floats(form, pairs, n, groups)) & ZERO_BITS
        else:
            zeros = pairs[..., form.scale_words - form.zero_words :]
            values = self._take(shape, fragments.unpack_halves(form, zeros, n, groups))
            values = values - MAGIC[form.activations]
        step = shape.spec.zero.block[0] or shape.n
        return values[..., ::step, :][..., :rows, :columns].to(torch.int16).contiguous()


def _pad(rows: Tensor, axis: int, count: int) -> Tensor:
    """Zeros appended along one of the last two axes."""
    extra = count - rows.shape[axis]
    return rows if extra == 0 else torch.nn.functional.pad(rows, (0, extra) if axis == -1 else (0, 0, 0, extra))


def _round_up(size: int, side: int) -> int:
    return -(-size // side) * side


def _row_base(scales: Tensor, rule: BaseRule | None) -> Tensor:
    """Per row, the power of two that moves from its scales to its factor."""
    assert rule is not None
    base = torch.frexp(scales.abs().amax(-1, keepdim=True).float())[1] + rule.shift
    return (base.clamp(min=0) if rule.clamp else base).float()


def _units(form: WeightForm, n: int, device: torch.device) -> Tensor:
    """[n, 1]: factors of the rows' scales, in the kernel's row order, that undo the power of two of unpacked codes."""
    low, high = units(form)
    return _power_of_two(low + (torch.arange(n, device=device) >> 3 & 1) * (high - low)).unsqueeze(1)


def code_words(codes: Tensor | Nibbles, nibbles: bool) -> Tensor:
    """Codes [experts, n, k] as 32-bit words [experts, parts, rows, words]: a view wherever possible."""
    if nibbles and not isinstance(codes, Nibbles):
        codes = Nibbles(pack_bits(codes, 4, torch.uint8))
    return codes.words if isinstance(codes, Nibbles) else codes.contiguous().view(torch.int32).unsqueeze(-3)


def _found_by_address(codes: Nibbles, addresses: list[int]) -> bool:
    """Whether kernels can read codes that are apart, as whole words where they are."""
    views = codes.turn is None or codes.turn.words is not None or codes.turn.columns is not None
    return views and codes.shape[-1] % 8 == 0 and pack_on_gpu.aligned(4, addresses)


def _by_part(words: Tensor, gated: bool) -> Tensor:
    """Words of one expert or several as [experts, parts, ...]: two parts if gated."""
    words = words if words.dim() == 4 else words.unsqueeze(0)
    return words.squeeze(1).unflatten(1, (2, -1)) if gated and words.shape[1] == 1 else words


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and tensor.is_contiguous()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in fp64, from its bits: exact on every device, which exp2 need not be."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


def _outer_factors(levels: Mapping[Scale, Tensor], n: int, device: torch.device) -> Tensor:
    """The product of all scales that cover all of K, [..., n, 1]."""
    factors = torch.ones(n, 1, dtype=torch.float32, device=device)
    for level, stored in levels.items():
        each = expand(level.dtype.decode(stored), (level.block[0], 1), n, 1)
        factors = factors / each if level.op == DIV else factors * each
    return factors


def _stored_levels(spec: QuantSpec) -> tuple[Scale, ...]:
    """Scale levels over all of K that cannot be recovered from the rows' factors."""
    outer = outer_levels(spec)
    if len(outer) == 1 and len(spec.scales) == 1 and outer[0].block == CHANNEL and outer[0].op != DIV:
        return () if outer[0].dtype.wide is not None else outer
    return outer
