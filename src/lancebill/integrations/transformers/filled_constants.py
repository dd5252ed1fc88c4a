"""Constants of a model's forward, made on the device: `torch.tensor(0.0, device="cuda")` copies from the host, which a
CUDA graph cannot capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FilledConstants(TorchFunctionMode):
    """Within this context, `torch.tensor` of a number or of a list of numbers fills memory of the device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None and len(args) == 1:
            numbers = args[0] if isinstance(args[0], list) else [args[0]]
            if numbers and all(type(number) in (bool, int, float) for number in numbers):
                return _filled(numbers, isinstance(args[0], list), **kwargs)
        return func(*args, **kwargs)


def _filled(numbers: list[bool | int | float], is_list: bool, **options: Any) -> torch.Tensor:
    dtype = options.pop("dtype", None) or torch.tensor(numbers, device="cpu").dtype
    parts = [torch.full((1,), number, dtype=dtype, **options) for number in numbers]
    return torch.cat(parts) if is_list else parts[0].reshape(())
