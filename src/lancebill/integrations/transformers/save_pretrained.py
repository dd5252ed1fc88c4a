"""Saving a model whose experts are packed, as a checkpoint that anyone reads.

Experts are never changed after loading, so what is written comes from the files they were loaded
from: byte for byte where they are kept as stored, through the converter where they were requantised.
A model that was changed since is not saved as if it had not been.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lancebill.checkpoint.read.config import CONFIG_FILES
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.write.convert import ConvertOptions, convert, plan_conversion
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.checkpoint.write.target import choose_target
from lancebill.errors import CannotEncode, SpecError
from lancebill.integrations.transformers.gguf_models import check_savable
from lancebill.layer.recipe import LoadOptions
from lancebill.layer.rules import weight_targets
from lancebill.numbers.spec import QuantSpec

_MOOT = ("safe_serialization", "max_shard_size")  # always safe; the shards of the files it came from


@dataclass(frozen=True)
class Origin:
    """Where a model's numbers came from, and how to tell that they still are those."""

    checkpoint: Checkpoint
    options: LoadOptions
    layers: tuple[int, ...]
    versions: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module, checkpoint: Checkpoint, options: LoadOptions) -> Origin:
        from lancebill.integrations.transformers.packed_experts import packed_experts

        layers = tuple(place.index for _, place in packed_experts(model))
        return cls(checkpoint, options, layers, _versions(model))

    def __deepcopy__(self, memo: object) -> Origin:
        """Copies of a model come from the same files, whose open descriptors cannot be copied."""
        return self

    def check_unchanged(self, model: nn.Module) -> None:
        now = _versions(model)
        changed = sorted(name for name in {*now, *self.versions} if now.get(name) != self.versions.get(name))
        if changed:
            raise CannotEncode(
                "the model was changed since it was loaded, and only what was loaded can be saved",
                where=changed[0],
                hint="save the changed parameters yourself",
            )

    def target(self) -> QuantSpec | None:
        """The one spec all experts have now; None where they are as stored."""
        specs = [weight_targets(self.options.weights, layer) for layer in self.layers]
        if not any(specs):
            return None
        first = specs[0].get("w13")
        if first is None or any(spec != {"w13": first, "w2": first} for spec in specs):
            raise CannotEncode("a checkpoint holds experts of one spec", got="rules that differ between experts")
        return first


def save(
    model: nn.Module,
    origin: Origin | None,
    folder: Path,
    *,
    format: str | None = None,
    overwrite: bool = False,
    is_main_process: bool = True,
    **others: Any,
) -> None:
    """Write the checkpoint; `format` names the one to write where the experts were requantised.

    Other keywords of transformers' are taken where they change nothing, and refused where they would.
    """
    refused = [name for name, value in others.items() if value and name not in _MOOT]
    if refused:
        raise SpecError(f"{refused[0]}= is not for packed experts", expected="format=, overwrite=")
    if not is_main_process:
        return
    if origin is None:
        raise CannotEncode("this model was not loaded by lancebill.from_pretrained")
    check_savable(origin.checkpoint)
    origin.check_unchanged(model)
    spec = origin.target()
    if spec is None:
        _copy(origin.checkpoint, folder, overwrite)
        return
    options = ConvertOptions(overwrite=overwrite)
    convert(origin.checkpoint, folder, plan_conversion(origin.checkpoint, choose_target(spec, format), options), options)


def _copy(source: Checkpoint, folder: Path, overwrite: bool) -> None:
    with CheckpointWriter(folder, source.headers, source=source.path, overwrite=overwrite) as out:
        for file in (*source.other_files(), *(source.path / name for name in CONFIG_FILES)):
            if file.exists():
                out.copy_file(file)
        for name in source.headers:
            out.write(name, source.read(name))


def _versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter was written in place."""
    return {name: tensor._version for name, tensor in model.named_parameters()}
