"""kt-kernel, the CPU kernels of KTransformers: MXFP4 and int4 experts, as its wheel has them.

Its AMX kernels take 32 columns to a scale. An int4 group of 64 or 128 columns is given to them as several groups with
the same scale: the same numbers, but up to 9 % more bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lancebill.bench.peer import Peer
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.problem import Problem
from lancebill.numbers.bit_packing import pack_bits
from lancebill.numbers.dtypes import BF16
from lancebill.numbers.spec import MXFP4, group, int_spec

MOST_TOKENS = 8192
_COLUMNS = 32  # of a scale
_pools: dict[int, Any] = {}  # by number of threads: its worker threads never end


class KtKernel(Peer):
    """All experts on the CPU; rows go in and sums come out in bf16."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        import kt_kernel
        from kt_kernel.utils.amx import _select_mxfp4_backend, _select_rawint4_backend

        repeats = _group(problem) // _COLUMNS
        if any(weights.bias(matrix, torch.bfloat16) is not None for matrix in problem.matrices):
            raise SpecError("kt-kernel has no biases")
        extension = kt_kernel.kt_kernel_ext
        self.variant = kt_kernel.__cpu_variant__
        self.problem, threads = problem, torch.get_num_threads()
        if threads not in _pools:
            workers = extension.WorkerPoolConfig()
            workers.subpool_count, workers.subpool_numa_map, workers.subpool_thread_count = 1, [0], [threads]
            _pools[threads] = extension.CPUInfer(workers)
        self.pool = _pools[threads]
        self.on_gpu = torch.zeros(problem.experts, dtype=torch.bool, device="cpu")  # none
        config = extension.moe.MOEConfig(
            problem.experts, problem.top_k, problem.hidden, problem.intermediate, self.on_gpu.data_ptr()
        )
        config.layer_idx, config.pool, config.max_len = 0, self.pool.backend_, MOST_TOKENS
        config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, _COLUMNS, False
        kept = _matrices(problem, weights, repeats)
        at = {name: [[[tensor.data_ptr() for tensor in part]] for part in parts] for name, parts in kept.items()}
        config.gate_projs, config.gate_scales = at["gate"]
        config.up_projs, config.up_scales = at["up"]
        config.down_projs, config.down_scales = at["down"]
        is_float = problem.w13.spec == MXFP4
        self.moe = (_select_mxfp4_backend() if is_float else _select_rawint4_backend(_COLUMNS))(config)
        self.order = torch.arange(problem.experts, dtype=torch.int64, device="cpu")
        self.pool.submit(self.moe.load_weights_task(self.order.data_ptr()))
        self.pool.sync()
        del kept  # it has copied them into its own layout

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        given = x.bfloat16().contiguous(), ids.long().contiguous(), weights.float().contiguous()
        out = torch.empty_like(given[0])
        count = torch.tensor([x.shape[0]], dtype=torch.int32, device="cpu")
        self.pool.submit(
            self.moe.forward_task(
                count.data_ptr(), ids.shape[1], given[1].data_ptr(), given[2].data_ptr(), given[0].data_ptr(),
                out.data_ptr(), False,
            )
        )  # fmt: skip
        self.pool.sync()
        return out.to(x.dtype)


def _group(problem: Problem) -> int:
    """The columns of a scale."""
    specs = {shape.spec for shape in problem.matrices.values()}
    for columns in (32, 64, 128):
        if specs == {int_spec(4, group(columns), scale=BF16)} or (columns == 32 and specs == {MXFP4}):
            return columns
    raise SpecError("kt-kernel is measured with MXFP4 and int4 weights", got=problem.w13.spec)


def _matrices(problem: Problem, weights: Weights, repeats: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Codes two per byte and bf16 scales (each repeated) of gate, up and down, by expert; equal experts share them."""
    made: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in ("gate", "up", "down")}
    half = problem.w13.n // 2
    for expert in range(weights.distinct):
        first, second = (weights.logical(matrix, expert).to(torch.device("cpu")) for matrix in ("w13", "w2"))
        for name, weight, rows in (
            ("gate", first, slice(0, half)),
            ("up", first, slice(half, None)),
            ("down", second, slice(None)),
        ):
            made[name][0].append(pack_bits(weight.codes[rows].contiguous(), 4, torch.uint8).contiguous())
            level = weight.spec.scales[0]
            scales = level.dtype.decode(weight.scales[0][rows]).bfloat16()
            made[name][1].append(scales.repeat_interleave(repeats, dim=-1).contiguous())
    each = [expert % weights.distinct for expert in range(problem.experts)]
    return {name: ([codes[e] for e in each], [scales[e] for e in each]) for name, (codes, scales) in made.items()}
