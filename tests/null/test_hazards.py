"""A sanitizer's report, read: places, what stands there, and which findings are the compiler's own hand-over."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from hazards import Place, count, explain, findings

CODE = """
        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0140*/                   LDS.U8 R2, [R2+UR41+0xfcc4] ;
        /*0160*/               @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0200*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*0210*/                   LDS.U8 R2, [R2] ;
        /*1220*/                   STS [UR7+0xfcc8], R2 ;
        /*1230*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*1240*/                   IADD3 R1, R1, R2, RZ ;
"""
HAND_OVER = [
    "========= Error: Potential RAW hazard detected at __shared__ 0x100c9 in block (18,0,0) :",
    "=========     Write Thread (31,0,0) at slotwise+0x1220",
    "=========     Read Thread (160,0,0) at slotwise+0x140",
]
OTHER = [
    "========= Error: Race reported between Write access at 0x00001220 in slotwise",
    "=========     and Read access at 0x00000210 in slotwise [16 hazards]",
]
SAID = ["case 0: plain", *HAND_OVER, *OTHER]


def forms(label: str, kernel: str) -> dict[str, str]:
    return {"KIND=gated": CODE} if (label, kernel) == ("plain", "slotwise") else {}


def test_places_are_read_in_both_spellings() -> None:
    assert list(findings(SAID)) == [
        ("plain", [Place("Write", "slotwise", 0x1220), Place("Read", "slotwise", 0x140)]),
        ("plain", [Place("Write", "slotwise", 0x1220), Place("Read", "slotwise", 0x210)]),
    ]


def test_only_what_barrier_1_orders_is_a_hand_over() -> None:
    assert count(SAID, forms) == (1, 1)
    assert count(["case 0: plain", "Error: Invalid __global__ read", "    at slotwise+0x140"], forms) == (0, 1)
    assert count(["case 0: another", *HAND_OVER], forms) == (0, 1)


def test_instructions_are_shown_between_their_barriers() -> None:
    lines = explain(["case 0: plain", *HAND_OVER, "    at slotwise+0x1240"], forms)
    assert lines[0].startswith("slotwise+0x1220 (KIND=gated; plain): STS [UR7+0xfcc8], R2 [before it BAR.SYNC")
    assert lines[1].endswith("after it @P0 BAR.SYNC.DEFER_BLOCKING 0x1 at 0x160]")
    assert len(lines) == 2  # additions are nothing that tools watch
