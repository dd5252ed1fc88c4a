"""GGUF files of llama.cpp's quantiser, judged by the `gguf` package of the same project."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import dequantised, write_qwen3moe
from judge import INTERMEDIATE, assert_judged

llama = pytest.importorskip("cyllama.llama.llama_cpp")

# The numbers of llama.h's llama_ftype.
FILES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15,
         "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ3_S": 26, "IQ4_XS": 30, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37,
         "MXFP4_MOE": 38}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_experts(name: str, tmp_path: Path) -> None:
    """Rows of 128 columns are too short for the types with blocks of 256: llama.cpp takes others for them."""
    write_qwen3moe(tmp_path / "floats.gguf", INTERMEDIATE)
    settings = llama.LlamaModelQuantizeParams()
    settings.ftype, settings.nthread = FILES[name], 1
    quantised = tmp_path / "quantised" / "model.gguf"
    quantised.parent.mkdir()
    llama.model_quantize(str(tmp_path / "floats.gguf"), str(quantised), settings)
    assert_judged(quantised, {0: dequantised(quantised)})
