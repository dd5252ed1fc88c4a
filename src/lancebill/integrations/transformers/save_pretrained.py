"""Saves a model with packed experts as a standard checkpoint.

The weights are written from the files the model was loaded from, because packed experts do not change after loading:
the tensors are copied if everything is kept as stored, and converted if something was requantised while loading. A
model whose parameters changed since loading cannot be saved.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lancebill.checkpoint.read.config import CONFIG_FILES
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.write.convert import ConvertOptions, convert, plan_conversion
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.checkpoint.write.target import choose_target
from lancebill.errors import CannotEncode, SpecError
from lancebill.integrations.transformers.packed_rest import RestReport
from lancebill.integrations.transformers.saved_modules import is_stored_as, rest_modules, target_as_stored
from lancebill.layer.recipe import LoadOptions
from lancebill.layer.rules import weight_targets
from lancebill.moe.layout import W2, W13
from lancebill.numbers.spec import QuantSpec

log = logging.getLogger("lancebill")

# Keywords of transformers' `save_pretrained` that are ignored: we always write safetensors, with the source's shards.
_IGNORED = ("safe_serialization", "max_shard_size")
SAMPLES = 64  # values of a parameter that show whether it was changed


@dataclass(frozen=True)
class Origin:
    """The checkpoint a model was loaded from, and what shows that a parameter was changed later."""

    checkpoint: Checkpoint
    options: LoadOptions
    layers: tuple[int, ...]
    parameters: dict[str, tuple[int, bytes]]

    @classmethod
    def of(cls, model: nn.Module, checkpoint: Checkpoint, options: LoadOptions) -> Origin:
        from lancebill.integrations.transformers.packed_experts import packed_experts

        layers = tuple(place.index for _, place in packed_experts(model))
        return cls(checkpoint, options, layers, _parameters(model))

    def __deepcopy__(self, memo: object) -> Origin:
        """A copy of the model shares the origin: the open file descriptors cannot be copied."""
        return self

    def check_unchanged(self, model: nn.Module) -> None:
        """Raise if a parameter was added, removed or written since loading."""
        now, then = _parameters(model), self.parameters
        changed = sorted(name for name in {*now, *then} if now.get(name) != then.get(name))
        if changed:
            raise CannotEncode(
                "the model was changed since it was loaded, and only unchanged weights can be saved",
                where=changed[0],
                hint="save the changed parameters yourself",
            )

    def target(self) -> QuantSpec | None:
        """The spec that all experts were requantised to; None if they are as stored."""
        specs = [weight_targets(self.options.weights, layer) for layer in self.layers]
        if not any(specs):
            return None
        spec13 = specs[0].get(W13)
        if spec13 is None or any(spec != {W13: spec13, W2: spec13} for spec in specs):
            raise CannotEncode(
                "a checkpoint can only store experts of one spec", got="rules with different specs for some matrices"
            )
        return spec13


def save_packed(
    model: nn.Module,
    origin: Origin | None,
    folder: Path,
    *,
    format: str | None = None,
    overwrite: bool = False,
    rest: RestReport | None = None,
    is_main_process: bool = True,
    **keywords: Any,
) -> None:
    """Write the checkpoint; `format` names the checkpoint format, by default the stored one if nothing was requantised.

    `rest` says which modules outside the experts are packed, and which of them were requantised while loading.
    Other keywords of transformers' `save_pretrained` raise, unless they are false or in `_IGNORED`.
    """
    refused = [name for name, value in keywords.items() if value and name not in _IGNORED]
    if refused:
        raise SpecError(f"{refused[0]}= is not supported for packed experts", expected="format=, overwrite=")
    if not is_main_process:
        return
    if origin is None:
        raise CannotEncode("this model was not loaded by lancebill.from_pretrained")
    origin.check_unchanged(model)
    rest, spec = rest or RestReport(), origin.target()
    if spec is None and not rest.requantized and (format is None or is_stored_as(origin.checkpoint, format)):
        _copy(origin.checkpoint, folder, overwrite)
        return
    if origin.checkpoint.path.is_file():
        raise CannotEncode(
            "a GGUF model can only be saved as the file that it was loaded from",
            where=str(origin.checkpoint.path),
            hint="`lancebill convert --experts-only` writes its experts in another format",
        )
    target = choose_target(spec, format) if spec is not None else target_as_stored(origin.checkpoint, format)
    options = ConvertOptions(overwrite=overwrite, search=False)  # as the model's numbers were rounded while loading
    modules = rest_modules(model, origin.checkpoint, rest, origin.options.dtype)
    plan = plan_conversion(origin.checkpoint, target, options, modules)
    if plan.dequantized:
        what = f"{target.format.name} cannot hold {len(plan.dequantized)} modules outside the experts"
        log.warning("%s; they are written unquantised, such as %s", what, plan.dequantized[0].module)
    if plan.unread is not None:
        log.warning("transformers alone cannot load what is written: %s; lancebill does", plan.unread)
    convert(origin.checkpoint, folder, plan, options)


def _copy(source: Checkpoint, folder: Path, overwrite: bool) -> None:
    """The same tensors and configs; GGUF files hold everything themselves."""
    if source.path.is_file():
        with CheckpointWriter(folder, {}, source=source.path, overwrite=overwrite) as out:
            for file in source.files:
                out.copy_file(file)
        return
    with CheckpointWriter(folder, source.headers, source=source.path, overwrite=overwrite) as out:
        for file in (*source.other_files(), *(source.path / name for name in CONFIG_FILES)):
            if file.exists():
                out.copy_file(file)
        for name in source.headers:
            out.write(name, source.read(name))


def _parameters(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """Of each parameter torch's count of writes; and a few values, because writes to `.data` are not counted.

    Without values of experts: nobody writes to packed ones, and they may move.
    """
    from lancebill.integrations.transformers.packed_experts import packed_experts

    places = tuple(f"{name}." for name, _ in packed_experts(model))
    return {
        name: (tensor._version, b"" if name.startswith(places) else _some_values(tensor))
        for name, tensor in model.named_parameters()
    }


def _some_values(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    some = flat[:: flat.numel() // SAMPLES | 1].float()
    return bytes(some.cpu().numpy().tobytes())
