"""The kernels around a call, interpreted: they do what the CPU's view of a call does. And they assemble."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assembler import TARGETS, assert_assembles
from ptx_interpreter import Kernel

from lancebill.jit import driver
from lancebill.split import call_views, launch_ptx
from lancebill.split.call_kernels import PTX, THREADS
from lancebill.split.call_views import CallViews, StreamView, ThreadView, Uses


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run at once, in an interpreter, on memory of the CPU."""

    def launch(kernel: str, threads: int, *rest: Any) -> Callable[[int], None]:
        values = [int.from_bytes(value, "little") for _, value in rest[2]]
        return lambda stream: Kernel(PTX, kernel).run(values, threads)

    monkeypatch.setattr(driver, "in_context", lambda device: nullcontext())
    monkeypatch.setattr(launch_ptx, "_function", lambda ptx, kernel, device: kernel)
    monkeypatch.setattr(
        call_views, "pinned", lambda size, device, capturing: torch.full((size,), 0xFF, dtype=torch.uint8)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(driver, "Launch", launch)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("experts", [5, THREADS + 44])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_kernels_do_what_the_cpu_does(experts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(experts)
    live = torch.full((experts,), -1, dtype=torch.int32)
    everywhere = torch.randperm(experts, generator=generator, dtype=torch.int32)
    everywhere[1] = -1  # another rank's
    uses = [Uses(experts, torch.device("cpu")) for _ in range(2)]
    queue: Any = SimpleNamespace(capturing=False)
    views = [ThreadView(live, everywhere, uses[0]), StreamView(live, everywhere, uses[1], queue)]
    for step in range(1, 4):
        live[torch.randperm(experts, generator=generator)[:2]] = torch.tensor([0, 1], dtype=torch.int32)
        ids = torch.randint(-1, experts + 2, (70 * step, 4), generator=generator).to(dtype)
        for view in views:
            view.begin(ids)
            assert (view.begun, view.ended) == (step, step - 1)
        assert torch.equal(views[0].own, views[1].own) and torch.equal(views[0].own, live)
        assert torch.equal(views[0].host, views[1].host) and (views[0].host[views[0].own >= 0] == -1).all()
        assert uses[0].calls == uses[1].calls == step and uses[0].last() == uses[1].last()
        for view in views:
            view.end()
            assert view.ended == step


def test_calls_under_way_are_those_of_all_threads() -> None:
    views = CallViews(torch.tensor([0, -1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    view = views.current()
    assert views.current() is view and not views.under_way()
    view.begin(torch.tensor([[1]]))
    assert views.under_way() == [(view, 1)] and views.uses.last() == [0, 1]
    view.end()
    assert not views.under_way()


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_assemble(target: str, tmp_path: Path) -> None:
    assert_assembles(PTX, target, tmp_path)
