"""The config of a transformers model from the metadata of a GGUF file (`gguf_row.py` has the keys)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.gguf import read_metadata
from lancebill.errors import MalformedFile, UnsupportedProblem
from lancebill.integrations.transformers.gguf_row import (
    EMBEDDING,
    KEYS,
    OUTPUT,
    UNBOUNDED,
    GgufRow,
    StoredFactors,
)
from lancebill.integrations.transformers.gguf_rows import ROWS

_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
_LAYERS = "`RoutedExperts.from_checkpoint` reads the experts of any architecture, layer by layer"
_NEEDED = ("rms_norm_eps", "num_experts_per_tok")  # every model has them; no tensor's size contradicts a default
_LOG_MULTIPLIER = 0.1  # the file's multiplier of the logarithm of yarn's factor, for an `mscale` of 1


@dataclass(frozen=True)
class _File:
    """The metadata of a file below its architecture, every number checked before it is used."""

    where: str
    architecture: str
    metadata: Mapping[str, Any]
    largest: int  # dimension of a tensor

    def number(self, key: str) -> Any:
        """A number, or None; the largest one if there is one for each layer."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple) and value:
            value = max(value)
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.wrong(key, "a number that is not negative", value)
        if isinstance(value, int) and key not in UNBOUNDED and value > self.largest:
            raise self.wrong(key, f"at most {self.largest}, the largest dimension of a tensor", value)
        return value

    def need(self, key: str) -> Any:
        value = self.number(key)
        if not value:
            raise self.wrong(key, "a positive number", value)
        return value

    def per_layer(self, key: str, layers: int) -> tuple[Any, ...]:
        value = self.metadata.get(f"{self.architecture}.{key}")
        values = value if isinstance(value, tuple) else ()
        if len(values) < layers:
            raise self.wrong(key, f"a value for each of {layers} layers", f"a list of {len(values)}")
        return values[:layers]

    def wrong(self, key: str, expected: str, got: object) -> MalformedFile:
        what = f"the metadata '{self.architecture}.{key}' cannot be used"
        return MalformedFile(what, where=self.where, expected=expected, got=got)


def config_of(checkpoint: Checkpoint) -> PretrainedConfig:
    """The model's config."""
    row, where = row_of(checkpoint), str(checkpoint.path)
    shapes = [info.stored.shape for info in checkpoint.tensors.values()]
    largest = max((math.prod(shape) // min(shape) for shape in shapes if shape), default=0)
    file = _File(where, checkpoint.config.model["architecture"], read_metadata(checkpoint.path), largest)
    _check_required(file, row)
    layers = _layers(checkpoint)
    last = f"blk.{layers - 1}."
    values = _values(file, row, layers)
    for key, name in row.present.items():
        values[key] = name in checkpoint.tensors or any(_layers_with(checkpoint, name, layers))
    for name, keys in row.periods.items():
        values |= dict(zip(keys, _period(checkpoint, name, layers)))
    if row.layer_tensors:
        values[row.layer_key] = _layer_types(checkpoint, row, layers)
    if row.factors is not None and row.factors.short in checkpoint.tensors:
        values["rope_parameters"] |= _factors(checkpoint, file, row.factors, values["head_dim"] // 2)
    values |= {
        "num_hidden_layers": layers,
        "vocab_size": _vocabulary(checkpoint),
        "tie_word_embeddings": checkpoint.tensors.get(OUTPUT) is None,
    }
    other = row.variant is not None and last + row.variant[0] in checkpoint.tensors
    model_type = row.variant[1] if row.variant is not None and other else row.model_type
    if model_type not in CONFIG_MAPPING:
        what, hint = "this version of transformers does not know the model", "pip install --upgrade transformers"
        raise UnsupportedProblem(what, where=where, got=model_type, hint=hint)
    try:
        return CONFIG_MAPPING[model_type](**_sections(values))
    except Exception as error:
        raise MalformedFile("transformers refuses these metadata", where=where, got=error) from error


def _values(file: _File, row: GgufRow, layers: int) -> dict[str, Any]:
    """The config's values that the metadata and the row give."""
    keys = {**KEYS, **row.keys}
    found = {key: file.number(stored) for key, stored in keys.items()}
    for key in _NEEDED:
        file.need(keys[key])
    values = {**row.fixed, **{key: value for key, value in found.items() if value is not None}}
    for key, stored in row.keys.items() if row.stated else ():
        if key not in values:
            raise file.wrong(stored, "a number", None)
    values |= {"sliding_window": None} if values.get("sliding_window") == 0 else {}
    for heads in ("attention.head_count", "attention.head_count_kv"):
        if file.number(heads) is not None:
            file.need(heads)
    values |= {key: file.need(over) // file.need(under) for key, (over, under) in row.ratios.items()}
    for key, (stored, cases, other) in row.choices.items():
        values[key] = cases.get(file.number(stored), other)
    if row.latent:
        values |= _latent_sizes(file, values)
    if row.kinds is not None:
        values["layer_types"] = _layer_kinds(file, *row.kinds, layers)
    if not values.get("head_dim"):
        values["head_dim"] = file.need("embedding_length") // file.need("attention.head_count")
    values["rope_parameters"] = _rotary(file, row, values["head_dim"])
    return values | {key: file.metadata.get(f"tokenizer.ggml.{stored}") for key, stored in _TOKENS.items()}


def _layer_kinds(file: _File, key: str, cases: Mapping[int, str], other: str | None, layers: int) -> list[str]:
    """The type of each layer, by a value of the metadata."""
    found = []
    for value in file.per_layer(key, layers):
        kind = cases.get(value, other)
        if kind is None:
            raise file.wrong(key, " or ".join(map(str, cases)), value)
        found.append(kind)
    return found


def row_of(checkpoint: Checkpoint) -> GgufRow:
    architecture = checkpoint.config.model.get("architecture")
    row = ROWS.get(str(architecture))
    if row is None:
        raise UnsupportedProblem(
            "whole models of this GGUF architecture are not supported",
            where=str(checkpoint.path),
            expected=" or ".join(ROWS),
            got=architecture,
            hint=_LAYERS,
        )
    return row


def _layers(checkpoint: Checkpoint) -> int:
    """The number of layers, without those that predict further tokens. Each has a tensor of its own."""
    layers = checkpoint.config.model.get("num_hidden_layers")
    if not isinstance(layers, int) or not 0 < layers <= len(checkpoint.tensors):
        raise MalformedFile(
            "the number of layers cannot be right",
            where=str(checkpoint.path),
            expected=f"1 to {len(checkpoint.tensors)}, the number of tensors",
            got=layers,
        )
    return layers


def _check_required(file: _File, row: GgufRow) -> None:
    for key, expected in row.required.items():
        got = file.number(key)
        if (got or 0) != expected:
            what = f"models of this architecture are read only with one value of '{key}'"
            raise UnsupportedProblem(what, where=file.where, expected=expected, got=got, hint=_LAYERS)


def _layer_types(checkpoint: Checkpoint, row: GgufRow, layers: int) -> list[str]:
    """The type of each layer, by a tensor that only layers of that type have."""
    found = []
    for block in (f"blk.{layer}." for layer in range(layers)):
        kinds = [kind for name, kind in row.layer_tensors.items() if block + name in checkpoint.tensors]
        if len(kinds) != 1:
            expected = f"one of {', '.join(block + name for name in row.layer_tensors)}"
            raise MalformedFile("the type of a layer is not clear", where=str(checkpoint.path), expected=expected)
        found += kinds
    return found


def _layers_with(checkpoint: Checkpoint, name: str, layers: int) -> list[bool]:
    return [f"blk.{layer}.{name}" in checkpoint.tensors for layer in range(layers)]


def _period(checkpoint: Checkpoint, name: str, layers: int) -> tuple[int, int]:
    """The distance between layers that have this tensor, and the first of them."""
    found = [layer for layer, has in enumerate(_layers_with(checkpoint, name, layers)) if has]
    period, first = (found[1] - found[0] if len(found) > 1 else layers), found[0] if found else layers
    if found != list(range(first, layers, period)):
        what = "layers with this tensor must have the same distance"
        raise UnsupportedProblem(what, where=f"{checkpoint.path}: {name}", got=f"layers {found}")
    return period, first


def _sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of keys with a dot are put into sections."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        section, _, inner = key.rpartition(".")
        (made.setdefault(section, {}) if section else made)[inner] = value
    return made


def _vocabulary(checkpoint: Checkpoint) -> int:
    """The rows of the embedding: some files list fewer tokens."""
    embedding = checkpoint.tensors.get(EMBEDDING)
    if embedding is None:
        raise MalformedFile("the file has no embedding", where=str(checkpoint.path), expected=EMBEDDING)
    return embedding.stored.shape[0]


def _factors(checkpoint: Checkpoint, file: _File, stored: StoredFactors, count: int) -> dict[str, Any]:
    """Stored factors of the frequencies of rotary positions, in transformers' words for any list of factors."""
    original = file.number("rope.scaling.original_context_length") or file.need("context_length")
    scale = float(file.number("rope.scaling.attn_factor") or 1.0)
    made = {"rope_type": "longrope", "factor": 1.0, "attention_factor": scale, **dict.fromkeys(stored.scales, scale)}
    for key, name in (("short_factor", stored.short), ("long_factor", stored.long)):
        factors = (
            checkpoint.read(name).float()
            if name in checkpoint.tensors
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        if factors.shape != (count,) or not (factors > 0).all() or not factors.isfinite().all():
            what = "these factors of rotary frequencies cannot be used"
            raise MalformedFile(what, where=f"{file.where}: {name}", expected=f"{count} positive numbers")
        made[key] = factors.tolist()
    return {**made, "original_max_position_embeddings": original}


def _latent_sizes(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of heads that share a latent vector. Old files store them as those of plain heads."""
    whole = file.number("attention.key_length_mla") or file.need("attention.key_length")
    rotated = file.need("rope.dimension_count")
    sizes = {
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": file.number("attention.value_length_mla") or file.need("attention.value_length"),
        "num_key_value_heads": values["num_attention_heads"],
        "head_dim": rotated,
    }
    if values["n_group"] > 1:
        sizes["topk_method"] = "group_limited_greedy"
    return sizes


def _rotary(file: _File, row: GgufRow, head: int) -> dict[str, Any]:
    """transformers' description of rotary positions."""
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": file.number("rope.freq_base") or 10000.0}
    rotated = file.number("rope.dimension_count")
    if row.partial and rotated:
        made["partial_rotary_factor"] = rotated / head
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return made
    if kind not in ("linear", "yarn"):
        raise UnsupportedProblem("unknown scaling of rotary positions", where=file.where, expected="yarn", got=kind)
    made |= {"rope_type": kind, "factor": float(file.need("rope.scaling.factor")), **row.rotary}
    if kind == "yarn":
        made["original_max_position_embeddings"] = file.need("rope.scaling.original_context_length")
        given = {key: file.number(f"rope.scaling.{stored}") for key, stored in _YARN.items()}
        made |= {key: value for key, value in given.items() if value is not None}
        multiplier = file.number("rope.scaling.yarn_log_multiplier")
        if multiplier:
            made |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier / _LOG_MULTIPLIER)
    return made
