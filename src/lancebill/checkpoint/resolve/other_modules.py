"""Quantised modules outside the routed experts: attention, shared experts and so on.

Every module of the files is checked against the format. Quantised ones become projections, so that the loader reads
them like those of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.stored_layer import Projection, StoredPart
from lancebill.errors import LancebillError, MissingTensor, UnsupportedFormat, WrongShape
from lancebill.formats import axes as ax
from lancebill.formats import detect
from lancebill.formats.base import FLOATS, Module, Part, Scheme
from lancebill.formats.stored import Config, Stored
from lancebill.numbers.spec import ALL

MAX_SUFFIX_DOTS = 3  # the longest suffix in use is `.weight.quant_state.<kind>`
CHUNK_WEIGHTS = 1 << 24  # weights dequantised at a time


@dataclass(frozen=True)
class OtherModule(Projection):
    """A quantised [n, k] module that belongs to no expert."""

    @property
    def where(self) -> str:
        return f"module {self.module}"


def quantized_modules(manifest: Manifest, tensors: Mapping[str, Stored], read: Reader) -> list[OtherModule]:
    """Every quantised module outside the experts.

    Reads headers only, and the small tensors in which some formats store the size of a matrix.
    """
    if manifest.config.method is None:
        return []
    modules = []
    for name, names_by_suffix in _candidates(tensors, manifest.expert_tensors).items():
        module = Module(name, {suffix: tensors[tensor] for suffix, tensor in names_by_suffix.items()})
        scheme = _scheme(manifest, module)
        if scheme is not None and scheme.spec.quantized and _has_codes(scheme, module):
            modules.append(_resolve(scheme, module, names_by_suffix, read))
    return modules


def find_module(config: Config, tensors: Mapping[str, Stored], read: Reader, name: str) -> OtherModule:
    """One module by its name, quantised or not."""
    names_by_suffix = {t[len(name) :]: t for t in tensors if t == name or t.startswith((f"{name}.", f"{name}_"))}
    if not names_by_suffix:
        raise MissingTensor("no tensor is stored for this module", where=f"module {name}")
    module = Module(name, {suffix: tensors[tensor] for suffix, tensor in names_by_suffix.items()})
    return _resolve(detect(config).scheme(config, module), module, names_by_suffix, read)


def row_chunks(module: OtherModule) -> Iterator[tuple[int, OtherModule]]:
    """(first row, a chunk of the module's rows), so that dequantising takes little memory.

    The loader reads a chunk of rows in the same way as one half of a fused matrix.
    """
    sides = [level.block[0] for level in module.scheme.spec.levels if level.block[0] != ALL]
    multiple = max(sides, default=1)
    rows = max(1, CHUNK_WEIGHTS // (module.k * multiple)) * multiple
    for first in range(0, module.n, rows):
        yield first, replace(module, n=min(rows, module.n - first), first=first)


def _candidates(tensors: Mapping[str, Stored], experts: frozenset[str]) -> dict[str, dict[str, str]]:
    """For every possible module name: the tensors below it, by suffix."""
    below: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        if tensor in experts:
            continue
        words = tensor.split(".")
        for length in range(max(1, len(words) - MAX_SUFFIX_DOTS), len(words)):
            name = ".".join(words[:length])
            below.setdefault(name, {})[tensor[len(name) :]] = tensor
    return below


def _scheme(manifest: Manifest, module: Module) -> Scheme | None:
    """The module's scheme. If the format rejects it, that is an error unless its tensors are plain floats."""
    try:
        return manifest.format.scheme(manifest.config, module)
    except LancebillError:
        direct = [stored for suffix, stored in module.stored.items() if suffix.count(".") == 1]
        if all(stored.dtype in FLOATS for stored in direct):
            return None
        raise


def _has_codes(scheme: Scheme, module: Module) -> bool:
    part = scheme.part("codes")
    return part is not None and any(module.has(s) and module.stored[s].dtype in part.dtypes for s in part.suffix)


def _resolve(scheme: Scheme, module: Module, names_by_suffix: Mapping[str, str], read: Reader) -> OtherModule:
    where = f"module {module.name}"
    parts: dict[str, tuple[Part, str]] = {}
    for part in scheme.parts:
        suffix = next((s for s in part.suffix if module.has(s)), None)
        if suffix is not None:
            parts[part.role] = part, suffix
        elif not part.optional:
            expected = module.name + part.suffix[0]
            raise MissingTensor(f"'{part.role}' is missing", where=where, expected=expected)
    n, k = _size(scheme, module, parts, names_by_suffix, read)
    sources = {}
    for role, (part, suffix) in parts.items():
        stored = module.stored[suffix]
        shapes = zip(part.axes, part.shapes(n, k, stored.dtype))
        fitting = next((axes for axes, shape in shapes if ax.fits(shape, stored.shape)), None)
        if fitting is None or stored.dtype not in part.dtypes:
            raise WrongShape(
                f"'{role}' in {names_by_suffix[suffix]}",
                where=where,
                expected=f"{part.shapes(n, k, part.dtypes[0])} of {', '.join(part.dtypes)}",
                got=f"{list(stored.shape)} of {stored.dtype}",
            )
        sources[role] = StoredPart(names_by_suffix[suffix], part, fitting, stored.dtype, None, False)
    return OtherModule(-1, -1, "weight", module.name, scheme, n, k, sources, n)


def _size(
    scheme: Scheme,
    module: Module,
    parts: Mapping[str, tuple[Part, str]],
    names_by_suffix: Mapping[str, str],
    read: Reader,
) -> tuple[int, int]:
    """N and K: from a tensor that stores them, else from the shapes of the parts."""

    def stored(role: str) -> Tensor | None:
        return read(names_by_suffix[parts[role][1]], ()) if role in parts else None

    size = scheme.stored_size(stored)
    if size is not None:
        return size
    inferred: dict[str, int] = {}
    for part, suffix in parts.values():
        header = module.stored[suffix]
        for axes in part.axes:
            if len(ax.parse(axes)) == len(header.shape) and header.dtype in part.dtypes:
                inferred = {**ax.infer(axes, header.shape, part.ratio(header.dtype)), **inferred}
                break
    if "n" not in inferred or "k" not in inferred:
        raise UnsupportedFormat(
            "the size of this module does not follow from its tensors", where=f"module {module.name}"
        )
    return inferred["n"], inferred["k"]
