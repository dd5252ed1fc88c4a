"""Find experts that are stored unquantised although the config says otherwise.

Tools that quantise modules silently skip experts that are one stacked parameter. Such a checkpoint can be read:
the tensors are plain floats. But it has none of the size or speed that it was made for, and engines that believe the
config look for scales that do not exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.stored_layer import Projection, StoredLayer
from lancebill.errors import LancebillError, WrongDtype, ranges


def unquantized_experts(manifest: Manifest) -> Iterator[WrongDtype]:
    """One error for all layers with the same difference between config and tensors."""
    if manifest.config.method is None or not manifest.format.lists_dense:
        return
    layers = defaultdict(list)
    prefixes = _prefixes(manifest)
    for index, layer in manifest.layers.items():
        if (sample := _sample(layer)).scheme.spec.quantized:
            continue
        names = {prefix + sample.module.removeprefix(layer.prefix) for prefix in (layer.prefix, *prefixes)}
        specs = {_declared(manifest, name) for name in names}
        if len(specs) == 1 and None not in specs:
            layers[specs.pop(), str(sample.scheme.spec)].append(index)
    for (declared, stored), indices in layers.items():
        yield WrongDtype(
            "the experts are not quantised, but the config says that they are",
            where=f"layers {ranges(indices)}" + (f", {manifest.naming.mixture}" if manifest.naming.mixture else ""),
            expected=declared,
            got=stored,
            hint="the tool skipped the experts: quantise them, or list them in the config as not quantised",
        )


def _sample(layer: StoredLayer) -> Projection:
    return next(iter(layer.projections.values()))


def _prefixes(manifest: Manifest) -> tuple[str, ...]:
    """Prefixes under which the config declares what the quantised experts are: those of other classes of the model."""
    quantized = next((each for each in manifest.layers.values() if _sample(each).scheme.spec.quantized), None)
    if quantized is None:
        return ()
    name = _sample(quantized).module.removeprefix(quantized.prefix)
    return tuple(prefix for prefix in quantized.form.prefixes if _declared(manifest, prefix + name) is not None)


def _declared(manifest: Manifest, name: str) -> str | None:
    """The spec that the config declares for this module, whatever is stored; None if it is not quantised."""
    module = manifest.format.expert_module(manifest.config, name)
    try:
        spec = manifest.format.scheme(manifest.config, module).spec
    except LancebillError:  # the config alone does not decide it
        return None
    return str(spec) if spec.quantized else None
