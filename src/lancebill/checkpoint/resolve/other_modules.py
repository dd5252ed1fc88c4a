"""Quantised modules outside the experts: attention, shared experts, whatever else a format covers.

They are found by asking the format about every module the files have, and presented as projections
so that the loader reads them like any expert's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from lancebill.checkpoint.load.load_experts import Reader
from lancebill.checkpoint.resolve.manifest import Manifest, Projection, StoredPart
from lancebill.errors import LancebillError, MissingTensor, UnsupportedFormat, WrongShape
from lancebill.formats import axes as ax
from lancebill.formats import detect
from lancebill.formats.base import FLOATS, Module, Part, Scheme
from lancebill.formats.stored import Config, Stored
from lancebill.numbers.spec import ALL

DEPTH = 3  # dots in the longest suffix a format spells: `.weight.quant_state.<kind>`
ROWS_AT_ONCE = 1 << 24  # weights of a chunk


@dataclass(frozen=True)
class OtherModule(Projection):
    """A quantised [n, k] module that belongs to no expert."""

    @property
    def where(self) -> str:
        return f"module {self.module}"


def quantized_modules(manifest: Manifest, tensors: Mapping[str, Stored], read: Reader) -> list[OtherModule]:
    """Every module outside the experts that its format says is quantised; only headers are read, and
    the small tensors in which some formats tell a matrix's size."""
    if manifest.config.method is None:
        return []
    found = []
    for name, owned in _candidates(tensors, manifest.expert_tensors).items():
        module = Module(name, {suffix: tensors[tensor] for suffix, tensor in owned.items()})
        scheme = _scheme(manifest, module)
        if scheme is not None and scheme.spec.quantized and _has_codes(scheme, module):
            found.append(_resolve(scheme, module, owned, read))
    return found


def find_module(config: Config, tensors: Mapping[str, Stored], read: Reader, name: str) -> OtherModule:
    """One module by its name, quantised or not."""
    owned = {t[len(name) :]: t for t in tensors if t == name or t.startswith((f"{name}.", f"{name}_"))}
    if not owned:
        raise MissingTensor("no tensor is stored under this module", where=f"module {name}")
    module = Module(name, {suffix: tensors[tensor] for suffix, tensor in owned.items()})
    return _resolve(detect(config).scheme(config, module), module, owned, read)


def row_chunks(module: OtherModule) -> Iterator[tuple[int, OtherModule]]:
    """(first row, that part of the module), small enough to dequantise in little memory.

    A part of a matrix is to the loader what one half of a fused matrix is.
    """
    sides = [level.block[0] for level in module.scheme.spec.levels if level.block[0] != ALL]
    multiple = max(sides, default=1)
    rows = max(1, ROWS_AT_ONCE // (module.k * multiple)) * multiple
    for first in range(0, module.n, rows):
        yield first, replace(module, n=min(rows, module.n - first), first=first)


def _candidates(tensors: Mapping[str, Stored], experts: frozenset[str]) -> dict[str, dict[str, str]]:
    """For every name that could be a module's: the tensors below it, by suffix."""
    below: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        if tensor in experts:
            continue
        words = tensor.split(".")
        for length in range(max(1, len(words) - DEPTH), len(words)):
            name = ".".join(words[:length])
            below.setdefault(name, {})[tensor[len(name) :]] = tensor
    return below


def _scheme(manifest: Manifest, module: Module) -> Scheme | None:
    """What the format says of a module. Where it cannot say, that matters only if the module's own
    tensors are not plain floats."""
    try:
        return manifest.format.scheme(manifest.config, module)
    except LancebillError:
        own = [stored for suffix, stored in module.stored.items() if suffix.count(".") == 1]
        if all(stored.dtype in FLOATS for stored in own):
            return None
        raise


def _has_codes(scheme: Scheme, module: Module) -> bool:
    part = scheme.part("codes")
    return part is not None and any(module.has(s) and module.stored[s].dtype in part.dtypes for s in part.suffix)


def _resolve(scheme: Scheme, module: Module, owned: Mapping[str, str], read: Reader) -> OtherModule:
    where = f"module {module.name}"
    held: dict[str, tuple[Part, str]] = {}
    for part in scheme.parts:
        suffix = next((s for s in part.suffix if module.has(s)), None)
        if suffix is not None:
            held[part.role] = part, suffix
        elif not part.optional:
            expected = module.name + part.suffix[0]
            raise MissingTensor(f"'{part.role}' is missing", where=where, expected=expected)
    n, k = _size(scheme, module, held, owned, read)
    sources = {}
    for role, (part, suffix) in held.items():
        stored = module.stored[suffix]
        shapes = zip(part.axes, part.shapes(n, k, stored.dtype))
        fitting = next((axes for axes, shape in shapes if ax.fits(shape, stored.shape)), None)
        if fitting is None or stored.dtype not in part.dtypes:
            raise WrongShape(
                f"'{role}' in {owned[suffix]}",
                where=where,
                expected=f"{part.shapes(n, k, part.dtypes[0])} of {', '.join(part.dtypes)}",
                got=f"{list(stored.shape)} of {stored.dtype}",
            )
        sources[role] = StoredPart(owned[suffix], part, fitting, stored.dtype, None, False)
    return OtherModule(-1, -1, "weight", module.name, scheme, n, k, sources, n)


def _size(
    scheme: Scheme, module: Module, held: Mapping[str, tuple[Part, str]], owned: Mapping[str, str], read: Reader
) -> tuple[int, int]:
    """N and K: told by a stored tensor, or following from the shapes of the parts."""

    def stored(role: str) -> Tensor | None:
        return read(owned[held[role][1]], ()) if role in held else None

    told = scheme.told_size(stored)
    if told is not None:
        return told
    known: dict[str, int] = {}
    for part, suffix in held.values():
        header = module.stored[suffix]
        for axes in part.axes:
            if len(ax.parse(axes)) == len(header.shape) and header.dtype in part.dtypes:
                known = {**ax.infer(axes, header.shape, part.ratio(header.dtype)), **known}
                break
    if "n" not in known or "k" not in known:
        raise UnsupportedFormat("the stored tensors do not tell the size of this module", where=f"module {module.name}")
    return known["n"], known["k"]
