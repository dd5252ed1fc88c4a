"""Addresses of tensors for our C++ libraries: nothing else hands them one.

They run on the CPU, and the address of a tensor on a GPU would end the process. So an address leaves torch only here,
of a tensor in memory of the host. (Pinned memory is that, too.)
"""

from __future__ import annotations

from torch import Tensor

from lancebill.errors import LaunchError


def host_address(tensor: Tensor, name: str = "a tensor") -> int:
    """Where a library on the CPU finds the tensor."""
    if not tensor.is_cpu:
        raise LaunchError(f"{name} is not where the CPU reads", expected="cpu", got=tensor.device)
    return tensor.data_ptr()
