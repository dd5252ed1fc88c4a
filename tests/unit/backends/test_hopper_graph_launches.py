"""Hopper programs that launch their kernels as one CUDA graph, on a fake driver."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from fake_driver import (
    ROUTED,
    FakeDriver,
    bind_program,
    fake_gpu,  # noqa: F401
    small_problem,
)

from lancebill.backends.gpu import program as bound
from lancebill.errors import ContextError, DriverError
from lancebill.jit import driver
from lancebill.moe.problem import CONTIGUOUS
from lancebill.testing.layers import make_layer


def test_few_tokens_are_launched_as_one_graph(gpu: FakeDriver) -> None:
    """Nodes run in order, and only those with changed arguments are updated.

    A call that changes every launch launches kernels one by one.
    """
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), 100, layer)
    call, count = (16, 32, 48, 64, *ROUTED), len(program.bindings.launches)
    program.run(100, call)
    assert gpu.graph_launches == 0 and gpu.launched == count
    program.run(100, (16, 80, 48, 64, *ROUTED))
    assert gpu.graph_launches == 1 and gpu.edges == [(i, i + 1) for i in range(1, count)]
    assert all(
        params == [(launch.config.gx, launch.parameters)]
        for params, launch in zip(gpu.nodes, program.bindings.launches)
    )
    program.run(100, (16, 160, 48, 64, *ROUTED))
    assert [len(params) for params in gpu.nodes] == [1 + (i in program.bindings.with_caller) for i in range(count)]
    assert (
        0 in program.bindings.with_caller
        and count - 1 in program.bindings.with_caller
        and len(program.bindings.with_caller) < count
    )
    program.run(90, call)
    assert gpu.graph_launches == 2
    program.run(90, call)
    assert gpu.graph_launches == 3
    assert all(params[-1][0] == launch.config.gx for params, launch in zip(gpu.nodes, program.bindings.launches))
    assert gpu.nodes[0][-1][0] == 91  # one block per token, and one that builds the lists
    program.run(80, call)
    program.run(80, call)
    assert gpu.nodes[0][-1][0] == 81 and gpu.destroyed == 0
    del program
    gc.collect()
    assert gpu.destroyed == 2


@pytest.mark.parametrize(("tokens", "old"), [(300, False), (100, True)])
def test_many_tokens_or_an_old_driver_use_no_graph(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, tokens: int, old: bool
) -> None:
    if old:
        monkeypatch.delattr(FakeDriver, "cuGraphAddDependencies_v2")
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), tokens, layer)
    program.run(tokens, (16, 32, 48, 64, *ROUTED))
    assert gpu.graph_launches == 0 and gpu.launched == len(program.bindings.launches)


def test_a_contiguous_graph_follows_its_input(gpu: FakeDriver) -> None:
    """The first GEMM may read x only through a tensor map: its node is updated all the same."""
    problem = small_problem(dispatch=CONTIGUOUS)
    layer = make_layer(problem, "hopper", "cpu", distinct=1)
    program = bind_program(problem, 100, layer)
    for _ in range(2):
        program.run(100, (16, 32, 48))
    assert program.graph is not None and program.bindings.mapped
    for _ in range(2):
        program.run(100, (1 << 20, 32, 48))
    reading = {program.bindings.launches.index(launch) for launch, _ in program.bindings.mapped}
    assert gpu.graph_launches > 1 and all(len(gpu.nodes[number]) == 2 for number in reading)


@pytest.mark.parametrize("what", ["outdated", "copy_grids"])
def test_the_graph_has_the_right_grids_after_an_interrupted_call(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), 100, layer)
    program.run(100, (16, 32, 48, 64, *ROUTED))
    program.run(100, (16, 80, 48, 64, *ROUTED))
    assert program.graph is not None

    class Interrupted(set[int]):
        def update(self, *added: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        if what == "outdated":
            during.setattr(program, "outdated", Interrupted())
        else:
            during.setattr(program.graph, "copy_grids", Interrupted().update)
        program.run(90, (16, 32, 48, 64, *ROUTED))
    program.run(90, (16, 32, 48, 64, *ROUTED))
    program.run(90, (16, 80, 48, 64, *ROUTED))
    assert [params[-1][0] for params in gpu.nodes] == [launch.config.gx for launch in program.bindings.launches]


@pytest.mark.parametrize("tokens", [1, 100, 300])
def test_a_new_thread_gets_the_cuda_context(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """With single launches and with graphs: nothing is launched twice, and other errors are raised."""
    layer = make_layer(small_problem(), "hopper", "cpu", distinct=1)
    program = bind_program(small_problem(), tokens, layer)
    call, count, used = (16, 32, 48, 64, *ROUTED), len(program.bindings.launches), list[int]()
    monkeypatch.setattr(bound, "use_context", used.append)
    for name, whole in (("cuLaunchKernelEx", gpu.cuLaunchKernelEx), ("cuGraphLaunch", gpu.cuGraphLaunch)):

        def refuse(*arguments: object, whole: Any = whole) -> int:
            return int(whole(*arguments)) if used else 201

        monkeypatch.setattr(gpu, name, refuse)
    program.go = gpu.cuLaunchKernelEx
    program.run(tokens, call)
    assert used == [0] and gpu.launched == count
    used.clear()
    program.run(tokens, call)
    assert used == [0] and gpu.launched == 2 * count
    monkeypatch.setattr(program, "go", lambda *arguments: 700)
    with pytest.raises(DriverError, match="700"):
        program.run(tokens - 1 or 2, call)
    program.graph = None
    with pytest.raises(ContextError, match="201"):
        driver.check(201, "computing")
