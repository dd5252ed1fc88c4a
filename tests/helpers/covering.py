"""Covering cases of formats, families and parallel layouts, and weights whose results are exact.

Every format is combined with each of its families, each of its examples and all 18 layouts; every naming form is
combined with every tp, ep and redundancy. `test_every_pair_is_covered` checks this.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.checkpoint.resolve.naming import TABLE, NameForm, Naming
from lancebill.errors import CannotEncode
from lancebill.formats import registry
from lancebill.formats.base import Example, Format
from lancebill.moe.placement import LINEAR, ROUND_ROBIN, Placement
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import DType
from lancebill.numbers.spec import DIV, Scale
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing.weights import random_example

SIZES = {"tp": (1, 2, 4), "ep": (1, 2, 4), "redundant": (0, 2)}
Layout = tuple[int, int, int]
LAYOUTS = tuple(itertools.product(*SIZES.values()))
PAD_TO = 384  # pads every intermediate size used here
# Combinations that cannot exist: DBRX's flat stack cannot store one quant state per matrix, and DeepSeek-V4 has its own
# fp8 format.
IMPOSSIBLE = {("bitsandbytes", "dbrx", 0), *(("fp8", "deepseek_v4", form) for form in range(3))}
GATE_SCALE = 128.0  # silu(128 n) is exactly 128 n or 0


@dataclass(frozen=True)
class Case:
    """A format's example in a family's naming form, under a parallel layout."""

    format: Format
    example: Example
    row: Naming
    form: NameForm
    tp: int
    ep: int
    redundant: int
    strategy: str
    pad_to: int

    @property
    def number(self) -> int:
        return self.row.forms.index(self.form)

    def __str__(self) -> str:
        layout = f"tp{self.tp}-ep{self.ep}-r{self.redundant}-{self.strategy}-pad{self.pad_to}"
        return f"{self.format.name}:{self.example.name}-{self.row.family}{self.number}-{layout}"

    def placements(self) -> Iterator[Placement]:
        """Every rank of this layout."""
        for tp, ep in itertools.product(range(self.tp), range(self.ep)):
            yield Placement(tp, self.tp, ep, self.ep, self.strategy, self.redundant, self.pad_to)


def distinct_forms() -> list[tuple[Naming, list[NameForm]]]:
    """Every naming form once, in the first row that has it, without GGUF's. Many families share theirs.

    Layers with several mixtures have a test of their own.
    """
    seen: list[NameForm] = []
    found = []
    for row in TABLE:
        own = [form for form in row.forms if form not in seen and row.family != "gguf" and not row.beside]
        seen += own
        found += [(row, own)] if own else []
    return found


def families_and_forms(fmt: Format) -> list[tuple[Naming, list[NameForm]]]:
    """The families that a format is used with, and their possible naming forms."""
    model_types = {e.config.model.get("model_type") for e in fmt.examples()} - {None}
    rows = [(row, list(row.forms)) for row in TABLE if model_types & set(row.model_types)] or distinct_forms()
    possible = [
        (row, [f for f in forms if (fmt.name, row.family, row.forms.index(f)) not in IMPOSSIBLE]) for row, forms in rows
    ]
    return [(row, forms) for row, forms in possible if forms]


def cases() -> list[Case]:
    """The cases; deterministic."""
    chosen, chance = [], random.Random(0)
    for number, fmt in enumerate(registry().values()):
        examples, rows = list(fmt.examples()), families_and_forms(fmt)
        layouts = chance.sample(LAYOUTS, len(LAYOUTS))
        for i in range(max(len(examples), len(rows), len(LAYOUTS))):
            row, forms = rows[i % len(rows)]
            form = forms[(i // len(rows) + number) % len(forms)]
            chosen.append(_case(chance, fmt, examples[i % len(examples)], row, form, layouts[i % len(layouts)]))
    return chosen + list(_completed(chance, chosen))


def _case(chance: random.Random, fmt: Format, example: Example, row: Naming, form: NameForm, layout: Layout) -> Case:
    if chance.random() < 0.3 and example.scheme.part("bias") is not None:
        example = replace(example, bias=True)
    return Case(fmt, example, row, form, *layout, chance.choice((LINEAR, ROUND_ROBIN)), chance.choice((1, PAD_TO)))


def _completed(chance: random.Random, chosen: list[Case]) -> Iterator[Case]:
    """More cases, so that every form is combined with every size."""
    by_form: dict[tuple[str, int], list[Case]] = {}
    for case in chosen:
        by_form.setdefault((case.row.family, case.number), []).append(case)
    for covered in by_form.values():
        tp, ep, redundant = (
            [v for v in values if v not in {getattr(c, kind) for c in covered}] for kind, values in SIZES.items()
        )
        for layout in itertools.zip_longest(tp, ep, redundant):
            case = covered[0]
            filled = [given if given is not None else chance.choice(v) for given, v in zip(layout, SIZES.values())]
            yield _case(chance, case.format, case.example, case.row, case.form, (filled[0], filled[1], filled[2]))


def tame(example: Example, n: int, k: int, seed: int, order_seed: int = 0) -> LogicalWeight:
    """Like `random_example`, but with small integer weights where the scheme can store them.

    Gate and up are multiples of 128. Then silu and all products and sums are exact, and the order of sums does not
    matter. Seeds follow `checkpoints.generate` with its default seed.
    """
    weight = random_example(example, n, k, seed, order_seed)
    factor = 1.0 if is_down(seed) else GATE_SCALE
    generator = torch.Generator().manual_seed(seed)
    exact = replace(weight, **_small_values(weight, factor, generator))
    if weight.bias is not None:
        bias = torch.randint(-2, 3, (n,), generator=generator) * (GATE_SCALE**2 if is_down(seed) else GATE_SCALE)
        exact = replace(exact, bias=bias.to(weight.bias.dtype))
    try:
        example.scheme.encode(exact)
    except CannotEncode:
        return weight
    return exact


def is_down(seed: int) -> bool:
    return seed % 4 == 2


def is_tame(weight: LogicalWeight, factor: float) -> bool:
    """Whether every value is a small multiple of factor / 2, and some are negative: else sums are not small."""
    value = dequantize(weight) / factor * 2
    return bool((value == value.round()).all() and value.abs().max() <= 4 and value.min() < 0)


def _small_values(weight: LogicalWeight, factor: float, generator: torch.Generator) -> dict[str, object]:
    spec = weight.spec
    if not spec.quantized:
        return {"stored": spec.dtype.encode(torch.randint(-2, 3, weight.codes.shape, generator=generator) * factor)}
    middle, zero = 0.0, weight.zero
    if zero is not None and spec.zero is not None:
        middle = float(spec.zero.dtype.decode(zero.flatten()[:1]))
        zero = torch.full_like(zero, zero.flatten()[0].item())
    small = [c for c in spec.dtype.valid_codes if abs(spec.dtype.table[c] - middle) in (0, 0.5, 1, 2)]
    codes = torch.tensor(small or [0], dtype=torch.uint8)
    scales, left = [], factor
    for level, tensor in zip(spec.scales, weight.scales):
        scale = 1 / left if level.op == DIV else left
        exact = _is_exact(level.dtype, scale)
        scales.append(_filled(level, tensor, scale if exact else 1.0))
        left = 1.0 if exact else left
    return {
        "stored": codes[torch.randint(len(codes), weight.codes.shape, generator=generator)],
        "scales": tuple(scales),
        "zero": zero,
        "minimum": tuple(_filled(level, t, 0.0) for level, t in zip(spec.minimum, weight.minimum)),
    }


def _is_exact(dtype: DType, value: float) -> bool:
    return float(dtype.decode(dtype.encode(torch.tensor([value])))) == value


def _filled(level: Scale, tensor: Tensor, value: float) -> Tensor:
    return level.dtype.encode(torch.full(tensor.shape, value))
