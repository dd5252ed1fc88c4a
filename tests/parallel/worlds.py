"""Real processes that talk through gloo on this machine.

Workers come from a fork server that has imported everything once and computed nothing: a world
starts in a moment, and no thread pool is ever copied.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(
    ["torch.distributed", "lancebill.layer.loading", "lancebill.parallel", "lancebill.testing.checkpoints"]
)


def run_world(size: int, worker: Callable[..., None], *args: Any, seconds: float = 100) -> None:
    """worker(rank, *args) in `size` processes; raises the first failure, or when time is up."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        world = mp.start_processes(
            _enter, (size, store, worker, args), nprocs=size, join=False, start_method="forkserver"
        )
        end = time.monotonic() + seconds
        while not world.join(timeout=1):
            if time.monotonic() > end:
                for process in world.processes:
                    process.kill()
                raise TimeoutError(f"{worker.__name__} took more than {seconds} s")


def _enter(rank: int, size: int, store: str, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        worker(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
