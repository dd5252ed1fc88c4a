"""Loads and calls on fake GPUs: which tensors kernels are given. Kernels that pack are not there, so torch packs, after
they were asked for; those of calls are launched on a fake driver, and compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, fake_load_kernel
from fake_gpus import plugged_in
from torch import Tensor

from lancebill.backends import call_signature
from lancebill.backends.gpu import bindings, executor, linear_call, pack_on_gpu, route_program, workspace
from lancebill.backends.gpu.bindings import Bindings
from lancebill.backends.gpu.workspace import Workspaces
from lancebill.errors import CompileError
from lancebill.jit import driver, load
from lancebill.jit.compile import Binary, KernelSource


class Given:
    """The devices of all tensors that kernels were given, by kernel."""

    def __init__(self) -> None:
        self.packing, self.bound = list[str](), list[str]()

    def all_on(self, device: torch.device) -> bool:
        return set(self.packing) | set(self.bound) == {str(device)}


@pytest.fixture(name="given")
def given_to_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    given, fake, launch, bind = Given(), FakeDriver(), pack_on_gpu.launch, Bindings.bind

    def kernel(source: KernelSource, device: int) -> tuple[int, Binary]:
        if "pack" in source.kernel:
            raise CompileError("there is no compiler")
        return fake_load_kernel(source, device)

    def launch_packing(make: Any, key: Any, values: pack_on_gpu.Values, *rest: Any) -> bool:
        given.packing += [str(value.device) for value in values.values() if isinstance(value, Tensor)]
        return launch(make, key, values, *rest)

    def bind_program(plan: Any, steps: Any, weights: Any, *rest: Any) -> Bindings:
        given.bound += [str(tensor.device) for packed in weights.values() for tensor in packed.values()]
        return bind(plan, steps, weights, *rest)

    monkeypatch.setattr(driver, "library", lambda: fake)
    for module in (bindings, executor, workspace):
        monkeypatch.setattr(module, "outside_pools", lambda device, stream, make: make())
    for module in (bindings, route_program):
        monkeypatch.setattr(module, "use_context", lambda device: None)
    monkeypatch.setattr(load, "load_kernel", kernel)
    monkeypatch.setattr(load, "_encode", lambda matrix, facts: bytes(driver.MAP_BYTES))
    monkeypatch.setattr(pack_on_gpu, "launch", launch_packing)
    monkeypatch.setattr(pack_on_gpu, "in_context", lambda device: nullcontext())
    monkeypatch.setattr(Bindings, "bind", bind_program)
    monkeypatch.setattr(call_signature, "guards", None)  # they ask C++ for the device
    monkeypatch.setattr(linear_call, "fast_empty", None)  # it allocates on a GPU only
    monkeypatch.setattr(executor, "WORKSPACES", Workspaces())
    with plugged_in(monkeypatch, count=2):
        yield given
