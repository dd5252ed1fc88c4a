"""The model types with routed experts that transformers has: with a row in the naming table, or with a reason.

A test makes the list from the installed transformers and compares.
"""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.checkpoint.resolve.naming import REFUSED, REMOTE_CODE, TABLE, Naming

WITHOUT_ROW = REFUSED
TRANSFORMERS = "5.23"  # the version that the lists are of
# Types of the text section of a multimodal config, which is no model of its own.
TEXT_SECTIONS = (
    "deepseek_ocr2_text", "diffusion_gemma_text", "ernie4_5_vl_moe_text", "glm4v_moe_text", "glm5_next_text",
    "mistral_large4_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "step3p7_text", "unlimited_ocr_text",
)  # fmt: skip
_NOT_MODELS = {"gguf", *REMOTE_CODE, *TEXT_SECTIONS}


def judged_types(row: Naming) -> Iterator[str]:
    """The model types of a row that transformers can judge."""
    yield from (name for name in row.model_types if name not in _NOT_MODELS)


def families() -> tuple[str, ...]:
    """The model types with experts that transformers has: all with a row, then all with a reason."""
    return (*(name for row in TABLE for name in judged_types(row)), *WITHOUT_ROW)
