"""Types of the naming table: how a family names the tensors of its experts and of their router."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lancebill.checkpoint.resolve.expert_sizes import ExpertSizes, expert_sizes
from lancebill.errors import UnsupportedFormat, WrongShape

GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"
# Prefixes before "layers.": text models, multimodal wrappers, state-space hybrids.
PREFIXES = (
    "", "model.", "language_model.", "language_model.model.", "language.model.", "model.language_model.",
    "thinker.model.", "thinker.model.language_model.", "model.llm.", "llm.model.", "backbone.",
    "language_model.backbone.",
)  # fmt: skip

NUMBER = "0|[1-9][0-9]*"  # one spelling for each number: 00 is not 0, nor is a digit of another script
ANY_DIGITS = r"\d+"


@dataclass(frozen=True)
class NameForm:
    """One way in which a family names its expert tensors.

    `home` is the module that contains the experts; `names` are the projections below it, with `{expert}` where each
    expert has its own tensors. In stacked forms the first axis is the expert.
    """

    home: str
    names: Mapping[str, str]
    transposed: tuple[str, ...] = ()  # projections stored [K, N], block scales too
    interleaved: bool = False  # fused rows alternate gate, up, gate, up
    flat: bool = False  # experts stacked along the first matrix axis: [E*I, H]
    modules: bool = False  # stacked tensors are modules' weights (`fc1.weight`), not parameters (`gate_up_proj`)
    exclusive: bool = True  # everything below home belongs to the experts
    together: bool = False  # one numbering for all mixtures of a layer; this mixture has the experts [first, end)
    first: int = 0
    end: int | None = None
    prefixes: tuple[str, ...] = PREFIXES
    architectures: tuple[str, ...] = ()  # of GGUF files that have this form and no other; (): all others
    # Formats in which transformers loads experts with these names, and the prefixes below which it does; (): all.
    loads: tuple[str, ...] = field(default=(), compare=False)
    below: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def stacked(self) -> bool:
        return all("{expert}" not in name for name in self.names.values())

    @property
    def parameters(self) -> bool:
        """Whether tensors are parameters of the module that holds the experts, so that suffixes follow a `_`."""
        return self.stacked and not self.modules

    @property
    def fused(self) -> bool:
        return GATE_UP in self.names

    @property
    def gated(self) -> bool:
        return self.fused or UP in self.names

    @property
    def holder(self) -> str:
        """The last word of `home`."""
        return self.home.rpartition(".")[2]

    def module(self, prefix: str, layer: int, expert: int, projection: str) -> str:
        """The module name of a projection."""
        return (prefix + self.home + self.names[projection]).format(layer=layer, expert=self.first + expert)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a tensor name; its groups are prefix, layer, expert, projection and suffix."""
        alternatives = []
        for projection, name in sorted(self.names.items(), key=lambda item: -len(item[1])):
            escaped = re.escape(name).replace(re.escape("{expert}"), f"(?P<{projection}_expert>{NUMBER})")
            if self.stacked:  # torchao writes `_gate_up_proj_scale` for a part of `gate_up_proj`
                escaped = escaped.replace(re.escape("."), r"\._?", 1)
            alternatives.append(rf"(?P<{projection}>{escaped})")
        return re.compile(
            rf"{_below(self.prefixes, self.home)}(?:{'|'.join(alternatives)})(?:\.base_layer)?(?P<suffix>(?:[._].*)?)"
        )

    @cached_property
    def at_home(self) -> re.Pattern[str]:
        """Matches the name of the module that contains the experts of a layer."""
        return re.compile(_below(self.prefixes, self.home))

    @cached_property
    def below_home(self) -> re.Pattern[str]:
        """Matches every name below `home`, also of layers whose number is spelled otherwise."""
        return re.compile(rf"{_below(self.prefixes, self.home, ANY_DIGITS)}\..*")

    @cached_property
    def in_layer(self) -> re.Pattern[str]:
        """Matches the name of every tensor of a layer, an expert's or not."""
        blocks = self.home[: self.home.index("{layer}")] + "{layer}"
        return re.compile(rf"{_below(self.prefixes, blocks)}\..*")


def _below(prefixes: Iterable[str], template: str, number: str = NUMBER) -> str:
    """A pattern for `template` below any of the prefixes; its groups are prefix and layer."""
    listed = "|".join(re.escape(p) for p in sorted(prefixes, key=len, reverse=True))
    return rf"(?P<prefix>{listed})" + re.escape(template).replace(re.escape("{layer}"), f"(?P<layer>{number})")


@dataclass(frozen=True)
class ParsedName:
    """The parts of an expert tensor's name."""

    prefix: str
    layer: int
    expert: int | None  # None for stacked tensors
    projection: str
    suffix: str


def parse_name(form: NameForm, name: str) -> ParsedName | None:
    """Parse a tensor name under this form; None if it is not an expert tensor, or one of another mixture."""
    match = form.pattern.fullmatch(name)
    if match is None:
        return None
    projection = next(p for p in form.names if match[p] is not None)
    expert = None if form.stacked else int(match[f"{projection}_expert"]) - form.first
    if expert is not None and (expert < 0 or (form.end is not None and form.first + expert >= form.end)):
        return None
    return ParsedName(match["prefix"], int(match["layer"]), expert, projection, match["suffix"])


@dataclass(frozen=True)
class Claim:
    """What a tensor is, by its name alone: a part of the routed experts of `layer`, or of their router."""

    layer: int
    expert: int | None = None  # None: all experts, or the router
    router: str | None = None  # its role: bias, correction, table or scale; None: the tensor is the experts'


Names = str | tuple[str, ...]


@dataclass(frozen=True)
class Router:
    """Names of the router's tensors, below the prefix. Where a family spells one in several ways, all are listed."""

    weight: Names = "layers.{layer}.mlp.gate.weight"
    bias: Names = ()
    correction: Names = ()  # added to the scores for expert selection only
    table: Names = ()  # token id -> expert ids
    scale: Names = ()  # one factor for each expert, on the routing weights
    shared: Names = ()  # of those, tensors with a row for each mixture of a layer
    row: int = 0  # ... and the row of this one
    quantizable: bool = True  # the gate matrix is the weight of a module of its own, which tools may quantise
    prefixes: tuple[str, ...] = (*PREFIXES, "transformer.")

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """{role: templates} of the tensors that a layer keeps: all but the gate matrix."""
        given = {"bias": self.bias, "correction": self.correction, "table": self.table, "scale": self.scale}
        return {role: _tuple(names) for role, names in given.items() if names}

    @property
    def gate_templates(self) -> tuple[str, ...]:
        """The names of the gate matrix, below the prefix."""
        return _tuple(self.weight)

    def names(self, layer: int) -> dict[str, str]:
        """{tensor name under any prefix: role} for the router tensors that a layer keeps."""
        return {
            prefix + template.format(layer=layer): role
            for role, templates in self.roles.items()
            for template in templates
            for prefix in self.prefixes
        }

    def gates(self, layer: int) -> tuple[str, ...]:
        """The names that the gate matrix of a layer may have."""
        return tuple(prefix + name.format(layer=layer) for name in self.gate_templates for prefix in self.prefixes)

    def claim(self, name: str) -> Claim | None:
        """The router tensor with this name; None if a layer keeps no such tensor."""
        for role, pattern in self._patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                return Claim(int(match["layer"]), router=role)
        return None

    def gate_layer(self, name: str) -> int | None:
        """The layer number if this name is a gate matrix, else None."""
        matches = (pattern.fullmatch(name) for pattern in self._gate_patterns)
        return next((int(match["layer"]) for match in matches if match is not None), None)

    def gate_part(self, name: str) -> int | None:
        """The layer whose gate has a part with this name, its matrix or what a quantised one is stored as.

        For names that `claim` does not know.
        """
        if not self.quantizable:
            return self.gate_layer(name)
        matches = (pattern.fullmatch(name) for pattern in self._gate_parts)
        return next((int(match["layer"]) for match in matches if match is not None), None)

    def is_shared(self, name: str) -> bool:
        """Whether the tensor has a row for each mixture of a layer."""
        return any(pattern.fullmatch(name) for pattern in self._shared_patterns)

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """What of a router tensor is this mixture's."""
        if not self.is_shared(name):
            return tensor
        if tensor.ndim < 2 or len(tensor) <= self.row:
            what = f"'{name}' has no row for each mixture of its layer"
            raise WrongShape(what, expected=f"at least {self.row + 1} rows", got=list(tensor.shape))
        return tensor[self.row]

    @cached_property
    def _shared_patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(_below(self.prefixes, template)) for template in _tuple(self.shared))

    @cached_property
    def _gate_parts(self) -> tuple[re.Pattern[str], ...]:
        modules = (template.rpartition(".")[0] for template in self.gate_templates)
        return tuple(re.compile(rf"{_below(self.prefixes, module)}\.[^.]*") for module in modules)

    @cached_property
    def _gate_patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(_below(self.prefixes, template)) for template in self.gate_templates)

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        return tuple(
            (role, re.compile(_below(self.prefixes, template)))
            for role, templates in self.roles.items()
            for template in templates
        )


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def layer_name(layer: int, mixture: str | None) -> str:
    """A layer, or one of its mixtures, for messages."""
    return f"layer {layer}" if mixture is None else f"layer {layer}, {mixture}"


@dataclass(frozen=True)
class Naming:
    """A model family: its `model_type`s and the naming forms of its experts."""

    family: str
    model_types: tuple[str, ...]
    forms: tuple[NameForm, ...]
    router: Router = field(default_factory=Router)
    uneven: bool = False  # tensor-parallel shards keep blocks whole and may differ in size
    biased: bool = False  # every projection has a bias
    described: bool = True  # the config states the routing and the activation
    mixture: str | None = None  # its name, where a layer has several
    entry: int | None = None  # ... and its place in lists of the config that have a value for each
    beside: tuple[Naming, ...] = ()  # ... and the others
    own_names: tuple[str, ...] = ()  # model types of which transformers does not know the hub's form, the first one
    merges: tuple[str, ...] = ()  # names of tensors outside the experts that transformers merges while it loads

    @property
    def mixtures(self) -> tuple[Naming, ...]:
        return (self, *self.beside)

    def of_architecture(self, model: Mapping[str, Any]) -> Naming:
        """With the forms of a GGUF file's architecture, where some have forms of their own."""
        own = tuple(form for form in self.forms if model.get("architecture") in form.architectures)
        return replace(self, forms=own or tuple(form for form in self.forms if not form.architectures))

    def numbered(self, model: Mapping[str, Any]) -> Naming:
        """With its part of the numbers for each mixture, where one numbering has the experts of all of them.

        The last part has no end, so that an expert that the config does not have is still found, and reported.
        """
        if not self.beside:
            return self
        parts, first = list[Naming](), 0
        for one in self.mixtures:
            count = one.sizes(model).experts
            if count is None:
                what = "the config does not state how many experts each mixture of a layer has"
                raise UnsupportedFormat(what, where="config.json", expected="moe_num_experts")
            end = None if one is self.beside[-1] else first + count
            forms = (replace(form, first=first, end=end) if form.together else form for form in one.forms)
            parts.append(replace(one, forms=tuple(forms), beside=()))
            first += count
        return replace(parts[0], beside=tuple(parts[1:]))

    def loaded_forms(self, format: str, model_type: str) -> tuple[NameForm, ...]:
        """The forms that transformers loads in a checkpoint of this format, the hub's first."""
        known = self.forms[1:] if model_type in self.own_names else self.forms
        return tuple(form for form in known if format in form.loads)

    def is_merged(self, name: str) -> bool:
        """Whether transformers merges this tensor with others while it loads."""
        return any(re.fullmatch(_below(PREFIXES, template), name) for template in self.merges)

    def sizes(self, model: Mapping[str, Any]) -> ExpertSizes:
        """The sizes of the experts that a config states."""
        return expert_sizes(model, self.entry)

    def where(self, layer: int) -> str:
        """A layer of experts, for messages."""
        return layer_name(layer, self.mixture)

    def claim(self, name: str) -> Claim | None:
        """Parse a tensor name; None unless it belongs to an expert or to a router."""
        for form in self.forms:
            parsed = parse_name(form, name)
            if parsed is not None:
                return Claim(parsed.layer, parsed.expert)
        return self.router.claim(name)

    def layer_of(self, name: str) -> int | None:
        """The layer of any tensor, an expert's or not; None if it is in no layer."""
        matches = (pattern.fullmatch(name) for pattern in self._layers)
        return next((int(match["layer"]) for match in matches if match is not None), None)

    @cached_property
    def _layers(self) -> tuple[re.Pattern[str], ...]:
        return tuple({form.in_layer.pattern: form.in_layer for form in self.forms}.values())

    def has_experts_in(self, module: str) -> bool:
        """Whether the module with this name contains experts of this family, an image encoder's experts excluded."""
        return any(form.at_home.fullmatch(module) for form in self.forms)
