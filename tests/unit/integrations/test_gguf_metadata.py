"""Metadata and tensors of GGUF files that contradict each other, refused before a model is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.errors import LancebillError, MalformedFile, UnsupportedProblem
from lancebill.integrations.transformers.gguf_config import config_of
from lancebill.integrations.transformers.gguf_rows import ROWS
from lancebill.testing.gguf import write_gguf

EMBEDDING = {"token_embd.weight": (32, 32)}
WITH_KINDS = next(name for name, row in ROWS.items() if row.kinds is not None)
WITH_PERIODS = next(name for name, row in ROWS.items() if row.periods)
WITH_FACTORS = next(name for name, row in ROWS.items() if row.factors is not None)


def _sizes(architecture: str) -> dict[str, Any]:
    row = ROWS[architecture]
    keys = {
        "embedding_length",
        "attention.head_count",
        "context_length",
        *(k for pair in row.ratios.values() for k in pair),
        *(row.keys.values() if row.stated else ()),
    }
    return {**dict.fromkeys(keys, 4), "attention.layer_norm_rms_epsilon": 1e-6, **row.required}


def _periodic() -> dict[str, tuple[int, ...]]:
    name = next(iter(ROWS[WITH_PERIODS].periods))
    return {**EMBEDDING, **{f"blk.{layer}.{name}": (32, 32) for layer in (0, 1, 3)}, "output.weight": (32, 32)}


def _factors() -> dict[str, tuple[int, ...]]:
    factors = ROWS[WITH_FACTORS].factors
    assert factors is not None
    return {**EMBEDDING, factors.short: (5,)}


def _config(architecture: str, path: Path, **metadata: Any) -> Any:
    stated = {**_sizes(architecture), "block_count": 1, "expert_count": 2, "expert_used_count": 1, **metadata}
    named = {f"{architecture}.{key}": v for key, v in stated.items() if v is not None}
    named["general.architecture"] = architecture
    write_gguf(path, named, {name: ("F32", torch.ones(shape)) for name, shape in EMBEDDING.items()})
    with Checkpoint.open(path) as checkpoint:
        return config_of(checkpoint)


def test_positions_that_are_scaled_linearly(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    plain, scaled = _config("qwen3moe", tmp_path / "p.gguf"), _config("qwen3moe", tmp_path / "s.gguf", **scaling)
    assert plain.rope_parameters["rope_type"] == "default"
    assert scaled.rope_parameters["rope_type"] == "linear" and scaled.rope_parameters["factor"] == 4.0


def test_a_model_that_this_transformers_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "qwen3moe", replace(ROWS["qwen3moe"], model_type="qwen99_moe"))
    with pytest.raises(UnsupportedProblem, match=r"does not know the model.*qwen99_moe.*pip install"):
        _config("qwen3moe", tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("qwen3moe", "expert_used_count"),
        ("qwen3moe", "attention.layer_norm_rms_epsilon"),
        ("dbrx", "attention.layer_norm_epsilon"),
        ("deepseek", "expert_shared_count"),
        ("deepseek32", "attention.indexer.top_k"),
        ("deepseek4", "swiglu_clamp_exp"),
    ],
)
def test_a_number_of_another_model_does_not_replace_a_missing_one(architecture: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=f"{architecture}.{key}.*expected a (positive )?number"):
        _config(architecture, tmp_path / "x.gguf", **{key: None})


@pytest.mark.parametrize(
    ("architecture", "layers", "metadata", "tensors", "kind", "message"),
    [
        ("qwen3moe", 1, {"attention.head_count": -1}, EMBEDDING, MalformedFile, "not negative"),
        ("qwen3moe", 1, {}, {"output.weight": (32, 32)}, MalformedFile, "no embedding"),
        (WITH_KINDS, 1, {}, EMBEDDING, MalformedFile, "a value for each of 1 layers.*a list of 0"),
        ("deepseek4", 1, {"attention.compress_ratios": [5]}, EMBEDDING, MalformedFile, "0 or 4 or 128"),
        (WITH_PERIODS, 4, {}, _periodic(), UnsupportedProblem, "the same distance"),
        (WITH_FACTORS, 1, {}, _factors(), MalformedFile, "rotary frequencies"),
    ],
    ids=["number", "embedding", "kinds", "kind", "periods", "factors"],
)
def test_what_contradicts_itself_is_refused(
    architecture: str,
    layers: int,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[int, ...]],
    kind: type[LancebillError],
    message: str,
    tmp_path: Path,
) -> None:
    stated = {**_sizes(architecture), "block_count": layers, "expert_count": 2, "expert_used_count": 1, **metadata}
    named = {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in stated.items()}}
    write_gguf(tmp_path / "x.gguf", named, {name: ("F32", torch.ones(shape)) for name, shape in tensors.items()})
    with Checkpoint.open(tmp_path / "x.gguf") as checkpoint, pytest.raises(kind, match=message):
        config_of(checkpoint)
