"""Start groups of processes that communicate with gloo on this machine.

Workers are forked from a server process that has imported everything but has started no thread pools: they start fast,
and no thread pool is copied by a fork.
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
    ["torch.distributed", "lancebill.layer.push", "lancebill.parallel", "lancebill.testing.checkpoints"]
)


def run_world(size: int, worker: Callable[..., None], *args: Any, seconds: float = 100) -> None:
    """Run worker(rank, *args) in `size` processes; raises the first failure, or `TimeoutError`."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        world = mp.start_processes(
            _start_worker, (size, store, worker, args), nprocs=size, join=False, start_method="forkserver"
        )
        end = time.monotonic() + seconds
        while not world.join(timeout=1):
            if time.monotonic() > end:
                for process in world.processes:
                    process.kill()
                raise TimeoutError(f"{worker.__name__} took more than {seconds} s")


def _start_worker(rank: int, size: int, store: str, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        worker(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
