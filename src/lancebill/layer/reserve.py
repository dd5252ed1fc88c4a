"""Memory that captured calls of a whole model share."""

from __future__ import annotations

from torch import nn

from lancebill.backends.base import Executor
from lancebill.layer.packed_module import PackedModule


def reserve(model: nn.Module, max_tokens: int) -> int:
    """Reserve scratch memory for captured calls of all our layers in `model` with up to `max_tokens`; returns bytes.

    Without it, a captured call takes its memory from the capture's own pool. With it, captures allocate nothing: all
    graphs use the same memory, so they must not be replayed at the same time. If a capture has several branches, those
    but the first take memory of the capture's pool. The reservation ends when a layer is moved, copied or given other
    parameters; then reserve again. Memory that was reserved before stays, for graphs that use it, as long as the layers
    do.
    """
    groups: dict[tuple[type[Executor], str], list[Executor]] = {}
    for module in model.modules():
        if isinstance(module, PackedModule):
            executor = module.executor
            groups.setdefault((type(executor), str(executor.device)), []).append(executor)
    return sum(kind.reserve(executors, max_tokens) for (kind, _), executors in groups.items())
