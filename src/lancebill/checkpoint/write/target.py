"""Plan the output of a conversion from metadata alone: format, spec, names, shapes, config.

The whole output is declared, read back as a manifest and checked before the first tensor is read. A conversion that
starts can then fail only on bad data or lack of disk space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from lancebill.checkpoint.read.config import QUANT_SECTIONS
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.manifest import Manifest, Projection, StoredLayer
from lancebill.checkpoint.resolve.naming import DOWN, GATE, GATE_UP, UP, NameForm, Naming
from lancebill.checkpoint.resolve.orientation import is_matrix_like
from lancebill.checkpoint.resolve.other_modules import OtherModule
from lancebill.checkpoint.write.rest import RestModule, WrittenModule, add_rest, keeps_spec
from lancebill.checkpoint.write.variants import first_that_holds
from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats import axes as ax
from lancebill.formats import registry
from lancebill.formats.base import FLOATS, Format, Module, Part, Scheme
from lancebill.formats.stored import DTYPE_NAMES, Config, Stored
from lancebill.numbers.codec import quantize, recasts
from lancebill.numbers.spec import ALL, DENSE_BF16, QuantSpec
from lancebill.numbers.weight import FACTORS

DEFAULT_FORMAT, DENSE_FORMAT = "compressed-tensors", "dense"
ALIASES = {"gpt-oss": "mxfp4"}
GGUF = "gguf"
# GGUF architectures and the families whose tensor names their output uses.
ARCHITECTURES = {
    "llama": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "qwen3vlmoe": "qwen3_vl_moe",
    "olmoe": "olmoe", "deepseek2": "deepseek_v3", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss", "llama4": "llama4",
    "minimax-m2": "minimax_m2", "nemotron_h_moe": "nemotron_h", "phimoe": "phimoe", "jamba": "jamba",
    "dbrx": "dbrx", "granitemoe": "granitemoe",
}  # fmt: skip
PROBE = 256  # rows and minimum columns of the matrix that is encoded to learn what a scheme writes


@dataclass(frozen=True)
class Target:
    """The output format, and the spec as this format stores it."""

    format: Format
    spec: QuantSpec

    def scheme(self) -> Scheme:
        return self.format.config_for(self.spec, ())[1]


def choose_target(spec: QuantSpec, name: str | None = None) -> Target:
    """The format called `name`, or the default one, with `spec` as it stores it."""
    name = ALIASES.get(name or "", name) or (DEFAULT_FORMAT if spec.quantized else DENSE_FORMAT)
    formats = registry()
    if name not in formats:
        raise UnsupportedFormat(f"unknown format '{name}'", expected=f"for {spec}: {_able(spec)}")
    try:
        return _hold(formats[name], spec)
    except CannotEncode as error:
        able = _able(spec)
        hint = f"formats that can store {spec}: {able}" if able else error.hint
        raise CannotEncode(error.what, where=name, expected=error.expected, got=spec, hint=hint) from error


def _able(spec: QuantSpec) -> str:
    """The formats that can store `spec`."""
    public_names = {format_name: alias for alias, format_name in ALIASES.items()}
    return ", ".join(public_names.get(name, name) for name, format in registry().items() if _can_hold(format, spec))


def _hold(format: Format, spec: QuantSpec) -> Target:
    return Target(format, first_that_holds(spec, lambda variant: format.config_for(variant, ()))[0])


def _can_hold(format: Format, spec: QuantSpec) -> bool:
    try:
        _hold(format, spec)
    except CannotEncode:
        return False
    return True


# What is written where -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One output module and its source projections (two for a fused gate and up)."""

    layer: int
    expert: int
    experts: int  # of the layer, or of its mixture
    form: NameForm
    stored: str
    module: str
    sources: tuple[Projection, ...]

    @property
    def bias(self) -> bool:
        return "bias" in self.sources[0].sources


@dataclass(frozen=True)
class Output:
    """The whole output: the config, every tensor, and the jobs that write them."""

    target: Target
    config: dict[str, Any]
    scheme: Scheme
    plain_scheme: Scheme  # for modules that are dequantised
    tensors: dict[str, Stored]
    jobs: tuple[Job, ...]
    copied: tuple[str, ...]
    recast: tuple[OtherModule, ...]
    dequantized: tuple[OtherModule, ...]
    rest: tuple[WrittenModule, ...] = ()  # modules outside the experts with specs of their own

    def place(self, job: Job, role: str) -> tuple[str, int | None]:
        """The tensor that stores a part of a job's module, and the expert's index in it if stacked."""
        part = self.scheme.part(role)
        assert part is not None
        return job.module + _suffix(part, job.form, self.target.format), job.expert if job.form.stacked else None

    def flipped(self, job: Job, role: str) -> bool:
        part = self.scheme.part(role)
        return part is not None and job.stored in job.form.transposed and is_matrix_like(part.axes[0])


def plan_output(
    manifest: Manifest,
    target: Target,
    tensors: Mapping[str, Stored],
    others: Sequence[OtherModule] = (),
    *,
    rest: Iterable[RestModule] = (),
    experts_only: bool = False,
) -> Output:
    """Plan the whole output; `others` are the quantised modules outside the experts, `rest` what a model made of
    some modules."""
    naming = _family(manifest)
    jobs = tuple(_jobs(manifest, naming, target))
    format = target.format if target.spec.quantized else registry()[DEFAULT_FORMAT]
    rest = [r for r in rest if not r.as_stored or keeps_spec(format, r)]
    others = [module for module in others if module.module not in {r.module.module for r in rest}]
    reencoded = {source.tensor for module in others for source in module.sources.values()}
    reencoded = reencoded.union(*(r.replaced for r in rest))
    copied = [] if experts_only else [n for n in tensors if n not in manifest.expert_tensors and n not in reencoded]
    written = [] if experts_only else list(others)
    exact = [m for m in written if _stays_quantized(m, target)]
    plain = [m for m in written if m not in exact]
    ignored = [*_dense_modules(copied, tensors), *(m.module for m in plain)] if target.spec.quantized else []
    quant, scheme = target.format.config_for(target.spec, ignored)
    quant, written_rest = add_rest(format, quant, scheme, rest)
    plain_spec = DENSE_BF16 if target.spec.quantized else target.spec
    output = Output(
        target,
        _config(manifest, naming, quant, untied=any(r.tied for r in rest)),
        scheme,
        registry()[DENSE_FORMAT].config_for(plain_spec, ())[1],
        {name: tensors[name] for name in copied},
        jobs,
        tuple(copied),
        tuple(exact),
        tuple(plain),
        written_rest,
    )
    _declare(output, tensors)
    _check(output, quant)
    return output


def _family(manifest: Manifest) -> Naming:
    """The naming row of the output: that of the source, or for GGUF that of its architecture."""
    if manifest.naming.family != GGUF:
        return manifest.naming
    architecture = manifest.config.model.get("architecture")
    family = ARCHITECTURES.get(str(architecture))
    if family is None:
        raise UnsupportedFormat(
            f"unknown GGUF architecture '{architecture}'",
            expected=", ".join(sorted(ARCHITECTURES)),
        )
    return next(row for row in names.TABLE if row.family == family)


def _form(manifest: Manifest, naming: Naming, target: Target) -> NameForm:
    """The naming form of the experts: stacked if the format stacks them, that of the source if they stay unquantised,
    else one set of tensors per expert."""
    source = next(iter(manifest.layers.values())).form
    foreign = naming is not manifest.naming
    if target.format.stacked:
        able = [f for f in naming.forms if f.stacked and not f.flat and f.gated == source.gated]
        if not able:
            raise CannotEncode(
                f"{target.format.name} stacks experts, and the family '{naming.family}' cannot name stacked tensors",
                where=target.format.name,
            )
        return able[0]
    if not foreign and (not target.spec.quantized or not (source.stacked or source.fused)):
        return source
    return next(f for f in naming.forms if not f.stacked and not f.fused and f.gated == source.gated)


def _jobs(manifest: Manifest, naming: Naming, target: Target) -> Iterator[Job]:
    """Every module of every expert, of all mixtures."""
    for one, row in zip(manifest.mixtures, naming.mixtures):
        form = _form(one, row, target)
        for layer in one.layers.values():
            yield from _layer_jobs(layer, form)


def _layer_jobs(layer: StoredLayer, form: NameForm) -> Iterator[Job]:
    prefix = layer.prefix if layer.prefix in form.prefixes and layer.form.prefixes == form.prefixes else _prefix(form)
    for expert in range(layer.experts):
        for stored in form.names:
            parts = (GATE, UP) if stored == GATE_UP else (stored,)
            sources = tuple(layer.projections[expert, part] for part in parts)
            module = form.module(prefix, layer.index, expert, stored)
            yield Job(layer.index, expert, layer.experts, form, stored, module, sources)


def _prefix(form: NameForm) -> str:
    return "model." if "model." in form.prefixes else form.prefixes[0]


def _suffix(part: Part, form: NameForm, format: Format) -> str:
    """The suffix of a part: formats that can also stack list the suffix of stacked tensors last."""
    return part.usual_suffix(form.stacked and not format.stacked)


def _dense_modules(copied: Iterable[str], tensors: Mapping[str, Stored]) -> list[str]:
    """Matrices that stay unquantised: the config must list them, or engines would look for their scales."""
    return [
        name.removesuffix(".weight")
        for name in copied
        if name.endswith(".weight") and len(tensors[name].shape) == 2 and tensors[name].dtype in FLOATS
    ]


def _stays_quantized(module: OtherModule, target: Target) -> bool:
    """Whether a module outside the experts can be stored in the target's spec without changing a value."""
    if not target.spec.quantized or target.format.stacked or module.scheme.act_order:
        return False
    if not divides(target.spec, module.k) or FACTORS in module.sources:
        return False
    return recasts(module.scheme.spec, target.spec)


def divides(spec: QuantSpec, k: int) -> bool:
    """Whether rows of length `k` consist of whole groups. Blocks of several rows may be partial."""
    return all(level.block[0] != 1 or level.block[1] == ALL or k % level.block[1] == 0 for level in spec.levels)


# Names and shapes ------------------------------------------------------------------------------------


def _declare(output: Output, tensors: Mapping[str, Stored]) -> None:
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
    small = scheme.encode(quantize(torch.zeros(PROBE, side), scheme.spec))
    declared = {}
    for role, tensor in small.items():
        part, dtype = scheme.part(role), DTYPE_NAMES[tensor.dtype]
        assert part is not None
        axes = next(a for a in part.axes if ax.fits(ax.shape(a, PROBE, side, part.ratio(dtype)), tuple(tensor.shape)))
        declared[role] = Stored(dtype, ax.shape(axes, n, k, part.ratio(dtype)))
    if any(ax.ANY in stored.shape for stored in declared.values()):
        full = scheme.encode(quantize(torch.zeros(n, k), scheme.spec))
        return {role: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for role, t in full.items()}
    return declared


def _groups(k: int) -> list[int]:
    return [size for size in (16, 32, 64, 128, 256, 512) if k % size == 0] or [math.gcd(k, 128)]


# The config ------------------------------------------------------------------------------------------


def _config(manifest: Manifest, naming: Naming, quant: Mapping[str, Any], *, untied: bool) -> dict[str, Any]:
    """The model's config with its quantisation section replaced; if `untied`, no two modules share a matrix."""
    stale = {*QUANT_SECTIONS, *manifest.format.model_keys}
    model = {key: value for key, value in manifest.config.model.items() if key not in stale}
    text = model.get("text_config")
    if isinstance(text, Mapping):
        model["text_config"] = {key: value for key, value in text.items() if key not in stale}
    if naming is not manifest.naming:
        model["model_type"] = naming.model_types[0]
    for section in (model, model.get("text_config")) if untied else ():
        if isinstance(section, dict):
            section["tie_word_embeddings"] = False
    if quant:
        model["quantization_config"] = dict(quant)
    return model


def _check(output: Output, quant: Mapping[str, Any]) -> None:
    """Resolve the declared output like any checkpoint, before anything is written."""
    config = Config(output.config, quant, quant.get("quant_method"))
    written, format = manifests.build(config, output.tensors), output.target.format.name
    if written.problems and written.format.name != format:
        raise CannotEncode(
            f"a model of this family with a config of {format} is read as {written.format.name}",
            where=format,
            got=output.target.spec,
            hint="choose another format",
        )
    written.check("the converted checkpoint")
    planned = {job.sources[0].where_layer for job in output.jobs}
    missing = sorted(planned - {layer.where for layer in written.stored_layers})
    wrong = [layer.where for layer in written.stored_layers if layer.spec(DOWN) != output.target.spec]
    if missing or wrong:
        raise CannotEncode(
            f"{format} cannot read back its own output",
            expected=f"{output.target.spec} in {len(planned)} layers",
            got=f"missing: {'; '.join(missing) or 'none'}, with other specs: {'; '.join(wrong) or 'none'}",
        )
    others = [(module, output.scheme) for module in output.recast] + [(r.module, r.scheme) for r in output.rest]
    for module, scheme in others:
        suffixes = [suffix for part in scheme.parts for suffix in part.suffix]
        stored = {s: output.tensors[module.module + s] for s in suffixes if module.module + s in output.tensors}
        if written.format.scheme(config, Module(module.module, stored)).spec != scheme.spec:
            raise CannotEncode("the format cannot read this module back", where=module.where)
