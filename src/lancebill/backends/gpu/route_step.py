"""Which kernel a routing needs, and the arguments that no call changes. Needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lancebill.backends.route_call import RouteCall
from lancebill.jit.compile import KernelSource
from lancebill.moe.routing import Routing

KERNELS = "lancebill.backends.gpu.kernels.route"
_LOGITS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INTEGERS = {torch.int32: "i32", torch.int64: "i64"}
_MOST_EXPERTS, _MOST_GROUPS, _MOST_SLOTS = 2048, 32, 64  # padded
_MOST_COMPARISONS = 128  # of a thread: merging compares each expert of the groups' lists with each
_LEAST_SLOTS = 32  # one a thread, so that most top-k share a kernel
_EXPERTS_PER_WARP = 512  # 16 a thread; with many more, registers would spill
_WARP, _MOST_WARPS = 32, 16  # threads of a warp; warps that leave a thread 128 registers


@dataclass(frozen=True)
class RouteStep:
    """The routing kernel for logits of one dtype and number of columns."""

    source: KernelSource
    values: dict[str, int | float]  # every argument but tensors and the row stride

    @classmethod
    def of(cls, call: RouteCall) -> RouteStep | None:
        """None if the kernel does not support so many experts, groups or slots."""
        routing, logits, (bias, correction, table), input_ids = call
        if not routing.hashed or table is None or input_ids is None:
            return cls.make(
                routing, logits.shape[1], logits.dtype, biased=bias is not None, corrected=correction is not None
            )
        lookup = table.dtype, input_ids.dtype
        return cls.make(
            routing, logits.shape[1], logits.dtype, biased=bias is not None, lookup=lookup, vocabulary=len(table)
        )

    @classmethod
    def make(
        cls, routing: Routing, experts: int, logits: torch.dtype, *, biased: bool = False, corrected: bool = False,
        lookup: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.int32), vocabulary: int = 0,
    ) -> RouteStep | None:  # fmt: skip
        """`lookup`: the dtypes of the hash table and of the token ids."""
        groups = routing.n_group if routing.grouped else 1
        size = experts // groups
        g, s = _power_of_two(groups), _power_of_two(size)
        slots = max(_power_of_two(routing.top_k), _LEAST_SLOTS)
        listed = min(_power_of_two(max(routing.top_k, 2)), s) if g > 1 else slots
        warps = _warps(g, s)
        if g > _MOST_GROUPS or g * s > _MOST_EXPERTS or slots > _MOST_SLOTS:
            return None
        if g > 1 and (g * listed) ** 2 > _MOST_COMPARISONS * _WARP * warps:
            return None
        constants = {
            "SCORING": routing.scoring, "AFTER": routing.after_top_k, "HASHED": routing.hashed, "BIASED": biased,
            "CORRECTED": corrected, "ZEROS": routing.zero_experts > 0, "G": g, "S": s, "K": slots,
            "C": listed,
        }  # fmt: skip
        values = {
            "experts": experts, "size": size, "topk_group": routing.topk_group, "top_k": routing.top_k,
            "vocabulary": vocabulary, "first_zero": experts - routing.zero_experts,
            "renormalize": int(routing.renormalize), "epsilon": routing.epsilon, "scale": routing.folded_scale,
        }  # fmt: skip
        types = _LOGITS[logits], _INTEGERS[lookup[0]], _INTEGERS[lookup[1]]
        return cls(_source(*types, constants, warps), values)

    def compiled_for(self, arch: int) -> RouteStep:
        """The same kernel for GPUs of this compute capability."""
        return replace(self, source=replace(self.source, arch=arch))


def _source(logits: str, table: str, input_ids: str, constants: Mapping[str, Any], warps: int) -> KernelSource:
    """The kernel for these element types. No argument is declared aligned: rows may be at any address."""
    pointers = {
        "logits": logits, "bias": "fp32", "correction": "fp32", "table": table, "input_ids": input_ids, "ids": "i32",
        "weights": "fp32", "identity": "fp32",
    }  # fmt: skip
    integers = ("stride", "experts", "size", "topk_group", "top_k", "vocabulary", "first_zero", "renormalize")
    arguments = (
        *((name, f"*{element}") for name, element in pointers.items()),
        *((name, "i32") for name in integers),
        *((name, "fp32") for name in ("epsilon", "scale")),
    )
    options = (("num_warps", warps), ("maxnreg", 255 if warps <= 8 else 128))
    return KernelSource(KERNELS, "route_tokens", arguments, tuple(constants.items()), (), options)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _warps(groups: int, size: int) -> int:
    """One expert a thread if a group fits into a warp: each step of a selection then takes place inside a warp."""
    per_warp = _WARP if groups > 1 and size <= _WARP else _EXPERTS_PER_WARP
    return min(max(1, groups * size // per_warp), _MOST_WARPS)
