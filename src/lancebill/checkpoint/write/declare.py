"""Names, dtypes and shapes of the tensors that a conversion writes, before it has any of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from lancebill.checkpoint.resolve.other_modules import OtherModule
from lancebill.checkpoint.resolve.stored_layer import Projection
from lancebill.checkpoint.write.output import Output
from lancebill.errors import CannotEncode
from lancebill.formats import axes as ax
from lancebill.formats.base import Scheme
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.numbers.codec import quantize
from lancebill.numbers.spec import ALL, QuantSpec

PROBE = 256  # rows and minimum columns of the matrix that is encoded to learn what a scheme writes


def declare(output: Output, tensors: Mapping[str, Stored]) -> None:
    """Add every tensor that will be written to `output.tensors`."""
    for module in output.dequantized:
        _declare_module(output, module, output.plain_scheme, tensors)
    for module in output.recast:
        _declare_module(output, module, output.scheme, tensors)
    for written in output.rest:
        _check_groups(written.scheme.spec, written.module)
        _declare_module(output, written.module, written.scheme, tensors)
    for job in output.jobs:
        n = sum(p.n for p in job.sources)
        k = job.sources[0].k
        _check_groups(output.target.spec, job.sources[0])
        parts = dict(_encoded(output.scheme, n, k))
        if job.bias:
            parts["bias"] = replace(_bias(job.sources[0], tensors), shape=(n,))
        for role, stored in parts.items():
            name, expert = output.place(job, role)
            shape = stored.shape[::-1] if output.flipped(job, role) else stored.shape
            if expert is not None:
                flat = job.form.flat and shape
                shape = (job.experts * shape[0], *shape[1:]) if flat else (job.experts, *shape)
            output.tensors[name] = Stored(stored.dtype, shape)


def _check_groups(spec: QuantSpec, projection: Projection) -> None:
    if not divides(spec, projection.k):
        raise CannotEncode(
            f"rows of length {projection.k} do not consist of whole groups of {spec}",
            where=projection.where,
            expected=f"a group size that divides {projection.k}: {', '.join(map(str, _groups(projection.k)))}",
            hint=f"int4-g{_groups(projection.k)[0]}, or a scale for each row or block: int4, fp8-channel, fp8-block",
        )


def _declare_module(output: Output, module: OtherModule, scheme: Scheme, tensors: Mapping[str, Stored]) -> None:
    parts = dict(_encoded(scheme, module.n, module.k))
    if "bias" in module.sources:
        parts["bias"] = _bias(module, tensors)
    for role, stored in parts.items():
        part = scheme.part(role)
        if part is None:
            raise CannotEncode(f"this format cannot store '{role}'", where=module.where)
        output.tensors[module.module + part.suffix[0]] = stored


def _bias(projection: Projection, tensors: Mapping[str, Stored]) -> Stored:
    return Stored(tensors[projection.sources["bias"].tensor].dtype, (projection.n,))


@lru_cache(maxsize=64)
def _encoded(scheme: Scheme, n: int, k: int) -> Mapping[str, Stored]:
    """Dtypes and shapes of the tensors that `scheme` writes for an [n, k] matrix.

    Encodes a small matrix of zeros to see which tensors the scheme writes and which of its allowed axes they have.
    Where a tensor's size does not follow from its axes, a matrix of full size is encoded.
    """
    side = math.lcm(PROBE, *(level.block[1] or 1 for level in scheme.spec.levels))
    small = scheme.encode(quantize(torch.zeros(PROBE, side, dtype=torch.float32, device="cpu"), scheme.spec))
    declared = {}
    for role, tensor in small.items():
        part, dtype = scheme.part(role), DTYPE_NAMES[tensor.dtype]
        assert part is not None
        axes = next(a for a in part.axes if ax.fits(ax.shape(a, PROBE, side, part.ratio(dtype)), tuple(tensor.shape)))
        declared[role] = Stored(dtype, ax.shape(axes, n, k, part.ratio(dtype)))
    if any(ax.ANY in stored.shape for stored in declared.values()):
        full = scheme.encode(quantize(torch.zeros(n, k, dtype=torch.float32, device="cpu"), scheme.spec))
        return {role: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for role, t in full.items()}
    return declared


def _groups(k: int) -> list[int]:
    return [size for size in (16, 32, 64, 128, 256, 512) if k % size == 0] or [math.gcd(k, 128)]


def divides(spec: QuantSpec, k: int) -> bool:
    """Whether rows of length `k` consist of whole groups. Blocks of several rows may be partial."""
    return all(level.block[0] != 1 or level.block[1] == ALL or k % level.block[1] == 0 for level in spec.levels)
