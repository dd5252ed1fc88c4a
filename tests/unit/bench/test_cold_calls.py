"""Single calls with cold weights: the threads that sweep are not those that are timed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from project import ROOT

from lancebill.backends.cpu import native

PROGRAM = """
import os, sys
sys.path.insert(0, ".")
import torch
torch.set_num_threads(1)  # otherwise making a tensor starts threads of OpenMP
from lancebill.bench import timing
timing.last_level_cache = lambda: 1 << 20
from benchmarks.cpu import Sweeper, read
from benchmarks.machine import threads_of
alone = threads_of()
clock = Sweeper(helpers=2, threads=2)
assert threads_of() <= alone
read(clock.private, 2)
workers = threads_of() - alone
cores = sorted(os.sched_getaffinity(0))[:2]
clock.place(cores[:1], cores)
assert all(os.sched_getaffinity(each) == {cores[0]} for each in workers)
clock.evict()
child = clock.helper.process
print(len(workers), len(threads_of(child.pid)), threads_of() - alone == workers)
clock.end()
assert child.exitcode == 0
"""


@pytest.mark.skipif(native.library() is None or not hasattr(os, "sched_getaffinity"), reason="no library, or no Linux")
def test_sweepers_are_not_our_workers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("1 2 True", 0), done.stderr
