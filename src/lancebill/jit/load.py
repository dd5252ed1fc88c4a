"""Loads kernels onto a device and prepares their launches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lancebill.jit.build import get_binary
from lancebill.jit.compile import SCRATCH_POINTERS, Binary, Desc, KernelSource
from lancebill.jit.driver import MAP_BYTES, Launch, capability, encode_map, load_function, uncaptured

_SCRATCH = tuple((f"scratch{i}", struct.pack("Q", 0)) for i in range(SCRATCH_POINTERS))
_functions: dict[tuple[KernelSource, int], tuple[int, Binary]] = {}


@dataclass(frozen=True)
class MappedMatrix:
    """The address and shape of a row-major tensor for a tensor-map argument. Does not keep the tensor alive."""

    pointer: int
    shape: tuple[int, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        strides = [1]
        for side in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * side)
        return tuple(strides)


Value = int | float | MappedMatrix


def loadable(source: KernelSource, device: int) -> KernelSource:
    """The kernel as a GPU takes it: PTX if it cannot run machine code of this kind."""
    return source if source.runs_on(capability(device)) else replace(source, ptx=True)


def load_kernel(source: KernelSource, device: int) -> tuple[int, Binary]:
    """The kernel's function in this device's context, which must be current. Loads each kernel once."""
    key = (source, device)
    if key not in _functions:
        compiled = get_binary(loadable(source, device))
        with uncaptured():
            _functions[key] = load_function(compiled.cubin, compiled.name, compiled.shared), compiled
    return _functions[key]


def prepare_launch(
    source: KernelSource, device: int, stream: int, values: Mapping[str, Value], *, dependent: bool
) -> Launch:
    """A launch with all arguments set; pass 0 for a pointer or a tensor map that is set later."""
    handle, compiled = load_kernel(source, device)
    parameters: list[tuple[str, bytes]] = []
    maps: dict[str, Mapping[str, object]] = {}
    descs = iter(compiled.descs)
    for name, kind in source.arguments:
        value = values[name]
        if isinstance(kind, Desc):
            maps[name] = facts = next(descs)
            shape, strides, encoded = kind.box, kind.box, bytes(MAP_BYTES)
            if isinstance(value, MappedMatrix):
                shape, strides, encoded = value.shape, value.strides, _encode(value, facts)
            parameters.append((name, encoded))
            parameters += [(f"{name}.shape", struct.pack("i", side)) for side in shape]
            parameters += [(f"{name}.stride", struct.pack("q", stride)) for stride in strides]
        elif kind.startswith("*"):
            parameters.append((name, struct.pack("Q", value)))
        else:
            parameters.append((name, struct.pack("f" if kind == "fp32" else "i", value)))
    return Launch(handle, compiled.threads, compiled.shared, stream, [*parameters, *_SCRATCH], dependent, maps)


def encode_tensor_map(launch: Launch, name: str, matrix: MappedMatrix) -> bytes:
    """The bytes of a tensor-map argument of `launch` that points at `matrix`."""
    return _encode(matrix, launch.maps[name])


def _encode(matrix: MappedMatrix, facts: Mapping[str, object]) -> bytes:
    buffer = ctypes.create_string_buffer(MAP_BYTES + 64)
    aligned = -(-ctypes.addressof(buffer) // 64) * 64
    box, item, swizzle = facts["block_size"], facts["elem_size"], facts["swizzle"]
    assert isinstance(box, list) and isinstance(item, int) and isinstance(swizzle, int)
    encode_map(matrix.pointer, item, matrix.shape, matrix.strides, tuple(box), swizzle, aligned)
    return ctypes.string_at(aligned, MAP_BYTES)
