"""Sizes of layers that Hopper computes by strips of features for one token, with codes of 4 bits and of 8."""

from __future__ import annotations

STRIPS = {"hidden": 2944, "intermediate": 384, "experts": 16, "top_k": 4}
STRIP_SIZES = [
    {"top_k": 3},
    {"top_k": 1},
    {"hidden": 7168, "intermediate": 256, "top_k": 8},  # more columns than a window has; few of the second GEMM
    {"hidden": 2816, "intermediate": 1664, "top_k": 2},  # blocks with less of K
]
