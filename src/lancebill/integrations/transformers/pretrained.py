"""Loads transformers models with packed experts.

    model = lancebill.from_pretrained("path/to/checkpoint")
    model.generate(...)

The model is an instance of transformers' own class with its experts modules replaced, and every other module whose
matrix is quantised. transformers handles everything else (names, tied weights, buffers, generation).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from lancebill.backends import oracle
from lancebill.checkpoint.read.config import QUANT_SECTIONS
from lancebill.checkpoint.read.files import Checkpoint, model_path
from lancebill.checkpoint.read.hub import local_path
from lancebill.checkpoint.resolve.manifest import Manifest, together
from lancebill.checkpoint.resolve.missing_layers import missing_layers
from lancebill.checkpoint.resolve.naming import is_refused
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
from lancebill.integrations.transformers.freed_memory import give_back_freed
from lancebill.integrations.transformers.fused_modules import fuse
from lancebill.integrations.transformers.gguf_config import config_of as gguf_config_of
from lancebill.integrations.transformers.graphed_generation import Decoding, GraphedGeneration
from lancebill.integrations.transformers.kept_wide import return_inputs_dtype
from lancebill.integrations.transformers.loaders import (
    custom_code,
    load_config,
    load_generation_config,
    load_model,
    refusing,
)
from lancebill.integrations.transformers.narrow_modules import keep_narrow
from lancebill.integrations.transformers.other_tensors import LazyTensor, lazy_tensors, read_quantized
from lancebill.integrations.transformers.packed_experts import packed_experts, replace_experts
from lancebill.integrations.transformers.packed_rest import RestReport, RestRules, pack_rest
from lancebill.integrations.transformers.save_pretrained import Origin, save_packed
from lancebill.layer.check_split import check_split
from lancebill.layer.mixtures import Mixtures, mixtures_of
from lancebill.layer.recipe import UNQUANTISED, LoadOptions
from lancebill.layer.report import LoadReports
from lancebill.layer.rules import EXPERTS, REST, ActivationRules, WeightRules, split_rest
from lancebill.moe.device import parse_device
from lancebill.moe.placement import Placement
from lancebill.moe.problem import FAST
from lancebill.numbers.torch_defaults import default_device, torch_defaults
from lancebill.split.moves import OFF

register()

# Keywords of transformers' `from_pretrained` that we do not take, and what to use instead.
_INSTEAD = {
    "torch_dtype": "dtype=",
    "device_map": "device=",
    "max_memory": "gpu_memory=",
    "tp_plan": "lancebill.parallel",
    "quantization_config": "weights=",
    "experts_implementation": "backend=",
    "gguf_file": "the path of the file itself",
}
# What transformers raises for a config with a wrong value, wherever it first uses it.
_REFUSALS = (
    *(StrictDataclassError, ArithmeticError, AssertionError, AttributeError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)


class PackedModel(GraphedGeneration):
    """Mixin for a transformers model class: replaces its experts, and saves them."""

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        try:
            with refusing("config.json", "auto_map of a part of the model"):
                super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        except _REFUSALS as error:
            hint = "see config.json, and the arguments that transformers got"
            raise _refused("transformers cannot build the model", None, error, hint) from error
        assert isinstance(self, nn.Module)
        self.lancebill_origin: Origin | None = None
        self.lancebill_rest, self.lancebill_decoding = RestReport(), Decoding()
        replace_experts(self, config.to_dict())

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write a standard checkpoint in the experts' format; see `save_pretrained.save_packed`."""
        assert isinstance(self, PreTrainedModel)
        with torch_defaults():
            save_packed(self, self.lancebill_origin, Path(save_directory), rest=self.lancebill_rest, **options)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, without the ways of decoding that transformers downloads as code."""
        with refusing("generate", "a way of decoding that is code on the hub"), torch_defaults():
            return super().generate(*args, **kwargs)

    def load_custom_generate(self, pretrained_model_name_or_path: Any = None, **_: Any) -> NoReturn:
        """Refuses the code that `generate(custom_generate=...)` names; functions are taken."""
        raise custom_code(str(pretrained_model_name_or_path), "custom_generate")

    def lancebill_reports(self) -> LoadReports:
        """The load report of each layer: specs, bytes, the backend and why it was chosen. Prints as a table."""
        assert isinstance(self, nn.Module)
        reports = LoadReports(module.report for _, module in packed_experts(self) if module.report is not None)
        reports.not_quantised = self.lancebill_rest.not_quantised
        return reports


def from_pretrained(
    path: str | Path,
    *,
    weights: WeightRules = None,
    activations: ActivationRules = None,
    backend: str = oracle.AUTO,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = "auto",
    order: str = FAST,
    revision: str | None = None,
    gpu_memory: int | str | None = None,
    gpu_experts: int | None = None,
    moves: str = OFF,
    cpu_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Any:
    """The causal language model at `path` (a folder, a .gguf file, a name on the hub), its experts packed as stored.

    Other matrices that are stored quantised stay packed too. `weights` and `activations` take a spec or rules for the
    experts as in `RoutedExperts.from_checkpoint`, or `{"experts": ..., "rest": ...}` (`layer/rules.py`). `dtype` is
    the type of what is not quantised ("auto": the config's, or fp32 on a CPU without arithmetic of that type). Without
    `device` the model goes to torch's default device, as in transformers: the CPU, unless that was changed.
    `gpu_memory` ("20GiB", or bytes) limits the experts on a GPU, `gpu_experts` those of each layer: the others stay in
    host memory, computed by `cpu_threads` threads of the CPU (docs/hybrid.md). `moves` "recency" keeps those on the
    GPU that were used last. `progress`, instead of transformers' bar, is called with the bytes of experts packed so far
    and in all. Other keywords are passed to transformers' `from_pretrained` (attn_implementation, ...).
    """
    for name in kwargs.keys() & _INSTEAD.keys():
        raise SpecError(f"lancebill.from_pretrained has no argument {name}=", hint=f"use {_INSTEAD[name]}")
    target = parse_device(default_device() if device is None else device).torch
    check_split(gpu_memory, gpu_experts, moves, cpu_threads, order=order)
    folder = model_path(local_path(path, revision))
    checkpoint = open_checkpoint(folder)
    config, stored = config_of(checkpoint, dtype)
    wide = stored
    if dtype == "auto" and target.type == "cpu" and not _computes(stored):
        # Rounds the inputs of quantised matrices as the model would; the other operators compute in fp32.
        activations, wide = activations or dict.fromkeys((EXPERTS, REST), str(UNQUANTISED[stored])), torch.float32
    (expert_weights, rest_weights), (expert_inputs, rest_inputs) = split_rest(weights), split_rest(activations)
    options = LoadOptions(target, Placement(), backend, expert_weights, expert_inputs, wide, order)
    if target.type != "cpu":
        options = replace(options, gpu_memory=gpu_memory, gpu_experts=gpu_experts, moves=moves, cpu_threads=cpu_threads)
    with torch_defaults():
        model = _loaded(config, checkpoint, options, stored, RestRules(rest_weights, rest_inputs), progress, kwargs)
    model.config.name_or_path = model.name_or_path = str(path)
    return model


def _loaded(
    config: PretrainedConfig, checkpoint: Checkpoint, options: LoadOptions, stored: torch.dtype, rest_rules: RestRules,
    progress: Callable[[int, int], None] | None, others: dict[str, Any],
) -> Any:  # fmt: skip
    """The model with all its weights; `others` are keywords of transformers."""
    folder, wide = checkpoint.path, options.dtype
    experts = _experts(config, checkpoint, options)
    other_tensors = _other_tensors(config, checkpoint, experts, wide)
    model = _without_experts(config, folder, state_dict=dict(other_tensors), dtype=wide, **others)
    rest = pack_rest(model, options, rest_rules, read_quantized(other_tensors.values()))
    model.lancebill_rest = replace(rest, not_quantised=_computed_as(stored, wide))
    model = _on_device(model, parse_device(options.device).torch, stored, wide)
    give_back_freed()
    load_experts(model, experts, progress)
    if (folder / "generation_config.json").exists():
        kind = type(model.generation_config or GenerationConfig())  # some models have a class of their own
        model.generation_config = load_generation_config(kind, folder)
    model.lancebill_origin = Origin.of(model, checkpoint, options)
    return model


def _other_tensors(
    config: PretrainedConfig, checkpoint: Checkpoint, experts: Mixtures, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Everything but the experts, read when transformers asks for it."""
    manifest = _complete(experts, checkpoint.path)
    if checkpoint.path.is_file():
        return gguf.lazy_tensors(checkpoint, manifest.expert_tensors, _meta_model(config), dtype)
    return lazy_tensors(checkpoint, manifest, dtype)


def _without_experts(config: PretrainedConfig, folder: Path, **options: Any) -> Any:
    """The model as transformers loads it, its experts still empty."""
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # `_check_loaded` names the tensors
    model, info = load_model(packed_class(class_of(config)), config, **options)
    _check_loaded(info, folder)
    return model


def _on_device(model: Any, target: torch.device, stored: torch.dtype, wide: torch.dtype) -> Any:
    """The model on its device, with modules that suit the dtypes there."""
    return_inputs_dtype(model, wide)
    model = model.to(target)
    if target.type == "cpu":
        if stored != wide:
            keep_narrow(model, stored)
        fuse(model, wide)
    return model


def reload_experts(model: Any, **changes: Any) -> None:
    """Load the experts of a model again from its checkpoint, with changed options (weights, activations, backend)."""
    origin: Origin = model.lancebill_origin
    checkpoint, options = origin.checkpoint, replace(origin.options, **changes)
    with torch_defaults():
        load_experts(model, mixtures_of(checkpoint, options))
    model.lancebill_origin = Origin.of(model, checkpoint, options)


def load_experts(model: nn.Module, experts: Mixtures, progress: Callable[[int, int], None] | None = None) -> None:
    """Load the experts of all layers, one layer after the other. Without `progress` transformers' own bar shows it."""
    places = dict(packed_experts(model))
    missing = [name for name, place in places.items() if place.index not in experts[place.mixture].layers]
    if missing:
        raise MissingTensor("the checkpoint has no experts for this layer", where=missing[0])
    wanted = dict.fromkeys((place.index, place.mixture) for place in places.values())  # without further predictors
    sizes = {(index, mixture): experts[mixture].recipe(index).bytes for index, mixture in wanted}
    done, total = 0, sum(sizes.values())
    bar = partial(logging.tqdm, total=total, desc="Loading experts", unit="B", unit_scale=True)
    with bar() if progress is None else nullcontext() as shown:
        for index, mixture in wanted:
            done += sizes[index, mixture]
            layer = experts[mixture].layer(index)
            for place in (place for place in places.values() if (place.index, place.mixture) == (index, mixture)):
                place.experts = layer
            if progress is not None:
                progress(done, total)
            elif shown is not None:
                shown.update(sizes[index, mixture])


def packed_class(base: type[PreTrainedModel]) -> Any:
    """A subclass of `base` with packed experts. It keeps the name and module, which transformers writes to configs."""
    return type(base.__name__, (PackedModel, base), {"__module__": base.__module__})


def class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' language model for a config: with a text config inside, the multimodal one, which holds it."""
    mappings = [MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING]
    if config.get_text_config() is not config:
        mappings = [*mappings[1:], mappings[0]]
    classes = next((found for mapping in mappings if (found := mapping.get(type(config), None)) is not None), None)
    if classes is None:
        raise UnsupportedProblem(
            "transformers has no causal language model for this config", got=config.model_type or type(config).__name__
        )
    chosen = classes[0] if isinstance(classes, (list, tuple)) else classes
    assert chosen is not None
    return chosen


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint; raises if it has neither a config.json nor GGUF metadata for transformers."""
    if folder.suffix != gguf.SUFFIX and not (folder / "config.json").exists():
        files = sorted(file.name for file in folder.glob(f"*{gguf.SUFFIX}"))
        raise UnsupportedFormat(
            "no config.json: not a transformers checkpoint",
            where=str(folder),
            expected="the folder of a checkpoint, or a .gguf file",
            hint=f"pass the path of one file: {', '.join(files)}" if files else None,
        )
    return Checkpoint.open(folder)


def config_of(checkpoint: Checkpoint, dtype: torch.dtype | str) -> tuple[PretrainedConfig, torch.dtype]:
    """The model's config and the dtype of everything but the experts.

    The quantisation section is removed: transformers would otherwise try to quantise the model itself.
    """
    try:
        config = gguf_config_of(checkpoint) if checkpoint.path.is_file() else load_config(checkpoint.path)
    except _REFUSALS as error:
        kind = checkpoint.config.model.get("model_type")
        if not isinstance(kind, str) or kind in CONFIG_MAPPING:
            hint = "compare config.json with that of the original model"
            raise _refused("transformers cannot read the config", str(checkpoint.path), error, hint) from error
        raise UnsupportedProblem(
            "this version of transformers does not know the model",
            where=str(checkpoint.path),
            got=kind,
            hint="pip install --upgrade transformers",
        ) from None
    for section in (config, config.get_text_config()):
        for key in QUANT_SECTIONS:
            if hasattr(section, key):
                delattr(section, key)
    requested = config.dtype or config.get_text_config().dtype or torch.bfloat16 if dtype == "auto" else dtype
    by_name = {str(wide).removeprefix("torch."): wide for wide in UNQUANTISED}
    chosen = by_name.get(str(requested).removeprefix("torch."))
    if chosen is None:
        raise SpecError("this dtype is not supported", expected=" or ".join(("auto", *by_name)), got=requested)
    return config, chosen


def _refused(what: str, where: str | None, error: Exception, hint: str) -> UnsupportedFormat:
    text = shorten(str(error), 300, placeholder=" ...")
    return UnsupportedFormat(what, where=where, got=f"{type(error).__name__}: {text}", hint=hint)


def _computed_as(stored: torch.dtype, wide: torch.dtype) -> str:
    """For the report: the dtype of what is not quantised."""
    said = str(UNQUANTISED[wide])
    return said if stored == wide else f"{said} ({UNQUANTISED[stored]} is slower on this CPU)"


def _computes(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of this dtype as such. Without, torch takes many times as long.

    oneDNN supports bf16 with AVX-512 alone, but converts it: three times as slow as fp32.
    """
    if dtype == torch.bfloat16:
        own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return bool(own if torch.cpu._is_avx2_supported() else torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _experts(config: PretrainedConfig, checkpoint: Checkpoint, options: LoadOptions) -> Mixtures:
    """The checkpoint's experts; raises if the model has none."""
    try:
        return mixtures_of(checkpoint, options)
    except UnsupportedFormat:
        if not is_refused(checkpoint.config.model):
            _meta_model(config)  # raises a clearer error if the model has no experts
        raise


def _complete(experts: Mixtures, folder: Path) -> Manifest:
    """The manifest of a whole model. Raises before transformers builds it, which takes long, if layers are missing or
    the first cannot be computed.
    """
    manifest = together(each.manifest() for each in experts.values())
    missing = [problem for problem in missing_layers(manifest) if isinstance(problem, MissingTensor)]
    if missing:
        raise CheckpointProblems(missing, where=str(folder))
    for each in experts.values():
        for index in each.layers[:1]:
            each.recipe(index)
    return manifest


def _meta_model(config: PretrainedConfig) -> nn.Module:
    """The model on the meta device, which allocates no memory."""
    with torch.device("meta"):
        model: nn.Module = packed_class(class_of(config))(config)
    return model


def _check_loaded(info: dict[str, Any], folder: Path) -> None:
    """Raise if transformers did not find a tensor: it would leave random values there."""
    problems: list[CheckpointError] = [
        MissingTensor("the model needs this tensor", where=name) for name in sorted(info["missing_keys"])
    ]
    for entry in sorted(info["mismatched_keys"]):
        name, got, expected = entry
        problems.append(
            WrongShape("the tensor has a wrong shape for the model", where=name, expected=list(expected), got=list(got))
        )
    if problems:
        raise CheckpointProblems(problems, where=str(folder))
