"""Checks a kernel's SASS for writes to registers that a wgmma in flight still reads.

Such a write silently corrupts results, and only on a GPU. wgmma reads its A operand (the weights) from registers
asynchronously; the registers are free after a wait (`WARPGROUP.DEPBAR.LE gsb0, n`: all but the last n groups done).
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

_LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;")
_OPERANDS = 4  # registers of A per instruction
# Instructions whose first register operand is not a result.
_NO_RESULT = ("ST", "RED", "BRA", "BAR", "SYNCS", "UTMA", "WARPGROUP", "WARPSYNC", "EXIT", "NOP", "MEMBAR", "FENCE")

_WAIT = "WARPGROUP.DEPBAR"

Instruction = tuple[str, str]


def overwritten(listing: list[Instruction]) -> list[str]:
    """Instructions that write a register of a wgmma in flight; two passes, to cover the loop's back edge."""
    places = [i for i, (opcode, _) in enumerate(listing) if "GMMA" in opcode]
    if not places:
        return []
    end = next(i for i in range(places[-1], len(listing)) if listing[i][0].startswith(_WAIT))
    return _conflicts(listing[: end + 1] * 2)


def instructions(cubins: Sequence[bytes]) -> list[list[Instruction]]:
    """The instructions of each kernel in order: (opcode, operands).

    nvdisasm takes half a second to start, so it is started once, for the machine code of all kernels in a row.
    """
    codes = [_machine_code(cubin) for cubin in cubins]
    ends = list(accumulate(len(code) for code in codes))
    listings: list[list[Instruction]] = [[] for _ in codes]
    for address, instruction in _instructions(_nvdisasm(b"".join(codes), "--binary", "SM90a")):
        listings[bisect(ends, address)].append(instruction)
    return listings


def _machine_code(cubin: bytes) -> bytes:
    """The section `.text.<kernel>` of an ELF file."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    first_name = sections[names][4]
    (code,) = [cubin[at : at + n] for name, *_, at, n in sections if cubin.startswith(b".text.", first_name + name)]
    return code


def disassemble(cubin: bytes) -> str:
    """The output of nvdisasm."""
    return _nvdisasm(cubin, "-c")


def _nvdisasm(content: bytes, *options: str) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(content)
        command = [knobs.nvidia.nvdisasm.path, *options, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _instructions(text: str) -> Iterator[tuple[int, Instruction]]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            yield int(match[1], 16), (match[2], match[3])


def _conflicts(listing: list[Instruction]) -> list[str]:
    open_group: set[int] = set()
    in_flight: list[set[int]] = []
    conflicts = []
    for opcode, operands in listing:
        if "GMMA" in opcode:
            open_group |= _weights(operands)
            if "gsb0" in operands:
                in_flight.append(open_group)
                open_group = set()
        elif opcode.startswith(_WAIT):
            left = int(operands.rpartition("0x")[2], 16)
            in_flight = in_flight[len(in_flight) - left :] if left else []
        elif _results(opcode, operands) & open_group.union(*in_flight):
            conflicts.append(f"{opcode} {operands}")
    return conflicts


def _weights(operands: str) -> set[int]:
    """The registers of A; none if A is in shared memory."""
    first = re.match(r"R(\d+)$", operands.split(",")[1].strip())
    return set() if first is None else set(range(int(first[1]), int(first[1]) + _OPERANDS))


def _results(opcode: str, operands: str) -> set[int]:
    first = re.match(r"R(\d+)\b", operands)
    if first is None or opcode.startswith(_NO_RESULT):
        return set()
    count = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode or opcode.startswith("CS2R") else 1
    return set(range(int(first[1]), int(first[1]) + count))
