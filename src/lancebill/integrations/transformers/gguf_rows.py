"""All GGUF architectures that are read as whole models."""

from __future__ import annotations

from lancebill.integrations.transformers.gguf_attention_rows import ATTENTION_ROWS
from lancebill.integrations.transformers.gguf_deepseek_rows import DEEPSEEK_ROWS
from lancebill.integrations.transformers.gguf_recurrent_rows import RECURRENT_ROWS
from lancebill.integrations.transformers.gguf_row import GgufRow

ROWS: dict[str, GgufRow] = {**ATTENTION_ROWS, **DEEPSEEK_ROWS, **RECURRENT_ROWS}
