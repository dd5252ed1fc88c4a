"""The table of model families: how each spells the tensors of its experts.

This is the only place where a tensor's name decides anything. A family is a row; a row has forms,
the spellings in use (one tensor for each expert, or all experts stacked in one; gate and up apart,
or fused). gpt-oss's interleaved rows and Llama-4's transposed matrices are columns of this table,
not branches of the loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lancebill.errors import UnsupportedFormat

GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"
# What may stand before "layers.": text models, vision-language wrappers, state-space hybrids.
PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.", "backbone.")


@dataclass(frozen=True)
class NameForm:
    """One spelling of a family's expert tensors.

    `home` is the experts' container; `names` are the projections below it, with `{expert}` where
    each expert has tensors of its own. Stacked forms have the expert dimension first.
    """

    home: str
    names: Mapping[str, str]
    transposed: tuple[str, ...] = ()  # projections whose matrices and block scales are stored [K, N]
    interleaved: bool = False  # fused rows alternate gate, up, gate, up
    flat: bool = False  # experts stacked along the first matrix axis: [E*I, H]
    exclusive: bool = True  # nothing but experts lives below home
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
        """The module name a projection is stored under."""
        return (prefix + self.home + self.names[projection]).format(layer=layer, expert=expert)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """One match tells prefix, layer, expert, projection and suffix of a tensor's name."""
        alternatives = []
        for projection, name in sorted(self.names.items(), key=lambda item: -len(item[1])):
            spelled = re.escape(name).replace(re.escape("{expert}"), rf"(?P<{projection}_expert>\d+)")
            alternatives.append(rf"(?P<{projection}>{spelled})")
        return re.compile(
            rf"{self._home_pattern()}(?:{'|'.join(alternatives)})(?:\.base_layer)?(?P<suffix>(?:[._].*)?)"
        )

    @cached_property
    def territory(self) -> re.Pattern[str]:
        """Names below `home`, claimed or not."""
        return re.compile(rf"{self._home_pattern()}\..*")

    def _home_pattern(self) -> str:
        prefixes = "|".join(re.escape(p) for p in sorted(self.prefixes, key=len, reverse=True))
        home = re.escape(self.home).replace(re.escape("{layer}"), r"(?P<layer>\d+)")
        return rf"(?P<prefix>{prefixes}){home}"


@dataclass(frozen=True)
class Claim:
    """What a tensor's name says: whose it is."""

    prefix: str
    layer: int
    expert: int | None  # None for stacked tensors
    projection: str
    suffix: str


def claim(form: NameForm, name: str) -> Claim | None:
    """The owner of a tensor under this form; None where the name is not an expert's."""
    match = form.pattern.fullmatch(name)
    if match is None:
        return None
    projection = next(p for p in form.names if match[p] is not None)
    expert = None if form.stacked else int(match[f"{projection}_expert"])
    return Claim(match["prefix"], int(match["layer"]), expert, projection, match["suffix"])


@dataclass(frozen=True)
class Router:
    """Names of the tensors that choose experts, below the layer's prefix."""

    weight: str = "layers.{layer}.mlp.gate.weight"
    bias: str | None = None
    correction: str | None = None  # added to scores for selection only
    table: str | None = None  # token id -> expert ids
    prefixes: tuple[str, ...] = (*PREFIXES, "transformer.")

    def names(self, layer: int) -> dict[str, str]:
        """Every spelling of the tensors a layer keeps (all but the gate's matrix) -> their role."""
        roles = {"bias": self.bias, "correction": self.correction, "table": self.table}
        return {
            prefix + template.format(layer=layer): role
            for role, template in roles.items()
            if template is not None
            for prefix in self.prefixes
        }


@dataclass(frozen=True)
class Naming:
    """A model family: its config's `model_type`s and the forms its experts come in."""

    family: str
    model_types: tuple[str, ...]
    forms: tuple[NameForm, ...]
    router: Router = field(default_factory=Router)
    uneven: bool = False  # tensor-parallel cuts keep blocks whole and may differ in size


@dataclass(frozen=True)
class Sizes:
    """The geometry of the routed experts, as far as the config tells it."""

    experts: int | None
    hidden: int | None
    intermediate: int | None
    top_k: int | None
    layers: int | None


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

# The forms of every family that names its projections gate_proj, up_proj, down_proj below mlp.
_STANDARD = (NameForm(_MLP, _LLAMA_NAMES), NameForm(_MLP, _FUSED_NAMES), NameForm(_MLP, _FUSED_EACH))

TABLE: tuple[Naming, ...] = (
    Naming(
        "mixtral",
        ("mixtral",),
        (NameForm(_BLOCK, _MIXTRAL_NAMES), NameForm(_BLOCK, _W13_EACH), NameForm(_MLP, _FUSED_NAMES), NameForm(_BLOCK, _FUSED_NAMES)),
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
        (NameForm("layers.{layer}.ffn.experts", _MIXTRAL_NAMES), NameForm(_MLP, _FUSED_NAMES), NameForm(_MLP, _LLAMA_NAMES)),
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


def find(model: Mapping[str, Any], table: Iterable[Naming] = TABLE) -> Naming:
    """The row for a config.json, by its `model_type` or that of its text part."""
    wanted = [section.get("model_type") for section in sections(model)]
    for naming in table:
        if any(name in naming.model_types for name in wanted):
            return naming
    raise UnsupportedFormat(
        f"no naming row for model_type {wanted[0]!r}",
        where="config.json",
        expected=", ".join(sorted(t for row in table for t in row.model_types)),
        hint="pass a custom Naming row",
    )


def sizes(model: Mapping[str, Any]) -> Sizes:
    """Experts, hidden, intermediate, top-k and layers under whichever name the family uses."""

    def look(*keys: str) -> int | None:
        for section in sections(model):
            for key in keys:
                value = section.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    return Sizes(
        experts=look("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
        hidden=look("hidden_size", "d_model"),
        intermediate=look("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"),
        top_k=look("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token"),
        layers=look("num_hidden_layers", "n_layers"),
    )


def sections(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config itself and the nested ones that describe its text model and its experts."""
    nested = [model.get(key) for key in ("text_config", "ffn_config")]
    return [model, *(part for part in nested if isinstance(part, Mapping))]
