"""Reads and writes the section `transform_config` of compressed-tensors: rotations of weights and inputs.

A group has a type and a list of places. Transforms of weights are in the stored numbers already. One that is applied
while the model runs must be a plain Hadamard rotation of a module's input; all others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from lancebill.errors import UnsupportedFormat
from lancebill.formats._ct_config import FUSED, Targets, read_section, read_targets
from lancebill.formats.base import Config, Module, Scheme, checked, optional

WHOLE = -1  # one block over all columns
BLOCKS = tuple(1 << power for power in range(1, 17))
HADAMARD, INPUT, OFFLINE = "hadamard", "input", ("weight_input", "weight_output")
_GROUP_KEYS = {"type", "apply", "randomize", "requires_grad", "head_dim", "precision"}
_PLACE_KEYS = {"targets", "location", "inverse", "ignore"}


@dataclass(frozen=True)
class _Rotation:
    """A rotation of the inputs of some modules. Files also hold its matrix, under the name of the rotation."""

    name: str
    targets: Targets
    ignore: Targets
    block: int

    def applies(self, module: str) -> bool:
        if self.ignore.match(module):
            return False
        return self.targets.match(module) or "Linear" in self.targets.exact


def _input_rotation(config: Config, module: str) -> _Rotation | None:
    """The rotation of a module's input. Both halves of a fused projection must have the same."""
    rotations = _rotations(config)
    if not rotations:
        return None
    parent, _, last = module.rpartition(".")
    names = [f"{parent}.{half}" for half in FUSED.get(last, ())] or [module]
    found = [[rotation for rotation in rotations if rotation.applies(name)] for name in names]
    if len(found[0]) > 1 or any(other != found[0] for other in found):
        raise UnsupportedFormat(
            "an input has more than one rotation, or only one half of a fused projection has it",
            where=f"{config.source}, module {module}",
            got=", ".join(rotation.name for half in found for rotation in half),
        )
    return found[0][0] if found[0] else None


@lru_cache(maxsize=64)
def _rotations(config: Config) -> tuple[_Rotation, ...]:
    """The rotations of inputs that a config asks for; raises for all else that must happen while the model runs."""
    section = optional(config, "transform_config", dict, {})
    groups = checked(section.get("config_groups", section), "transform_config.config_groups", dict, (), config.source)
    return tuple(rotation for key, value in groups.items() for rotation in _read_group(key, value, config.source))


def _read_group(name: str, value: Any, source: str) -> Iterator[_Rotation]:
    key = f"transform_config.config_groups.{name}"
    group = read_section(value, key, _GROUP_KEYS, source)
    for number, one in enumerate(checked(group.get("apply", []), f"{key}.apply", list, (), source)):
        where = f"{key}.apply.{number}"
        place = read_section(one, where, _PLACE_KEYS, source)
        if place.get("location") in OFFLINE:
            continue
        checked(place.get("location"), f"{where}.location", str, (INPUT,), source)
        checked(group.get("type"), f"{key}.type", str, (HADAMARD,), source)
        checked(group.get("randomize", False), f"{key}.randomize", bool, (False,), source)
        block = group.get("head_dim")
        block = WHOLE if block is None else checked(block, f"{key}.head_dim", int, BLOCKS, source)
        targets, ignore = (read_targets(place.get(side), f"{where}.{side}", source) for side in ("targets", "ignore"))
        yield _Rotation(name, targets, ignore, block)


def rotated(scheme: Scheme, config: Config, module: Module) -> Scheme:
    """The scheme of a module, with the rotation that the config asks for."""
    rotation = _input_rotation(config, module.name)
    if rotation is None:
        return scheme
    if scheme.act_order:
        where = f"{config.source}, module {module.name}"
        raise UnsupportedFormat("a rotated matrix with an act-order is not supported", where=where)
    block = _all_columns(scheme, config, module) if rotation.block == WHOLE else rotation.block
    return replace(scheme.rotated(block), unread=(f".{rotation.name}_{INPUT}.weight",))


def _all_columns(scheme: Scheme, config: Config, module: Module) -> int:
    """The number of columns of a module, from the headers of its tensors."""
    codes, group = scheme.part("codes"), scheme.spec.group
    assert codes is not None
    packed = next((module.stored[suffix] for suffix in codes.suffix if module.has(suffix)), None)
    scale = next((module.stored[suffix] for part in scheme.parts if part.role == "scale" for suffix in part.suffix
                  if module.has(suffix)), None)  # fmt: skip
    columns = 0
    if group and scale is not None:
        columns = scale.shape[-1] * group
    elif packed is not None and codes.axes in (("n k",), ("n k^",)):
        bits, word = codes.ratio(packed.dtype)
        columns = packed.shape[-1] * (word // bits if codes.axes == ("n k^",) else 1)
    return int(checked(columns, "columns of a whole rotation", int, BLOCKS, f"{config.source}, module {module.name}"))


def write_rotation(block: int, ignore: Sequence[str]) -> dict[str, Any]:
    """The section for matrices that were rotated, and inputs that must be, in blocks of `block` columns."""
    places = [
        {"targets": ["Linear"], "location": location, "inverse": location != INPUT, "ignore": list(ignore)}
        for location in (INPUT, OFFLINE[0])
    ]
    group = {
        "type": HADAMARD, "apply": places, "randomize": False, "requires_grad": False, "head_dim": block,
        "precision": "torch.float32",
    }  # fmt: skip
    return {"config_groups": {"rotation": group}}
