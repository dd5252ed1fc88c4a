"""The table of model families and the names of their expert tensors.

This is the only place where the name of a tensor decides how it is used. A family is a row; a row has forms, the naming
schemes in use (one tensor per expert or all experts stacked; gate and up separate or fused). gpt-oss's interleaved
rows and Llama-4's transposed matrices are columns of this table, not branches in the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.checkpoint.resolve.expert_sizes import config_sections
from lancebill.checkpoint.resolve.name_forms import (
    DOWN,
    GATE,
    GATE_UP,
    UP,
    Claim,
    NameForm,
    Naming,
    ParsedName,
    Router,
    layer_name,
    parse_name,
)
from lancebill.errors import SpecError, UnsupportedFormat

__all__ = [
    "DOWN", "GATE", "GATE_UP", "REFUSED", "REMOTE_CODE", "TABLE", "UP", "Claim", "NameForm", "Naming", "ParsedName",
    "Router", "find_family", "is_refused", "known_type", "layer_name", "parse_name",
]  # fmt: skip

_LLAMA_NAMES = {GATE: ".{expert}.gate_proj", UP: ".{expert}.up_proj", DOWN: ".{expert}.down_proj"}
_MIXTRAL_NAMES = {GATE: ".{expert}.w1", UP: ".{expert}.w3", DOWN: ".{expert}.w2"}
_FUSED_NAMES = {GATE_UP: ".gate_up_proj", DOWN: ".down_proj"}
_FUSED_EACH = {GATE_UP: ".{expert}.gate_up_proj", DOWN: ".{expert}.down_proj"}
_LINEAR_NAMES = {GATE_UP: ".input_linear", DOWN: ".output_linear"}
_W13_EACH = {GATE_UP: ".{expert}.w13", DOWN: ".{expert}.w2"}
_LISTED_NAMES = {GATE_UP: ".gate_up_projs.{expert}", DOWN: ".down_projs.{expert}"}  # lists of modules
_LISTED_EACH = {GATE: ".gate_proj.{expert}", UP: ".up_proj.{expert}", DOWN: ".down_proj.{expert}"}
_SEPARATE_NAMES = {GATE: ".gate_proj", UP: ".up_proj", DOWN: ".down_proj"}
_BOTH = (GATE_UP, DOWN)
# Formats in which transformers loads experts: what it merges while loading, and its own stacked parameters.
_MERGED, _DENSE = ("dense", "compressed-tensors", "fp8"), ("dense",)

_LAYER = "layers.{layer}"
_MLP, _BLOCK, _FEED = (f"{_LAYER}.{block}.experts" for block in ("mlp", "block_sparse_moe", "feed_forward"))
_MIXER = f"{_LAYER}.mixer.experts"


def _in_layer(*names: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}.{name}" for name in names)


# Shared forms. What a family stores on the hub comes first; transformers' own stacked form is in every row.
_MLP_STACKED = NameForm(_MLP, _FUSED_NAMES, loads=_DENSE)
# mlx-lm stacks experts, gate and up apart: mostly below `switch_mlp`.
_MLX, _MLX_BLOCK, _MLX_FEED = (
    NameForm(f"{_LAYER}.{block}.switch_mlp", _SEPARATE_NAMES, modules=True)
    for block in ("mlp", "block_sparse_moe", "feed_forward")
)
_MLX_EXPERTS = NameForm(_MLP, _SEPARATE_NAMES, modules=True)
_EACH = NameForm(_MLP, _LLAMA_NAMES)
_STANDARD = (replace(_EACH, loads=_MERGED), _MLP_STACKED, NameForm(_MLP, _FUSED_EACH), _MLX)
_STACKED = (_MLP_STACKED, _EACH, NameForm(_MLP, _FUSED_EACH), _MLX)
_OCR = (replace(_STANDARD[0], below=("model.", "")), *_STANDARD[1:])
_CONVOLUTION = ("layers.{layer}.self_attn.q_conv1d.weight",)  # stored apart from those of keys and values
# Tools take stacked experts apart and give them their own names: llm-compressor below the hub's, Quark below
# transformers'.
_TAKEN_APART = (NameForm(_BLOCK, _LLAMA_NAMES), _EACH)
_MIXTRAL = (NameForm(_BLOCK, _MIXTRAL_NAMES, loads=_MERGED), _MLP_STACKED, *_TAKEN_APART, _MLX_BLOCK)
_FEED_STACKED = NameForm(_FEED, _FUSED_NAMES, loads=_DENSE)
_GEMMA = (
    NameForm(f"{_LAYER}.experts", _FUSED_NAMES, loads=_DENSE), NameForm(f"{_LAYER}.experts", _LLAMA_NAMES),
    NameForm(f"{_LAYER}.experts.switch_glu", _SEPARATE_NAMES, modules=True),
)  # fmt: skip
_GEMMA_ROUTER = Router(_in_layer("router.proj.weight"), scale=_in_layer("router.per_expert_scale"))
_DIFFUSION_PREFIXES = ("model.decoder.", "model.encoder.language_model.")  # which share experts, stored once
_STACKED_TRANSPOSED = NameForm(_MLP, _FUSED_NAMES, transposed=_BOTH, loads=_DENSE)
_STEP = (
    NameForm(f"{_LAYER}.moe", _SEPARATE_NAMES, modules=True, exclusive=False, loads=_DENSE),
    NameForm(f"{_LAYER}.moe.experts", _LLAMA_NAMES),
)  # fmt: skip
_INKLING = (
    NameForm(_MLP, {GATE_UP: ".w13_weight", DOWN: ".w2_weight"}, interleaved=True, loads=_DENSE), _MLP_STACKED, _EACH
)  # fmt: skip

_MIXTRAL_ROUTER = Router(_in_layer("block_sparse_moe.gate.weight", "mlp.gate.weight"))
_KIMI_ROUTER = replace(_MIXTRAL_ROUTER, correction=_in_layer(
    "block_sparse_moe.gate.e_score_correction_bias", "mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"
))  # fmt: skip
_CORRECTED = Router(correction=_in_layer("mlp.gate.e_score_correction_bias"))
_BLOCK_CORRECTIONS = ("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias")
_ERNIE_VL = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl")


def _ernie_vl(mixture: str, entry: int) -> Naming:
    """One of the two mixtures of every layer: text tokens or image tokens.

    The hub's names have one numbering for the experts of both, one gate with two matrices, and one correction.
    """
    own, number = f"mlp.{mixture}_moe", f"_{entry}" if entry else ""
    both = f"{_LAYER}.mlp.moe_statics.e_score_correction_bias"
    corrections = _in_layer(f"{own}.gate.moe_statics.e_score_correction_bias", f"mlp.e_score_correction_bias{number}")
    gates = _in_layer(f"mlp.gate.weight{number}", f"{own}.gate.weight", f"mlp.gate{number}.weight")
    forms = (
        NameForm(_MLP, _LLAMA_NAMES, together=True, exclusive=entry == 0, loads=_DENSE),
        NameForm(f"{_LAYER}.{own}.experts", _FUSED_NAMES, loads=_DENSE),
        NameForm(f"{_LAYER}.{own}.experts", _LLAMA_NAMES),
        NameForm(f"{_LAYER}.mlp.switch_mlp{number}", _SEPARATE_NAMES, modules=True),
    )
    router = Router(
        tuple(dict.fromkeys(gates)), correction=(both, *corrections), shared=both, row=entry, quantizable=False
    )
    return Naming("ernie4_5_vl_moe", _ERNIE_VL, forms, router, mixture=mixture, entry=entry)


TABLE: tuple[Naming, ...] = (
    Naming("mixtral", ("mixtral", "arctic"), (
        _MIXTRAL[0], NameForm(_BLOCK, _W13_EACH), _MLP_STACKED, NameForm(_BLOCK, _FUSED_NAMES, loads=_DENSE),
        *_TAKEN_APART, _MLX_BLOCK,
    ), _MIXTRAL_ROUTER),
    Naming("minimax", ("minimax", "minimax_text_01", "minimax_m1"), _MIXTRAL, _MIXTRAL_ROUTER),
    Naming("minimax_m2", ("minimax_m2",), _MIXTRAL, replace(
        _MIXTRAL_ROUTER, correction=_in_layer(*_BLOCK_CORRECTIONS)
    )),
    Naming("minimax_m3", ("minimax_m3_vl", "minimax_m3_vl_text"), _MIXTRAL, replace(
        _MIXTRAL_ROUTER, correction=_in_layer(_BLOCK_CORRECTIONS[0], "mlp.gate.e_score_correction_bias")
    ), own_names=("minimax_m3_vl_text",), merges=("layers.{layer}.block_sparse_moe.shared_experts.gate_proj.weight",)),
    Naming("kimi_linear", ("kimi_linear",), (*_MIXTRAL, _MLX), _KIMI_ROUTER, merges=_CONVOLUTION),
    Naming("kimi_k3", ("kimi_k3",), (*_MIXTRAL, _MLX), _KIMI_ROUTER),
    Naming("phimoe", ("phimoe",), _MIXTRAL, Router(_in_layer("block_sparse_moe.gate.weight", "mlp.router.weight"))),

    # Families with gate_proj, up_proj and down_proj below mlp: no correction ...
    Naming("qwen2_moe", ("qwen2_moe",), _STANDARD),
    Naming("qwen3_moe", ("qwen3_moe",), _STANDARD),
    Naming("qwen3_next", ("qwen3_next",), _STANDARD),
    Naming("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), _STANDARD),
    Naming("qwen4_exp", ("qwen4_exp", "qwen4_exp_text"), _STANDARD),
    Naming("qwen3_omni_moe", ("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"), _STANDARD),
    Naming("qwen3_vl_moe", ("qwen3_vl_moe", "qwen3_vl_moe_text"), (
        _STACKED_TRANSPOSED, _MLP_STACKED, _EACH, _MLX, NameForm(_MLP, _LISTED_EACH),  # the last: ModelOpt
    )),
    Naming("olmoe", ("olmoe",), _STANDARD),
    Naming("flex_olmo", ("flex_olmo",), _STANDARD),
    Naming("mellum", ("mellum",), _STANDARD),
    Naming("flint", ("flint",), _STANDARD),
    Naming("cohere2_moe", ("cohere2_moe",), _STANDARD),
    Naming("mistral4", ("mistral4",), _STACKED),
    Naming("hunyuan_v1_moe", ("hunyuan_v1_moe",), _STANDARD, Router(_in_layer("mlp.gate.wg.weight"))),
    Naming("hunyuan", ("hunyuan",), _STANDARD, Router(_in_layer("mlp.gate.wg.weight"))),
    Naming("pangu_pro_moe", ("PanguProMoE",), _STANDARD),
    Naming("deepseek_v2", ("deepseek_v2", "deepseek"), _STANDARD),
    Naming("deepseek_ocr", ("deepseek_ocr2", "deepseek_ocr2_text"), _OCR),
    Naming("unlimited_ocr", ("unlimited_ocr", "unlimited_ocr_text"), (replace(_OCR[0], loads=_DENSE), *_OCR[1:])),
    # ... and with a correction.
    Naming("deepseek_v3", ("deepseek_v3", "deepseek_v32"), _STANDARD, _CORRECTED),
    Naming("kimi_k2", ("kimi_k2", "kimi_k25"), _STANDARD, _CORRECTED),
    Naming("glm4_moe", (
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "glm4v_moe_text"
    ), _STANDARD, _CORRECTED),
    Naming("glm5_next", ("glm5_next", "glm5_next_text"), _STANDARD, _CORRECTED, merges=_CONVOLUTION),
    Naming("dots1", ("dots1",), (*_STANDARD, _MLX_EXPERTS), _CORRECTED),
    Naming("dots3_note", ("dots3_note", "dots3_note_text"), _STANDARD, _CORRECTED, merges=(
        "vision_encoder.blocks.{layer}.mlp.experts.0.fc1.weight",
    )),
    Naming("solar_open", ("solar_open",), _STANDARD, _CORRECTED),
    Naming("mimo_v2_flash", ("mimo_v2_flash", "mimo_v2"), _STANDARD, _CORRECTED),
    Naming("axk", ("axk1", "axk2"), _STANDARD, _CORRECTED),
    Naming("beam", ("beam",), _STANDARD, _CORRECTED),
    Naming("hy_v4", ("hy_v4",), _STACKED, _CORRECTED),
    Naming("bailing_hybrid", ("bailing_hybrid",), _STANDARD, Router(correction=_in_layer(
        "mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"
    )), merges=("layers.{layer}.attention.q_conv1d.weight",)),
    Naming("bailing_moe", ("bailing_moe", "bailing_moe_v2", "bailing_moe_linear"), _STANDARD, Router(
        _in_layer("mlp.gate.weight", "mlp.gate.gate_proj.weight"), correction=_in_layer("mlp.gate.expert_bias")
    )),
    Naming("pangu_ultra_moe", ("pangu_ultra_moe",), _STANDARD, Router(correction=_in_layer(
        "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"
    ))),
    Naming("exaone_moe", ("exaone_moe",), _STANDARD, Router(correction=_in_layer(
        "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"
    ))),
    Naming("laguna", ("laguna",), _STANDARD, Router(correction=_in_layer(
        "mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"
    ))),
    Naming("kolibri1", ("kolibri1",), _STANDARD, Router(correction=_in_layer(
        "moe.router.expert_bias", "mlp.gate.e_score_correction_bias"
    ))),
    Naming("ernie4_5_moe", ("ernie4_5_moe",), _STANDARD, Router(correction=_in_layer(
        "mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"
    ))),
    replace(_ernie_vl("text", 0), beside=(_ernie_vl("vision", 1),)),
    Naming("hy_v3", ("hy_v3",), _STANDARD, Router(
        _in_layer("mlp.router.gate.weight", "mlp.gate.weight"),
        correction=_in_layer("mlp.expert_bias", "mlp.e_score_correction_bias"),
    )),
    Naming("afmoe", ("afmoe",), (*_STANDARD, _MLX_EXPERTS), Router(
        _in_layer("mlp.router.gate.weight"), correction=_in_layer("mlp.expert_bias")
    )),
    Naming("longcat_flash", ("longcat_flash",), tuple(replace(form, loads=()) for form in _STANDARD), Router(
        _in_layer("mlp.router.classifier.weight"), correction=_in_layer("mlp.router.e_score_correction_bias")
    )),
    Naming("zaya", ("zaya",), _STACKED, Router(_in_layer("mlp.gate.router_mlp.out_proj.weight"))),

    # Families with names of their own.
    Naming("deepseek_v4", ("deepseek_v4",), (
        NameForm(f"{_LAYER}.ffn.experts", _MIXTRAL_NAMES, loads=_MERGED), _MLP_STACKED, _EACH
    ), Router(
        _in_layer("ffn.gate.weight", "mlp.gate.weight"),
        correction=_in_layer("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
        table=_in_layer("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    )),
    Naming("mistral_large4", ("mistral_large4", "mistral_large4_text"), (
        NameForm(f"{_LAYER}.experts", _MIXTRAL_NAMES, loads=_MERGED), _MLP_STACKED, _EACH
    ), Router(_in_layer("gate.weight", "mlp.gate.weight"))),
    Naming("gpt_oss", ("gpt_oss",), (
        NameForm(_MLP, _FUSED_NAMES, transposed=_BOTH, interleaved=True, loads=("dense", "mxfp4")), _EACH, _MLX_EXPERTS,
        NameForm(_MLP, _LISTED_NAMES, interleaved=True),  # Unsloth, so that bitsandbytes quantises the experts
        NameForm(_MLP, _FUSED_EACH, interleaved=True),  # Quark
    ), Router(
        _in_layer("mlp.router.weight", "mlp.router.linear.weight"),
        bias=_in_layer("mlp.router.bias", "mlp.router.linear.bias"),
    ), uneven=True, biased=True),
    Naming("llama4", ("llama4", "llama4_text"), (
        NameForm(_FEED, _FUSED_NAMES, transposed=_BOTH, loads=_DENSE),
        NameForm(_FEED, _LLAMA_NAMES, loads=("compressed-tensors",)), NameForm(_FEED, _SEPARATE_NAMES, modules=True),
    ), Router(_in_layer("feed_forward.router.weight"))),
    Naming("nemotron_h", ("nemotron_h", "nemotron_h_omni", "nemo_speechlm"), (
        NameForm(_MIXER, {GATE: ".{expert}.up_proj", DOWN: ".{expert}.down_proj"}, loads=_MERGED),
        NameForm(_MIXER, {GATE: ".up_proj", DOWN: ".down_proj"}, loads=_DENSE),
        NameForm(_MIXER, {GATE: ".gate_and_up_projs", DOWN: ".down_projs"}, transposed=(GATE, DOWN)),
        NameForm(f"{_LAYER}.mixer.switch_mlp", {GATE: ".fc1", DOWN: ".fc2"}, modules=True),
    ), Router(_in_layer("mixer.gate.weight"), correction=_in_layer("mixer.gate.e_score_correction_bias"))),
    Naming(
        "jamba", ("jamba",), (NameForm(_FEED, _LLAMA_NAMES, loads=_MERGED), _FEED_STACKED, _MLX_FEED),
        Router(_in_layer("feed_forward.router.weight")),
    ),
    Naming("lfm2_moe", ("lfm2_moe",), (
        NameForm(_FEED, _MIXTRAL_NAMES, loads=_MERGED), _FEED_STACKED, _MLX_FEED, NameForm(_FEED, _LLAMA_NAMES)
    ), Router(
        _in_layer("feed_forward.gate.weight"), correction=_in_layer("feed_forward.expert_bias")
    )),
    Naming("gemma4", ("gemma4", "gemma4_text"), _GEMMA, _GEMMA_ROUTER),
    Naming(
        "diffusion_gemma", ("diffusion_gemma", "diffusion_gemma_text"),
        tuple(replace(form, prefixes=_DIFFUSION_PREFIXES) for form in _GEMMA),
        replace(_GEMMA_ROUTER, prefixes=_DIFFUSION_PREFIXES),
    ),
    Naming("aria", ("aria", "aria_text"), (
        NameForm(_MLP, {GATE_UP: ".fc1", DOWN: ".fc2"}, transposed=_BOTH, modules=True, loads=_DENSE),
        _STACKED_TRANSPOSED, _EACH,
    ), Router(_in_layer("mlp.router.weight"))),
    Naming("step3", ("step3_vl", "step3_text"), _STEP, Router(_in_layer("moe.gate.weight"))),
    Naming("step3p7", ("step3p7", "step3p7_text", "step3p5"), (
        *_STEP, _MLP_STACKED, _EACH, _MLX
    ), Router(
        _in_layer("moe.gate.weight", "mlp.gate.weight", "mlp.gate.gate.weight"),
        correction=_in_layer("moe.router_bias", "mlp.gate.e_score_correction_bias", "mlp.gate.router_bias"),
    )),
    Naming("grok1", ("grok-1",), (NameForm(f"{_LAYER}.moe_block.experts", {
        GATE: ".{expert}.linear", UP: ".{expert}.linear_v", DOWN: ".{expert}.linear_1"
    }),), Router(_in_layer("moe_block.gate.weight"))),
    Naming("inkling", ("inkling_mm_model", "inkling_text"), _INKLING, own_names=("inkling_text",)),
    Naming("inkling2", ("inkling2", "inkling2_text"), _INKLING, Router(
        correction=_in_layer("mlp.gate.bias", "mlp.gate.e_score_correction_bias")
    )),
    Naming("dbrx", ("dbrx",), (
        NameForm(
            "blocks.{layer}.ffn.experts.mlp", {GATE: ".w1", UP: ".v1", DOWN: ".w2"}, flat=True, transposed=(DOWN,),
            prefixes=("transformer.",), loads=_DENSE,
        ),
        NameForm("blocks.{layer}.ffn.experts", _LLAMA_NAMES, prefixes=("transformer.",)),
    ), Router("blocks.{layer}.ffn.router.layer.weight")),
    Naming("granitemoe", ("granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa"), (
        NameForm(f"{_LAYER}.block_sparse_moe", _LINEAR_NAMES, modules=True, exclusive=False, loads=_DENSE),
        NameForm(_BLOCK, _FUSED_NAMES, loads=_DENSE), NameForm(_BLOCK, _LLAMA_NAMES), _MLX_BLOCK,
    ), Router(
        _in_layer("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight")
    ), own_names=("granitemoe_swa",)),
    Naming("jetmoe", ("jetmoe",), (
        NameForm(f"{_LAYER}.mlp", _LINEAR_NAMES, modules=True, exclusive=False, loads=_DENSE), _EACH
    ), Router(_in_layer("mlp.router.layer.weight"))),
    Naming("gguf", ("gguf",), (
        NameForm(
            "blk.{layer}", {GATE: ".ffn_gate_exps", UP: ".ffn_up_exps", DOWN: ".ffn_down_exps"}, exclusive=False,
            modules=True, prefixes=("",),
        ),
        NameForm(
            "blk.{layer}", {GATE_UP: ".ffn_gate_up_exps", DOWN: ".ffn_down_exps"}, exclusive=False, modules=True,
            prefixes=("",),
        ),
        NameForm(  # before experts were stacked
            "blk.{layer}", {GATE: ".ffn_gate.{expert}", UP: ".ffn_up.{expert}", DOWN: ".ffn_down.{expert}"},
            exclusive=False, prefixes=("",),
        ),
        NameForm(  # no gate
            "blk.{layer}", {GATE: ".ffn_up_exps", DOWN: ".ffn_down_exps"}, exclusive=False, modules=True,
            prefixes=("",), architectures=("nemotron_h_moe",),
        ),
    ), Router(
        "blk.{layer}.ffn_gate_inp.weight",
        bias="blk.{layer}.ffn_gate_inp.bias",
        correction="blk.{layer}.exp_probs_b.bias",
        table="blk.{layer}.ffn_gate_tid2eid.weight",
    )),
)  # fmt: skip


# Model types whose code is on the hub, not in transformers. Their rows are from published configs.
REMOTE_CODE = (
    "arctic", "bailing_moe", "bailing_moe_linear", "bailing_moe_v2", "deepseek", "ernie4_5_moe_vl", "grok-1",
    "hunyuan", "kimi_k2", "kimi_k3", "mimo_v2", "minimax_m1", "minimax_text_01", "PanguProMoE", "pangu_ultra_moe",
    "step3_text", "step3_vl", "step3p5",
)  # fmt: skip

# Families that a row cannot describe, and why.
REFUSED = {
    "doge": "an expert is one pair of vectors, found by product keys, not a pair of matrices",
    "muse_spark": "a norm follows every expert, before its output is weighted, which no kernel computes",
}


def find_family(model: Mapping[str, Any], *, mixture: str | None = None) -> Naming:
    """The row for a config.json, by its `model_type`, or by that of its text_config if that one is not known.

    If layers have several mixtures, `mixture` chooses one. The default is the first, with the rest in `beside`.
    """
    row = _row(model).numbered(model).of_architecture(model)
    if mixture is None:
        return row
    for one in row.mixtures:
        if one.mixture == mixture:
            return replace(one, beside=())
    raise SpecError(
        "the layers of this model have no such mixture of experts",
        where=f"naming '{row.family}'",
        expected=" or ".join(one.mixture for one in row.mixtures if one.mixture) or "no name: each layer has one",
        got=mixture,
    )


def known_type(model: Mapping[str, Any], row: Naming) -> str:
    """The `model_type` of a config by which it has this row; the row's first one, if by none."""
    stated = (name for name in _model_types(model) if name in row.model_types)
    return next(stated, row.model_types[0])


def is_refused(model: Mapping[str, Any]) -> bool:
    """Whether the config is of a family that no row can describe."""
    return any(isinstance(name, str) and name in REFUSED for name in _model_types(model))


def _model_types(model: Mapping[str, Any]) -> list[Any]:
    """Those of a config and its sections, the outermost first."""
    return [section.get("model_type") for section in config_sections(model)][::-1]


def _row(model: Mapping[str, Any]) -> Naming:
    model_types = _model_types(model)
    rows = {name: row for row in TABLE for name in row.model_types}
    for name in (name for name in model_types if isinstance(name, str)):
        if name in rows:
            return rows[name]
        if name in REFUSED:
            what = f"model_type {quoted(name)} is not supported: {REFUSED[name]}"
            raise UnsupportedFormat(what, where="config.json", hint="transformers itself loads it")
    if not model:
        raise UnsupportedFormat(
            "no config.json, which says what model this is", hint="copy it from the model that these tensors belong to"
        )
    raise _unknown_family(model_types[0], rows)


def _unknown_family(model_type: Any, rows: Mapping[str, Naming]) -> UnsupportedFormat:
    if model_type is None:
        what = "the config does not say which model this is"
        return UnsupportedFormat(
            what, where="config.json", expected="model_type", hint="copy it from the original model"
        )
    similar = get_close_matches(str(model_type), rows, n=3)
    return UnsupportedFormat(
        f"no family with experts has model_type {quoted(model_type)}",
        where="config.json",
        expected=f"one of {len(rows)} (docs/formats.md){', such as ' * bool(similar)}{', '.join(similar)}",
        hint="`naming=` describes another family; a model without experts is loaded with transformers",
    )
