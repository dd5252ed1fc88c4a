"""Whether hooks see the calls of a module. What takes a shorter way than `nn.Module.__call__` must ask first."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

try:
    from torch.nn.modules.module import (
        _global_backward_hooks,
        _global_backward_pre_hooks,
        _global_forward_hooks,
        _global_forward_pre_hooks,
    )
except ImportError:  # pragma: no cover - private: in a torch without them, every module counts as seen
    _GLOBAL: tuple[Mapping[int, object], ...] = ({0: None},)
else:
    _GLOBAL = _global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks


def has_hooks(module: nn.Module) -> bool:
    """Hooks of its own, or of all modules."""
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own) or any(_GLOBAL)
