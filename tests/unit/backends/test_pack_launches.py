"""Packing for a GPU on a fake driver: which kernels are launched, and what they are given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from codes_apart import codes_apart
from fake_driver import FakeDriver, fake_load_kernel
from fake_gpus import plugged_in

from lancebill.backends.gpu import pack_on_gpu
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.errors import CompileError, LaunchError
from lancebill.jit import driver, load
from lancebill.numbers.bit_packing import Nibbles, pack_bits
from lancebill.numbers.unusual import assuming
from lancebill.numbers.weight import same_bits, stack_experts
from lancebill.testing.layers import layer_problem, plausible_weight

EXPERTS = 3
GPU = torch.device("cuda", 0)


@pytest.fixture(name="fake")
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A fake driver of two fake GPUs."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(load, "load_kernel", fake_load_kernel)
    monkeypatch.setattr(pack_on_gpu, "in_context", lambda device: nullcontext())
    monkeypatch.setattr(pack_on_gpu, "_target", lambda device: 90)
    monkeypatch.setattr(pack_on_gpu, "_prepared", pack_on_gpu._Prepared())
    with plugged_in(monkeypatch, count=2):
        yield fake


def pack(
    spec: str, activations: str = "bf16", device: torch.device = GPU
) -> tuple[FragmentLayout, dict[str, dict[str, torch.Tensor]]]:
    """Of weights on the CPU."""
    problem = layer_problem(spec, activations, hidden=256, intermediate=128, experts=EXPERTS, top_k=1)
    layout, packed = FragmentLayout(problem), {}
    for name, shape in problem.matrices.items():
        weights = stack_experts([plausible_weight(shape, seed) for seed in range(EXPERTS)])
        packed[name] = layout.allocate(shape, EXPERTS, device)
        for tensor in packed[name].values():
            tensor.zero_()
        with assuming():  # what the kernel would have written is not there
            layout.pack(shape, weights, packed[name])
    return layout, packed


@pytest.mark.parametrize("spec", ["mxfp4", "int4-g128-zp", "fp8-block", "int4"])
def test_a_matrix_takes_two_launches_for_all_experts(fake: FakeDriver, spec: str) -> None:
    pack(spec)
    assert fake.launched == 4


def test_a_launch_gets_the_arguments_of_its_own_call(fake: FakeDriver) -> None:
    """Launches are prepared once and then changed."""
    for _ in range(2):
        _, packed = pack("mxfp4")
    assert fake.launched == 8 and len(pack_on_gpu._prepared.launches) == 4
    by_kernel = {(key[0], key[1][1]): held for key, held in pack_on_gpu._prepared.launches.items()}  # type: ignore[index]
    for name, gated in (("w13", True), ("w2", False)):
        launch, _ = by_kernel[pack_on_gpu.code_source, gated]
        assert pointer(launch, "out") == packed[name]["codes"].data_ptr()
        assert [launch.integer_slot(size).value for size in ("units", "slices")] == [2, 4 if gated else 2]
        assert launch.integer_slot("rows").value == (128 if gated else 256)
        launch, _ = by_kernel[pack_on_gpu.scale_source, gated]
        assert pointer(launch, "factors") == packed[name]["factors"].data_ptr() and pointer(launch, "bias") == 0


def test_codes_that_are_apart_are_found_by_their_distance(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.Tensor | int | None] = []
    monkeypatch.setattr(
        pack_on_gpu, "launch", lambda make, key, values, *_: tables.append(values.get("places")) or True
    )
    problem = layer_problem("mxfp4", "bf16", hidden=256, intermediate=128, experts=EXPERTS, top_k=1)
    shape = problem.matrices["w13"]
    weights = stack_experts([plausible_weight(shape, seed) for seed in range(EXPERTS)]).to(GPU)
    for stored in codes_apart(weights, gated=True):
        with assuming():
            FragmentLayout(problem).pack(
                shape, replace(weights, stored=stored), FragmentLayout(problem).allocate(shape, EXPERTS, GPU)
            )
        first = stored.apart[0].data_ptr()
        each = 2 * EXPERTS // len(stored.apart)  # gate and up of one tensor share its place
        want = [(tensor.data_ptr() - first) // 4 for tensor in stored.apart for _ in range(each)]
        assert isinstance(tables[-1], torch.Tensor) and tables[-1].tolist() == want


def test_a_launch_refuses_tensors_of_another_device(fake: FakeDriver) -> None:
    codes = torch.zeros(4, dtype=torch.int32)
    for elsewhere in (codes, codes.to("cuda:1")):
        with pytest.raises(LaunchError, match="codes is not where the kernel reads; expected cuda:0; got c"):
            pack_on_gpu.launch(pack_on_gpu.code_source, (), {"out": codes.to(GPU), "codes": elsewhere}, 1, GPU)
    problem = layer_problem("mxfp4", "bf16", hidden=256, intermediate=128, experts=EXPERTS, top_k=1)
    layout, shape = FragmentLayout(problem), problem.matrices["w13"]
    weights, out = stack_experts([plausible_weight(shape, 0)] * EXPERTS), layout.allocate(shape, EXPERTS, GPU)
    for stored in codes_apart(weights.to(GPU), gated=True):
        last = replace(stored, apart=(*stored.apart[:-1], stored.apart[-1].cpu()))
        with pytest.raises(LaunchError, match="not where the kernel reads"):
            layout._pack_codes_on_gpu(shape, layout.form(shape), last, out["codes"])
    assert fake.launched == 0


@pytest.mark.parametrize("behind", ["stored", "scales", "bias"])
def test_what_was_left_on_the_cpu_is_moved(fake: FakeDriver, behind: str) -> None:
    problem = layer_problem("mxfp4", "bf16", hidden=256, intermediate=128, experts=EXPERTS, top_k=1, bias=True)
    layout, shape = FragmentLayout(problem), problem.matrices["w13"]
    weights = stack_experts([plausible_weight(shape, 0)] * EXPERTS)
    assert weights.bias is not None
    weights = replace(weights, bias=weights.bias.float(), stored=Nibbles(pack_bits(weights.codes, 4, torch.uint8)))
    with assuming():
        mixed = replace(weights.to(GPU), **{behind: getattr(weights, behind)})
        layout.pack(shape, mixed, layout.allocate(shape, EXPERTS, GPU))
    given = {
        pointer(launch, name)
        for launch, _ in pack_on_gpu._prepared.launches.values()
        for name in ("codes", "scales", "bias")
        if name in launch._index
    }
    here = {weights.stored.data.data_ptr(), weights.scales[0].data_ptr(), weights.bias.data_ptr()}
    assert fake.launched == 2 and len(given) == 3 and not given & here


def pointer(launch: driver.Launch, name: str) -> int:
    return ctypes.c_uint64.from_address(launch.address(name)).value


def test_without_a_compiler_torch_packs(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise CompileError("Triton is not installed")

    monkeypatch.setattr(load, "load_kernel", missing)
    _, got = pack("int4-g128")
    _, want = pack("int4-g128", device=torch.device("cpu"))
    assert fake.launched == 0
    assert all(same_bits(got[m][name].cpu(), want[m][name]) for m in want for name in want[m])
