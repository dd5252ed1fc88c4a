"""One name for each Gluon function that Triton has renamed.

Triton 3.6 has `thread_barrier`, later versions `barrier`. Up to 3.7 it is `async_copy_global_to_shared`, then
`async_load`; up to 3.8 `_reinterpret`, then `reinterpret`. From 3.8 on a buffer can only be reinterpreted at its own
size.
"""

from __future__ import annotations

from typing import Any

from triton import __version__
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# Whether part of a buffer may be reinterpreted as a larger buffer. Token tiles are then split into powers of two, else
# into boxes of one copy.
LARGER_VIEWS = tuple(int(part) for part in __version__.split(".")[:2]) < (3, 8)


@builtin  # type: ignore[untyped-decorator]
def view(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Reinterpret shared memory with another dtype, shape and layout."""
    sides = [_unwrap_if_constexpr(side) for side in _unwrap_if_constexpr(shape)]
    return _semantic.memdesc_reinterpret(memory, _unwrap_if_constexpr(dtype), sides, _unwrap_if_constexpr(layout))
