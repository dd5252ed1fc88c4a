"""Compiles kernels that vLLM's DeepSeek-V4 launches, TileLang's and DeepGEMM's, before an engine needs them.

python benchmarks/vllm_v4_kernels.py [--tokens 1 16 64 8192]

An engine compiles them one after the other, for each number of tokens that splits the sums of a kernel in another way.
Both keep them in folders, so a later engine finds them. Each is compiled in a process of its own, by a call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from vllm_models import DEEPSEEK_V4_FLASH
from vllm_serving import fork, say, wait_for

HIDDEN, STREAMS = DEEPSEEK_V4_FLASH["hidden_size"], DEEPSEEK_V4_FLASH["hc_mult"]
MIXES = STREAMS * (STREAMS + 2)
POST_ALPHA = 2.0  # of vLLM's decoder layer
BLOCK = 128  # of fp8 matrices with one scale
Calls = dict[str, Callable[[int], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 8192])
    parser.add_argument("--limit", type=int, default=60, help="seconds for all")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit
    calls = streams_calls() | dense_calls()
    running = [
        (f"{name} of {tokens}", fork(lambda call=call, tokens=tokens: call(tokens), None))  # type: ignore[misc]
        for tokens in arguments.tokens
        for name, call in calls.items()
    ]
    for label, child in running:
        failure = wait_for(child, max(0, round(deadline - time.monotonic())), None)
        say(f"{label}: {'done' if failure is None else failure}")


def dense_calls() -> Calls:
    """DeepGEMM's kernels of the matrices in fp8, for a number of tokens."""
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe, deep_gemm_fp8_o_proj
    from vllm.utils.deep_gemm import fp8_gemm_nt

    config = DEEPSEEK_V4_FLASH
    heads, width, rope = config["num_attention_heads"], config["head_dim"], config["qk_rope_head_dim"]
    rank, groups, middle = config["o_lora_rank"], config["o_groups"], config["moe_intermediate_size"]

    def linear(n: int, k: int) -> Callable[[int], object]:
        def call(tokens: int) -> object:
            aligned = -(-tokens // 4) * 4
            rows = fp8(tokens, k), ones(k // BLOCK, aligned).T[:tokens]
            out = ones(tokens, n, dtype=torch.bfloat16)
            return fp8_gemm_nt(rows, (fp8(n, k), ones(n // BLOCK, k // BLOCK)), out)

        return call

    def output(tokens: int) -> object:
        columns = heads * width // groups
        scales = ones(groups, rank // BLOCK, columns // BLOCK)
        recipe, aligned = compute_fp8_einsum_recipe()
        return deep_gemm_fp8_o_proj(
            ones(tokens, heads, width, dtype=torch.bfloat16),
            torch.zeros(tokens, dtype=torch.int64, device="cuda"),
            ones(1, rope),
            SimpleNamespace(weight=fp8(groups, rank, columns), weight_scale_inv=scales),  # type: ignore[arg-type]
            torch.nn.Identity(),
            n_groups=groups,
            heads_per_group=heads // groups,
            nope_dim=width - rope,
            rope_dim=rope,
            o_lora_rank=rank,
            einsum_recipe=recipe,
            tma_aligned_scales=aligned,
        )

    queries = config["q_lora_rank"]
    shapes = (
        (queries + width, HIDDEN),
        (heads * width, queries),
        (config["index_n_heads"] * config["index_head_dim"], queries),
        (HIDDEN, groups * rank),
        (2 * middle, HIDDEN),
        (HIDDEN, middle),
    )
    return {"output": output} | {f"{n} x {k}": linear(n, k) for n, k in shapes}


def streams_calls() -> Calls:
    """TileLang's kernels around every block, with the model's constants, for a number of tokens."""
    from vllm.model_executor.kernels.mhc import tilelang as mhc

    config = DEEPSEEK_V4_FLASH
    rms, eps, rounds = config["rms_norm_eps"], config["hc_eps"], config["hc_sinkhorn_iters"]
    constants = (rms, eps, eps, POST_ALPHA, rounds)

    def norm() -> dict[str, Any]:
        return {"norm_weight": ones(HIDDEN, dtype=torch.bfloat16), "norm_eps": rms}

    def mixing() -> tuple[torch.Tensor, ...]:
        return ones(MIXES, STREAMS * HIDDEN), ones(3), ones(MIXES)

    def streams(tokens: int) -> torch.Tensor:
        return ones(tokens, STREAMS, HIDDEN, dtype=torch.bfloat16)

    def first(tokens: int) -> object:
        x, fn = ones(tokens, HIDDEN, dtype=torch.bfloat16), ones(MIXES, HIDDEN)
        return mhc.mhc_pre_broadcast_tilelang(x, *mixing(), *constants, **norm(), fn_broadcast=fn)

    def between(tokens: int) -> object:
        x, post, mix = (
            ones(tokens, HIDDEN, dtype=torch.bfloat16),
            ones(tokens, STREAMS, 1),
            ones(tokens, STREAMS, STREAMS),
        )
        return mhc.mhc_fused_post_pre_tilelang(x, streams(tokens), post, mix, *mixing(), *constants, **norm())

    def last(tokens: int) -> object:
        x, post, mix = (
            ones(tokens, HIDDEN, dtype=torch.bfloat16),
            ones(tokens, STREAMS, 1),
            ones(tokens, STREAMS, STREAMS),
        )
        return mhc.mhc_post_tilelang(x, streams(tokens), post, mix)

    def head(tokens: int) -> object:
        fn, scale, base = ones(STREAMS, STREAMS * HIDDEN), ones(1), ones(STREAMS)
        return mhc.hc_head_fused_kernel_tilelang(streams(tokens), fn, scale, base, rms, eps)

    return {"first": first, "between": between, "last": last, "head": head}


def fp8(*shape: int) -> torch.Tensor:
    return ones(*shape, dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


if __name__ == "__main__":
    main()
