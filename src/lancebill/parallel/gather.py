"""The gather form: every rank gets every token and computes its own experts; the outputs are summed over ranks.

Shapes depend only on the largest batch and the host reads no device data, so CUDA graphs work if they work for the
backend. Routing happens before, on the token's own rank, so token ids and router logits are not
sent. This form sends more bytes than the all-to-all form, and sums partial results by rank instead of by slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.parallel.groups import RankGroup


def forward(
    layer: RoutedExperts, group: RankGroup, max_tokens: int, x: Tensor, indexed: Indexed, wire: torch.dtype
) -> Tensor:
    """Run x [M <= max_tokens, H] through the physical experts in `indexed`: [M, H] in the dtype `wire`.

    A collective: every rank of the group calls it, with any number of tokens.
    """
    tokens = x.shape[0]
    if tokens > max_tokens:
        raise LaunchError("the batch has more tokens than max_tokens", expected=f"<= {max_tokens}", got=tokens)
    rows = group.all_gather(pad_rows(x, max_tokens, 0))
    ids = pad_rows(indexed.ids.to(torch.int32), max_tokens, -1)
    weights = pad_rows(indexed.weights.float(), max_tokens, 0)
    gathered = group.all_gather(torch.cat([ids, weights.view(torch.int32)], dim=1))
    ids, bits = gathered.chunk(2, dim=1)
    partial = torch.empty(rows.shape, dtype=wire, device=x.device)
    layer.compute(rows, ids, bits.contiguous().view(torch.float32), partial)
    return group.reduce_scatter(partial)[:tokens]


def pad_rows(tensor: Tensor, count: int, value: int) -> Tensor:
    """Pad with rows of `value` to `count` rows."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, count - tensor.shape[0]), value=value)
