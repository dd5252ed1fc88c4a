"""Check the tensors outside the experts, as they are stored: NaN and infinity in plain floats."""

from __future__ import annotations

import math

from lancebill.checkpoint.read.slices import Reader
from lancebill.errors import BadValue, LancebillError
from lancebill.formats.base import FLOATS
from lancebill.formats.stored import Stored
from lancebill.numbers.scan import all_finite

CHUNK = 1 << 24  # elements read at a time


def check_tensor(read: Reader, name: str, header: Stored) -> LancebillError | None:
    """An error if a number of this tensor is NaN or infinite. Tensors of other types than floats are not read."""
    if header.dtype not in FLOATS:
        return None
    try:
        if not header.shape:
            return None if all_finite(read(name, ())) else _error(name)
        width = max(1, math.prod(header.shape[1:]))
        rows = max(1, CHUNK // width)
        for first in range(0, header.shape[0], rows):
            if not all_finite(read(name, (slice(first, first + rows),))):
                return _error(name)
    except LancebillError as error:
        return error
    return None


def _error(name: str) -> BadValue:
    return BadValue("NaN or infinite", where=name, hint="every token passes this tensor: the model cannot answer")
