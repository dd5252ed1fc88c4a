"""Weight codes beyond the common ones, as whole layers: exact where every step is exact, else by the worst row.

Int8 in groups of 32, MXFP8, 2- and 3-bit integers, NF4 and IQ4 tables. All are multiplied by 16-bit activations.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from calls import skip_unless_ours
from exact import make_exact_layer
from test_gpu_exact import OTHER_BATCHES, check, other_problem
from test_gpu_layer import compare, large_enough, make_problem

from lancebill.moe.problem import Problem

skip_unless_ours()

EXACT = ("int8-g32:fp16", "mxfp8", "int2-g64", "int3-g128", "int3-g32:fp16", "nf4")
LAYERS = [
    *((spec, "bf16") for spec in (
        "int8-g32:fp16", "mxfp8", "int2-g64", "int2-g32:fp16-zp", "int3-g128", "int3-g64-zp", "nf4", "iq4-g32:fp16",
    )),
    *((spec, "fp16") for spec in ("mxfp8", "int3-g64-zp", "nf4", "iq4-g32:fp16")),
]  # fmt: skip
BATCHES = (3, 70)  # the exact layers have larger ones
ODD = {"hidden": 160, "intermediate": 96}  # no whole number of units, slices or stages


def plans() -> Iterator[tuple[Problem, int]]:
    """What these tests launch; compiled together before the tests."""
    yield from ((other_problem(spec, "bf16"), tokens) for spec in EXACT for tokens in OTHER_BATCHES)
    yield from ((make_problem(spec, act, **large_enough(spec)), tokens) for spec, act in LAYERS for tokens in BATCHES)
    yield from ((make_problem("int3-g32", "bf16", **ODD), tokens) for tokens in BATCHES)


@pytest.mark.parametrize("spec", EXACT)
def test_exact(spec: str) -> None:
    problem = other_problem(spec, "bf16")
    check(problem, make_exact_layer(problem), OTHER_BATCHES)


@pytest.mark.parametrize(("spec", "activations"), LAYERS)
@pytest.mark.parametrize("tokens", BATCHES)
def test_worst_row(spec: str, activations: str, tokens: int) -> None:
    compare(spec, activations, tokens, **large_enough(spec))


@pytest.mark.parametrize("tokens", BATCHES)
def test_planes_of_odd_sizes(tokens: int) -> None:
    compare("int3-g32", "bf16", tokens, **ODD)
