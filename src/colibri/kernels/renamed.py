"""Gluon's functions that have had other names: ours call them as they are called here.

3.6 says `thread_barrier`, later ones `barrier`; up to 3.7 it is `async_copy_global_to_shared`, then `async_load`.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_LANGUAGE, _COPIES = vars(gl), vars(tma)

barrier = _LANGUAGE["barrier" if "barrier" in _LANGUAGE else "thread_barrier"]
copy_tile = _COPIES["async_load" if "async_load" in _COPIES else "async_copy_global_to_shared"]
