"""The dequantiser of compressed-tensors as a judge, for the tools that write its format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from judge import Layers, named_experts, stored_tensors

nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")

ROUNDING = 2**-22  # NVFP4: the judge divides the scale by the global scale first


def judged_by_compressed_tensors(folder: Path) -> Layers:
    """Given to the dequantiser in fp32, because it computes in the dtype of the scales, and without the other modules:

    it takes every weight for a linear module's.
    """
    stored = {
        name: tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        for name, tensor in stored_tensors(folder).items()
        if ".experts." in name
    }
    with _fp4_in_fp32():
        return named_experts(converters.CompressedTensorsDequantizer(folder, dtype=torch.float32).process(stored))


@contextmanager
def _fp4_in_fp32() -> Iterator[None]:
    """The dequantiser unpacks FP4 to bf16 and then computes in it, by a default of its own."""
    unpack = nvfp4.unpack_fp4_from_uint8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvfp4, "unpack_fp4_from_uint8", lambda *words: unpack(*words, dtype=torch.float32))
        yield
