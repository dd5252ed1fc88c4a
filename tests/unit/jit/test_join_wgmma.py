"""Products of neighbouring tokens become one instruction, and nothing else does."""

from __future__ import annotations

import re

import pytest

from lancebill.jit.join_wgmma import join

FENCE, COMMIT = "\twgmma.fence.sync.aligned;", "\twgmma.commit_group.sync.aligned;"


def product(width: int, sums: str, held: str, tile: str = "%rd1", rest: str = "%p1, 1, 1;") -> str:
    return f"\twgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3 {{{sums}}}, {{{held}}}, {tile}, {rest}"


def group(*products: str) -> list[str]:
    return [FENCE, *products, COMMIT]


FIRST = group(product(64, "%r1,%r2", "%r7,%r8"), "\tadd.s64 %rd2, %rd1, 2;", product(64, "%r1,%r2", "%r9", "%rd2"))
SECOND = group(product(32, "%r3", "%r7,%r8", "%rd3"), product(32, "%r3", "%r9", "%rd4"))
THIRD = group(product(16, "%r4", "%r7,%r8", "%rd5"), product(16, "%r4", "%r9", "%rd6"))


def text(*groups: list[str]) -> str:
    return "\n".join(line for held in groups for line in held)


def products_of(ptx: str) -> list[str]:
    return [line for line in ptx.split("\n") if "mma_async" in line]


def test_two_and_three_become_one() -> None:
    joined = join(text(FIRST, SECOND))
    assert products_of(joined) == [
        product(96, "%r1,%r2,%r3", "%r7,%r8"),
        product(96, "%r1,%r2,%r3", "%r9", "%rd2"),
    ]
    assert (joined.count(FENCE), joined.count(COMMIT)) == (1, 1)
    assert products_of(join(text(FIRST, SECOND, THIRD)))[0] == product(112, "%r1,%r2,%r3,%r4", "%r7,%r8")


@pytest.mark.parametrize(
    "second",
    [
        group(product(32, "%r3", "%r7,%r6", "%rd3"), product(32, "%r3", "%r9", "%rd4")),  # other weights
        group(product(32, "%r3", "%r7,%r8", "%rd3")),  # fewer of them
        group(product(32, "%r1,%r2", "%r7,%r8", "%rd3"), product(32, "%r1,%r2", "%r9", "%rd4")),  # the same sums
        group(product(32, "%r3", "%r7,%r8", rest="%p2, 1, 1;"), product(32, "%r3", "%r9", "%rd4")),  # fresh sums
        group(product(256, "%r3", "%r7,%r8"), product(256, "%r3", "%r9", "%rd4")),  # wider than there is
        ["\twgmma.wait_group.sync.aligned 0;", *SECOND],
        ["\tbar.sync 1;", *SECOND],
        ["$L__BB0_1:", *SECOND],
        ["\t@%p1 bra $L__BB0_1;", *SECOND],
        ["\tmov.b32 %r5, %r2;", *SECOND],  # reads a sum in flight
        [*SECOND[:2], "\tmov.b32 %r5, %r3;", *SECOND[2:]],
    ],
)
def test_others_stay_as_they_are(second: list[str]) -> None:
    assert join(text(FIRST, second)) == text(FIRST, second)


def test_a_program_without_products_is_left_alone() -> None:
    assert join("\tadd.s32 %r1, %r2, %r3;\n") == "\tadd.s32 %r1, %r2, %r3;\n"


def test_sums_may_be_readied_in_between() -> None:
    """The joined product comes after that."""
    ready = "\tmov.b32 %r3, %r5;"
    joined = join(text(FIRST, [ready], SECOND)).split("\n")
    assert joined.index(ready) < joined.index(product(96, "%r1,%r2,%r3", "%r7,%r8"))
    assert len(products_of("\n".join(joined))) == 2


def test_copies_of_an_operand_are_the_operand() -> None:
    """Unless they are of another, or are set more than once."""

    def copied(*copies: str) -> str:
        return text(FIRST, [f"\tmov.b32 {copy};" for copy in copies], [line.replace("%r8", "%r6") for line in SECOND])

    assert len(products_of(join(copied("%r6, %r8")))) == 2
    assert len(products_of(join(copied("%r6, %r5")))) == 4
    assert len(products_of(join(copied("%r6, %r5", "%r6, %r8")))) == 4


@pytest.mark.parametrize(
    ("spec", "activations", "tokens"),
    [("mxfp4", "fp8", 96), ("mxfp4", "bf16", 112), ("mxfp4", "bf16", 24), ("int4-g128", "fp8", 48)],
)
def test_kernels_multiply_all_their_tokens_at_once(spec: str, activations: str, tokens: int) -> None:
    """In the assembler's own code there is no product of a part of a tile."""
    pytest.importorskip("triton")
    from lancebill.backends.hopper.plan import make_plan
    from lancebill.backends.hopper.steps import steps
    from lancebill.backends.hopper.tuning.policy import Rule
    from lancebill.jit.build import binary
    from lancebill.testing import sass
    from lancebill.testing.layers import layer_problem

    problem = layer_problem(spec, activations, hidden=256, intermediate=256, experts=4, top_k=2)
    plan = make_plan(problem, 400, Rule((tokens,), False), decode=False)
    found = set()
    for source in {step.source for step in steps(plan) if step.source.kernel == "grouped"}:
        cubin = binary(source).cubin
        found |= {re.sub(r".*64x(\d+)x.*", r"\1", op) for op, _ in sass.instructions(cubin) if "GMMA" in op}
        assert sass.overwritten(cubin) == []
    assert found == {str(tokens)}
