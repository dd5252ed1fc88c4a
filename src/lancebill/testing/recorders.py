"""Stand-ins for CUDA graphs on machines without a GPU: `Recorder`s as in `integrations/transformers/decode_graphs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PlainRecorder:
    """Replays by calling again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
        call()
        return call


class TapeRecorder(PlainRecorder):
    """Replays torch's operations on the tensors they were recorded with, and nothing that Python did between them.

    As with a CUDA graph, a number that Python computed while recording stays what it was.
    """

    def record(self, call: Callable[[], Any]) -> Callable[[], Any]:
        with _Tape() as tape:
            result = call()

        def replay() -> Any:
            for function, given, named, results in tape.operations:
                for old, new in zip(tree_leaves(results), tree_leaves(function(*given, **named))):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return result

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, results))
        return results
