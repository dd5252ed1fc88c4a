"""Everything outside the experts that is quantised stays packed: attention, shared experts, `lm_head`, embeddings.

transformers has put a `StoredMatrix` into each module whose matrix is stored quantised. Linear modules become
`QuantizedLinear`, embeddings `PackedEmbedding`; anything else, and what no fast backend computes, is dequantised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.errors import LancebillError, SpecError, UnsupportedProblem
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

_REPLACED = (nn.Linear.forward, nn.Embedding.forward)  # a subclass with a forward of its own computes something else


@dataclass(frozen=True)
class RestRules:
    """What `weights=` and `activations=` say about modules outside the experts."""

    weights: object = None
    activations: object = None


@dataclass(frozen=True)
class RestReport:
    """The modules outside the experts: what stays packed, and what was dequantised and why."""

    packed: dict[str, str] = field(default_factory=dict)  # spec and backend, by module
    dequantized: dict[str, str] = field(default_factory=dict)  # the reason, by module
    bytes: int = 0  # of what stays packed
    specs: dict[str, QuantSpec] = field(default_factory=dict)  # of what stays packed, by linear module
    requantized: tuple[str, ...] = ()  # modules with other numbers than the checkpoint's
    not_quantised: str = ""  # the dtype of what is not quantised, and why it is not the one that was stored

    def __str__(self) -> str:
        lines = [f"other modules: {self.bytes / 2**20:.1f} MiB packed"]
        lines += [f"  {count} x {kind}" for kind, count in Counter(self.packed.values()).items()]
        lines += [f"  {count} dequantised: {why}" for why, count in Counter(self.dequantized.values()).items()]
        return "\n".join([*lines, f"  what is not quantised: {self.not_quantised}"] if self.not_quantised else lines)


def pack_rest(model: nn.Module, options: LoadOptions, rules: RestRules) -> RestReport:
    """Replace every module whose matrix is stored quantised, or is to be quantised by a rule."""
    report = RestReport()
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
            report.dequantized[name] = error.what.splitlines()[0]
            continue
        made.append(packed)
        requantized += [] if target is None else [name]
        model.set_submodule(name, packed)
    _check_inputs(rules.activations, linears)
    _dequantize_left(model)
    size = sum(t.nbytes for module in made for t in module.parameters())
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
    made = QuantizedLinear.from_weight(
        replace(weight, bias=bias),
        device=options.device,
        backend=options.backend,
        activations=rest_activation(rules.activations, name),
        dtype=options.dtype,
        order=options.order,
        where=name,
    )
    if not made.choice.backend.is_fast(made.choice.problem) and options.backend == oracle.AUTO:
        raise UnsupportedProblem(f"no fast backend for {weight.spec}")
    return made


def _quantized(weight: Tensor, target: QuantSpec | None) -> LogicalWeight:
    if not isinstance(weight, StoredMatrix):
        assert target is not None
        return quantize(weight.detach().float(), target)
    if isinstance(weight, StoredMixture):
        assert target is not None
        return weight.rows.requantized(target)
    return weight.stored if target is None else requantize(weight.stored, target)[0]


def _routers(model: nn.Module) -> set[str]:
    """Linear modules beside the experts: routers and gates of shared experts, which choose and are not quantised."""
    blocks = {name.rpartition(".")[0] for name, _ in packed_experts(model)}
    return {
        f"{block}.{name}"
        for block in blocks
        for name, module in model.get_submodule(block).named_children()
        if isinstance(module, nn.Linear)
    }


def _dequantize_left(model: nn.Module) -> None:
    """Make plain parameters of the matrices that no packed module took; tied ones stay tied."""
    plain: dict[int, nn.Parameter] = {}
    for module, name, parameter in _parameters(model):
        if isinstance(parameter, StoredMatrix):
            if id(parameter) not in plain:
                plain[id(parameter)] = nn.Parameter(parameter.plain(), requires_grad=False)
            module._parameters[name] = plain[id(parameter)]


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module, name, parameter
