"""What the engine needs of a model, and what a model may have for small steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lancebill.errors import LaunchError


class Runner(Protocol):
    """A model that continues several sequences in one call."""

    whole_prompts: bool  # whether each must be read in one step: in pieces, the model would compute something else

    def new_sequence(self) -> Any:
        """The state of a sequence without tokens."""
        ...

    def step(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to each sequence; the logits after the last token of each, `[sequences, vocabulary]`."""
        ...


class KeysShape(Protocol):
    """Keys or values of one layer."""

    @property
    def layer(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...


class SmallSteps(Protocol):
    """A faster way to compute steps of a few tokens, which reads and writes the same keys and values.

    `caches` are addresses of arrays of addresses: keys and values of each layer, `[heads, capacity, dim]`.
    """

    most_tokens: int  # of a step that takes less time than the model's own
    caches: Sequence[Any]  # the shape of each layer's keys and values
    cache_type: torch.dtype

    def step(
        self, ids: Sequence[int], positions: Sequence[int], capacities: Sequence[int], caches: Sequence[int],
        picks: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Logits after the tokens at `picks`, which ascend: `[picks, vocabulary]`."""
        ...

    def current(self) -> bool:
        """Whether it still computes what the model does."""
        ...

    def settle(self, own_seconds: float, small_seconds: float) -> None:
        """Find `most_tokens`, knowing how long a step of few tokens takes the model itself and takes this."""
        ...


def check_device(device: torch.device | str) -> None:
    """Raise if this device computes nothing any more: after an illegal access, every call on that GPU fails."""
    try:
        torch.zeros(1, dtype=torch.float32, device=device).add_(1).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as error:
        lost = "this device computes nothing any more, so the engine ends"
        raise LaunchError(
            lost, where=str(device), got=str(error).split("\n")[0], hint="start the server again"
        ) from error
