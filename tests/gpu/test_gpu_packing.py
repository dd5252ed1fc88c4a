"""Packing on the GPU gives the bits of packing on the CPU, for every form; loads and moves stay within memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import OURS, skip_unless_ours
from codes_apart import codes_apart

from lancebill.backends.gpu import pack_on_gpu
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.numbers.bit_packing import Nibbles, pack_awq, pack_bits, turn_awq, turned_stream_codes
from lancebill.numbers.weight import LogicalWeight, same_bits, stack_experts
from lancebill.testing.checkpoints import Geometry
from lancebill.testing.layers import layer_problem, plausible_weight
from lancebill.testing.models import write_model

skip_unless_ours()

SPECS = [
    *((s, a) for a in ("bf16", "fp16") for s in (
        "mxfp4", "nvfp4", "int4-g32", "int4-g64:fp16", "int4-g128", "int4", "int4-g128-zp", "int4-g32-zp", "int4-zp",
        "int8", "int8-g128", "fp8", "fp8-block", "int8-g32:fp16", "mxfp8", "int2-g64", "int2-g32:fp16-zp", "int3-g128",
        "int3-g64-zp", "nf4", "iq4-g32:fp16",
    )),
    *((s, "fp8") for s in ("mxfp4", "fp8", "fp8-block", "int4", "int4-g128", "int4-g128-zp")),
]  # fmt: skip
EXPERTS = 3
MIB = 1 << 20


def packed_on(device: str, layout: FragmentLayout, shape: MatrixShape, weights: LogicalWeight) -> Packed:
    out = layout.allocate(shape, EXPERTS, device)
    for tensor in out.values():
        tensor.fill_(85)  # pack must write every byte
    layout.pack(shape, weights.to(torch.device(device)), out)
    return {name: tensor.cpu() for name, tensor in out.items()}


@pytest.mark.parametrize(("spec", "activations"), SPECS)
def test_packed_on_the_gpu_is_packed_on_the_cpu(spec: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[bool] = []
    original = pack_on_gpu.launch
    monkeypatch.setattr(pack_on_gpu, "launch", lambda *a, **k: launched.append(original(*a, **k)) or launched[-1])
    for hidden, intermediate in ((512, 256), (384, 128)):
        problem = layer_problem(spec, activations, hidden=hidden, intermediate=intermediate, experts=EXPERTS, top_k=1)
        layout = FragmentLayout(problem)
        for shape in problem.matrices.values():
            weights = stack_experts([plausible_weight(shape, seed) for seed in range(EXPERTS)])
            want, got = (packed_on(device, layout, shape, weights) for device in ("cpu", "cuda"))
            assert all(same_bits(got[name], want[name]) for name in want), shape
            if shape.spec.dtype.bits == 4:
                dense = Nibbles(pack_bits(weights.codes, 4, torch.uint8))
                words = pack_bits(weights.codes, 4, torch.int32).mT.contiguous()
                awq = turn_awq(pack_awq(weights.codes.mT.contiguous()), weights.n)
                for stored in (dense, turned_stream_codes(words, 4, weights.k), awq):
                    got = packed_on("cuda", layout, shape, replace(weights, stored=stored))
                    assert all(same_bits(got[name], want[name]) for name in want), shape
                on_gpu = weights.to(torch.device("cuda"))
                for stored in codes_apart(on_gpu, gated=problem.is_gated(shape.name)):
                    got = packed_on("cuda", layout, shape, replace(on_gpu, stored=stored))
                    assert all(same_bits(got[name], want[name]) for name in want), shape
            held = {name: tensor.cuda() for name, tensor in want.items()}
            assert layout.unpack(shape, held).to(torch.device("cpu")).equals(weights)
    assert launched and all(launched)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lancebill.cli.convert import run_conversion, target_of

    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("packed")
    write_model(source, Geometry(16, 1024, 768, 1, top_k=4))
    run_conversion(source, folder / "model", target_of("int4-g128"), {})
    return folder / "model"


def test_a_load_to_the_gpu_is_a_load_to_the_cpu_that_moved(checkpoint: Path) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = RoutedExperts.from_checkpoint(checkpoint, 0, device="cuda")
    torch.cuda.synchronize()
    final = sum(p.nbytes for p in loaded.parameters())
    assert torch.cuda.max_memory_allocated() - before <= max(1.05 * final, final + 512 * MIB)
    moved = RoutedExperts.from_checkpoint(checkpoint, 0, device="cpu").to("cuda")
    assert loaded.choice.backend.name == moved.choice.backend.name == OURS
    for (name, a), (_, b) in zip(loaded.named_parameters(), moved.named_parameters()):
        assert same_bits(a.data, b.data), name
