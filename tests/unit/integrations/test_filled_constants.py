"""Constants of a forward are filled on the device, with the values and types that `torch.tensor` gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lancebill.integrations.transformers.filled_constants import FilledConstants

FILLED = [(0.0, torch.bfloat16), (2.5, None), (7, None), (True, None), ([-1], torch.int64), ([1, 2.5], None)]
LEFT = [[[1, 2]], [], [torch.ones(())]]


class Seen(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("data", "dtype"), FILLED)
def test_values_and_types(data: Any, dtype: torch.dtype | None) -> None:
    want = torch.tensor(data, dtype=dtype, device="cpu")
    with FilledConstants():
        got = torch.tensor(data, dtype=dtype, device="cpu")
    assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(("data", "dtype"), FILLED)
def test_memory_is_filled(data: Any, dtype: torch.dtype | None) -> None:
    """torch itself makes a tensor on the host, and no operator that a mode sees."""
    with Seen() as seen:
        torch.tensor(data, dtype=dtype, device="meta")
    assert "full" not in seen.names
    with seen, FilledConstants():
        torch.tensor(data, dtype=dtype, device="meta")
    assert "full" in seen.names


@pytest.mark.parametrize("data", LEFT)
def test_other_data_is_left_to_torch(data: Any) -> None:
    with FilledConstants():
        assert torch.equal(torch.tensor(data, device="cpu"), torch.tensor(data))
