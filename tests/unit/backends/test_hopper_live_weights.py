"""Hopper layers whose weights are replaced between calls, and layers that are dropped, on a fake driver."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from fake_driver import (
    MAPPED_ADDRESSES,
    FakeDriver,
    fake_gpu,  # noqa: F401
    layer_and_call,
    read_argument,
    small_problem,
)

from lancebill.backends.gpu import program as bound
from lancebill.backends.gpu.executor import GpuExecutor
from lancebill.backends.gpu.step import Ref
from lancebill.backends.hopper.steps import steps
from lancebill.backends.registry import registry
from lancebill.errors import MissingTensor
from lancebill.testing.layers import make_layer


def parameter_names() -> list[str]:
    problem = small_problem()
    layout = registry()["hopper"].layout(problem)
    return [f"{matrix}_{name}" for matrix, shape in problem.matrices.items() for name in layout.storage(shape)]


@pytest.mark.parametrize("name", parameter_names())
@pytest.mark.parametrize("way", ["data", "parameter", "dictionary", "adopt", "deletion"])
def test_launches_read_replaced_weights(gpu: FakeDriver, name: str, way: str) -> None:
    """Replaces each tensor of a layer in each way: launches read the new memory. A deleted tensor raises an error."""
    layer, x, call = layer_and_call(100)
    for _ in range(2):
        layer(x, **call)
    value = layer.get_parameter(name).data.clone()
    if way == "data":
        layer.get_parameter(name).data = value
    elif way == "parameter":
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    elif way == "dictionary":
        layer._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    elif way == "adopt":
        matrix, _, own = name.partition("_")
        layer.adopt(
            layer.choice,
            {m: ({**tensors, own: value} if m == matrix else tensors) for m, tensors in layer.packed.items()},
        )
    else:
        del layer._parameters[name]
        gpu.launched = 0
        with pytest.raises(MissingTensor, match=name):
            layer(x, **call)
        assert gpu.launched == 0
        return
    gpu.launched = 0
    layer(x, **call)
    layer(x, **call)
    assert gpu.launched > 0
    executor = layer.executor
    assert isinstance(executor, GpuExecutor)
    for addresses, program in executor.made.values():
        assert addresses[:-2] == layer.executor.tensors.addresses()
        assert value.data_ptr() in addresses
        assert value.data_ptr() in bound_addresses(program)


def bound_addresses(program: bound.Program) -> set[int]:
    """The addresses in the arguments of all launches, and those that tensor maps were encoded for."""
    bound_to = set(MAPPED_ADDRESSES)
    for step, launch in zip(steps(program.bindings.plan), program.bindings.launches):
        for argument, value in step.values.items():
            if isinstance(value, Ref) and value.mapped is None:
                bound_to.add(read_argument(launch, argument) - value.offset)
    return bound_to


def test_dropped_layers_are_freed(gpu: FakeDriver) -> None:
    """200 layers, called and dropped: neither the backend nor a cache keeps their executors."""
    made = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    executors = []
    for _ in range(200):
        layer, x, call = layer_and_call(4, made)
        layer(x, **call)
        layer(x, **call)
        executors.append(weakref.ref(layer.executor))
    del layer
    gc.collect()
    assert not [ref for ref in executors if ref() is not None]
    assert not vars(made.backend)
