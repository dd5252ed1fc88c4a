"""Addresses of tensors for kernels of a GPU: nothing else hands them one.

A kernel that reads host memory, or that of another GPU, ends with an illegal access and takes the process's context
with it. So an address leaves torch only here, of a tensor that is where the kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.errors import LaunchError


def address_on(tensor: Tensor, device: torch.device, name: str = "a tensor") -> int:
    """Where kernels on `device` find the tensor."""
    if tensor.device != device:
        raise LaunchError(f"{name} is not where the kernel reads", expected=device, got=tensor.device)
    return tensor.data_ptr()
