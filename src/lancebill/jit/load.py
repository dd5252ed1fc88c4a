"""Sources to loaded functions and ready launches, compiled at most once."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from lancebill.jit.build import binary
from lancebill.jit.compile import SCRATCH_POINTERS, Binary, Desc, KernelSource
from lancebill.jit.driver import MAP_BYTES, Launch, encode_map, load_function

_SCRATCH = tuple((f"scratch{i}", struct.pack("Q", 0)) for i in range(SCRATCH_POINTERS))
_functions: dict[tuple[KernelSource, int], tuple[int, Binary]] = {}


@dataclass(frozen=True)
class MappedMatrix:
    """A row-major tensor behind a tensor-map argument, by its address: nothing here keeps it alive."""

    pointer: int
    shape: tuple[int, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each side."""
        steps = [1]
        for side in reversed(self.shape[1:]):
            steps.insert(0, steps[0] * side)
        return tuple(steps)


Value = int | float | MappedMatrix


def function(source: KernelSource, device: int) -> tuple[int, Binary]:
    """The function in this device's context (which must be current)."""
    key = (source, device)
    if key not in _functions:
        compiled = binary(source)
        _functions[key] = load_function(compiled.cubin, compiled.name, compiled.shared), compiled
    return _functions[key]


def prepare(source: KernelSource, device: int, stream: int, values: Mapping[str, Value], *, dependent: bool) -> Launch:
    """A launch on a stream with every argument set; 0 stands for a pointer or a tensor that is set later."""
    handle, compiled = function(source, device)
    laid_out: list[tuple[str, bytes]] = []
    maps: dict[str, Mapping[str, object]] = {}
    descs = iter(compiled.descs)
    for name, kind in source.arguments:
        value = values[name]
        if isinstance(kind, Desc):
            maps[name] = facts = next(descs)
            sides, steps, encoded = kind.box, kind.box, bytes(MAP_BYTES)
            if isinstance(value, MappedMatrix):
                sides, steps, encoded = value.shape, value.strides, _tensor_map(value, facts)
            laid_out.append((name, encoded))
            laid_out += [(f"{name}.shape", struct.pack("i", side)) for side in sides]
            laid_out += [(f"{name}.stride", struct.pack("q", step)) for step in steps]
        elif kind.startswith("*"):
            laid_out.append((name, struct.pack("Q", value)))
        else:
            laid_out.append((name, struct.pack("f" if kind == "fp32" else "i", value)))
    return Launch(handle, compiled.threads, compiled.shared, stream, [*laid_out, *_SCRATCH], dependent, maps)


def encoded(launch: Launch, name: str, matrix: MappedMatrix) -> bytes:
    """A tensor-map argument that points at another tensor."""
    return _tensor_map(matrix, launch.maps[name])


def _tensor_map(matrix: MappedMatrix, facts: Mapping[str, object]) -> bytes:
    room = ctypes.create_string_buffer(MAP_BYTES + 64)
    at = -(-ctypes.addressof(room) // 64) * 64
    box, item, swizzle = facts["block_size"], facts["elem_size"], facts["swizzle"]
    assert isinstance(box, list) and isinstance(item, int) and isinstance(swizzle, int)
    encode_map(matrix.pointer, item, matrix.shape, matrix.strides, tuple(box), swizzle, at)
    return ctypes.string_at(at, MAP_BYTES)
