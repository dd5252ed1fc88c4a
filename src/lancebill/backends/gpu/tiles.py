"""Token tiles of the grouped GEMMs, as values, and the token counts that share a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lancebill.backends.gpu.kernels.limits import LARGEST_SIZE, MOST_SIZES
from lancebill.errors import SpecError


@dataclass(frozen=True)
class Tile:
    """The token tiles of one launch and their pipeline."""

    sizes: tuple[int, ...]
    stages: int
    slices: int
    blocks: int  # resident per SM
    registers: int
    units: int = 1
    together: int = 1  # entries of the tile list that take turns at every unit
    row_slices: int = 0  # slices of the quantised row in shared memory, when decoding with fp8

    @property
    def box(self) -> int:
        """Tokens per copy: the largest power of two that divides all sizes."""
        together = 0
        for size in self.sizes:
            together |= size
        return together & -together


@dataclass(frozen=True)
class Strips:
    """A block of the GEMM of one matrix for few rows: strips of 16 features, by parts of K that its warps take in
    turns."""

    count: int
    parts: int
    ahead: int  # slices of a warp that are being read
    rows: int  # of the tile: 1, 8 or 16
    window: int  # slices of x that are copied to shared memory together, while another window is used
    registers: int = 0  # of a thread; 0: as many as ptxas takes, which reads less ahead to save some

    @property
    def features(self) -> int:
        return 16 * self.count

    @property
    def warps(self) -> int:
        return self.count * self.parts


@dataclass(frozen=True)
class SlotStrips:
    """How blocks of both GEMMs of a layer go through strips of features: parts of K that their warps take in turns."""

    first_parts: int
    first_ahead: int  # slices of a warp that are being read
    second_parts: int
    second_ahead: int
    window: int  # slices of x that are copied to shared memory together
    slots: int  # hidden rows for which there is room in shared memory
    slices: int  # of such a row


@dataclass(frozen=True)
class Rule:
    """The tuned choices for a number of rows per expert.

    `launches` has the tile sizes of each launch of a GEMM. Experts are cut into full tiles of `full` tokens, by
    default the largest size. A size above `full` takes a full tile and a small remainder together.
    """

    launches: tuple[tuple[int, ...], ...]
    overlap: bool  # programmatic dependent launch
    paired: bool = False  # small tiles take two units where the matrix has an even number of them
    full: int | None = None

    def __post_init__(self) -> None:
        if len(self.sizes) > MOST_SIZES or not all(0 < size <= LARGEST_SIZE and size % 8 == 0 for size in self.sizes):
            expected = f"up to {MOST_SIZES} multiples of 8 up to {LARGEST_SIZE}"
            raise SpecError("no kernel has these token tiles", expected=expected, got=self.tiles)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for launch in self.launches for size in launch)

    @property
    def full_tile(self) -> int:
        return max(self.sizes) if self.full is None else self.full

    @property
    def tiles(self) -> str:
        """Sizes as text, "64/32+8": launches are joined with "+", sizes of a launch with "/". A j marks sizes above
        `full`."""
        return "+".join(
            "/".join(f"{size}{'j' if size > self.full_tile else ''}" for size in launch) for launch in self.launches
        )

    @classmethod
    def parse(cls, tiles: str, *, overlap: bool = True, paired: bool = False) -> Rule:
        """The rule with these `tiles`."""
        launches = [launch.split("/") for launch in tiles.split("+")]
        sizes = tuple(tuple(int(size.rstrip("j")) for size in launch) for launch in launches)
        full = max(int(size) for launch in launches for size in launch if not size.endswith("j"))
        return cls(sizes, overlap, paired, full if "j" in tiles else None)


def reachable(rule: Rule, rows: int) -> Rule:
    """The rule without tiles that are larger than necessary if no expert has more than `rows` rows."""
    enough = min((size for size in rule.sizes if size >= rows), default=max(rule.sizes))
    launches = tuple(tuple(size for size in launch if size <= enough) for launch in rule.launches)
    return replace(rule, launches=tuple(filter(None, launches)), full=None if enough < rule.full_tile else rule.full)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def bucket(tokens: int) -> int:
    """Round a token count up to its bucket, one of four per power of two. A bucket shares one plan."""
    step = max(1, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def buckets(most: int) -> tuple[int, ...]:
    """All buckets up to the one that holds `most` tokens."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(bucket(sizes[-1] + 1))
    return tuple(sizes)
