"""What llama.cpp changes about tensors: the order of rows, and values.

An order gives, for each row (or column) of the model's tensor, its row in the file. It takes the model's config and the
number of rows in the file, and fails where these do not fit. A change of values takes the tensor in fp32 and its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import BadValue

Order = Callable[[Any, int], Tensor]
Change = Callable[[Tensor, str], Tensor]


def _pairs(heads: int, rows: int) -> Tensor:
    return torch.arange(rows, device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(-1)


def query_pairs(config: Any, rows: int) -> Tensor:
    """Rotary columns are neighbours in the file and half a head apart in the model."""
    return _pairs(config.num_attention_heads, rows)


def key_pairs(config: Any, rows: int) -> Tensor:
    """As `query_pairs`."""
    return _pairs(config.num_key_value_heads, rows)


PAIRS: dict[str, Order] = {"attn_q": query_pairs, "attn_k": key_pairs}


def _queries_keys_values(config: Any, rows: int) -> tuple[Tensor, ...]:
    keys = config.num_key_value_heads * config.head_dim
    return torch.arange(rows, device="cpu").split([config.num_attention_heads * config.head_dim, keys, keys])


def query_rows(config: Any, rows: int) -> Tensor:
    """The queries of a matrix that has keys and values below them."""
    return _queries_keys_values(config, rows)[0]


def key_rows(config: Any, rows: int) -> Tensor:
    """As `query_rows`."""
    return _queries_keys_values(config, rows)[1]


def value_rows(config: Any, rows: int) -> Tensor:
    """As `query_rows`."""
    return _queries_keys_values(config, rows)[2]


QUERIES_KEYS_VALUES: dict[str, Order] = {
    "self_attn.q_proj": query_rows,
    "self_attn.k_proj": key_rows,
    "self_attn.v_proj": value_rows,
}


def delta_heads(config: Any, rows: int) -> Tensor:
    """Queries, keys, values and gates of linear attention: each of all heads in the file, together in a head here."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = torch.arange(rows, device="cpu").split([heads * keys, heads * keys, heads * values, heads * values])
    return torch.cat([part.view(heads, -1) for part in parts], dim=1).reshape(-1)


def values_of_heads(config: Any, rows: int) -> Tensor:
    """Value heads of linear attention: here those of a key head together, in the file the first of each, and so on."""
    heads = config.linear_num_key_heads
    return (
        torch.arange(rows, device="cpu")
        .view(config.linear_num_value_heads // heads, heads, -1)
        .transpose(0, 1)
        .reshape(-1)
    )


def values_of_heads_below(config: Any, rows: int) -> Tensor:
    """The same below the queries and keys, which are in order."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([torch.arange(keys, device="cpu"), keys + values_of_heads(config, rows - keys)])


def minus_one(tensor: Tensor, name: str) -> Tensor:
    """The model adds 1 to its norm when it computes; the file has the sum."""
    return tensor - 1


def log_of_negated(tensor: Tensor, name: str) -> Tensor:
    """The model has the logarithm of the decay; the file has the decay, which is negative."""
    if not (tensor < 0).all():
        raise BadValue("the decay of a state must be negative", where=name, got=tensor.max().item())
    return torch.log(-tensor)
