"""The PTX pass that joins wgmma instructions: which groups it joins and which it leaves alone."""

from __future__ import annotations

import re

import pytest

from lancebill.jit.join_wgmma import join_wgmma

FENCE, COMMIT = "\twgmma.fence.sync.aligned;", "\twgmma.commit_group.sync.aligned;"


def wgmma(width: int, accumulators: str, a: str, tile: str = "%rd1", flags: str = "%p1, 1, 1;") -> str:
    return f"\twgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3 {{{accumulators}}}, {{{a}}}, {tile}, {flags}"


def group(*instructions: str) -> list[str]:
    return [FENCE, *instructions, COMMIT]


FIRST = group(wgmma(64, "%r1,%r2", "%r7,%r8"), "\tadd.s64 %rd2, %rd1, 2;", wgmma(64, "%r1,%r2", "%r9", "%rd2"))
SECOND = group(wgmma(32, "%r3", "%r7,%r8", "%rd3"), wgmma(32, "%r3", "%r9", "%rd4"))
THIRD = group(wgmma(16, "%r4", "%r7,%r8", "%rd5"), wgmma(16, "%r4", "%r9", "%rd6"))


def text(*groups: list[str]) -> str:
    return "\n".join(line for lines in groups for line in lines)


def wgmmas_of(ptx: str) -> list[str]:
    return [line for line in ptx.split("\n") if "mma_async" in line]


def test_two_or_three_groups_are_joined() -> None:
    joined = join_wgmma(text(FIRST, SECOND))
    assert wgmmas_of(joined) == [
        wgmma(96, "%r1,%r2,%r3", "%r7,%r8"),
        wgmma(96, "%r1,%r2,%r3", "%r9", "%rd2"),
    ]
    assert (joined.count(FENCE), joined.count(COMMIT)) == (1, 1)
    assert wgmmas_of(join_wgmma(text(FIRST, SECOND, THIRD)))[0] == wgmma(112, "%r1,%r2,%r3,%r4", "%r7,%r8")


@pytest.mark.parametrize(
    "second",
    [
        group(wgmma(32, "%r3", "%r7,%r6", "%rd3"), wgmma(32, "%r3", "%r9", "%rd4")),  # other registers
        group(wgmma(32, "%r3", "%r7,%r8", "%rd3")),  # fewer instructions
        group(wgmma(32, "%r1,%r2", "%r7,%r8", "%rd3"), wgmma(32, "%r1,%r2", "%r9", "%rd4")),  # the same accumulators
        group(wgmma(32, "%r3", "%r7,%r8", flags="%p2, 1, 1;"), wgmma(32, "%r3", "%r9", "%rd4")),  # other flags
        group(wgmma(256, "%r3", "%r7,%r8"), wgmma(256, "%r3", "%r9", "%rd4")),  # more than 256 columns
        ["\twgmma.wait_group.sync.aligned 0;", *SECOND],
        ["\tbar.sync 1;", *SECOND],
        ["$L__BB0_1:", *SECOND],
        ["\t@%p1 bra $L__BB0_1;", *SECOND],
        ["\tmov.b32 %r5, %r2;", *SECOND],  # reads an accumulator in use
        [*SECOND[:2], "\tmov.b32 %r5, %r3;", *SECOND[2:]],
    ],
)
def test_other_groups_are_not_joined(second: list[str]) -> None:
    assert join_wgmma(text(FIRST, second)) == text(FIRST, second)


def test_a_program_without_wgmma_is_unchanged() -> None:
    assert join_wgmma("\tadd.s32 %r1, %r2, %r3;\n") == "\tadd.s32 %r1, %r2, %r3;\n"


def test_accumulators_may_be_initialised_in_between() -> None:
    """The joined instruction comes after the initialisation."""
    initialise = "\tmov.b32 %r3, %r5;"
    joined = join_wgmma(text(FIRST, [initialise], SECOND)).split("\n")
    assert joined.index(initialise) < joined.index(wgmma(96, "%r1,%r2,%r3", "%r7,%r8"))
    assert len(wgmmas_of("\n".join(joined))) == 2


def test_copies_of_an_operand_are_recognised() -> None:
    """But not copies of another register, or registers written twice."""

    def copied(*copies: str) -> str:
        return text(FIRST, [f"\tmov.b32 {copy};" for copy in copies], [line.replace("%r8", "%r6") for line in SECOND])

    assert len(wgmmas_of(join_wgmma(copied("%r6, %r8")))) == 2
    assert len(wgmmas_of(join_wgmma(copied("%r6, %r5")))) == 4
    assert len(wgmmas_of(join_wgmma(copied("%r6, %r5", "%r6, %r8")))) == 4


def test_kernels_use_one_wgmma_for_all_tokens_of_a_tile() -> None:
    """The SASS has no wgmma with fewer columns than the tile has tokens."""
    pytest.importorskip("triton")
    from lancebill.backends.gpu.tiles import Rule
    from lancebill.backends.hopper.plan import make_plan
    from lancebill.backends.hopper.steps import steps
    from lancebill.jit.build import get_binary
    from lancebill.testing import sass
    from lancebill.testing.layers import layer_problem

    sources = {}
    for spec, activations, tokens in [
        ("mxfp4", "fp8", 96), ("mxfp4", "bf16", 112), ("mxfp4", "bf16", 24), ("int4-g128", "fp8", 48),
    ]:  # fmt: skip
        problem = layer_problem(spec, activations, hidden=256, intermediate=256, experts=4, top_k=2)
        plan = make_plan(problem, 400, Rule.parse(str(tokens), overlap=False), decode=False)
        found = [step.source for step in steps(plan) if step.source.kernel == "grouped_gemm"]
        assert found
        sources |= dict.fromkeys(found, tokens)
    listings = sass.instructions([get_binary(source).cubin for source in sources])
    for (source, tokens), listing in zip(sources.items(), listings):
        columns = {re.sub(r".*64x(\d+)x.*", r"\1", opcode) for opcode, _ in listing if "GMMA" in opcode}
        assert columns == {str(tokens)}, source.label
        assert sass.overwritten(listing) == [], source.label
