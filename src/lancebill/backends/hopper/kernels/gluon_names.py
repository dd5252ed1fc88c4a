"""Gluon's functions that have had other names: ours call them as they are called here.

3.6 says `thread_barrier`, later ones `barrier`; up to 3.7 it is `async_copy_global_to_shared`, then `async_load`; up to
3.8 `_reinterpret`, then `reinterpret`. From 3.8 on only whole buffers are seen as something else, of the same size.
"""

from __future__ import annotations

from typing import Any

from triton import __version__
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

_LANGUAGE, _COPIES = vars(gl), vars(tma)

barrier = _LANGUAGE["barrier" if "barrier" in _LANGUAGE else "thread_barrier"]
copy_tile = _COPIES["async_load" if "async_load" in _COPIES else "async_copy_global_to_shared"]

# Whether a part of a buffer may be seen as a larger one: tokens then lie in powers of two, else in boxes of one copy.
LARGER_VIEWS = tuple(int(part) for part in __version__.split(".")[:2]) < (3, 8)


@builtin  # type: ignore[untyped-decorator]
def view(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory seen as something else."""
    sides = [_unwrap_if_constexpr(side) for side in _unwrap_if_constexpr(shape)]
    return _semantic.memdesc_reinterpret(memory, _unwrap_if_constexpr(dtype), sides, _unwrap_if_constexpr(layout))
