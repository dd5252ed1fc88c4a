"""Several tile sizes as one compile-time integer, a byte each.

A module of its own: a GEMM that imported the dispatch kernels would be compiled again whenever they change.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def size_of(SIZES, number):
    """One of several tile sizes; 0 if there are fewer. SIZES has a byte for each."""
    return (SIZES >> (8 * number)) & 255


@triton.constexpr_function
def size_count(SIZES):
    return (SIZES.bit_length() + 7) // 8


@triton.constexpr_function
def largest_size(SIZES):
    return max(SIZES.to_bytes(8, "little"))


@triton.constexpr_function
def launch_of(SIZES, LAUNCHES, size):
    """The launch of a tile size: LAUNCHES has a byte for each of SIZES."""
    return LAUNCHES.to_bytes(8, "little")[SIZES.to_bytes(8, "little").index(size)]


@triton.constexpr_function
def launches_padded(LAUNCHES):
    """The number of launches, rounded up to a power of two."""
    return 1 << max(LAUNCHES.to_bytes(8, "little")).bit_length()
