"""Small checkpoints with the config keys and tensor names of published ones.

Nothing of the library writes them: each packer here follows the published definition of its format, and returns the
stored tensors by suffix with the matrix that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

EXPERTS, HIDDEN, INTER = 2, 128, 192
Stored = dict[str, Tensor]
Packer = Callable[[int, int], tuple[Stored, Tensor]]
Truth = dict[tuple[int, str], Tensor]  # (expert, projection) -> the matrix

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def model(model_type: str, **keys: Any) -> dict[str, Any]:
    """A config.json; a key that is given as ... is left out."""
    usual = {
        "model_type": model_type, "num_hidden_layers": 1, "hidden_size": HIDDEN, "moe_intermediate_size": INTER,
        "intermediate_size": INTER, "num_experts": EXPERTS, "num_experts_per_tok": 1, "hidden_act": "silu",
    }  # fmt: skip
    return {key: value for key, value in (usual | keys).items() if value is not ...}


def write(folder: Path, files: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A folder with these JSON files and one file of tensors."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def experts(
    packer: Packer, home: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Stored, Truth]:
    """Experts with a module for each projection; `home` ends with what precedes the number of the expert."""
    tensors, truth = {}, {}
    for expert in range(EXPERTS):
        for projection, name in zip(("gate", "up", "down"), names):
            stored, truth[expert, projection] = packer(*_size(projection))
            tensors |= {f"{home}{expert}.{name}{suffix}": tensor for suffix, tensor in stored.items()}
    return tensors, truth


def _size(projection: str) -> tuple[int, int]:
    return (HIDDEN, INTER) if projection == "down" else (INTER, HIDDEN)


def bf16(n: int, k: int) -> tuple[Stored, Tensor]:
    matrix = torch.randn(n, k).bfloat16()
    return {".weight": matrix}, matrix.float()


def pairs(codes: Tensor) -> Tensor:
    """Two codes in a byte, the first in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(n: int, k: int) -> tuple[Stored, Tensor]:
    """ModelOpt's: e2m1 codes, e4m3 scales of 16 columns, and a factor of the matrix."""
    codes = torch.randint(16, (n, k))
    scales = (torch.rand(n, k // 16) * 100 + 1).to(torch.float8_e4m3fn)
    factor = torch.rand(()) * 1e-3
    matrix = E2M1[codes] * scales.float().repeat_interleave(16, 1) * factor
    stored = {".weight": pairs(codes), ".weight_scale": scales, ".weight_scale_2": factor}
    return {**stored, ".input_scale": torch.rand(()) + 0.01}, matrix


def nvfp4_divided(n: int, k: int) -> tuple[Stored, Tensor]:
    """compressed-tensors': the same, with a divisor of the matrix."""
    codes, divisor = torch.randint(16, (n, k)), torch.rand(1) * 1000 + 1
    scales = (torch.rand(n, k // 16) * 100 + 1).to(torch.float8_e4m3fn)
    matrix = E2M1[codes] * (scales.float() / divisor).repeat_interleave(16, 1)
    return {".weight_packed": pairs(codes), ".weight_scale": scales, ".weight_global_scale": divisor}, matrix


def fp4_e5m3(n: int, k: int) -> tuple[Stored, Tensor]:
    """AutoRound's FP4 with scales of five exponent bits and three of mantissa, and none of the matrix."""
    codes, scales = torch.randint(16, (n, k)), torch.randint(1, 255, (n, k // 16))
    exponent, mantissa = scales >> 3, (scales & 7) / 8
    values = torch.where(exponent == 0, mantissa * 2.0**-14, (1 + mantissa) * torch.exp2(exponent - 15.0))
    matrix = E2M1[codes] * values.repeat_interleave(16, 1)
    return {".weight_packed": pairs(codes), ".weight_scale": scales.to(torch.uint8)}, matrix


def mxfp4(n: int, k: int) -> tuple[Stored, Tensor]:
    """DeepSeek-V4's: e2m1 codes, and a power of two for 32 columns."""
    codes, exponents = torch.randint(16, (n, k)), torch.randint(115, 125, (n, k // 32)).to(torch.uint8)
    matrix = E2M1[codes] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {".weight": pairs(codes), ".scale": exponents.view(torch.float8_e8m0fnu)}, matrix


def mxfp8(n: int, k: int) -> tuple[Stored, Tensor]:
    """MiniMax-M3's: e4m3 codes, and a byte with a power of two for 32 columns."""
    codes = (torch.randn(n, k) * 100).to(torch.float8_e4m3fn)
    exponents = torch.randint(115, 125, (n, k // 32)).to(torch.uint8)
    matrix = codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {".weight": codes, ".weight_scale_inv": exponents}, matrix


def nf4(n: int, k: int) -> tuple[Stored, Tensor]:
    """bitsandbytes': a codebook and the largest magnitude of 64 elements, over the flattened matrix."""
    codes, absmax = torch.randint(16, (n * k,)), torch.rand(n * k // 64) + 0.01
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]})
    stored = {
        ".weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).reshape(-1, 1),
        ".weight.absmax": absmax,
        ".weight.quant_map": NF4.clone(),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    return stored, (NF4[codes].reshape(-1, 64) * absmax[:, None]).reshape(n, k)


def fp8_rows(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 codes [n, k], one scale for each row [n, 1], and their product."""
    codes, scales = (torch.randn(n, k) * 100).to(torch.float8_e4m3fn), torch.rand(n, 1) + 0.01
    return codes, scales, codes.float() * scales


def mlx(n: int, k: int) -> tuple[Stored, Tensor]:
    """MLX's affine mode: 4-bit codes in 32-bit words, a scale and a bias for 64 columns."""
    codes = torch.randint(16, (n, k))
    words = (codes.reshape(n, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    scales, biases = (torch.randn(n, k // 64).bfloat16() for _ in range(2))
    wide = [level.float().repeat_interleave(64, 1) for level in (scales, biases)]
    stored = {".weight": words.to(torch.uint32), ".scales": scales, ".biases": biases}
    return stored, codes.float() * wide[0] + wide[1]


def int4_words(n: int, k: int) -> tuple[Stored, Tensor]:
    """compressed-tensors' pack-quantized: signed 4-bit codes in 32-bit words, a scale for 32 columns."""
    codes, scales = torch.randint(16, (n, k)), (torch.rand(n, k // 32) + 0.01).bfloat16()
    words = (codes.reshape(n, -1, 8) << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)
    stored = {".weight_packed": words, ".weight_scale": scales, ".weight_shape": torch.tensor([n, k])}
    return stored, (codes - 8).float() * scales.float().repeat_interleave(32, 1)
