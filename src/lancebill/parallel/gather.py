"""Every rank sees every token, computes its own experts, and the outputs are summed.

Shapes are fixed by the largest batch and nothing is read back by the host, so that a backend whose
forward can be captured in a graph stays capturable here. Routing is done before, on the token's own
rank: token ids and router logits need not travel. It moves more bytes than the all-to-all form and
sums partial results rank by rank, not slot by slot.
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
    """x [M <= max_tokens, H] through the physical experts `indexed` names: [M, H] in `wire`.

    Every rank of the group calls this, with as many tokens as it has.
    """
    tokens = x.shape[0]
    if tokens > max_tokens:
        raise LaunchError("more tokens than this layer was made for", expected=f"<= {max_tokens}", got=tokens)
    rows = group.all_gather(pad_rows(x, max_tokens, 0))
    ids = pad_rows(indexed.ids.to(torch.int32), max_tokens, -1)
    weights = pad_rows(indexed.weights.float(), max_tokens, 0)
    facts = group.all_gather(torch.cat([ids, weights.view(torch.int32)], dim=1))
    ids, bits = facts.chunk(2, dim=1)
    partial = torch.empty(rows.shape, dtype=wire, device=x.device)
    layer.compute(rows, ids, bits.contiguous().view(torch.float32), partial)
    return group.reduce_scatter(partial)[:tokens]


def pad_rows(tensor: Tensor, count: int, value: int) -> Tensor:
    """Rows of `value` up to `count` rows."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, count - tensor.shape[0]), value=value)
