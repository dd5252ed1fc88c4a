"""Everything outside the experts that is quantised stays packed: attention, shared experts, `lm_head`, embeddings.

transformers has put a `StoredMatrix` into each module whose matrix is stored quantised. Linear modules become
`QuantizedLinear`, embeddings `PackedEmbedding`; anything else, and what no backend computes faster than torch computes
plain matrices, is dequantised, with one warning.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lancebill.checkpoint.resolve.naming import find_family
from lancebill.errors import LancebillError, SpecError
from lancebill.integrations.transformers.mixed_linear import MixedLinear
from lancebill.integrations.transformers.packed_embedding import PackedEmbedding
from lancebill.integrations.transformers.packed_experts import packed_experts
from lancebill.integrations.transformers.stored_matrix import StoredMatrix, StoredMixture
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.recipe import LoadOptions
from lancebill.layer.rules import check_patterns, rest_activation, rest_weight
from lancebill.numbers.codec import quantize, requantize
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight

log = logging.getLogger("lancebill")

_MERGED = "the model has them merged, divided or transposed"
_OTHER_MODULE = "their modules compute with a plain matrix in a way of their own"
_REPLACED = (nn.Linear.forward, nn.Embedding.forward)  # a subclass with a forward of its own computes something else


@dataclass(frozen=True)
class RestRules:
    """What `weights=` and `activations=` say about modules outside the experts."""

    weights: object = None
    activations: object = None


@dataclass(frozen=True)
class RestReport:
    """The modules outside the experts: what stays packed, and what was dequantised and why."""

    packed: dict[str, str] = field(default_factory=dict)  # module -> spec and backend
    dequantized: dict[str, str] = field(default_factory=dict)  # module -> reason, one or more lines
    bytes: int = 0  # packed bytes
    specs: dict[str, QuantSpec] = field(default_factory=dict)  # packed linear module -> spec
    requantized: tuple[str, ...] = ()  # modules that no longer have the checkpoint's numbers
    not_quantised: str = ""  # the dtype of what is not quantised, and why it is not the one that was stored

    def __str__(self) -> str:
        lines = [f"other modules: {self.bytes / 2**20:.1f} MiB packed"]
        lines += [f"  {count} x {kind}" for kind, count in Counter(self.packed.values()).items()]
        lines += [f"  {len(names)} dequantised: {_first_line(why)}" for why, names in self._reasons().items()]
        return "\n".join([*lines, f"  what is not quantised: {self.not_quantised}"] if self.not_quantised else lines)

    def warn_of_dequantized(self) -> None:
        """One warning that names them all, with the reasons."""
        if not self.dequantized:
            return
        lines = [f"{len(self.dequantized)} quantised matrices outside the experts are computed as plain ones"]
        for why, names in self._reasons().items():
            lines += [f"  {', '.join(_kinds(names))}:", *(f"    {line}" for line in why.splitlines())]
        log.warning("%s", "\n".join(lines))

    def _reasons(self) -> dict[str, list[str]]:
        """The modules that were dequantised, by reason."""
        found: dict[str, list[str]] = {}
        for name, why in self.dequantized.items():
            found.setdefault(why, []).append(name)
        return found


def _first_line(text: str) -> str:
    return text.splitlines()[0]


def _kinds(names: Sequence[str]) -> list[str]:
    """Names that differ in their numbers only are one pattern."""
    counted = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [kind if count == 1 else f"{count} x {kind}" for kind, count in counted.items()]


def pack_rest(model: nn.Module, options: LoadOptions, rules: RestRules, read: Collection[str] = ()) -> RestReport:
    """Replace every module whose matrix is stored quantised, or is to be quantised by a rule.

    `read` names the quantised modules that transformers has read from the checkpoint: where the model has no quantised
    matrix now, it was dequantised on the way.
    """
    report = RestReport()
    kept = {each.name for _, _, each in _parameters(model) if isinstance(each, StoredMatrix)}
    report.dequantized.update(dict.fromkeys(sorted(set(read) - kept), _MERGED))
    routers = _routers(model)
    for each in (rules.weights, rules.activations):
        check_patterns(each, [name for name, module in model.named_modules() if isinstance(module, nn.Linear)])
    made: list[nn.Module] = []
    linears: list[str] = []
    requantized: list[str] = []
    for name, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None or type(module).forward not in _REPLACED:
            continue
        target = None if name in routers or isinstance(module, nn.Embedding) else rest_weight(rules.weights, name)
        if target is None and not isinstance(weight, StoredMatrix):
            continue
        linears += [] if isinstance(module, nn.Embedding) else [name]
        try:
            packed: nn.Module
            if isinstance(module, nn.Embedding):
                assert isinstance(weight, StoredMatrix)
                packed = PackedEmbedding(weight.stored, weight.dtype)
                report.packed[name] = f"{weight.stored.spec}, rows looked up"
            elif isinstance(weight, StoredMixture) and target is None:
                assert isinstance(module, nn.Linear)
                packed = _mixed(name, module, weight, options, rules)
                report.packed[name] = " and ".join(str(part.spec) for part in weight.rows.parts)
            else:
                assert isinstance(module, nn.Linear)
                packed = _linear(name, _quantized(weight, target), _bias(module), options, rules)
                report.packed[name] = f"{packed.problem.w13.spec} on {packed.choice.backend.name}"
                report.specs[name] = packed.problem.w13.spec
        except LancebillError as error:
            report.dequantized[name] = error.what
            continue
        made.append(packed)
        requantized += [] if target is None else [name]
        model.set_submodule(name, packed)
    _check_inputs(rules.activations, linears)
    left = sorted(_dequantize_left(model) - report.dequantized.keys())
    report.dequantized.update(dict.fromkeys(left, _OTHER_MODULE))
    size = sum(t.nbytes for module in made for t in module.parameters())
    report.warn_of_dequantized()
    return replace(report, bytes=size, requantized=tuple(requantized))


def _check_inputs(rules: object, linears: Sequence[str]) -> None:
    """Raise if a rule quantises the inputs of no module: without quantised weights inputs stay as they are."""
    for pattern, value in rules.items() if isinstance(rules, Mapping) else [("*", rules)]:
        kind = rest_activation(value, pattern)
        if kind is not None and kind.spec.quantized and not any(fnmatchcase(name, pattern) for name in linears):
            what = (
                f"no module outside the experts that this rule matches has quantised weights: {kind} inputs need them"
            )
            raise SpecError(
                what, where="activations", got={"rest": rules}, hint='weights={"rest": "int8"} quantises them'
            )


def _bias(module: nn.Linear) -> Tensor | None:
    return None if module.bias is None else module.bias.detach()


def _mixed(name: str, module: nn.Linear, weight: StoredMixture, options: LoadOptions, rules: RestRules) -> MixedLinear:
    parts = [_linear(name, part, None, options, rules) for part in weight.rows.parts]
    return MixedLinear(parts, weight.rows.order, _bias(module))


def _linear(
    name: str, weight: LogicalWeight, bias: Tensor | None, options: LoadOptions, rules: RestRules
) -> QuantizedLinear:
    return QuantizedLinear.from_weight(
        replace(weight, bias=bias),
        device=options.device,
        backend=options.backend,
        activations=rest_activation(rules.activations, name),
        dtype=options.dtype,
        order=options.order,
        where=name,
        refuse_slow=True,
    )


def _quantized(weight: Tensor, target: QuantSpec | None) -> LogicalWeight:
    if not isinstance(weight, StoredMatrix):
        assert target is not None
        return quantize(weight.detach().float(), target)
    if isinstance(weight, StoredMixture):
        assert target is not None
        return weight.rows.requantized(target)
    return weight.stored if target is None else requantize(weight.stored, target)[0]


def _routers(model: Any) -> set[str]:
    """Linear modules that choose and are not quantised: routers, wherever the family has them, and what is beside the
    experts, such as gates of shared experts."""
    blocks = {name.rpartition(".")[0] for name, _ in packed_experts(model)}
    beside = {
        f"{block}.{name}"
        for block in blocks
        for name, module in model.get_submodule(block).named_children()
        if isinstance(module, nn.Linear)
    }
    routers = [row.router for row in find_family(model.config.to_dict()).mixtures]
    names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return beside | {n for n in names if any(router.gate_layer(f"{n}.weight") is not None for router in routers)}


def _dequantize_left(model: nn.Module) -> set[str]:
    """Make plain parameters of the matrices that no packed module took; tied ones stay tied. Returns their modules."""
    plain: dict[int, nn.Parameter] = {}
    left = set()
    for place, name, parameter in _parameters(model):
        if isinstance(parameter, StoredMatrix):
            left.add(place if name == "weight" else f"{place}.{name}")
            if id(parameter) not in plain:
                plain[id(parameter)] = nn.Parameter(parameter.plain(), requires_grad=False)
            model.get_submodule(place)._parameters[name] = plain[id(parameter)]
    return left


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Module, name and value of each."""
    for place, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield place, name, parameter
