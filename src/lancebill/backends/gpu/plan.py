"""Plans of the GPU backends: what one call launches, and the scratch memory it needs. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lancebill.backends.base import Plan
from lancebill.backends.gpu.kernels.limits import MOST_SIZES, MOST_SLOTS
from lancebill.backends.gpu.kernels.weight_form import E2M1_CODE, E4M3, ROWS, S8, WeightForm
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.gpu.roofline import activated_experts
from lancebill.backends.gpu.tiles import Rule, SlotStrips, Strips, Tile, power_of_two
from lancebill.backends.gpu.workspace import SECOND
from lancebill.errors import SpecError
from lancebill.moe.problem import FAST, INDEXED, Problem

SINGLE = "single"
SMALL = 256  # most tokens that a single launch dispatches
_FEWEST_COUNTED, _MOST_COUNTED = 128, 1024  # slots that one program counts
_COUNTING = 128  # programs that run at once
MOST_READS = 1.4  # of an expert, on average, where each slot is a tile; above, tiles of several rows are faster
REROUNDED = "groups more than 11 powers of two below their row's largest scale are rounded again; loading counts them"


@dataclass(frozen=True)
class GemmPlan:
    """The GEMM of one matrix: its form, sizes, tiles, and the conversion of its input rows."""

    form: WeightForm
    units: int
    slices: int
    scale_blocks: int
    tiles: tuple[Tile, ...] = ()  # of each launch
    each: int = 0  # stages of a chunk, when decoding; more if there would be more than `shares` chunks
    shares: int = 0
    pieces: int = 1  # the most chunks that share a tile, when decoding
    ordered: bool = False  # permute input columns per expert (act-order)
    scaled: bool = False  # multiply the input by a vector per expert
    static: bool = False  # quantise the input with a scale per expert
    rotation: int = 0  # rotate blocks of so many input columns
    promote: bool = False  # add sums to fp32 totals after every slice

    @property
    def byte_inputs(self) -> bool:
        return self.form.byte_inputs

    @property
    def row_type(self) -> torch.dtype | None:
        """The type of quantised input rows."""
        return {E4M3: torch.float8_e4m3fn, S8: torch.int8}.get(self.form.activations)

    @property
    def converts_rows(self) -> bool:
        """Whether input rows must be converted before the GEMM."""
        return self.byte_inputs or self.ordered or self.scaled or self.rotation > 0


@dataclass(frozen=True)
class GpuPlan(Plan):
    """What one call launches. `tokens` is the bucket: the plan serves every batch up to this size."""

    rule: Rule | None = None
    w13: GemmPlan | None = None
    w2: GemmPlan | None = None
    decode: bool = False  # each slot is a tile
    few_rows: bool = False  # of one matrix: all of them are one tile
    strips: Strips | None = None  # of few rows: blocks have narrow strips of the matrix, and share none
    slot_strips: SlotStrips | None = None  # the same, of a layer's matrices, for one token
    arch: int = 90  # compute capability of the GPU
    graphed: bool = False  # submit the launches as one CUDA graph

    def __post_init__(self) -> None:
        if self.problem.experts < 1:  # a part of a split layer may have none, and is not computed then
            raise SpecError("there is nothing to plan without experts", where="experts", expected=">= 1", got=0)
        if self.decode and self.slots > MOST_SLOTS:
            what = "the kernels for one tile per slot do not hold so many slots"
            raise SpecError(what, where="decode", expected=f"<= {MOST_SLOTS}", got=self.slots)

    @property
    def work(self) -> str:
        """The problem's dispatch, or "single" if all rows belong to the only expert."""
        return SINGLE if self.problem.w2 is None and self.problem.experts == 1 else self.problem.dispatch

    @property
    def counts(self) -> bool:
        """Whether blocks share tiles, and count the pieces of each."""
        return (self.decode and self.slot_strips is None) or (self.few_rows and self.strips is None)

    @property
    def slots(self) -> int:
        """Rows of the GEMMs."""
        return self.tokens * (self.problem.top_k if self.work == INDEXED else 1)

    @property
    def expected_slots(self) -> int:
        """The rows of this rank's experts, if a router chooses all experts equally often."""
        problem = self.problem
        everywhere = problem.global_experts if self.work == INDEXED else problem.experts
        return min(self.slots, -(-self.slots * problem.experts // everywhere))

    @property
    def first_gemm(self) -> GemmPlan:
        assert self.w13 is not None
        return self.w13

    def gemm(self, name: str) -> GemmPlan:
        gemm = {"w13": self.w13, "w2": self.w2}[name]
        assert gemm is not None
        return gemm

    @property
    def needs_owners(self) -> bool:
        """Whether a kernel needs each row's expert (the `owners` tensor)."""
        if self.work == SINGLE:
            return False
        if self.work == INDEXED:
            return True
        return self.first_gemm.converts_rows or (self.w2 is not None and self.w2.converts_rows)


def gemm_plan(layout: FragmentLayout, name: str) -> GemmPlan:
    """The GEMM of one matrix, before a backend chooses its tiles."""
    problem = layout.problem
    shape, activations = problem.matrices[name], problem.inputs_of(name)
    form, (n, k) = layout.form(shape), layout.padded(shape)
    return GemmPlan(
        form,
        n // ROWS,
        k // form.slice_columns,
        k // form.block_columns if form.block_columns else 1,
        ordered=shape.act_order,
        scaled=problem.pre_scale,
        static=activations.static,
        rotation=shape.spec.rotation,
    )


def form_notes(forms: Sequence[WeightForm]) -> tuple[str, ...]:
    """The forms of a plan's matrices, and what they round."""
    rounded = any(form.code == E2M1_CODE and form.activations == E4M3 for form in forms)
    return (*dict.fromkeys(form.name for form in forms), *([REROUNDED] if rounded else []))


def may_decode(plan: GpuPlan, layout: FragmentLayout) -> bool:
    """Whether kernels with one tile per slot can compute this: they read the caller's rows, and there is a lane for
    each slot and a counter for each tile. With few experts, slots share experts, whose weights would be read for every
    slot."""
    problem = plan.problem
    if plan.work not in (INDEXED, SINGLE) or problem.order != FAST or plan.slots > MOST_SLOTS:
        return False
    if any(plan.slots * layout.padded(shape)[0] // ROWS > SECOND for shape in problem.matrices.values()):
        return False
    if plan.work == INDEXED and plan.expected_slots > MOST_READS * activated_experts(problem, plan.expected_slots):
        return False
    per_expert = problem.w13.act_order or problem.pre_scale
    return not (problem.rotated or per_expert or problem.activations.static or problem.second_activations.static)


def scratch(plan: GpuPlan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every intermediate tensor."""
    problem, slots, first = plan.problem, plan.slots, plan.first_gemm
    experts = experts_padded(problem)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "x_scales": ((slots,), torch.float32),
        "tiles": ((MOST_SIZES * list_capacity(plan), 4), torch.int32),
        "counts": ((4 * MOST_SIZES,), torch.int32),
    }
    if plan.work == INDEXED or first.converts_rows:
        tensors["x"] = (
            (slots, row_width(first, problem.hidden)),
            first.row_type or problem.input.storage,
        )
    if plan.work == INDEXED:
        tensors["y"] = (slots, problem.w2.n if problem.w2 else 0), problem.input.storage
        tensors["slots"] = tensors["places"] = (slots,), torch.int32
        tensors["counted"] = (chunks(plan, slots), experts), torch.int32
    if plan.needs_owners:
        tensors["owners"] = (slots,), torch.int32
    if plan.decode and plan.slot_strips is None:
        for name, gemm in (("parts13", plan.w13), ("parts2", plan.w2)):
            if gemm is not None:
                whole = name == "parts13" and plan.w2 is not None and gemm.pieces == 1
                tensors[name] = (0 if whole else slots * gemm.units * gemm.pieces, ROWS), torch.float32
    if plan.few_rows and first.pieces > 1:
        tensors["parts13"] = (first.units * first.pieces * max(first.tiles[0].sizes), ROWS), torch.float32
    if plan.w2 is not None:
        tensors["h"] = (slots, problem.intermediate), problem.input.storage
    if plan.w2 is not None and plan.w2.row_type is not None:
        tensors["h8"] = (slots, row_width(plan.w2, problem.intermediate)), plan.w2.row_type
        tensors["h_scales"] = (slots,), torch.float32
    return tensors


def row_width(gemm: GemmPlan, columns: int) -> int:
    """Columns of an input row in memory: quantised rows are padded to whole slices."""
    side = gemm.form.slice_columns
    return -(-columns // side) * side if gemm.byte_inputs else columns


def experts_padded(problem: Problem) -> int:
    """Experts rounded up to a power of two, at least 256: Triton's scan traps with fewer elements than threads."""
    return max(256, power_of_two(problem.experts))


def list_capacity(plan: GpuPlan) -> int:
    """The most tiles of a launch: all full tiles, and one partial tile per expert."""
    assert plan.rule is not None
    return -(-plan.slots // plan.rule.full_tile) + experts_padded(plan.problem)


def chunk(plan: GpuPlan) -> int:
    """Slots that one program counts and places: few, but so many that all programs run at once."""
    return min(_MOST_COUNTED, max(_FEWEST_COUNTED, power_of_two(-(-plan.slots // _COUNTING))))


def chunks(plan: GpuPlan, slots: int) -> int:
    return -(-slots // chunk(plan))
