"""Between numbers and codes: `dequantize` is the definition of truth, the rest is measured by it.

Everything is plain torch, runs on CPU and GPU alike, and works through a matrix by row chunks so
that fp32 temporaries stay small whatever the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colibri.dtypes import BF16, E8M0, F32, INTEGER, TERNARY, ZERO16, DType, biased_type
from colibri.errors import BadValue
from colibri.quant import ALL, DIV, Block, Level, QuantSpec, Scale, blocks_along
from colibri.weight import LogicalWeight, expand

FLOOR, CEIL = "floor", "ceil"  # how an MX block rounds its power-of-two scale
_CHUNK = 1 << 19  # elements of fp32 temporaries at a time


@dataclass(frozen=True)
class Loss:
    """What a requantisation cost, against the dequantised source."""

    max_error: float = 0.0  # largest |difference| over largest |value|
    rms_error: float = 0.0  # root of (sum of squared differences over sum of squared values)
    saturated: int = 0  # values beyond what their block's scale can reach
    flushed: int = 0  # values that were not zero and now are
    count: int = 0

    def merge(self, other: Loss) -> Loss:
        """The worst maximum; the RMS weighted by the number of values."""
        count = self.count + other.count
        squares = self.rms_error**2 * self.count + other.rms_error**2 * other.count
        return Loss(
            max(self.max_error, other.max_error),
            math.sqrt(squares / count) if count else 0.0,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            count,
        )


def dequantize(weight: LogicalWeight) -> Tensor:
    """fp32 [N, K] in natural column order: (table[code] - zero) op scale_1 op ... - minimum."""
    out = torch.empty(weight.n, weight.k, dtype=torch.float32, device=weight.codes.device)
    for low, high in _row_chunks(weight):
        out[low:high] = _dequantize_rows(weight, low, high)
    if weight.perm is not None:
        natural = torch.empty_like(out)
        natural[:, weight.perm.long()] = out
        return natural
    return out


def _dequantize_rows(weight: LogicalWeight, low: int, high: int) -> Tensor:
    part = replace(weight, bias=None).cut((low, high), (0, weight.k))
    n, k, spec = part.n, part.k, part.spec
    value = spec.dtype.decode(part.codes)
    if spec.zero is not None and part.zero is not None:
        value -= expand(spec.zero.dtype.decode(part.zero), spec.zero.block, n, k)
    for scale, codes in zip(spec.scales, part.scales):
        factor = expand(scale.dtype.decode(codes), scale.block, n, k)
        value = value.div_(factor) if scale.op == DIV else value.mul_(factor)
    if spec.minimum:
        value -= _product(spec.minimum, part.minimum, n, k)
    return value


def _product(levels: tuple[Scale, ...], tensors: tuple[Tensor, ...], n: int, k: int) -> Tensor:
    value = expand(levels[0].dtype.decode(tensors[0]), levels[0].block, n, k)
    for level, codes in zip(levels[1:], tensors[1:]):
        value = value * expand(level.dtype.decode(codes), level.block, n, k)
    return value


def quantize(values: Tensor, spec: QuantSpec, *, mx_rule: str = FLOOR) -> LogicalWeight:
    """Round to nearest under `spec`: scales from each block's largest magnitude, then codes.

    Integers without a zero point use scale = amax / ((2**b - 1) / 2), so that no value is more than
    half a step off; int8 uses amax / 127. Power-of-two scales follow `mx_rule`: OCP's floor
    (may saturate the largest value) or ceil (never does). All-zero blocks get a scale of one.
    """
    if not all(torch.isfinite(extreme) for extreme in torch.aminmax(values)):  # NaN spreads to both
        raise BadValue("cannot quantise NaN or infinity", hint="`colibri verify --values` finds where they are")
    if not spec.quantized:
        return LogicalWeight(spec, spec.dtype.encode(values))
    n, k = values.shape
    low, high = _block_extremes(values, spec)
    zero_values: Tensor | None = None
    minimum: tuple[Tensor, ...] = ()
    if spec.minimum:
        minimum = _fit_levels(-low.clamp(max=0), spec, spec.minimum, 1.0, (n, k), mx_rule)
        low, high = torch.zeros_like(low), high - low.clamp(max=0)
    if spec.zero is not None:
        ideal = (high.clamp(min=0) - low.clamp(max=0)) / (spec.dtype.max - spec.dtype.min)
    else:
        ideal = torch.maximum(high, -low) / _reach(spec.dtype)
    scales = _fit_levels(ideal, spec, spec.scales, spec.dtype.max, (n, k), mx_rule)
    zero: Tensor | None = None
    if spec.zero is not None:
        inner = _inner_block(spec)
        step = _total_scale(spec, scales, *_grid(inner, n, k), inner)
        zero_values = -low.clamp(max=0) / step
        if spec.zero.dtype == ZERO16:
            zero_values = zero_values.round().clamp(0, spec.dtype.max)
        zero = spec.zero.dtype.encode(zero_values)
    codes = torch.empty(n, k, dtype=torch.uint8, device=values.device)
    partial = LogicalWeight(spec, codes, scales, zero, minimum)
    for start, stop in _row_chunks(partial):
        codes[start:stop] = _encode_rows(values, partial, start, stop)
    return partial


def _encode_rows(values: Tensor, weight: LogicalWeight, low: int, high: int) -> Tensor:
    part = weight.cut((low, high), (0, weight.k))
    n, k, spec = part.n, part.k, part.spec
    value = values[low:high].float()
    if spec.minimum:
        value = value + _product(spec.minimum, part.minimum, n, k)
    inner = _inner_block(spec)
    step = _total_scale(spec, part.scales, *_grid(inner, n, k), inner)
    value = _divide_blocks(value, step, inner)
    if spec.zero is not None and part.zero is not None:
        value = value + expand(spec.zero.dtype.decode(part.zero), spec.zero.block, n, k)
    return spec.dtype.encode(value)


def requantize(weight: LogicalWeight, spec: QuantSpec, *, mx_rule: str = FLOOR) -> tuple[LogicalWeight, Loss]:
    """The same matrix under another spec, exactly where possible, and what it cost.

    Bias and activation-side tensors travel along; an act-order is undone (rounding sees natural
    columns), since the target's groups are its own.
    """
    count = weight.n * weight.k
    exact = recast(weight, spec)
    if exact is not None:
        return exact, Loss(count=count)
    source = dequantize(weight)
    result = replace(quantize(source, spec, mx_rule=mx_rule), bias=weight.bias, inputs=weight.inputs)
    return result, loss(source, result)


def loss(source: Tensor, result: LogicalWeight) -> Loss:
    """How far `result` is from `source`, by row chunks."""
    worst = squares = energy = peak = 0.0
    saturated = flushed = 0
    dtype = result.spec.dtype
    edge_low, edge_high = (dtype.encode(torch.tensor([v])) for v in (dtype.min, dtype.max))
    for low, high in _row_chunks(result):
        want, got = source[low:high], _dequantize_rows(result, low, high)
        difference = (want - got).abs()
        worst = max(worst, difference.max().item())
        peak = max(peak, want.abs().max().item())
        squares += difference.square().sum(dtype=torch.float64).item()
        energy += want.square().sum(dtype=torch.float64).item()
        flushed += _flushed(want, got)
        if result.spec.quantized:
            codes = result.codes[low:high]
            at_edge = (codes == edge_low.to(codes.device)) | (codes == edge_high.to(codes.device))
            saturated += int(torch.count_nonzero(at_edge & (want.abs() > got.abs() * (1 + 2**-20))))
    rms = math.sqrt(squares / energy) if energy else 0.0
    return Loss(worst / peak if peak else 0.0, rms, saturated, flushed, source.numel())


def _flushed(want: Tensor, got: Tensor) -> int:
    """Values that were not zero and now are; matrices without zeros, the usual case, need one count."""
    if int(torch.count_nonzero(want)) == want.numel():
        return want.numel() - int(torch.count_nonzero(got))
    return int(torch.count_nonzero((got == 0) & (want != 0)))


def recast(weight: LogicalWeight, spec: QuantSpec) -> LogicalWeight | None:
    """`weight` under `spec` where no number changes: finer blocks, wider scales, a zero point made
    explicit. None where rounding would be needed."""
    if weight.spec == spec:
        return weight
    source = _explicit_zero(weight, spec)
    if source.spec.dtype != spec.dtype or bool(source.spec.zero) != bool(spec.zero):
        return None
    levels = list(zip(source.spec.levels, spec.levels))
    if len(source.spec.levels) != len(spec.levels) or len(source.spec.scales) != len(spec.scales):
        return None
    if not all(_refines(old, new) and _widens(old.dtype, new.dtype) for old, new in levels):
        return None
    n, k = source.n, source.k
    fine = source.reblock(_with_blocks(source.spec, spec))

    def convert(old: Level, new: Level, tensor: Tensor) -> Tensor:
        return tensor if old.dtype == new.dtype else new.dtype.encode(old.dtype.decode(tensor))

    assert (n, k) == (fine.n, fine.k)
    return replace(
        fine,
        spec=spec,
        scales=tuple(convert(o, s, t) for o, s, t in zip(fine.spec.scales, spec.scales, fine.scales)),
        minimum=tuple(convert(o, s, t) for o, s, t in zip(fine.spec.minimum, spec.minimum, fine.minimum)),
    )


def _explicit_zero(weight: LogicalWeight, spec: QuantSpec) -> LogicalWeight:
    """Offset-binary integers said as unsigned ones with the constant zero point 2**(b-1)."""
    old = weight.spec
    if old.zero is not None or spec.zero is None or old.dtype != biased_type(max(1, min(8, old.dtype.bits))):
        return weight
    if spec.zero.dtype != ZERO16 or spec.dtype.bits != old.dtype.bits:
        return weight
    zero = torch.full(
        spec.zero.shape(weight.n, weight.k), 1 << (old.dtype.bits - 1), dtype=torch.int16, device=weight.codes.device
    )
    return replace(weight, spec=replace(old, dtype=spec.dtype, zero=spec.zero), zero=zero)


def _with_blocks(old: QuantSpec, new: QuantSpec) -> QuantSpec:
    """`old`'s numbers over `new`'s blocks."""
    return replace(
        old,
        scales=tuple(replace(o, block=s.block) for o, s in zip(old.scales, new.scales)),
        zero=old.zero and new.zero and replace(old.zero, block=new.zero.block),
        minimum=tuple(replace(o, block=s.block) for o, s in zip(old.minimum, new.minimum)),
    )


def _refines(old: Level, new: Level) -> bool:
    if isinstance(old, Scale) and isinstance(new, Scale) and old.op != new.op:
        return False
    return all(b == a or (b != ALL and (a == ALL or a % b == 0)) for a, b in zip(old.block, new.block))


def _widens(old: DType, new: DType) -> bool:
    """Every value of `old` is a value of `new`."""
    if old == new or (new == F32 and old.kind != INTEGER):
        return True
    return old == E8M0 and new == BF16


def _reach(dtype: DType) -> float:
    """What the largest magnitude of a block is divided by to give its scale."""
    if dtype.kind == INTEGER and dtype != TERNARY:
        return dtype.max if dtype.bits == 8 or dtype.min >= 0 else (dtype.max - dtype.min) / 2
    return dtype.max


def _fit_levels(
    ideal: Tensor, spec: QuantSpec, levels: tuple[Scale, ...], reach: float, size: tuple[int, int], rule: str
) -> tuple[Tensor, ...]:
    """Encode an ideal scale (one per inner block) as the product of `levels`.

    Outer levels are fitted first, each so that the level inside it just reaches its own maximum;
    what an outer level rounds away, the inner one sees.
    """
    inner = _inner_block(spec)
    left = torch.where(ideal > 0, ideal, torch.ones_like(ideal)) if levels is spec.scales else ideal
    fitted: list[Tensor] = []
    for position in range(len(levels) - 1, -1, -1):
        level = levels[position]
        want = _block_max(left, inner, level.block, size)
        if position > 0:
            want = want / levels[position - 1].dtype.max
        codes = _encode_scale(want, level, reach, rule)
        fitted.append(codes)
        value = level.dtype.decode(codes)
        value = 1 / value if level.op == DIV else value
        spread_value = _spread_to(value, level.block, inner, size)
        left = left / torch.where(spread_value == 0, torch.ones_like(spread_value), spread_value)
    return tuple(reversed(fitted))


def _encode_scale(want: Tensor, level: Scale, reach: float, rule: str) -> Tensor:
    dtype = level.dtype
    if dtype == E8M0:
        return _power_of_two(want, reach, rule)
    want = 1 / want if level.op == DIV else want
    if dtype.kind == INTEGER:
        return dtype.encode(want)
    return dtype.encode(want.clamp(min=dtype.min_positive, max=dtype.max))


def _power_of_two(want: Tensor, reach: float, rule: str) -> Tensor:
    """Exponent bytes for scales of `want` = amax / reach."""
    if rule == FLOOR:
        # floor(log2(amax)) - emax: amax = want * reach can round, so the exponent of amax is taken
        # from want in fp64, where the product of an fp32 and a small table maximum is exact.
        exponent = torch.frexp(want.double() * reach).exponent - 1 - (math.frexp(reach)[1] - 1)
    else:
        mantissa, exponent = torch.frexp(want.double())
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def _block_extremes(values: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each inner block (for ternary digits: the mean magnitude)."""
    block = _inner_block(spec)
    n, k = values.shape
    rows, columns = _grid(block, n, k)
    low = torch.empty(rows, columns, dtype=torch.float32, device=values.device)
    high = torch.empty_like(low)
    if block[0] == ALL:
        strip_low, strip_high = zip(*(_strip_extremes(values[a:b], spec, b - a) for a, b in _chunks(n, k, 1)))
        low[0], high[0] = torch.stack(strip_low).amin(0), torch.stack(strip_high).amax(0)
        if spec.dtype == TERNARY:
            low[0], high[0] = -values.float().abs().mean(), values.float().abs().mean()
        return low, high
    for start, stop in _chunks(n, k, block[0]):
        a, b = start // block[0], blocks_along(stop, block[0])
        for row in range(a, b) if block[0] > 1 else ():
            low[row], high[row] = _strip_extremes(values[row * block[0] : (row + 1) * block[0]], spec, block[0])
        if block[0] == 1:
            low[a:b], high[a:b] = _row_extremes(values[start:stop], spec)
    return low, high


def _strip_extremes(values: Tensor, spec: QuantSpec, rows: int) -> tuple[Tensor, Tensor]:
    low, high = _row_extremes(values, spec)
    return low.amin(0), high.amax(0)


def _row_extremes(values: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    side = _inner_block(spec)[1]
    n, k = values.shape
    width = k if side == ALL else side
    if k % width:
        pad = width - k % width
        values = torch.cat([values, values[:, -1:].expand(n, pad)], dim=1)
    grouped = values.reshape(n, -1, width)
    if spec.dtype == TERNARY:
        mean = grouped.float().abs().mean(-1)
        return -mean, mean
    if spec.zero is None and not spec.minimum:  # only the magnitude is asked for, which is faster
        largest = grouped.abs().amax(-1).float()
        return -largest, largest
    low, high = torch.aminmax(grouped, dim=-1)
    return low.float(), high.float()


def _inner_block(spec: QuantSpec) -> Block:
    """The finest block of the spec: that of its first scale."""
    return spec.scales[0].block if spec.scales else (ALL, ALL)


def _grid(block: Block, n: int, k: int) -> tuple[int, int]:
    return blocks_along(n, block[0]), blocks_along(k, block[1])


def _block_max(tensor: Tensor, inner: Block, outer: Block, size: tuple[int, int]) -> Tensor:
    """The largest of the inner blocks in each outer block."""
    for axis in (0, 1):
        if outer[axis] == inner[axis]:
            continue
        if outer[axis] == ALL:
            tensor = tensor.amax(axis, keepdim=True)
            continue
        per = outer[axis] // inner[axis]
        count = blocks_along(size[axis], outer[axis])
        pad = count * per - tensor.shape[axis]
        if pad:
            tensor = torch.cat(
                [tensor, tensor.narrow(axis, tensor.shape[axis] - 1, 1).repeat_interleave(pad, axis)], axis
            )
        tensor = tensor.unflatten(axis, (count, per)).amax(axis + 1)
    return tensor


def _spread_to(tensor: Tensor, outer: Block, inner: Block, size: tuple[int, int]) -> Tensor:
    """Outer blocks' values on the grid of inner blocks."""
    for axis in (0, 1):
        if outer[axis] in (inner[axis], ALL):
            continue
        count = blocks_along(size[axis], inner[axis])
        tensor = tensor.repeat_interleave(outer[axis] // inner[axis], axis).narrow(axis, 0, count)
    return tensor


def _total_scale(spec: QuantSpec, scales: tuple[Tensor, ...], rows: int, columns: int, inner: Block) -> Tensor:
    """The factor all levels make together, on the grid of inner blocks."""
    total = torch.ones(rows, columns, dtype=torch.float32, device=scales[0].device)
    for level, codes in zip(spec.scales, scales):
        value = level.dtype.decode(codes)
        for axis, count in ((0, rows), (1, columns)):
            if value.shape[axis] not in (1, count):
                value = value.repeat_interleave(level.block[axis] // inner[axis], axis).narrow(axis, 0, count)
        total = total / value if level.op == DIV else total * value
    return total


def _divide_blocks(value: Tensor, step: Tensor, block: Block) -> Tensor:
    """value / step, each block by its own: without spreading the steps where groups divide K."""
    n, k = value.shape
    if block[0] == 1 and block[1] != ALL and k % block[1] == 0:
        return (value.view(n, -1, block[1]) / step.unsqueeze(-1)).view(n, k)
    return value / expand(step, block, n, k)


def _row_chunks(weight: LogicalWeight) -> Iterator[tuple[int, int]]:
    sides = [level.block[0] for level in weight.spec.levels if level.block[0] != ALL]
    return _chunks(weight.n, weight.k, math.lcm(1, *sides))


def _chunks(n: int, k: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about _CHUNK elements that start on multiples of `multiple`."""
    step = max(1, _CHUNK // max(1, k * multiple)) * multiple
    for low in range(0, n, step):
        yield low, min(n, low + step)
