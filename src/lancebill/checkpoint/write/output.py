"""Everything that a conversion writes, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lancebill.checkpoint.resolve.naming import NameForm
from lancebill.checkpoint.resolve.orientation import is_matrix_like
from lancebill.checkpoint.resolve.other_modules import OtherModule
from lancebill.checkpoint.resolve.stored_layer import Projection
from lancebill.checkpoint.write.rest import WrittenModule
from lancebill.checkpoint.write.target import Target
from lancebill.formats.base import Format, Part, Scheme
from lancebill.formats.stored import Stored


@dataclass(frozen=True)
class Job:
    """One output module and its source projections (two for a fused gate and up)."""

    layer: int
    expert: int
    experts: int  # of the layer, or of its mixture
    form: NameForm
    stored: str
    module: str
    sources: tuple[Projection, ...]

    @property
    def bias(self) -> bool:
        return "bias" in self.sources[0].sources


@dataclass(frozen=True)
class Output:
    """The whole output: the config, every tensor, and the jobs that write them."""

    target: Target
    config: dict[str, Any]
    scheme: Scheme
    plain_scheme: Scheme  # for modules that are dequantised
    tensors: dict[str, Stored]
    jobs: tuple[Job, ...]
    copied: tuple[str, ...]
    recast: tuple[OtherModule, ...]
    dequantized: tuple[OtherModule, ...]
    rest: tuple[WrittenModule, ...] = ()  # modules outside the experts with specs of their own
    unread: str | None = None  # why transformers itself cannot load the output, where that is known

    def place(self, job: Job, role: str) -> tuple[str, int | None]:
        """The tensor that stores a part of a job's module, and the expert's index in it if stacked."""
        part = self.scheme.part(role)
        assert part is not None
        return job.module + _suffix(part, job.form, self.target.format), job.expert if job.form.stacked else None

    def flipped(self, job: Job, role: str) -> bool:
        part = self.scheme.part(role)
        return part is not None and job.stored in job.form.transposed and is_matrix_like(part.axes[0])


def _suffix(part: Part, form: NameForm, format: Format) -> str:
    """The suffix of a part: formats that can also stack list the suffix of stacked tensors last."""
    return part.usual_suffix(form.parameters and not format.stacked)
