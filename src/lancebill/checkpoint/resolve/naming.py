"""The table of model families and the names of their expert tensors.

This is the only place where the name of a tensor decides how it is used. A family is a row; a row has forms, the naming
schemes in use (one tensor per expert or all experts stacked; gate and up separate or fused). gpt-oss's interleaved
rows and Llama-4's transposed matrices are columns of this table, not branches in the loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.checkpoint.resolve.expert_sizes import config_sections
from lancebill.errors import UnsupportedFormat

GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"
# Prefixes before "layers.": text models, vision-language wrappers, state-space hybrids.
PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.", "backbone.")

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
    transposed: tuple[str, ...] = ()  # projections whose matrices and block scales are stored [K, N]
    interleaved: bool = False  # fused rows alternate gate, up, gate, up
    flat: bool = False  # experts stacked along the first matrix axis: [E*I, H]
    exclusive: bool = True  # everything below home belongs to the experts
    prefixes: tuple[str, ...] = PREFIXES

    @cached_property
    def stacked(self) -> bool:
        return all("{expert}" not in name for name in self.names.values())

    @property
    def fused(self) -> bool:
        return GATE_UP in self.names

    @property
    def gated(self) -> bool:
        return self.fused or UP in self.names

    def module(self, prefix: str, layer: int, expert: int, projection: str) -> str:
        """The module name of a projection."""
        return (prefix + self.home + self.names[projection]).format(layer=layer, expert=expert)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a tensor name; its groups are prefix, layer, expert, projection and suffix."""
        alternatives = []
        for projection, name in sorted(self.names.items(), key=lambda item: -len(item[1])):
            escaped = re.escape(name).replace(re.escape("{expert}"), f"(?P<{projection}_expert>{NUMBER})")
            alternatives.append(rf"(?P<{projection}>{escaped})")
        return re.compile(
            rf"{_below(self.prefixes, self.home)}(?:{'|'.join(alternatives)})(?:\.base_layer)?(?P<suffix>(?:[._].*)?)"
        )

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
    """Parse a tensor name under this form; None if it is not an expert tensor."""
    match = form.pattern.fullmatch(name)
    if match is None:
        return None
    projection = next(p for p in form.names if match[p] is not None)
    expert = None if form.stacked else int(match[f"{projection}_expert"])
    return ParsedName(match["prefix"], int(match["layer"]), expert, projection, match["suffix"])


@dataclass(frozen=True)
class Claim:
    """What a tensor is, by its name alone: a part of the routed experts of `layer`, or of their router."""

    layer: int
    expert: int | None = None  # None: all experts, or the router
    router: str | None = None  # bias, correction or table; None: the tensor is the experts'


@dataclass(frozen=True)
class Router:
    """Names of the router's tensors, below the prefix."""

    weight: str = "layers.{layer}.mlp.gate.weight"
    bias: str | None = None
    correction: str | None = None  # added to the scores for expert selection only
    table: str | None = None  # token id -> expert ids
    prefixes: tuple[str, ...] = (*PREFIXES, "transformer.")

    @property
    def roles(self) -> dict[str, str]:
        """{role: template} of the tensors that a layer keeps: all but the gate matrix."""
        templates = {"bias": self.bias, "correction": self.correction, "table": self.table}
        return {role: template for role, template in templates.items() if template is not None}

    def names(self, layer: int) -> dict[str, str]:
        """{tensor name under any prefix: role} for the router tensors that a layer keeps."""
        return {
            prefix + template.format(layer=layer): role
            for role, template in self.roles.items()
            for prefix in self.prefixes
        }

    def claim(self, name: str) -> Claim | None:
        """The router tensor with this name; None if a layer keeps no such tensor."""
        for role, pattern in self._patterns.items():
            match = pattern.fullmatch(name)
            if match is not None:
                return Claim(int(match["layer"]), router=role)
        return None

    @cached_property
    def weight_pattern(self) -> re.Pattern[str]:
        """Matches the name of a layer's gate matrix."""
        return re.compile(_below(self.prefixes, self.weight))

    @cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        return {role: re.compile(_below(self.prefixes, template)) for role, template in self.roles.items()}


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

    def claim(self, name: str) -> Claim | None:
        """What the tensor with this name is; None if it is neither an expert's nor their router's."""
        for form in self.forms:
            parsed = parse_name(form, name)
            if parsed is not None:
                return Claim(parsed.layer, parsed.expert)
        return self.router.claim(name)


_LLAMA_NAMES = {GATE: ".{expert}.gate_proj", UP: ".{expert}.up_proj", DOWN: ".{expert}.down_proj"}
_MIXTRAL_NAMES = {GATE: ".{expert}.w1", UP: ".{expert}.w3", DOWN: ".{expert}.w2"}
_FUSED_NAMES = {GATE_UP: ".gate_up_proj", DOWN: ".down_proj"}
_FUSED_EACH = {GATE_UP: ".{expert}.gate_up_proj", DOWN: ".{expert}.down_proj"}
_BOTH = (GATE_UP, DOWN)
_W13_EACH = {GATE_UP: ".{expert}.w13", DOWN: ".{expert}.w2"}

_MLP = "layers.{layer}.mlp.experts"
_BLOCK = "layers.{layer}.block_sparse_moe.experts"
_FEED = "layers.{layer}.feed_forward.experts"
_CORRECTED = Router(correction="layers.{layer}.mlp.gate.e_score_correction_bias")

# The forms of families with gate_proj, up_proj and down_proj below mlp.
_STANDARD = (NameForm(_MLP, _LLAMA_NAMES), NameForm(_MLP, _FUSED_NAMES), NameForm(_MLP, _FUSED_EACH))

TABLE: tuple[Naming, ...] = (
    Naming(
        "mixtral",
        ("mixtral",),
        (
            NameForm(_BLOCK, _MIXTRAL_NAMES),
            NameForm(_BLOCK, _W13_EACH),
            NameForm(_MLP, _FUSED_NAMES),
            NameForm(_BLOCK, _FUSED_NAMES),
        ),
        Router("layers.{layer}.block_sparse_moe.gate.weight"),
    ),
    Naming("qwen2_moe", ("qwen2_moe",), _STANDARD),
    Naming("qwen3_moe", ("qwen3_moe",), _STANDARD),
    Naming("olmoe", ("olmoe",), _STANDARD),
    Naming(
        "qwen3_vl_moe",
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        (NameForm(_MLP, _LLAMA_NAMES), NameForm(_MLP, _FUSED_NAMES, transposed=_BOTH)),
    ),
    Naming("deepseek_v2", ("deepseek_v2",), _STANDARD),
    Naming("deepseek_v3", ("deepseek_v3", "deepseek_v32"), _STANDARD, _CORRECTED),
    Naming("kimi_k2", ("kimi_k2", "kimi_k25"), _STANDARD, _CORRECTED),
    Naming("glm4_moe", ("glm4_moe",), _STANDARD, _CORRECTED),
    Naming(
        "deepseek_v4",
        ("deepseek_v4",),
        (
            NameForm("layers.{layer}.ffn.experts", _MIXTRAL_NAMES),
            NameForm(_MLP, _FUSED_NAMES),
            NameForm(_MLP, _LLAMA_NAMES),
        ),
        Router(
            "layers.{layer}.ffn.gate.weight",
            correction="layers.{layer}.ffn.gate.bias",
            table="layers.{layer}.ffn.gate.tid2eid",
        ),
    ),
    Naming(
        "gpt_oss",
        ("gpt_oss",),
        (NameForm(_MLP, _FUSED_NAMES, transposed=_BOTH, interleaved=True), NameForm(_MLP, _LLAMA_NAMES)),
        Router("layers.{layer}.mlp.router.weight", bias="layers.{layer}.mlp.router.bias"),
        uneven=True,
        biased=True,
    ),
    Naming(
        "llama4",
        ("llama4", "llama4_text"),
        (NameForm(_FEED, _FUSED_NAMES, transposed=_BOTH), NameForm(_FEED, _LLAMA_NAMES)),
        Router("layers.{layer}.feed_forward.router.weight"),
    ),
    Naming(
        "minimax_m2",
        ("minimax_m2",),
        (NameForm(_BLOCK, _MIXTRAL_NAMES), NameForm(_MLP, _FUSED_NAMES)),
        Router(
            "layers.{layer}.block_sparse_moe.gate.weight",
            correction="layers.{layer}.block_sparse_moe.e_score_correction_bias",
        ),
    ),
    Naming(
        "nemotron_h",
        ("nemotron_h",),
        (NameForm("layers.{layer}.mixer.experts", {GATE: ".{expert}.up_proj", DOWN: ".{expert}.down_proj"}),),
        Router("layers.{layer}.mixer.gate.weight", correction="layers.{layer}.mixer.gate.e_score_correction_bias"),
    ),
    Naming(
        "phimoe",
        ("phimoe",),
        (NameForm(_BLOCK, _MIXTRAL_NAMES), NameForm(_MLP, _FUSED_NAMES)),
        Router("layers.{layer}.block_sparse_moe.gate.weight"),
    ),
    Naming(
        "jamba",
        ("jamba",),
        (NameForm(_FEED, _LLAMA_NAMES), NameForm(_FEED, _FUSED_NAMES)),
        Router("layers.{layer}.feed_forward.router.weight"),
    ),
    Naming(
        "dbrx",
        ("dbrx",),
        (
            NameForm(
                "blocks.{layer}.ffn.experts.mlp",
                {GATE: ".w1", UP: ".v1", DOWN: ".w2"},
                flat=True,
                transposed=(DOWN,),
                prefixes=("transformer.",),
            ),
            NameForm("blocks.{layer}.ffn.experts", _LLAMA_NAMES, prefixes=("transformer.",)),
        ),
        Router("blocks.{layer}.ffn.router.layer.weight"),
    ),
    Naming(
        "granitemoe",
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        (
            NameForm(
                "layers.{layer}.block_sparse_moe",
                {GATE_UP: ".input_linear", DOWN: ".output_linear"},
                exclusive=False,
            ),
            NameForm(_BLOCK, _LLAMA_NAMES),
        ),
        Router("layers.{layer}.block_sparse_moe.router.layer.weight"),
    ),
    Naming(
        "gguf",
        ("gguf",),
        (
            NameForm(
                "blk.{layer}",
                {GATE: ".ffn_gate_exps", UP: ".ffn_up_exps", DOWN: ".ffn_down_exps"},
                exclusive=False,
                prefixes=("",),
            ),
            NameForm(
                "blk.{layer}",
                {GATE_UP: ".ffn_gate_up_exps", DOWN: ".ffn_down_exps"},
                exclusive=False,
                prefixes=("",),
            ),
        ),
        Router(
            "blk.{layer}.ffn_gate_inp.weight",
            bias="blk.{layer}.ffn_gate_inp.bias",
            correction="blk.{layer}.exp_probs_b.bias",
            table="blk.{layer}.ffn_gate_tid2eid.weight",
        ),
    ),
)  # fmt: skip


def find_family(model: Mapping[str, Any], table: Iterable[Naming] = TABLE) -> Naming:
    """The row for a config.json, by its `model_type` or that of its text_config."""
    model_types = [section.get("model_type") for section in config_sections(model)]
    for naming in table:
        if any(name in naming.model_types for name in model_types):
            return naming
    raise UnsupportedFormat(
        f"no naming row for model_type {quoted(model_types[0])}",
        where="config.json",
        expected=", ".join(sorted(t for row in table for t in row.model_types)),
        hint="pass a custom Naming row",
    )
