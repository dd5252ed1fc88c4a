"""Which tensors a fast call accepts. The answer does not depend on earlier calls."""

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
VARIANTS = (
    "unchanged",
    "a copy",
    "a parameter",
    "another dtype",
    "with gaps",
    "column-major",
    "longer",
    "flat",
    "no memory",
)


def make_variant(tensor: Tensor, variant: str) -> Tensor:
    return {
        "unchanged": lambda: tensor,
        "a copy": tensor.clone,
        "a parameter": lambda: torch.nn.Parameter(tensor, requires_grad=False),
        "another dtype": lambda: tensor.to(torch.float16),
        "with gaps": lambda: torch.cat([tensor, tensor], 1)[:, ::2],
        "column-major": lambda: tensor.t().contiguous().t(),
        "longer": lambda: torch.cat([tensor, tensor]),
        "flat": tensor.flatten,
        "no memory": lambda: tensor.to("meta"),
    }[variant]()


def call(name: str, variant: str) -> tuple[Tensor, ...]:
    return tuple(make_variant(tensor, variant) if name == key else tensor for key, tensor in GOOD.items())


def new_signature() -> CallSignature:
    return CallSignature(ROWS, SLOTS, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("guarded", [True, False])
def test_only_tensors_that_kernels_can_read_are_accepted(
    name: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's guards, and with a torch that lacks them."""
    if not guarded:
        monkeypatch.delattr(guards, "TensorGuards")
    accepted = {variant for variant in VARIANTS if new_signature()(*call(name, variant))}
    assert accepted == {"unchanged", "a copy", "a parameter"}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("inference", [False, True])
def test_earlier_calls_do_not_change_the_answer(name: str, inference: bool) -> None:
    for before, variant in product(VARIANTS, VARIANTS):
        used = new_signature()
        used(*call(name, before))
        with torch.inference_mode(inference):
            for _ in range(2):
                assert used(*call(name, variant)) == new_signature()(*call(name, variant)), (before, variant)


def test_a_single_row_may_have_any_stride() -> None:
    signature = CallSignature((1, 8), (1, 2), torch.bfloat16, torch.device("cpu"))
    x, ids, weights, out = (tensor[:1] for tensor in GOOD.values())
    strided = torch.zeros(3, 16, dtype=torch.bfloat16)[:1, :8]
    for rows in (x, strided, x, strided):
        assert signature(rows, ids, weights, out)
