"""A problem and a number of tokens to a plan: tiles, launches, scratch memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lancebill.backends.base import Plan
from lancebill.backends.hopper.kernels.weight_form import E2M1_CODE, E4M3, ROWS, WeightForm
from lancebill.backends.hopper.layout import HopperLayout
from lancebill.backends.hopper.tuning import policy as tune
from lancebill.backends.hopper.tuning.policy import Rule, Tile
from lancebill.backends.hopper.workspace import SECOND, pieces
from lancebill.moe.problem import FAST, INDEXED, Problem

SINGLE = "single"
REROUNDED = "groups more than 11 powers of two below their row's largest scale are rounded again, and counted at load"
SMALL = 256  # tokens that one launch dispatches
_CHUNKS = {1024: 128, 4096: 256}  # up to so many tokens: slots that a program counts; more above
_MOST_COUNTED = 1024
_READ_RATE, _TENSOR_RATE = 4.3e6, {False: 6.5e8, True: 1.2e9}  # bytes and flops in a microsecond


@dataclass(frozen=True)
class Product:
    """One matrix in kernel terms."""

    form: WeightForm
    units: int
    slices: int
    scale_blocks: int
    tiles: tuple[Tile, ...]
    split: int = 1  # of K, when decoding
    ordered: bool = False  # columns of the input in an order of the expert's own
    scaled: bool = False  # the input times a vector of the expert's own
    static: bool = False  # the input over a scale of the expert's own
    promote: bool = False  # sums are carried to fp32 after every slice

    @property
    def narrow(self) -> bool:
        return self.form.activations == E4M3

    @property
    def prepared(self) -> bool:
        """Whether rows cannot be read as they come."""
        return self.narrow or self.ordered or self.scaled


@dataclass(frozen=True)
class HopperPlan(Plan):
    """What `run` launches. `tokens` is the bucket: the plan serves every smaller batch of it too."""

    rule: Rule | None = None
    w13: Product | None = None
    w2: Product | None = None
    decode: bool = False  # a tile is a slot

    @property
    def work(self) -> str:
        """How work comes: a dispatch, or "single": all rows are the only expert's."""
        return SINGLE if self.problem.w2 is None and self.problem.experts == 1 else self.problem.dispatch

    @property
    def slots(self) -> int:
        """Rows of the products."""
        return self.tokens * (self.problem.top_k if self.work == INDEXED else 1)

    @property
    def first(self) -> Product:
        assert self.w13 is not None
        return self.w13

    def product(self, name: str) -> Product:
        found = {"w13": self.w13, "w2": self.w2}[name]
        assert found is not None
        return found

    @property
    def owned(self) -> bool:
        """Whether someone asks which expert a row belongs to."""
        if self.work == SINGLE:
            return False
        if self.work == INDEXED:
            return self.w2 is not None and (self.w2.scaled or self.w2.static)
        return self.first.prepared or (self.w2 is not None and self.w2.prepared)


def make_plan(problem: Problem, tokens: int, tried: Rule | None = None, decode: bool | None = None) -> HopperPlan:
    """`tried` and `decode` stand in for what the data say: tuning compares them."""
    tokens = tune.bucket(max(tokens, 1))
    layout = HopperLayout(problem)
    plan = HopperPlan(problem, tokens, 0.0)
    slots = plan.slots
    forms = [layout.form(shape) for shape in problem.matrices.values()]
    units = problem.experts * layout.padded(problem.w13)[0] // ROWS
    rule = tried or tune.rule(forms[0].activations, slots, problem.experts, units)
    rule = replace(rule, sizes=tune.fitting(rule.sizes, forms))
    decode = _decodes(plan, layout, forms[0]) if decode is None else decode
    sizes = () if decode else rule.sizes
    products = [_product(layout, name, form, sizes, rule.paired) for name, form in zip(problem.matrices, forms)]
    if decode:
        products = [_slotwise(product, slots) for product in products]
    plan = replace(
        plan,
        estimate_us=_estimate(problem, layout, slots),
        notes=(
            "a tile for each slot" if decode else f"token tiles {'+'.join(map(str, sizes))}",
            *(form.name for form in forms),
            *(REROUNDED for form in forms[:1] if form.code == E2M1_CODE and form.activations == E4M3),
        ),
        rule=rule,
        w13=products[0],
        w2=products[1] if problem.w2 is not None else None,
        decode=decode,
    )
    return replace(plan, workspace_bytes=pieces(scratch(plan))[1])


def _decodes(plan: HopperPlan, layout: HopperLayout, form: WeightForm) -> bool:
    """Few slots, each of which reads its row as the others do: a tile for each."""
    problem = plan.problem
    if plan.work not in (INDEXED, SINGLE) or problem.order != FAST or not tune.decodes(form.activations, plan.slots):
        return False
    if any(plan.slots * layout.padded(shape)[0] // ROWS > SECOND for shape in problem.matrices.values()):
        return False  # more tiles than counters
    own = problem.w13.act_order or problem.pre_scale
    return not (own or problem.activations.static or problem.second_activations.static)


def _product(layout: HopperLayout, name: str, form: WeightForm, sizes: tuple[int, ...], paired: bool) -> Product:
    """Tiles for each size."""
    problem = layout.problem
    shape = problem.matrices[name]
    n, k = layout.padded(shape)
    units = n // ROWS
    blocks = k // form.block_columns if form.block_columns else 1
    activations = problem.activations if name == "w13" else problem.second_activations
    return Product(
        form,
        units,
        k // form.slice_columns,
        blocks,
        tuple(tune.tile(form, size, problem.is_gated(shape.name), paired and units % 2 == 0) for size in sizes),
        ordered=shape.act_order,
        scaled=problem.pre_scale,
        static=activations.static,
        promote=tune.promotes(form),
    )


def _slotwise(product: Product, slots: int) -> Product:
    """A tile for each slot."""
    split = tune.split(product.form, slots * product.units, product.slices)
    return replace(product, split=split, tiles=(tune.decode_tile(product.form, product.slices, split),))


def scratch(plan: HopperPlan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every intermediate tensor."""
    problem, slots, first = plan.problem, plan.slots, plan.first
    element = {True: torch.float8_e4m3fn, False: problem.input.storage}
    experts = experts_padded(problem)
    held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "x_scales": ((slots,), torch.float32),
        "tiles": ((list_capacity(plan) + 3 * experts, 4), torch.int32),
        "counts": ((16,), torch.int32),
    }
    if plan.work == INDEXED or first.prepared:
        held["x"] = (slots, row_width(first, problem.hidden)), element[first.narrow]
    if plan.work == INDEXED:
        held["y"] = (slots, problem.w2.n if problem.w2 else 0), problem.input.storage
        held["slots"] = held["places"] = (slots,), torch.int32
        held["counted"] = (chunks(plan, slots), experts), torch.int32
    if plan.owned:
        held["owners"] = (slots,), torch.int32
    if plan.decode:
        for name, product in (("parts13", plan.w13), ("parts2", plan.w2)):
            if product is not None:
                whole = name == "parts13" and plan.w2 is not None and product.split == 1
                held[name] = (0 if whole else slots * product.split, product.units * ROWS), torch.float32
    if plan.w2 is not None:
        held["h"] = (slots, problem.intermediate), problem.input.storage
    if plan.w2 is not None and plan.w2.narrow:
        held["h8"] = (slots, row_width(plan.w2, problem.intermediate)), torch.float8_e4m3fn
        held["h_scales"] = (slots,), torch.float32
    return held


def row_width(product: Product, columns: int) -> int:
    """Columns of a row as a product takes it: narrow ones are whole slices, in their own order."""
    side = product.form.slice_columns
    return -(-columns // side) * side if product.narrow else columns


def experts_padded(problem: Problem) -> int:
    """A power of two, and at least one for each of a block's 256 threads: Triton's scan traps on fewer."""
    return max(256, tune.power_of_two(problem.experts))


def list_capacity(plan: HopperPlan) -> int:
    """The most tiles of the first class: full ones, and one more for every expert."""
    assert plan.rule is not None
    return -(-plan.slots // plan.rule.sizes[0]) + experts_padded(plan.problem)


def chunk(plan: HopperPlan) -> int:
    return next((slots for tokens, slots in _CHUNKS.items() if plan.tokens <= tokens), _MOST_COUNTED)


def chunks(plan: HopperPlan, slots: int) -> int:
    return -(-slots // chunk(plan))


def _estimate(problem: Problem, layout: HopperLayout, slots: int) -> float:
    """The floor: activated weights over the read rate, or flops over the tensor rate; and some launches."""
    activated = problem.experts * (1 - (1 - 1 / problem.experts) ** slots)
    loaded = activated * sum(layout.bytes(shape) for shape in problem.matrices.values())
    flops = 2 * slots * sum(shape.n * shape.k for shape in problem.matrices.values())
    narrow = layout.form(problem.w13).activations == E4M3
    return max(loaded / _READ_RATE, flops / _TENSOR_RATE[narrow]) + 10
