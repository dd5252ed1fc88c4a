"""What the GEMM kernels pass to their helpers as one argument: compile-time settings and the ring of stages (Gluon)."""

# No `from __future__ import annotations`: Triton reads the annotations of an aggregate as types.

from dataclasses import dataclass, replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from lancebill.backends.gpu.kernels.weight_form import WeightForm


@dataclass(frozen=True)
class PipelineConfig:
    """The shape of a tile and of its pipeline."""

    form: WeightForm
    tokens: int  # per tile
    stages: int
    slices: int  # of K, per stage
    units: int  # of features, per tile
    promote: bool  # add sums to fp32 totals after every slice
    row_slices: int = 0  # decode with fp8: slices of the row that stay in shared memory
    box: int = 8  # tokens per copy
    pitch: int = 8  # tokens of a slice in shared memory: those of the largest tile of the launch

    def with_tokens(self, tokens: int) -> "PipelineConfig":
        """The same pipeline for a smaller tile."""
        return replace(self, tokens=tokens)

    @property
    def stage_bytes(self) -> int:
        """Bytes that one stage of a tile receives."""
        form, slices = self.form, self.slices
        weights = slices * form.slice_rows * 128 + 4 * form.stage_scale_words(slices)
        return slices * self.tokens * 128 + self.units * weights


@gluon.constexpr_function
def pipeline_config(form, TOKENS, STAGES, SLICES, UNITS, PROMOTE, ROW_SLICES=0, BOX=8, PITCH=8):
    return PipelineConfig(form, TOKENS, STAGES, SLICES, UNITS, PROMOTE, ROW_SLICES, BOX, PITCH)


@aggregate
class Ring:
    """Shared memory of all stages: token rows, packed codes, scale words, and the barriers of each stage."""

    x: gl.shared_memory_descriptor
    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, codes, scales, empty, full):
        self.x = x
        self.codes = codes
        self.scales = scales
        self.empty = empty
        self.full = full
