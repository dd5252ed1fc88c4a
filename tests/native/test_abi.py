"""lancebill.h and its ctypes mirror agree in numbers, version and field offsets."""

from __future__ import annotations

import ctypes
import re
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

from lancebill.backends.cpu.native import abi
from lancebill.native import build

HEADER = (build.KERNELS.folder / "lancebill.h").read_text(encoding="utf-8")
ENUMS: dict[str, tuple[type[IntEnum], str]] = {
    "lancebill_codes": (abi.Codes, "LANCEBILL_"),
    "lancebill_scale": (abi.ScaleKind, "LANCEBILL_SCALE_"),
    "lancebill_zero": (abi.ZeroKind, "LANCEBILL_ZERO_"),
    "lancebill_input_kind": (abi.Input, "LANCEBILL_INPUT_"),
    "lancebill_float": (abi.Float, "LANCEBILL_"),
    "lancebill_activation": (abi.ActivationKind, "LANCEBILL_"),
    "lancebill_scoring": (abi.Scoring, "LANCEBILL_SCORING_"),
    "lancebill_step_kind": (abi.DecodeStep, "LANCEBILL_STEP_"),
    "lancebill_level": (abi.IsaLevel, "LANCEBILL_"),
}
STRUCTS = {
    "lancebill_matrix": abi.MatrixStruct,
    "lancebill_layer": abi.LayerStruct,
    "lancebill_work": abi.WorkStruct,
    "lancebill_call": abi.CallStruct,
    "lancebill_mailbox": abi.MailboxStruct,
    "lancebill_slots": abi.SlotsStruct,
    "lancebill_routing": abi.RoutingStruct,
    "lancebill_dense": abi.DenseStruct,
    "lancebill_heads": abi.HeadsStruct,
    "lancebill_step": abi.StepStruct,
    "lancebill_decode": abi.DecodeStruct,
}


@pytest.mark.parametrize("name", ENUMS)
def test_enums_match_the_header(name: str) -> None:
    mirror, prefix = ENUMS[name]
    body = re.search(rf"enum {name} \{{(.*?)\}}", HEADER, re.DOTALL)
    assert body is not None
    header = {key.removeprefix(prefix): int(value) for key, value in re.findall(r"(LANCEBILL_\w+) = (\d+)", body[1])}
    header.pop("LEVELS", None)
    assert header == {member.name: member.value for member in mirror}


def test_version_matches_the_header() -> None:
    assert f"#define LANCEBILL_ABI {abi.ABI}\n" in HEADER
    assert f"LANCEBILL_MOST_EXPERTS = {abi.MOST_EXPERTS} " in HEADER
    assert f"LANCEBILL_BAD_TOKEN = {abi.BAD_TOKEN}," in HEADER


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_field_offsets_match_the_compiler(tmp_path: Path) -> None:
    lines = ['#include "mailbox.h"', "#include <cstdio>", "int main() {"]
    expected = []
    for name, struct in STRUCTS.items():
        lines.append(f'std::printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            lines.append(f'std::printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(vars(struct)[field].offset)
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    source.write_text("\n".join([*lines, "}"]))
    cxx = build.compiler()
    assert cxx is not None
    subprocess.run([cxx, f"-I{build.KERNELS.folder}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected
