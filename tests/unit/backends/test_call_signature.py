"""Which tensors a fast call accepts. The answer does not depend on earlier calls."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch._C._dynamo import guards

from lancebill.backends.call_signature import CallSignature, RoutingLayout

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


def layout(signature: CallSignature, given: tuple[Tensor, ...]) -> RoutingLayout | None:
    """As backends use a signature."""
    last = signature.last
    found = last if last.same(*given) else signature.match(*given)
    return None if found is None else found.layout


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
    accepted = {variant for variant in VARIANTS if new_signature().match(*call(name, variant))}
    routed = {"ids": {"with gaps", "column-major"}, "weights": {"with gaps", "column-major", "another dtype"}}
    assert accepted == {"unchanged", "a copy", "a parameter"} | routed.get(name, set())


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("inference", [False, True])
def test_earlier_calls_do_not_change_the_answer(name: str, inference: bool) -> None:
    for before, variant in product(VARIANTS, VARIANTS):
        used = new_signature()
        layout(used, call(name, before))
        with torch.inference_mode(inference):
            for _ in range(2):
                given = call(name, variant)
                assert layout(used, given) == layout(new_signature(), given), (before, variant)


@pytest.mark.parametrize("change", ["longer", "another dtype", "with gaps", "no memory"])
def test_the_expert_map_is_part_of_the_call(change: str) -> None:
    signature, good = new_signature(), (*GOOD.values(), torch.zeros(9, dtype=torch.int32))
    assert layout(signature, good) == (1, 2, 1, 9, 2, 2, 1) == layout(signature, good)
    places = {
        "longer": torch.zeros(10, dtype=torch.int32),
        "another dtype": torch.zeros(9, dtype=torch.int64),
        "with gaps": torch.zeros(18, dtype=torch.int32)[::2],
        "no memory": torch.zeros(9, dtype=torch.int32, device="meta"),
    }[change]
    assert layout(signature, (*good[:4], places)) == ((1, 2, 1, 10, 2, 2, 1) if change == "longer" else None)


def test_offsets_beyond_32_bits_are_not_accepted() -> None:
    """Kernels compute offsets in 32 bits. An int64 id has two words."""
    for dtype, row, fits in ((torch.int32, 2**28, True), (torch.int64, 2**28, False), (torch.int32, 2**29, False)):
        x, _, weights, out = (tensor.to("meta") for tensor in GOOD.values())
        ids = torch.empty(2**32, dtype=dtype, device="meta").as_strided(SLOTS, (row, 1))
        signature = CallSignature(ROWS, SLOTS, torch.bfloat16, torch.device("meta"))
        assert (signature.match(x, ids, weights, out) is not None) == fits


def test_a_single_row_may_have_any_stride() -> None:
    signature = CallSignature((1, 8), (1, 2), torch.bfloat16, torch.device("cpu"))
    x, ids, weights, out = (tensor[:1] for tensor in GOOD.values())
    strided = torch.zeros(3, 16, dtype=torch.bfloat16)[:1, :8]
    for rows in (x, strided, x, strided):
        assert layout(signature, (rows, ids, weights, out))
