"""Read a checkpoint's configuration: the model's config and its quantisation section.

Exporters put that section in a dozen places and spell its method differently. This module returns one `Config`
with a normalised `method`; the formats interpret the section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lancebill.checkpoint.read.strict_json import read_json
from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.errors import MalformedFile, UnsupportedFormat
from lancebill.formats.stored import Config

MODEL_CONFIG = "config.json"
MODELOPT, GPTQ, AWQ = "hf_quant_config.json", "quantize_config.json", "quant_config.json"
QUANTO = "quanto_qmap.json"
MODELOPT_LAYERS = "quant_cfg.json"  # what TensorRT-LLM keeps apart from MODELOPT
AUTO_ROUND = "quantization_config.json"  # a copy of the section in config.json
CONFIG_FILES = (MODEL_CONFIG, MODELOPT, GPTQ, AWQ, QUANTO, MODELOPT_LAYERS, AUTO_ROUND)

# Keys of config.json that hold a quantisation section: MLX's, most others', and an old one of compressed-tensors.
MLX_SECTION, USUAL_SECTION, OLD_SECTION = QUANT_SECTIONS = ("quantization", "quantization_config", "compression_config")
MODELOPT_METHODS = ("modelopt", "modelopt_mixed")
MIXED = "MIXED_PRECISION"  # ModelOpt's algorithm that stands for one of each layer, under one of these keys
PER_LAYER = {"quantized_layers", "config_groups"}

# A section without `quant_method` is recognised by keys that only one exporter writes.
TELLTALE_KEYS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"quant_algo"}), "modelopt"),
    (frozenset({"load_in_4bit"}), "bitsandbytes"),
    (frozenset({"load_in_8bit"}), "bitsandbytes"),
    (frozenset({"bits", "desc_act"}), "gptq"),
    (frozenset({"w_bit"}), "awq"),
    (frozenset({"zero_point"}), "awq"),
    (frozenset({"config_groups"}), "compressed-tensors"),
    (frozenset({"bits", "group_size", "mode"}), "mlx"),
    (frozenset({"quantization"}), "fastdeploy"),
)

# Published configs that do not say how the experts are stored. transformers writes it when it saves such a model.
UNSTATED: dict[str, dict[str, Any]] = {
    "inkling2": {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
}


def read_config(folder: Path) -> Config:
    """The configuration of a checkpoint folder; a missing config.json counts as empty."""
    path = folder / MODEL_CONFIG
    model = read_json(path) if _present(path) else {}
    for source, section, fallback in _sections(folder, model):
        method = _method(section, fallback, str(folder / source))
        return Config(model, _with_algorithms(folder, section, method), method, source)
    return _unstated(model)


def config_of_model(model: Mapping[str, Any], source: str = MODEL_CONFIG) -> Config:
    """The configuration of a model whose config.json is already in memory."""
    for section, fallback in _model_sections(model, source):
        return Config(model, section, _method(section, fallback, source), source)
    return _unstated(model)


def _unstated(model: Mapping[str, Any]) -> Config:
    """Without a section about quantisation: unquantised, but for models that are published without one."""
    model_type = model.get("model_type")
    if not isinstance(model_type, str) or model_type not in UNSTATED or "transformers_version" in model:
        return Config(model)
    section = UNSTATED[model_type]
    return Config(model, section, _method(section, None, MODEL_CONFIG), MODEL_CONFIG)


def _model_sections(model: Mapping[str, Any], where: str) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    holders = model, _section(model, "text_config", where)
    # MLX reads this key first. Next to it there may be a copy, or a section of the model that was converted.
    for mlx in (_section(holder, MLX_SECTION, where) for holder in holders):
        if mlx:
            yield mlx, "mlx"
    for key, fallback in ((USUAL_SECTION, None), (OLD_SECTION, "compressed-tensors")):
        for holder in holders:
            if section := _section(holder, key, where):
                yield _flat(section), fallback


def _sections(folder: Path, model: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """(file, section, method implied by the file or key), in order of precedence."""
    for section, fallback in _model_sections(model, str(folder / MODEL_CONFIG)):
        yield MODEL_CONFIG, section, fallback
    files = {MODELOPT: "modelopt", GPTQ: "gptq", AWQ: "awq", QUANTO: "quanto", AUTO_ROUND: None}
    for name, implied in files.items():
        if _present(folder / name):
            section = read_json(folder / name)
            if name == MODELOPT:
                section = dict(_section(section, "quantization", str(folder / name)))
            if section:
                yield name, section, implied


def _flat(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of hf_quant_config.json in config.json has its keys one level deeper."""
    nested = section.get("quantization")
    if not isinstance(nested, dict):
        return section
    return {key: value for key, value in section.items() if key != "quantization"} | nested


def _with_algorithms(folder: Path, section: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    """ModelOpt's section with the algorithms of its layers, which may be in one of two other files."""
    if method not in MODELOPT_METHODS or section.get("quant_algo") != MIXED or PER_LAYER & section.keys():
        return section
    for path in (path for name in (MODELOPT, MODELOPT_LAYERS) if _present(path := folder / name)):
        other = _flat(read_json(path))
        if PER_LAYER & other.keys():
            return {**other, **section}
    return section


def _present(path: Path) -> bool:
    """Whether the file exists. A dangling link counts, so that a lost config is an error and not an absent one."""
    return path.is_symlink() or path.exists()


def _section(holder: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """A nested object; a missing or null one counts as empty."""
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedFile(f"'{key}' is not an object", where=where, expected="{...}", got=quoted(value))
    return value


def _method(section: Mapping[str, Any], fallback: str | None, where: str) -> str:
    named = section.get("quant_method")
    if named is not None:
        if not isinstance(named, str) or not named.strip():
            raise UnsupportedFormat("'quant_method' is not a name", where=where, got=quoted(named))
        named = named.strip().lower()
        return "compressed-tensors" if named == "sparseml" else named
    for keys, method in TELLTALE_KEYS:
        if keys <= section.keys():
            return method
    if fallback is None:
        raise UnsupportedFormat(
            "the quantisation section has no quant_method, and its keys match no known method",
            where=where,
            expected="quant_method, or keys of one of " + ", ".join(dict.fromkeys(m for _, m in TELLTALE_KEYS)),
            got="keys " + quoted(sorted(section)),
        )
    return fallback
