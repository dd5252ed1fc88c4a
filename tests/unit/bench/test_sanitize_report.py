"""A sanitizer's report, read: places, what stands there, and which findings are hand-overs that barriers order."""

from __future__ import annotations

import re
import sys
from itertools import product
from typing import Any

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from sanitize_report import Place, count, explain, findings
from sanitize_barriers import meetings
from sanitize import Case, accepted, clean, judged, problem_of

from lancebill.backends.hopper.plan import make_plan

# What the assembler made of a decode kernel, less what neither branches nor touches shared memory.
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
        /*5e10*/                   RET.REL.NODEC R64 `(slotwise) ;
"""
# And of a kernel whose blocks take many tiles, less still: one warp feeds, the others multiply.
TURNS = """
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
HAND_OVER = [
    "========= Error: Race reported between Read access at slotwise+0x140",
    "=========     and Write access at slotwise+0x1360 [367 hazards]",
    "=========     and Write access at slotwise+0x5700 [463 hazards]",
    "========= ",
]
OLDER = [
    "========= Error: Potential RAW hazard detected at __shared__ 0x100c9 in block (18,0,0) :",
    "=========     Write Thread (31,0,0) at slotwise+0x1360",
    "=========     Read Thread (160,0,0) at slotwise+0x140",
]
# Made up: a row's maximum is written while others still read the one before.
RACE = [
    "========= Error: Race reported between Write access at 0x000023b0 in slotwise",
    "=========     and Read access at 0x00002450 in slotwise [16 hazards]",
]
LABEL = "case 3: plain"


def forms(label: str, kernel: str) -> dict[str, str]:
    return {"KIND=gated": CODE} if (label, kernel) == ("plain", "slotwise") else {}


def race(read: int, *writes: int) -> list[str]:
    places = [f"and Write access at slotwise+0x{write:x} [2 hazards]" for write in writes]
    return [LABEL, f"Error: Race reported between Read access at slotwise+0x{read:x}", *places]


def test_places_are_read_in_all_spellings() -> None:
    read, first, last = (Place(*p) for p in (("Read", "slotwise", 0x140), ("Write", "slotwise", 0x1360),
                                             ("Write", "slotwise", 0x5700)))  # fmt: skip
    assert list(findings([LABEL, *HAND_OVER, *OLDER, *RACE])) == [
        ("plain", [read, first, last]),
        ("plain", [first, read]),
        ("plain", [Place("Write", "slotwise", 0x23B0), Place("Read", "slotwise", 0x2450)]),
    ]


def test_meetings_are_counted_on_every_way_through_a_kernel() -> None:
    met = meetings(CODE)
    assert met[0x1360] == met[0x5700] == {0}  # tasks are written
    assert met[0x140] == {1}  # and read
    assert met[0xDB0] == met[0x23B0] == met[0x2450] == {2}  # and done
    assert met[0x5720] == {1}  # the end, for those who read that there is no more, and for those who wrote it


@pytest.mark.parametrize("unclear", ["BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "BAR.SYNC.DEFER_BLOCKING R5", "BRXU UR4"])
def test_code_that_cannot_be_followed_proves_nothing(unclear: str) -> None:
    code = CODE.replace("FADD.FTZ R48, R12, R112", unclear)
    assert not meetings(code)
    assert count([LABEL, *HAND_OVER], lambda label, kernel: {"": code}) == (0, 1)


def test_only_what_a_barrier_for_all_threads_orders_is_a_hand_over() -> None:
    assert count([LABEL, *HAND_OVER, *OLDER, *RACE], forms) == (2, 1)
    assert count([LABEL, "Error: Invalid __global__ read", "    at slotwise+0x140"], forms) == (0, 1)
    assert count(["case 0: another", *HAND_OVER], forms) == (0, 1)
    assert count(race(0x140, 0x1360, 0xDB0), forms) == (0, 1)  # the copy engine's writes are not a thread's
    assert count(race(0x2450, 0x1360), forms) == (1, 0)
    assert count(race(0x140, 0x1350, 0x23B0), forms) == (1, 0)  # an mbarrier is made by a thread
    assert count(race(0x140, 0xCC0), forms) == (0, 1)  # and waited for in other ways
    assert count(race(0x2450, 0x1360, 0x23B0), forms) == (0, 1)  # one of two is enough


def without(*barriers: str) -> str:
    return "\n".join(
        "" if line.strip().startswith(tuple(f"/*{b}*/" for b in barriers)) else line for line in CODE.split("\n")
    )


@pytest.mark.parametrize("barriers", [("0110",), ("0260",), ("0170",), ("13c0", "5670")])
def test_a_hand_over_without_its_barriers_is_a_race(barriers: tuple[str, ...]) -> None:
    assert count([LABEL, *HAND_OVER], lambda label, kernel: {"": without(*barriers)}) == (0, 1)


def test_a_finding_is_in_order_in_every_form_that_it_can_be_of() -> None:
    elsewhere = "        /*0140*/                   IADD3 R1, R1, R2, RZ ;"
    assert count([LABEL, *HAND_OVER], lambda label, kernel: {"one": CODE, "other": elsewhere}) == (1, 0)
    assert count([LABEL, *HAND_OVER], lambda label, kernel: {"one": CODE, "other": without("0110")}) == (0, 1)
    waits = without("0110").replace("STS [UR8+0xeca8]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0xeca8]")
    # Nothing is written there.
    assert count([LABEL, *HAND_OVER], lambda label, kernel: {"one": CODE, "other": waits}) == (1, 0)


def ordered_with(*edits: tuple[str, str]) -> bool:
    """Whether what is next is still handed over with other instructions at some places."""
    code = TURNS
    for place, instead in edits:
        code, changed = re.subn(rf"(/\*{place}\*/\s+).*;", lambda found, now=instead: f"{found[1]}{now} ;", code)
        assert changed == 1
    return count(race(0x3850, 0xD20), lambda label, kernel: {"": code}) == (1, 0)


def test_turns_are_handed_over_at_mbarriers() -> None:
    assert count(race(0x3850, 0xD20), lambda label, kernel: {"": TURNS}) == (1, 0)
    assert count(race(0x3850, 0xD20, 0x1350), lambda label, kernel: {"": TURNS}) == (1, 0)  # and a task at barrier 1
    assert ordered_with(("0d30", "WARPSYNC.ALL"))
    assert ordered_with(("0670", "NOP"))  # no stage is filled ahead


@pytest.mark.parametrize(
    ("place", "instead"),
    [
        ("0d40", "NOP"),  # nobody is told
        ("0d40", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0xe8c8], RZ"),
        ("0d40", "@!P0 SYNCS.ARRIVE.TRANS64 RZ, [R2+URZ+0xe8c0], R2"),  # tells of bytes
        ("0d30", "@P1 BRA `(.L_x_10)"),
        ("0d30", "STS [R3+0xe924], R7"),  # one of two
        ("3820", "NOP"),  # who loads has not waited
        ("3820", "@P1 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c0], R10"),
        ("3820", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c8], R10"),
        ("39a0", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11+URZ+0xe8c8], R10"),
        ("3830", "NOP"),  # or not to the end
        ("3830", "@!P1 BRA `(.L_x_21)"),
        ("39b0", "NOP"),
        ("3810", "@P1 BRA `(.L_x_26)"),  # or not on this way
        ("3860", "@P1 BRA `(.L_x_26)"),  # or not again
        ("2dd0", "NOP"),  # who loads is not waited for by the others
        ("2dd0", "@P1 BAR.SYNC.DEFER_BLOCKING 0x0, 0x80"),
        ("2dd0", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x20"),
        ("2dd0", "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"),
        ("2dd0", "BAR.ARV 0x0, 0x80"),
        ("2e10", "NOP"),  # nor by who stores
        ("2e10", "@P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0xe8c0], RZ"),
        ("06e0", "NOP"),
        ("06e0", "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR15+0xe900], R2"),
        ("06f0", "NOP"),
        ("0670", "@!P2 BRA `(.L_x_24)"),
        ("0740", "NOP"),  # nothing is filled
        ("3840", "BRXU UR4"),
        ("3850", "LDS R108, [R108+0xe924]"),  # another place
        ("3850", "LDS R108, [R108]"),
        ("3850", "LDSM.16.M88 R108, [R108+0xe920]"),
        ("0d10", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0xe8c0], RZ"),  # told too early
        ("3810", "@P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R11+URZ+0xe8c0], RZ"),  # by somebody else
        ("0630", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR15+0xe8e0], RZ"),  # who stores does not wait for who loads
        ("2e10", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0xe8e0], RZ"),  # nor for one of them
        ("3828", "ISETP.GE.AND P0, PT, R1, R2, PT"),  # asks something else
        ("3840", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80"),  # something in between
        ("3840", "ATOMS.ADD R1, [R3], R2"),
        ("0d30", "ATOMS.ADD R1, [R3], R2"),
        ("0d30", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80"),
    ],
)
def test_a_turn_without_one_of_its_mbarriers_is_a_race(place: str, instead: str) -> None:
    assert not ordered_with((place, instead))


def test_who_tells_nobody_is_not_heard_by_who_never_waits() -> None:
    assert not ordered_with(("0d40", "NOP"), ("3820", "NOP"), ("3830", "NOP"))


def test_instructions_are_shown_between_their_barriers() -> None:
    lines = explain([LABEL, *OLDER, "    at slotwise+0x5790"], forms)
    assert lines[0].startswith("slotwise+0x1360 (KIND=gated; plain): STS [UR8+0xeca8], R2 [before it @!UP5 SYNCS.EXCH")
    assert lines[1].endswith("after it @P0 BAR.SYNC.DEFER_BLOCKING 0x1 at 0x160]")
    assert len(lines) == 2  # additions are nothing that tools watch


def process(**said: Any) -> dict[str, Any]:
    """A process that came when every case was taken, as the tool told it, unless said otherwise."""
    nothing: dict[str, Any] = {"cases": {}, "not_ended": [], "summary": [], "lost": [], "handed_over": 0, "other": 0}
    return {**nothing, "status": 255, "finished": True, **said}


def test_a_process_that_got_no_case_does_not_count() -> None:
    found = ["RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)"]
    ran = process(cases={"plain": 0.5}, status=9, summary=found, handed_over=1)
    late, crashed = process(), process(finished=False, status=1)
    assert judged("racecheck", [ran, late], [Case()])["verdict"] == "clean"
    assert judged("racecheck", [late], [Case()])["verdict"] == "NOT FINISHED"
    assert judged("racecheck", [crashed], [Case()])["verdict"] == "NOT FINISHED"
    assert judged("racecheck", [{**ran, "handed_over": 0, "other": 1}, late], [Case()])["verdict"] == "FOUND"
    assert not clean(crashed) and not clean({**ran, "handed_over": 0})


def test_the_matrix_has_blocks_of_more_tiles_than_they_are_told_ahead() -> None:
    """Tiles are told in a ring: blocks go round it more than twice, with one stage a tile and with more."""
    found = set()
    for case in accepted()[0]:
        plan = make_plan(problem_of(case), case.rows)
        if not case.processors or plan.decode:
            continue
        for name in ("w13", "w2"):
            of = plan.product(name)
            (tile,) = of.tiles  # so that every expert that has rows has tiles in this list
            if case.experts // 2 * of.units > 2 * (tile.stages + 1) * tile.blocks * case.processors:
                found.add((name, of.narrow, of.promote, of.slices <= tile.slices))
    kinds = [(False, False), (True, False), (True, True)]
    assert found == {(name, *kind, single) for name in ("w13", "w2") for kind in kinds for single in (True, False)}


def test_the_matrix_reaches_whole_sums_and_parts() -> None:
    """Few tokens: whether K is split depends on sizes and on a rule that may change."""
    found = set()
    for case in accepted()[0]:
        plan = make_plan(problem_of(case), case.rows)
        if plan.decode and plan.w2 is not None:
            found.add((plan.first.narrow, plan.first.split > 1, plan.problem.activation.gated, case.bias))
    assert {(narrow, parts, gated) for narrow, parts, gated, _ in found} == set(product((True, False), repeat=3))
    assert {(narrow, parts) for narrow, parts, _, bias in found if bias} == set(product((True, False), repeat=2))
