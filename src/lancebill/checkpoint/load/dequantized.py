"""A quantised module outside the experts as one plain matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.other_modules import OtherModule, row_chunks
from lancebill.numbers.codec import plain_matrix


def dequantized_module(read: Reader, module: OtherModule, dtype: torch.dtype) -> Tensor:
    """The module's matrix, computed in row chunks to keep the fp32 intermediates small."""
    out = torch.empty(module.n, module.k, dtype=dtype, device="cpu")
    for first, part in row_chunks(module):
        out[first : first + part.n] = plain_matrix(load_projection(read, part))
    return out
