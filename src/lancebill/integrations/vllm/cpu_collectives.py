"""Two collectives that vLLM's CPU build does not have: without them no model with experts runs with data parallelism.

vLLM gathers the tokens of all data-parallel ranks before the experts and sums and scatters their results afterwards.
Ranks have different numbers of tokens. Its communicator for CPUs leaves both operations unimplemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from lancebill.errors import LaunchError


def all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor | list[Tensor]:
    """The tensors of all ranks, joined along their first dimension; `sizes` are its lengths by rank."""
    _require_rows(dim)
    if isinstance(input_, list):
        return [_gathered(self, tensor, sizes) for tensor in input_]
    return _gathered(self, input_, sizes)


def reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's rows of the sum over all ranks; `sizes` are the numbers of rows by rank."""
    _require_rows(dim)
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    if sizes is None:
        sizes = [total.shape[0] // self.world_size] * self.world_size
    return total.split(list(sizes))[self.rank_in_group].clone()


def _gathered(communicator: Any, tensor: Tensor, sizes: Sequence[int] | None) -> Tensor:
    """Gloo gathers equal shapes only: rows are padded to the longest rank's."""
    if sizes is None:
        sizes = [tensor.shape[0]] * communicator.world_size
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def _require_rows(dim: int) -> None:
    if dim != 0:
        raise LaunchError("these collectives join and cut rows only", expected="dimension 0", got=dim)


def add_cpu_collectives() -> None:
    """Add what is missing; a version of vLLM that has its own keeps it."""
    if CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv:
        CpuCommunicator.all_gatherv = all_gatherv
    if CpuCommunicator.reduce_scatterv is DeviceCommunicatorBase.reduce_scatterv:
        CpuCommunicator.reduce_scatterv = reduce_scatterv
