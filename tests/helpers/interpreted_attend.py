"""The kernels of decode attention in Triton's interpreter, against torch. See `interpreted.py`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from interpreted import scalars
from torch import Tensor

from lancebill.backends.gpu import decode_attention
from lancebill.backends.gpu.decode_attention import Heads
from lancebill.backends.gpu.kernels import attend as kernels
from lancebill.jit.compile import KernelSource

CAPACITY = 256


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(source: KernelSource, given: Mapping[str, Tensor | int | float], grid: tuple[int, int]) -> None:
        assert set(given) == {name for name, _ in source.arguments}
        kernel = vars(kernels)[source.kernel]
        kernel[grid](**given, **dict(source.constants))

    monkeypatch.setattr(decode_attention, "_launch", launch)
    monkeypatch.setattr(kernels, "range", scalars, raising=False)  # the interpreter's takes no tensors


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers computes it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@pytest.mark.parametrize(
    ("heads", "batch", "position"),
    [
        (Heads(4, 2, 64, torch.float16, 0.125), 1, 0),
        (Heads(4, 2, 64, torch.float16, 0.125, 1e-6), 3, 97),
        (Heads(3, 1, 128, torch.float16, 0.3, 1e-5), 2, 255),
    ],
)
def test_decode_attention(heads: Heads, batch: int, position: int) -> None:
    """Rotation is exact up to the order of a sum; columns after the position, which are NaN, are not read."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(heads.dtype)

    cache = random(batch, heads.keys, CAPACITY, heads.dim), random(batch, heads.keys, CAPACITY, heads.dim)
    for tensor in cache:
        tensor[:, :, position:] = float("nan")
    rows = (
        random(batch, heads.queries, heads.dim),
        random(batch, heads.keys, heads.dim),
        random(batch, heads.keys, heads.dim),
    )
    norms = None if heads.eps is None else (random(heads.dim), random(heads.dim))
    angles = torch.rand(batch, 1, heads.dim, generator=generator) * 6
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    at = torch.tensor([position])
    rotated = decode_attention.rotate_and_store(heads, rows, norms, (cos, sin), at, cache)
    q, k = rows[:2] if norms is None else (rms_norm(r, w, heads.eps or 0) for r, w in zip(rows, norms))
    torch.testing.assert_close(rotated, rotate(q, cos, sin), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(cache[0][:, :, position], rotate(k, cos, sin), rtol=2e-3, atol=2e-3)
    assert torch.equal(cache[1][:, :, position], rows[2])
    mask = (torch.arange(CAPACITY) <= position).expand(batch, 1, 1, CAPACITY).clone()
    if batch > 1:
        mask[0, ..., : position // 2] = False
    found = decode_attention.attend(heads, rotated, cache, mask, at)
    keys, values = (tensor.nan_to_num(0).float() for tensor in cache)
    want = F.scaled_dot_product_attention(
        rotated.float().unsqueeze(2), keys, values, mask, scale=heads.scaling, enable_gqa=True
    )
    torch.testing.assert_close(found.float(), want.squeeze(2), rtol=5e-3, atol=5e-3)
