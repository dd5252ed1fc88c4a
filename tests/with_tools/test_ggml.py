"""Every block type of ggml, quantised by the library itself and judged by the `gguf` package of the same project.

`test_llamacpp.py` lets llama.cpp choose the types of a file; here each type is named, with the importance matrix that
the smallest ones need. xllamacpp brings the compiled library for more kinds of CPUs.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import dequantised, gguf, write_qwen3moe
from judge import assert_judged

xllamacpp = pytest.importorskip("xllamacpp")
ggml = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t

INTERMEDIATE = 256  # columns of the largest block
NAMES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S",
         "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]  # fmt: skip
MIXED = [("IQ2_XXS", "Q2_K"), ("IQ1_M", "IQ2_XXS"), ("Q4_K", "Q6_K"), ("Q3_K", "Q5_K"), ("MXFP4", "Q8_0")]


@pytest.mark.parametrize("name", NAMES)
def test_type(name: str, tmp_path: Path) -> None:
    _judge(tmp_path / "model.gguf", name, name)


@pytest.mark.parametrize(("name", "down"), MIXED)
def test_down_in_another_type(name: str, down: str, tmp_path: Path) -> None:
    _judge(tmp_path / "model.gguf", name, down)


def _judge(path: Path, name: str, down: str) -> None:
    def quantise(projection: str, floats: Any) -> tuple[Any, Any]:
        kind = gguf.GGMLQuantizationType[down if projection == "down" else name]
        return _quantised(floats, kind), kind

    write_qwen3moe(path, INTERMEDIATE, quantise)
    assert_judged(path, {0: dequantised(path)})


def _quantised(floats: Any, kind: Any) -> Any:
    """The bytes of each row."""
    columns, (block, size) = floats.shape[-1], gguf.GGML_QUANT_SIZES[kind]
    stored = np.zeros((*floats.shape[:-1], columns // block * size), dtype=np.uint8)
    importance = np.random.default_rng(1).random(columns, dtype=np.float32) + 0.5
    rows, pointers = floats.size // columns, (each.ctypes.data_as(ctypes.c_void_p) for each in (floats, stored))
    written = ggml.ggml_quantize_chunk(
        ctypes.c_int(kind), *pointers, ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(columns),
        importance.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    assert written == stored.nbytes
    return stored
