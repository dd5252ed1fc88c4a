"""Reading compute-sanitizer's reports: places, instructions, and findings that barriers do order."""

from __future__ import annotations

import re
import sys
from itertools import product
from typing import Any

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "tests" / "campaign"))

from sanitize import clean, verdict_of
from sanitizer_cases import Case, problem_of, supported_cases
from sanitizer_reports import Place, count_ordered, explain, findings
from sass_barriers import barriers_before

from lancebill.backends.hopper.plan import make_plan

# SASS of a decode kernel, without instructions that neither branch nor access shared memory.
CODE = """
        /*0070*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0140*/                   LDS.U8 R2, [R2+UR27+0xeca4] ;
        /*0150*/                   ISETP.GT.U32.AND P0, PT, R2, 0x3, PT ;
        /*0160*/               @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0170*/               @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0180*/               @P0 BRA `(.L_x_1) ;
        /*01c0*/                   BRX R2 -0x1d0                     (*"BRANCH_TARGETS .L_x_2,.L_x_15,.L_x_80"*);
.L_x_2:
        /*0260*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
.L_x_9:
        /*0cc0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9+0xec70], R3 ;
        /*0db0*/                   UTMALDG.2D [UR20], [UR36] ;
        /*0e70*/              @!P0 BRA `(.L_x_9) ;
        /*0ee0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0f30*/                   BRA `(.L_x_1) ;
.L_x_15:
        /*1030*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*1040*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*1090*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*1350*/              @!UP5 SYNCS.EXCH.64 URZ, [UR8+0xeca0], UR4 ;
        /*1360*/                   STS [UR8+0xeca8], R2 ;
        /*1370*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*13c0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
.L_x_60:
        /*20f0*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*2330*/                   CALL.REL.NOINC `($divide) ;
        /*23b0*/              @!P2 STS [R5+0xec00], R18 ;
        /*2450*/                   LDS R12, [UR8+0xec00] ;
        /*50a0*/                   BSSY B0, `(.L_x_57) ;
        /*51b0*/                   BSYNC B0 ;
.L_x_57:
        /*5660*/              @!P4 BRA `(.L_x_60) ;
        /*5670*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*5700*/                   STS [UR4+0xeca8], R0 ;
        /*5710*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
.L_x_80:
        /*5720*/                   EXIT ;
$divide:
        /*5790*/                   FADD.FTZ R48, R12, R112 ;
        /*5e10*/                   RET.REL.NODEC R64 `(decode_gemm) ;
"""
# SASS of a kernel whose blocks compute many tiles, shortened further: one producer warp, the others consume.
TILE_RING = """
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0220*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*02b0*/                   LOP3.LUT P0, RZ, R0, 0x1f, RZ, 0xc0, !PT ;
.L_x_10:
        /*0320*/              @!P1 BRA `(.L_x_4) ;
.L_x_7:
        /*0630*/                   ISETP.LE.AND P2, PT, R9, UR4, PT ;
        /*0670*/              @!P2 BRA `(.L_x_5) ;
        /*06e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR15+0xe8e0], R2 ;
        /*06f0*/              @!P2 BRA `(.L_x_6) ;
.L_x_24:
        /*0740*/              @!P0 SYNCS.ARRIVE.TRANS64 RZ, [UR15+0xe900], R2 ;
        /*07e0*/                   UTMALDG.2D [UR24], [UR6] ;
.L_x_5:
        /*0920*/                   UTMALDG.2D [UR16], [UR14] ;
        /*0930*/                   ISETP.NE.AND P2, PT, R6, RZ, PT ;
        /*0960*/               @P2 BRA `(.L_x_7) ;
.L_x_4:
        /*0d10*/                   ISETP.GE.AND P2, PT, R6, R4, PT ;
        /*0d20*/                   STS [R3+0xe920], R6 ;
        /*0d30*/                   NOP ;
        /*0d40*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0xe8c0], RZ ;
        /*0d50*/              @!P2 BRA `(.L_x_10) ;
        /*0d60*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0db0*/                   EXIT ;
.L_x_0:
        /*1350*/                   STS [UR7+0xe930], R3 ;
        /*1360*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
.L_x_22:
        /*1850*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R5+UR10+0xe900], R4 ;
        /*1860*/              @!P0 BRA `(.L_x_22) ;
        /*2dd0*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*2e10*/               @P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0xe8e0], RZ ;
        /*3810*/                   NOP ;
        /*3820*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c0], R10 ;
        /*3828*/                   NOP ;
        /*3830*/              @!P0 BRA `(.L_x_21) ;
.L_x_26:
        /*3840*/                   NOP ;
        /*3850*/                   LDS R108, [R108+0xe920] ;
        /*3860*/                   ISETP.GE.AND P0, PT, R108, R3, PT ;
        /*3870*/              @!P0 BRA `(.L_x_22) ;
        /*3880*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*3930*/                   EXIT ;
.L_x_6:
        /*3940*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR15+0xe8e0], R2 ;
        /*3950*/              @!P2 BRA `(.L_x_6) ;
        /*3960*/                   BRA `(.L_x_24) ;
.L_x_21:
        /*39a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c0], R10 ;
        /*39b0*/              @!P0 BRA `(.L_x_21) ;
        /*39c0*/                   BRA `(.L_x_26) ;
"""
TASK_HANDOFF = [
    "========= Error: Race reported between Read access at decode_gemm+0x140",
    "=========     and Write access at decode_gemm+0x1360 [367 hazards]",
    "=========     and Write access at decode_gemm+0x5700 [463 hazards]",
    "========= ",
]
OLDER_SPELLING = [
    "========= Error: Potential RAW hazard detected at __shared__ 0x100c9 in block (18,0,0) :",
    "=========     Write Thread (31,0,0) at decode_gemm+0x1360",
    "=========     Read Thread (160,0,0) at decode_gemm+0x140",
]
# Invented: a thread writes a row's maximum while others still read the previous one.
RACE = [
    "========= Error: Race reported between Write access at 0x000023b0 in decode_gemm",
    "=========     and Read access at 0x00002450 in decode_gemm [16 hazards]",
]
LABEL = "case 3: plain"


def variants(label: str, kernel: str) -> dict[str, str]:
    return {"KIND=gated": CODE} if (label, kernel) == ("plain", "decode_gemm") else {}


def race(read: int, *writes: int) -> list[str]:
    places = [f"and Write access at decode_gemm+0x{write:x} [2 hazards]" for write in writes]
    return [LABEL, f"Error: Race reported between Read access at decode_gemm+0x{read:x}", *places]


def test_places_are_parsed_in_all_spellings() -> None:
    read, first, last = (Place(*p) for p in (("Read", "decode_gemm", 0x140), ("Write", "decode_gemm", 0x1360),
                                             ("Write", "decode_gemm", 0x5700)))  # fmt: skip
    assert list(findings([LABEL, *TASK_HANDOFF, *OLDER_SPELLING, *RACE])) == [
        ("plain", [read, first, last]),
        ("plain", [first, read]),
        ("plain", [Place("Write", "decode_gemm", 0x23B0), Place("Read", "decode_gemm", 0x2450)]),
    ]


def test_barriers_are_counted_on_every_path_through_a_kernel() -> None:
    barriers = barriers_before(CODE)
    assert barriers[0x1360] == barriers[0x5700] == {0}  # a task is written
    assert barriers[0x140] == {1}  # it is read
    assert barriers[0xDB0] == barriers[0x23B0] == barriers[0x2450] == {2}  # it is executed
    assert barriers[0x5720] == {1}  # the exit: for threads that read the end marker, and for those that wrote it


@pytest.mark.parametrize("instruction", ["BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "BAR.SYNC.DEFER_BLOCKING R5", "BRXU UR4"])
def test_code_that_cannot_be_followed_proves_nothing(instruction: str) -> None:
    code = CODE.replace("FADD.FTZ R48, R12, R112", instruction)
    assert not barriers_before(code)
    assert count_ordered([LABEL, *TASK_HANDOFF], lambda label, kernel: {"": code}) == (0, 1)


def test_only_accesses_between_full_barriers_are_ordered() -> None:
    assert count_ordered([LABEL, *TASK_HANDOFF, *OLDER_SPELLING, *RACE], variants) == (2, 1)
    assert count_ordered([LABEL, "Error: Invalid __global__ read", "    at decode_gemm+0x140"], variants) == (0, 1)
    assert count_ordered(["case 0: another", *TASK_HANDOFF], variants) == (0, 1)
    assert count_ordered(race(0x140, 0x1360, 0xDB0), variants) == (0, 1)  # the copy engine writes, not a thread
    assert count_ordered(race(0x2450, 0x1360), variants) == (1, 0)
    assert count_ordered(race(0x140, 0x1350, 0x23B0), variants) == (1, 0)  # a thread initialises the mbarrier
    assert count_ordered(race(0x140, 0xCC0), variants) == (0, 1)  # a wait does not write
    assert count_ordered(race(0x2450, 0x1360, 0x23B0), variants) == (0, 1)  # one unordered pair is enough


def test_a_variant_with_its_own_finding_is_none_for_another() -> None:
    """By its offsets a finding may be of two variants, in one of which it would be a copy: that one is known by
    another finding with the same read."""
    stored, copied = "STS [UR8+0xeca8], R2 ;", "STS [UR4+0xeca8], R0 ;"
    assert CODE.count(stored) == 1
    assert CODE.count(copied) == 1
    both = {"first": CODE.replace(copied, "NOP ;"), "second": CODE.replace(stored, "UTMALDG.2D [UR12], [UR28] ;")}
    ambiguous, own = race(0x140, 0x1360), race(0x140, 0x5700)
    assert count_ordered(ambiguous, lambda label, kernel: both) == (0, 1)
    assert count_ordered([*own, *ambiguous[1:]], lambda label, kernel: both) == (2, 0)


def without(*barriers: str) -> str:
    return "\n".join(
        "" if line.strip().startswith(tuple(f"/*{b}*/" for b in barriers)) else line for line in CODE.split("\n")
    )


@pytest.mark.parametrize("barriers", [("0110",), ("0260",), ("0170",), ("13c0", "5670")])
def test_a_handoff_without_its_barriers_is_a_race(barriers: tuple[str, ...]) -> None:
    assert count_ordered([LABEL, *TASK_HANDOFF], lambda label, kernel: {"": without(*barriers)}) == (0, 1)


def test_a_finding_must_be_ordered_in_every_variant_it_can_be_of() -> None:
    elsewhere = "        /*0140*/                   IADD3 R1, R1, R2, RZ ;"
    assert count_ordered([LABEL, *TASK_HANDOFF], lambda label, kernel: {"one": CODE, "other": elsewhere}) == (1, 0)
    assert count_ordered([LABEL, *TASK_HANDOFF], lambda *_: {"one": CODE, "other": without("0110")}) == (0, 1)
    waits = without("0110").replace("STS [UR8+0xeca8]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0xeca8]")
    # The second variant has no write there.
    assert count_ordered([LABEL, *TASK_HANDOFF], lambda label, kernel: {"one": CODE, "other": waits}) == (1, 0)


def still_ordered(*edits: tuple[str, str]) -> bool:
    """Whether the next tile's store and load are still ordered after replacing some instructions."""
    code = TILE_RING
    for place, instead in edits:
        code, changed = re.subn(rf"(/\*{place}\*/\s+).*;", lambda found, now=instead: f"{found[1]}{now} ;", code)
        assert changed == 1
    return count_ordered(race(0x3850, 0xD20), lambda label, kernel: {"": code}) == (1, 0)


def test_the_next_tile_is_ordered_by_mbarriers() -> None:
    assert count_ordered(race(0x3850, 0xD20), lambda label, kernel: {"": TILE_RING}) == (1, 0)
    # Plus a task, which barrier 1 orders.
    assert count_ordered(race(0x3850, 0xD20, 0x1350), lambda *_: {"": TILE_RING}) == (1, 0)
    assert still_ordered(("0d30", "WARPSYNC.ALL"))
    assert still_ordered(("0670", "NOP"))  # without stages filled ahead


@pytest.mark.parametrize(
    ("place", "instead"),
    [
        ("0d40", "NOP"),  # no arrival
        ("0d40", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0xe8c8], RZ"),
        ("0d40", "@!P0 SYNCS.ARRIVE.TRANS64 RZ, [R2+URZ+0xe8c0], R2"),  # announces bytes
        ("0d30", "@P1 BRA `(.L_x_10)"),
        ("0d30", "STS [R3+0xe924], R7"),  # two stores
        ("3820", "NOP"),  # the consumer does not wait
        ("3820", "@P1 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c0], R10"),
        ("3820", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c8], R10"),
        ("39a0", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c8], R10"),
        ("3830", "NOP"),  # or does not test that the wait succeeded
        ("3830", "@!P1 BRA `(.L_x_21)"),
        ("39b0", "NOP"),
        ("3810", "@P1 BRA `(.L_x_26)"),  # or one path skips the wait
        ("3860", "@P1 BRA `(.L_x_26)"),  # or the next iteration skips it
        ("2dd0", "NOP"),  # the consumers do not synchronise
        ("2dd0", "@P1 BAR.SYNC.DEFER_BLOCKING 0x0, 0x80"),
        ("2dd0", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x20"),
        ("2dd0", "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"),
        ("2dd0", "BAR.ARV 0x0, 0x80"),
        ("2e10", "NOP"),  # no release for the producer
        ("2e10", "@P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0xe8c0], RZ"),
        ("06e0", "NOP"),
        ("06e0", "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR15+0xe900], R2"),
        ("06f0", "NOP"),
        ("0670", "@!P2 BRA `(.L_x_24)"),
        ("0740", "NOP"),  # no stage is filled
        ("3840", "BRXU UR4"),
        ("3850", "LDS R108, [R108+0xe924]"),  # another address
        ("3850", "LDS R108, [R108]"),
        ("3850", "LDSM.16.M88 R108, [R108+0xe920]"),
        ("0d10", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0xe8c0], RZ"),  # arrives before the store
        ("3810", "@P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R11+URZ+0xe8c0], RZ"),  # another thread arrives
        ("0630", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR15+0xe8e0], RZ"),  # the producer releases its own stage
        ("2e10", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0xe8e0], RZ"),  # all lanes release, not one
        ("3828", "ISETP.GE.AND P0, PT, R1, R2, PT"),  # overwrites the predicate
        ("3840", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80"),  # another event in between
        ("3840", "ATOMS.ADD R1, [R3], R2"),
        ("0d30", "ATOMS.ADD R1, [R3], R2"),
        ("0d30", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80"),
    ],
)
def test_a_tile_handoff_without_one_of_its_mbarriers_is_a_race(place: str, instead: str) -> None:
    assert not still_ordered((place, instead))


def test_without_arrival_and_wait_nothing_is_ordered() -> None:
    assert not still_ordered(("0d40", "NOP"), ("3820", "NOP"), ("3830", "NOP"))


def test_instructions_are_shown_with_their_barriers() -> None:
    lines = explain([LABEL, *OLDER_SPELLING, "    at decode_gemm+0x5790"], variants)
    assert lines[0].startswith(
        "decode_gemm+0x1360 (KIND=gated; plain): STS [UR8+0xeca8], R2 [before it @!UP5 SYNCS.EXCH"
    )
    assert lines[1].endswith("after it @P0 BAR.SYNC.DEFER_BLOCKING 0x1 at 0x160]")
    assert len(lines) == 2  # the tools do not watch additions


def process(**fields: Any) -> dict[str, Any]:
    """The record of a process that found every case taken, with other `fields`."""
    empty: dict[str, Any] = {"cases": {}, "not_ended": [], "summary": [], "lost": [], "ordered": 0, "unordered": 0}
    return {**empty, "status": 255, "finished": True, **fields}


def test_a_process_without_cases_does_not_count() -> None:
    summary = ["RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)"]
    ran = process(cases={"plain": 0.5}, status=9, summary=summary, ordered=1)
    late, crashed = process(), process(finished=False, status=1)
    assert verdict_of("racecheck", [ran, late], [Case()])["verdict"] == "clean"
    assert verdict_of("racecheck", [late], [Case()])["verdict"] == "NOT FINISHED"
    assert verdict_of("racecheck", [crashed], [Case()])["verdict"] == "NOT FINISHED"
    assert verdict_of("racecheck", [{**ran, "ordered": 0, "unordered": 1}, late], [Case()])["verdict"] == "FOUND"
    assert not clean(crashed) and not clean({**ran, "ordered": 0})


def test_cases_wrap_the_ring_of_tiles() -> None:
    """Some blocks go round the ring of tile numbers more than twice, with one stage for each tile and with several."""
    reached = set()
    for case in supported_cases()[0]:
        plan = make_plan(problem_of(case), case.rows)
        if not case.processors or plan.decode:
            continue
        for name in ("w13", "w2"):
            gemm = plan.gemm(name)
            tile = gemm.tiles[-1]  # the smallest: nearly every expert with rows has a tile in this list
            if case.experts // 2 * gemm.units > 2 * (tile.stages + 1) * tile.blocks * case.processors:
                reached.add((name, gemm.byte_inputs, gemm.promote, gemm.slices <= tile.slices))
    kinds = [(False, False), (True, False), (True, True)]
    assert reached == {(name, *kind, single) for name in ("w13", "w2") for kind in kinds for single in (True, False)}


def test_cases_have_whole_and_shared_tiles() -> None:
    """With few tokens; whether blocks share a tile depends on sizes and on a rule that may change."""
    reached = set()
    for case in supported_cases()[0]:
        plan = make_plan(problem_of(case), case.rows)
        if plan.decode and plan.w2 is not None:
            gemm = plan.first_gemm
            reached.add((gemm.byte_inputs, gemm.pieces > 1, plan.problem.activation.gated, case.bias))
    assert {(fp8, shared, gated) for fp8, shared, gated, _ in reached} == set(product((True, False), repeat=3))
    assert {(fp8, shared) for fp8, shared, _, bias in reached if bias} == set(product((True, False), repeat=2))
