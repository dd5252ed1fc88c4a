"""Which blocks of scales a stage of a GEMM's pipeline needs (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon


@gluon.constexpr_function
def stage_blocks(form, SLICES):
    return form.stage_blocks(SLICES)


@gluon.constexpr_function
def scale_block_of(form, SLICES, slice):
    """The scale block of a slice within its stage."""
    if form.block_columns == 0:
        return 0
    return min(slice * form.slice_columns // form.block_columns, form.stage_blocks(SLICES) - 1)


@gluon.constexpr_function
def stages_per_block(form, SLICES):
    """Consecutive stages that read the same scale block (0: all stages)."""
    return 0 if form.block_columns == 0 else max(1, form.block_columns // (SLICES * form.slice_columns))


@gluon.constexpr_function
def stage_scale_words(form, SLICES):
    return form.stage_scale_words(SLICES)
