"""A kind of processor as a plain value, so that any machine can answer which kernel an sm_90 would use.

A newer GPU can also run the kernels of an older one: with `LANCEBILL_GPU=sm_80` those of this machine count as sm_80.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lancebill.errors import LaunchError, SpecError

if TYPE_CHECKING:  # slow to import, and names of devices are checked first of all
    import torch

ENV_GPU = "LANCEBILL_GPU"


@dataclass(frozen=True)
class Device:
    """A kind of processor: `cpu`, or `cuda` with its compute capability (90 = sm_90).

    `processors`: streaming multiprocessors of a GPU that is installed here; 0 of a GPU that only has a name.
    """

    kind: str
    arch: int = 0
    index: int = 0
    processors: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"sm_{self.arch}"

    @property
    def torch(self) -> torch.device:
        """The torch device to allocate on; raises if this machine has no such GPU."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        installed = parse_device(f"cuda:{self.index}")
        if installed.arch != self.arch:
            raise SpecError("this machine has another GPU", expected=self, got=installed)
        return torch.device("cuda", self.index)


def require_on(device: torch.device, **given: torch.Tensor | None) -> None:
    """Raise for an input of a call that is on another device than the layer. Weights are moved, inputs are not."""
    for name, tensor in given.items():
        if tensor is not None and tensor.device != device:
            raise LaunchError(
                f"{name} is on another device than the layer",
                expected=device,
                got=tensor.device,
                hint="move the input, or the layer with `.to()`",
            )


def parse_device(device: str | torch.device) -> Device:
    """`cpu`, `sm_90` (on any machine), or `cuda[:i]` (a GPU of this machine), or torch's own device.

    `cuda` is torch's current GPU, as everywhere in torch: each rank of a job has its own.
    """
    name = str(device)
    if name == "cpu":
        return Device("cpu")
    arch = _arch(name)
    if arch is not None:
        return Device("cuda", arch)
    installed = re.fullmatch(r"cuda(?::(\d+))?", name)
    if installed is None:
        raise SpecError(f"unknown device '{name}'", expected="cpu, cuda, cuda:0 or sm_90")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(installed[1]) if installed[1] else torch.cuda.current_device() if count else 0
    if index >= count:
        raise SpecError(f"this machine has no {name}", hint="`lancebill env` shows what torch sees")
    facts = torch.cuda.get_device_properties(index)
    return Device("cuda", _pretended() or 10 * facts.major + facts.minor, index, facts.multi_processor_count)


def _arch(name: str) -> int | None:
    """The compute capability in the name of a kind of GPU."""
    found = re.fullmatch(r"sm_?(\d+)a?", name)
    return int(found[1]) if found else None


def _pretended() -> int | None:
    """The compute capability that the environment sets for all GPUs of this machine; None if unset."""
    name = os.environ.get(ENV_GPU, "")
    arch = _arch(name)
    if name and arch is None:
        raise SpecError("this environment variable names no kind of GPU", where=ENV_GPU, expected="sm_80", got=name)
    return arch
