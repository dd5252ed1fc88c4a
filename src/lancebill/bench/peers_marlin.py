"""vLLM's Marlin as a peer, through the layer that its engine calls.

Weights, scales and biases are repacked by vLLM's own functions. Marlin's tiles need multiples of 256 hidden columns
and of 128 intermediate ones; as in vLLM, other sizes are padded with zeros, and so are the inputs of every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lancebill.bench.peer import Peer
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.moe.layout import MatrixShape, Packed, PlainLayout
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import biased_type
from lancebill.numbers.spec import MXFP4

_FUSED = "vllm.model_executor.layers.fused_moe"
_LAYERS = (f"{_FUSED}.experts.marlin_moe", f"{_FUSED}.fused_marlin_moe")  # from vLLM 0.26 on, and before
_HIDDEN, _INTERMEDIATE = 256, 128  # multiples that all of Marlin's tiles divide
_CODES_PER_WORD = 8


class Marlin(Peer):
    """`fused_marlin_moe` on 4-bit weights and 16-bit inputs."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        from vllm.scalar_type import scalar_types

        _require_supported(problem)
        self.layer = _fused_layer()
        self.hidden = -problem.hidden % _HIDDEN  # columns of padding
        plain = weights.cached("plain", lambda: weights.packed(PlainLayout()))
        halves = {"w13": 2, "w2": 1}  # gates and ups are padded apart
        self.packed: dict[str, Any] = {"gating_output": None}
        for name, (matrix, shape) in zip(("1", "2"), problem.matrices.items()):
            tensors = _repacked(shape, plain[matrix], halves[matrix], problem.input.storage)
            self.packed |= {f"w{name}": tensors["codes"], f"w{name}_scale": tensors["scales"]}
            self.packed[f"bias{name}"] = tensors.get("bias")
        spec = problem.w13.spec
        self.packed["quant_type_id"] = (scalar_types.float4_e2m1f if spec == MXFP4 else scalar_types.uint4b8).id
        self.packed |= _activation(problem)
        taken = set(inspect.signature(self.layer).parameters)
        self.packed = {key: value for key, value in self.packed.items() if key in taken}

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not self.hidden:
            return self.layer(hidden_states=x, topk_ids=ids, topk_weights=weights, **self.packed)
        padded = F.pad(x, (0, self.hidden))
        out = self.layer(hidden_states=padded, topk_ids=ids, topk_weights=weights, **self.packed)
        return out[:, : x.shape[1]]


def _fused_layer() -> Callable[..., Tensor]:
    """vLLM's function, from where its version has it."""
    for name in _LAYERS:
        try:
            layer: Callable[..., Tensor] = import_module(name).fused_marlin_moe
        except ModuleNotFoundError:
            continue
        return layer
    raise ModuleNotFoundError("vLLM has no fused_marlin_moe in a place known here", name=_LAYERS[0])


def _require_supported(problem: Problem) -> None:
    signed = all(shape.spec == MXFP4 or shape.spec.dtype == biased_type(4) for shape in problem.matrices.values())
    if problem.activation.name not in ("silu", "swigluoai") or not signed or problem.activations.spec.quantized:
        raise SpecError("Marlin is only set up here for silu and swigluoai, MXFP4 and signed int4, and 16-bit inputs")


def _activation(problem: Problem) -> dict[str, Any]:
    """The arguments of the activation. Our gates come first and ups second, which vLLM calls uninterleaved."""
    chosen = problem.activation
    if chosen.name == "silu":
        return {} if chosen.limit is None else {"clamp_limit": chosen.limit}
    kinds = import_module(f"{_FUSED}.activation").MoEActivation
    kind = kinds.SWIGLUOAI_UNINTERLEAVE
    return {"activation": kind, "clamp_limit": chosen.limit, "gemm1_alpha": chosen.alpha, "gemm1_beta": chosen.beta}


def _repacked(shape: MatrixShape, plain: Packed, halves: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Codes, scales and bias of all experts in Marlin's order. Padding has scales of zero, or codes of zero."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

    group = shape.spec.scales[0].block[1]
    multiples = (_INTERMEDIATE, _HIDDEN) if shape.name == "w13" else (_HIDDEN, _INTERMEDIATE)
    n, k = halves * _rounded(shape.n // halves, multiples[0]), _rounded(shape.k, multiples[1])
    no_order = torch.empty(0, dtype=torch.int32, device=plain["codes"].device)
    codes, scales = [], []
    for code, scale in zip(plain["codes"], plain["scale0"]):
        words = pad_halves(code.view(torch.int32), halves, n, k // _CODES_PER_WORD).t().contiguous()
        codes.append(ops.gptq_marlin_repack(words, no_order, k, n, 4))
        stored = torch.float8_e8m0fnu if shape.spec == MXFP4 else shape.spec.scales[0].dtype.storage
        values = pad_halves(scale.view(stored).to(dtype), halves, n, k // group).t().contiguous()
        permuted = marlin_utils.marlin_permute_scales(values, k, n, group)
        scales.append(marlin_utils_fp4.mxfp4_marlin_process_scales(permuted) if shape.spec == MXFP4 else permuted)
    made = {"codes": torch.stack(codes), "scales": torch.stack(scales)}
    if shape.bias:
        biases = [pad_halves(bias.view(torch.float32)[:, None], halves, n, 1)[:, 0] for bias in plain["bias"]]
        made["bias"] = torch.stack([marlin_utils.marlin_permute_bias(bias.to(dtype)) for bias in biases])
    return made


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pad_halves(rows: Tensor, halves: int, n: int, width: int) -> Tensor:
    """[n', width'] with zeros up to [n, width]; each half of the rows ends with its own."""
    apart = rows.reshape(halves, -1, rows.shape[1])
    padding = (0, width - apart.shape[2], 0, n // halves - apart.shape[1])
    return F.pad(apart, padding).reshape(n, width)
