"""What GPUs can do, for estimates and for the sizes of pipelines: a table of cards, and the nearest one for any other.

Rates are those of the data sheets: memory, dense bf16 with fp32 sums, dense int8. GeForce cards halve the rate of fp32
sums, so that they multiply int8 four times as fast as bf16; others multiply it twice as fast. GB10's sheet has only
sparse fp4; its matrices of bf16 were measured at 92 TFLOP/s, so it does not halve them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lancebill.moe.device import Device

_KB = 1024


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    arch: int
    processors: int  # streaming multiprocessors
    memory_gbs: float  # GB/s
    tensor_tflops: float  # bf16
    int8_tops: float
    cache_mb: int  # of L2

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a multiprocessor. A block may have all but one KB of it."""
        return _SHARED_KB[self.arch] * _KB


_SHARED_KB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 120: 100, 121: 100}

# The first card of an architecture stands for a GPU of which only the architecture is known.
CARDS = (
    Card("A100", 80, 108, 2039, 312, 624, 40),
    Card("A30", 80, 56, 933, 165, 330, 24),
    Card("A10", 86, 72, 600, 125, 250, 6),
    Card("RTX A6000", 86, 84, 768, 155, 310, 6),
    Card("RTX 3090", 86, 82, 936, 71, 284, 6),
    Card("RTX 3060", 86, 28, 360, 26, 102, 3),
    Card("AGX Orin", 87, 16, 205, 43, 85, 4),
    Card("L40S", 89, 142, 864, 362, 733, 96),
    Card("RTX 4090", 89, 128, 1008, 165, 661, 72),
    Card("L4", 89, 58, 300, 121, 242, 48),
    Card("RTX 4060", 89, 24, 272, 30, 121, 24),
    Card("H200", 90, 132, 4800, 989, 1979, 50),
    Card("RTX 5090", 120, 170, 1792, 209, 838, 96),
    Card("RTX PRO 6000", 120, 188, 1792, 503, 1007, 128),
    Card("RTX 5080", 120, 84, 960, 113, 450, 64),
    Card("RTX 5060", 120, 30, 448, 38, 153, 32),
    Card("GB10", 121, 48, 273, 125, 250, 24),
)
ARCHS = tuple(_SHARED_KB)


@lru_cache(maxsize=256)
def nearest_card(device: Device) -> Card:
    """The card of the nearest architecture with the most similar number of processors."""
    arch = min(ARCHS, key=lambda known: (abs(known - device.arch), known))
    known = [card for card in CARDS if card.arch == arch]
    return min(known, key=lambda card: abs(card.processors - device.processors)) if device.processors else known[0]
