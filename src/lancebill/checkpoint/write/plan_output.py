"""Plan the output of a conversion from metadata alone: names, shapes, config.

The whole output is declared, read back as a manifest and checked before the first tensor is read. A conversion that
starts can then fail only on bad data or lack of disk space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lancebill.checkpoint.read.config import QUANT_SECTIONS
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.naming import DOWN, GATE, GATE_UP, UP, NameForm, Naming
from lancebill.checkpoint.resolve.other_modules import OtherModule
from lancebill.checkpoint.resolve.stored_layer import StoredLayer
from lancebill.checkpoint.write.declare import declare, divides
from lancebill.checkpoint.write.output import Job, Output
from lancebill.checkpoint.write.readers import output_form, output_prefix, why_unread
from lancebill.checkpoint.write.rest import RestModule, add_rest, keeps_spec
from lancebill.checkpoint.write.target import DEFAULT_FORMAT, DENSE_FORMAT, Target
from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats import registry
from lancebill.formats.base import FLOATS, Module
from lancebill.formats.stored import Config, Stored
from lancebill.numbers.codec import recasts
from lancebill.numbers.spec import DENSE_BF16
from lancebill.numbers.weight import FACTORS

GGUF, OUTPUT = "gguf", "lm_head"
# GGUF architectures and the families whose tensor names their output uses.
ARCHITECTURES = {
    "llama": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "qwen3vlmoe": "qwen3_vl_moe",
    "olmoe": "olmoe", "deepseek2": "deepseek_v3", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss", "llama4": "llama4",
    "minimax-m2": "minimax_m2", "nemotron_h_moe": "nemotron_h", "phimoe": "phimoe", "jamba": "jamba",
    "dbrx": "dbrx", "granitemoe": "granitemoe",
}  # fmt: skip


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
    model_type = names.known_type(manifest.config.model, naming)
    rows = _named(manifest, naming, target, model_type)
    jobs = tuple(_jobs(rows))
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
    quantized = [*(m.module for m in exact), *(r.module.module for r in rest)]
    if quantized and OUTPUT not in {name.rpartition(".")[2] for name in (*ignored, *quantized)}:
        ignored.append(OUTPUT)  # no file stores a tied one, but engines have a module for it
    quant, scheme = target.format.config_for(target.spec, ignored)
    quant, written_rest = add_rest(format, quant, scheme, rest)
    if target.spec.quantized and not quantized:
        holder = jobs[0].form.holder
        quant = target.format.leave_rest(quant, holder, [name for name in ignored if holder in name.split(".")])
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
        None if experts_only else why_unread([(row, form) for _, row, form in rows], target, model_type, copied),
    )
    declare(output, tensors)
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


_Named = tuple[Manifest, Naming, NameForm]  # a mixture of the source; the row and the form of its output


def _named(manifest: Manifest, naming: Naming, target: Target, model_type: str) -> list[_Named]:
    """How the experts of each mixture are named."""
    mixtures = list(zip(manifest.mixtures, naming.mixtures))
    samples = (next(iter(one.layers.values())) for one, _ in mixtures)
    return [(*one, output_form(one[1], sample, target, model_type)) for one, sample in zip(mixtures, samples)]


def _jobs(rows: Iterable[_Named]) -> Iterator[Job]:
    """Every module of every expert, of all mixtures."""
    for manifest, _, form in rows:
        for layer in manifest.layers.values():
            yield from _layer_jobs(layer, form)


def _layer_jobs(layer: StoredLayer, form: NameForm) -> Iterator[Job]:
    prefix = output_prefix(layer, form)
    for expert in range(layer.experts):
        for stored in form.names:
            parts = (GATE, UP) if stored == GATE_UP else (stored,)
            sources = tuple(layer.projections[expert, part] for part in parts)
            module = form.module(prefix, layer.index, expert, stored)
            yield Job(layer.index, expert, layer.experts, form, stored, module, sources)


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
