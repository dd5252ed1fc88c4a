"""How a GGUF architecture with experts is a model of transformers: names, config keys, and what llama.cpp changes.

`NAMES` and `KEYS` hold the common part; a row extends or overrides them. Names are module names below a layer; keys are
metadata keys below the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lancebill.integrations.transformers.gguf_changes import Change, Order

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
WHOLE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KEYS = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts_per_tok": "expert_used_count",
}
# Not sizes of tensors, so that the largest tensor is no limit for them.
UNBOUNDED = {
    "context_length",
    "attention.sliding_window",
    "attention.indexer.top_k",
    "rope.scaling.original_context_length",
}


@dataclass(frozen=True)
class StoredFactors:
    """Tensors, which a file may have, of factors that divide the frequencies of rotary positions.

    `scales` are keys of the config for the factor of cosines and sines.
    """

    short: str  # for texts of up to the original length
    long: str
    scales: tuple[str, ...] = ()


@dataclass(frozen=True)
class GgufRow:
    """How one architecture is a model of transformers.

    `whole` are single tensors with their suffixes, `joined` modules whose matrices are stored apart, `divided` matrices
    that several modules share. `orders` (of rows), `columns` and `values` say by the name of a tensor or of a joined
    module what llama.cpp changes about it (`gguf_changes.py`).

    `fixed` are config values that the metadata may not have; `present` are true where a tensor of any layer is stored;
    `ratios` are quotients of two numbers of the metadata; `choices` have a key of the metadata, the values for some of
    its numbers, and the value for all others. `required` are metadata without which the model would compute something
    else (0: or none). `variant` is another model type, and the tensor of the last layer that tells it apart.
    `layer_tensors` tell the type of a layer by a tensor that only layers of that type have; `kinds` tell it by a value
    for each layer: its key, the types for some values, and the type for all others, if there are others. `periods` are
    the keys for the distance and the first of the layers that have a tensor. `zeros` are tensors of zeros, which the
    model adds and the file does not have. A key of the config with a dot is one of a section. Where all `keys` must be
    `stated`, none has the default of transformers: it is that of one published model.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    divided: Mapping[str, Mapping[str, Order]] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, Mapping[int, object], object]] = field(default_factory=dict)
    rotary: Mapping[str, object] = field(default_factory=dict)  # as `fixed`, of the rotary positions
    required: Mapping[str, object] = field(default_factory=dict)
    variant: tuple[str, str] | None = None
    orders: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)
    values: Mapping[str, Change] = field(default_factory=dict)
    latent: bool = False  # keys and values are projected from a latent vector (MLA)
    factors: StoredFactors | None = None
    partial: bool = False  # only some columns of a head may be rotated
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    layer_key: str = "layer_types"  # of the config
    periods: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)  # names that replace those in `WHOLE`
    layers: str = "model.layers"
    plain: tuple[str, ...] = ()  # matrices that the model reads otherwise than by calling their modules
    kinds: tuple[str, Mapping[int, str], str | None] | None = None
    zeros: tuple[str, ...] = ()
    stated: bool = False
