"""transformers models whose experts stay packed.

    model = lancebill.from_pretrained("path/to/checkpoint")
    model.generate(...)

The model is transformers' own class with one thing changed when it is made: its modules of experts.
Everything else (names, tied weights, buffers, generation) is left to transformers, which is given the
other tensors of the checkpoint, dequantised where a format quantised them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from lancebill.backends import oracle
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.errors import (
    CheckpointError,
    CheckpointProblems,
    MissingTensor,
    SpecError,
    UnsupportedFormat,
    UnsupportedProblem,
    WrongShape,
)
from lancebill.integrations.transformers import gguf_models as gguf
from lancebill.integrations.transformers.experts_interface import register
from lancebill.integrations.transformers.other_tensors import rest_of
from lancebill.integrations.transformers.packed_experts import packed_experts, swap
from lancebill.integrations.transformers.save_pretrained import Origin, save
from lancebill.layer.parts import pull
from lancebill.layer.recipe import WIDE, LoadOptions, Recipe
from lancebill.layer.report import LoadReport
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.layer.rules import ActivationRules, WeightRules
from lancebill.moe.placement import Placement
from lancebill.moe.problem import FAST, parse_device

register()

# Keywords of transformers' `from_pretrained` that have another name here, or no meaning.
_INSTEAD = {
    "torch_dtype": "dtype=",
    "device_map": "device=",
    "tp_plan": "lancebill.parallel",
    "quantization_config": "weights=",
    "experts_implementation": "backend=",
    "gguf_file": "the path of the file itself",
}
_QUANT_KEYS = ("quantization_config", "compression_config")


class PackedModel:
    """What a model's class is extended by: experts of ours, and saving that knows them."""

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        assert isinstance(self, nn.Module)
        self.lancebill_origin: Origin | None = None
        swap(self)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """A standard checkpoint in the format the experts are in; see `saving.save`."""
        assert isinstance(self, PreTrainedModel)
        save(self, self.lancebill_origin, Path(save_directory), **options)

    def lancebill_reports(self) -> list[LoadReport]:
        """What loading did, layer by layer: specs, bytes, the backend and why."""
        assert isinstance(self, nn.Module)
        return [module.report for _, module in packed_experts(self) if module.report is not None]


def from_pretrained(
    path: str | Path,
    *,
    weights: WeightRules = None,
    activations: ActivationRules = None,
    backend: str = oracle.AUTO,
    device: str = "cpu",
    dtype: torch.dtype | str = "auto",
    order: str = FAST,
    **kwargs: Any,
) -> Any:
    """The causal language model stored at `path` (a folder or a .gguf file), its experts packed as they are stored.

    `weights` and `activations` take a spec or rules as in `RoutedExperts.from_checkpoint`; `dtype` is
    that of everything but the experts ("auto": as the config says). Other keywords go to
    transformers' `from_pretrained` (attn_implementation, ...).
    """
    for name in kwargs.keys() & _INSTEAD.keys():
        raise SpecError(f"from_pretrained of lancebill takes no {name}=", hint=_INSTEAD[name])
    folder = _local(path)
    target = parse_device(device).torch
    checkpoint = _opened(folder)
    config, wide = _config(checkpoint, dtype)
    manifest = _manifest(config, checkpoint)
    options = LoadOptions(device, Placement(), backend, weights, activations, wide, order)
    if folder.is_file():
        rest = gguf.rest_of(checkpoint, manifest.expert_tensors, _without_memory(config), wide)
    else:
        rest = rest_of(checkpoint, manifest, wide)
    model, info = packed_class(_class_of(config)).from_pretrained(
        None,
        config=config,
        state_dict=rest,
        dtype=wide,
        output_loading_info=True,
        **kwargs,
    )
    _check_loaded(info, folder)
    model = model.to(target)
    fill(model, checkpoint, manifest, options)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = model.name_or_path = str(path)
    model.lancebill_origin = Origin.of(model, checkpoint, options)
    return model


def refill(model: Any, **changes: Any) -> None:
    """Load the experts of a model of ours again, with other options (weights, activations, backend)."""
    origin: Origin = model.lancebill_origin
    options = replace(origin.options, **changes)
    checkpoint = origin.checkpoint
    fill(model, checkpoint, manifests.build(checkpoint.config, checkpoint.headers), options)
    model.lancebill_origin = Origin.of(model, checkpoint, options)


def fill(model: nn.Module, checkpoint: Checkpoint, manifest: Manifest, options: LoadOptions) -> None:
    """Load every layer's experts into its place, one layer after the other."""
    places = dict(packed_experts(model))
    missing = [name for name, place in places.items() if place.index not in manifest.layers]
    if missing:
        raise MissingTensor("the checkpoint has no experts for this layer", where=missing[0])
    for place in places.values():
        place.experts = RoutedExperts(pull(Recipe.make(manifest, place.index, options), checkpoint.read))


def packed_class(base: type[PreTrainedModel]) -> Any:
    """`base` with our experts. Name and module stay: configs are written with them."""
    return type(base.__name__, (PackedModel, base), {"__module__": base.__module__})


def _class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise UnsupportedProblem(
            "transformers has no causal language model for this config", got=config.model_type or type(config).__name__
        )
    chosen = found[0] if isinstance(found, (list, tuple)) else found
    assert chosen is not None
    return chosen


def _local(path: str | Path) -> Path:
    """The folder itself, or that of a model of the hub, downloaded if it is not there."""
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(str(path), allow_patterns=wanted))
    except (OSError, ValueError) as error:  # what the hub raises is one of these
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise CheckpointError("no such folder, and no such model to download", where=str(path), got=why) from None


def _opened(folder: Path) -> Checkpoint:
    """A checkpoint that tells transformers what model it is: by its config, or by the metadata of GGUF."""
    if folder.suffix != gguf.SUFFIX and not (folder / "config.json").exists():
        files = sorted(file.name for file in folder.glob(f"*{gguf.SUFFIX}"))
        raise UnsupportedFormat(
            "no config.json: not a checkpoint transformers can name",
            where=str(folder),
            expected="the folder of a checkpoint, or a .gguf file",
            hint=f"give the file: {files[0]}" if files else None,
        )
    return Checkpoint.open(folder)


def _config(checkpoint: Checkpoint, dtype: torch.dtype | str) -> tuple[PretrainedConfig, torch.dtype]:
    """The model's config without its quantisation, which is our business, and the dtype of the rest."""
    try:
        config = (
            gguf.config_of(checkpoint) if checkpoint.path.is_file() else AutoConfig.from_pretrained(checkpoint.path)
        )
    except ValueError:
        raise UnsupportedProblem(
            "this transformers does not know the model",
            where=str(checkpoint.path),
            got=checkpoint.config.model.get("model_type"),
            hint="pip install --upgrade transformers",
        ) from None
    for section in (config, config.get_text_config()):
        for key in _QUANT_KEYS:
            vars(section).pop(key, None)
    said = config.dtype or config.get_text_config().dtype or torch.bfloat16 if dtype == "auto" else dtype
    by_name = {str(wide).removeprefix("torch."): wide for wide in WIDE}
    found = by_name.get(str(said).removeprefix("torch."))
    if found is None:
        raise SpecError("no model computes in this dtype", expected=" or ".join(("auto", *by_name)), got=said)
    return config, found


def _manifest(config: PretrainedConfig, checkpoint: Checkpoint) -> Manifest:
    """What the checkpoint holds, complete. One whose names are unknown may be no mixture of experts at all."""
    try:
        manifest = manifests.build(checkpoint.config, checkpoint.headers)
    except UnsupportedFormat:
        _without_memory(config)  # says so, if it is that
        raise
    manifest.check(where=str(checkpoint.path))
    return manifest


def _without_memory(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = packed_class(_class_of(config))(config)
    return made


def _check_loaded(info: dict[str, Any], folder: Path) -> None:
    """Missing tensors are errors: transformers would fill them with random numbers."""
    problems: list[CheckpointError] = [
        MissingTensor("the model needs this tensor", where=name) for name in sorted(info["missing_keys"])
    ]
    for entry in sorted(info["mismatched_keys"]):
        name, got, expected = entry
        problems.append(WrongShape("the model has another shape", where=name, expected=list(expected), got=list(got)))
    if problems:
        raise CheckpointProblems(problems, where=str(folder))
