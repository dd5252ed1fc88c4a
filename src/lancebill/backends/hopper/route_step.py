"""Which kernel a routing needs, and the arguments that no call changes. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.backends.hopper import kernel_sources as src
from lancebill.jit.compile import KernelSource
from lancebill.moe.routing import Routing

LOGITS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INTEGERS = {torch.int32: "i32", torch.int64: "i64"}  # of the hash table and of token ids
_MOST_EXPERTS, _MOST_GROUPS, _MOST_SLOTS = 2048, 32, 64  # padded; a block ranks all pairs of groups
_LEAST_SLOTS = 32  # a warp holds as many at no cost, so most top-k share a kernel
_ELEMENTS_PER_WARP = 512  # 16 a thread; more would spill


@dataclass(frozen=True)
class RouteStep:
    """The routing kernel for logits of one dtype and number of columns."""

    source: KernelSource
    values: dict[str, int | float]  # every argument but tensors

    @classmethod
    def make(
        cls, routing: Routing, experts: int, logits: torch.dtype, *, biased: bool = False, corrected: bool = False,
        lookup: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.int32), vocabulary: int = 0,
    ) -> RouteStep | None:  # fmt: skip
        """None if the kernel does not support it. `lookup`: the dtypes of the hash table and of the token ids."""
        groups = routing.n_group if routing.grouped else 1
        size = experts // groups
        padded = _power_of_two(groups), _power_of_two(size)
        slots = max(_power_of_two(routing.top_k), _LEAST_SLOTS)
        if (
            routing.custom is not None
            or routing.simulated is not None
            or logits not in LOGITS
            or not set(lookup) <= set(INTEGERS)
            or slots > _MOST_SLOTS
            or padded[0] > _MOST_GROUPS
            or padded[0] * padded[1] > _MOST_EXPERTS
        ):
            return None
        constants = {
            "SCORING": routing.scoring, "AFTER": routing.after_top_k, "HASHED": routing.hashed, "BIASED": biased,
            "CORRECTED": corrected and not routing.hashed, "ZEROS": routing.zero_experts > 0, "G": padded[0], "S": padded[1], "K": slots,
        }  # fmt: skip
        values = {
            "experts": experts, "size": size, "topk_group": routing.topk_group, "top_k": routing.top_k,
            "vocabulary": vocabulary, "first_zero": experts - routing.zero_experts,
            "renormalize": int(routing.renormalize), "epsilon": routing.epsilon, "scale": routing.folded_scale,
        }  # fmt: skip
        warps = max(1, padded[0] * padded[1] // _ELEMENTS_PER_WARP)
        kinds = LOGITS[logits], INTEGERS[lookup[0]], INTEGERS[lookup[1]]
        return cls(src.route_kernel(*kinds, constants, warps), values)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def rows_readable(logits: Tensor) -> bool:
    """Whether the kernel can read rows of these logits as they are."""
    return logits.stride(1) == 1 and 0 <= logits.stride(0) < 1 << 31
