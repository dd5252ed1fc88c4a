"""How much of a matrix is lost when it is rounded to codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.numbers.dtypes import DType
from lancebill.numbers.native import RoundingStruct

# Relative rounding error of a 16-bit scale. Errors up to this neither force a refit nor count as saturation.
SCALE_ROUNDING = 2.0**-8


@dataclass(frozen=True)
class Loss:
    """Error of a requantisation against the dequantised source.

    A value counts as saturated if it is outside its block's range by more than half a step, so that
    clamping moves it further than rounding would. The small amount by which rounding a 16-bit scale
    can shrink the range is tolerated.
    """

    max_error: float = 0.0  # largest |difference| over largest |value|
    rms_error: float = 0.0  # root of (sum of squared differences over sum of squared values)
    saturated: int = 0
    flushed: int = 0  # non-zero values that became zero
    count: int = 0

    def merge(self, other: Loss) -> Loss:
        """The larger maximum; the RMS weighted by the number of values."""
        count = self.count + other.count
        squares = self.rms_error**2 * self.count + other.rms_error**2 * other.count
        return Loss(
            max(self.max_error, other.max_error),
            math.sqrt(squares / count) if count else 0.0,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            count,
        )


def saturation(dtype: DType) -> tuple[float, float]:
    """Positions outside this range are saturated."""
    low, high = dtype.rounding_range
    tolerance = max(high, -low) * SCALE_ROUNDING if dtype.table else 0.0
    return low - tolerance, high + tolerance


@dataclass
class LossMeter:
    """Accumulates a `Loss` over chunks."""

    dtype: DType
    worst: float = 0.0
    peak: float = 0.0
    squares: float = 0.0
    energy: float = 0.0
    saturated: int = 0
    flushed: int = 0
    count: int = 0

    def add(self, want: Tensor, got: Tensor, position: Tensor) -> None:
        """Add a chunk: `want` was encoded and decoded to `got`; `position` is `want` in units of the code table."""
        difference = (want - got).abs_()
        self.worst = max(self.worst, difference.amax().item())
        self.peak = max(self.peak, want.amax().item(), -want.amin().item())
        self.squares += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
        self.energy += torch.linalg.vector_norm(want, dtype=torch.float64).item() ** 2
        self.count += want.numel()
        self.saturated += self._beyond(position)
        remaining = int(torch.count_nonzero(got))  # |got| + difference is zero only if both values are zero
        self.flushed += int(torch.count_nonzero(difference.add_(got.abs()))) - remaining

    def merge(self, chunk: RoundingStruct) -> None:
        """Add a chunk that was measured while it was rounded."""
        self.worst, self.peak = max(self.worst, chunk.worst), max(self.peak, chunk.peak)
        self.squares, self.energy = self.squares + chunk.squares, self.energy + chunk.energy
        self.saturated, self.flushed = self.saturated + chunk.saturated, self.flushed + chunk.flushed
        self.count += chunk.rows * chunk.columns

    def _beyond(self, position: Tensor) -> int:
        """How many positions are outside the range of the codes. Most chunks have none: check the extremes first."""
        low, high = saturation(self.dtype)
        if low <= position.amin().item() and position.amax().item() <= high:
            return 0
        return int(torch.count_nonzero(position.clamp(low, high).sub_(position)))

    def loss(self) -> Loss:
        return Loss(
            self.worst / self.peak if self.peak else 0.0,
            math.sqrt(self.squares / self.energy) if self.energy else 0.0,
            self.saturated,
            self.flushed,
            self.count,
        )
