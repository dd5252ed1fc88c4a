"""Which tensors a fast call accepts: the answer never depends on earlier calls."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch._C._dynamo import guards

from lancebill.backends.call_signature import CallSignature

ROWS, SLOTS = (6, 8), (6, 2)
GOOD = {
    "x": torch.zeros(ROWS, dtype=torch.bfloat16),
    "ids": torch.zeros(SLOTS, dtype=torch.int32),
    "weights": torch.zeros(SLOTS),
    "out": torch.zeros(ROWS, dtype=torch.bfloat16),
}
WAYS = ("as it is", "a copy", "a parameter", "another dtype", "with gaps", "turned", "longer", "flat", "no memory")


def changed(tensor: Tensor, way: str) -> Tensor:
    return {
        "as it is": lambda: tensor,
        "a copy": tensor.clone,
        "a parameter": lambda: torch.nn.Parameter(tensor, requires_grad=False),
        "another dtype": lambda: tensor.to(torch.float16),
        "with gaps": lambda: torch.cat([tensor, tensor], 1)[:, ::2],
        "turned": lambda: tensor.t().contiguous().t(),
        "longer": lambda: torch.cat([tensor, tensor]),
        "flat": tensor.flatten,
        "no memory": lambda: tensor.to("meta"),
    }[way]()


def call(name: str, way: str) -> tuple[Tensor, ...]:
    return tuple(changed(tensor, way) if name == own else tensor for own, tensor in GOOD.items())


def fresh() -> CallSignature:
    return CallSignature(ROWS, SLOTS, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("guarded", [True, False])
def test_only_what_kernels_take_fits(name: str, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch has no guards."""
    if not guarded:
        monkeypatch.delattr(guards, "TensorGuards")
    accepted = {way for way in WAYS if fresh()(*call(name, way))}
    assert accepted == {"as it is", "a copy", "a parameter"}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("inference", [False, True])
def test_what_came_before_does_not_matter(name: str, inference: bool) -> None:
    for before, way in product(WAYS, WAYS):
        used = fresh()
        used(*call(name, before))
        with torch.inference_mode(inference):
            for _ in range(2):
                assert used(*call(name, way)) == fresh()(*call(name, way)), (before, way)


def test_a_single_row_fits_whatever_its_stride() -> None:
    signature = CallSignature((1, 8), (1, 2), torch.bfloat16, torch.device("cpu"))
    x, ids, weights, out = (tensor[:1] for tensor in GOOD.values())
    wide = torch.zeros(3, 16, dtype=torch.bfloat16)[:1, :8]
    for rows in (x, wide, x, wide):
        assert signature(rows, ids, weights, out)
