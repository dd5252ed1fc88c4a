"""One tensor of a file: name, dtype, shape and byte range from a checked header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lancebill.formats.stored import Stored


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor; `start` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def stored(self) -> Stored:
        return Stored(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def quoted(name: object, limit: int = 120) -> str:
    """A name or value from a file, safe to print: escaped and shortened."""
    text = ascii(name) if not isinstance(name, str) else repr(name[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."
