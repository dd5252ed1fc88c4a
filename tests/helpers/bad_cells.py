"""Runs cells of which only one is good, and prints what the runner says about them."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest import SkipTest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from cells import Cell, Notes, Place
from run_cells import Runner


def fails(place: Place) -> None:
    raise AssertionError("wrong numbers")


def skips(place: Place) -> None:
    raise SkipTest("not here")


def passes(place: Place) -> Notes:
    return {"device": place.device}


def dies(place: Place) -> None:
    os.abort()


def sleeps(place: Place) -> None:
    time.sleep(600)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    runner = Runner(Namespace(device="cpu", jobs=2, seconds=60.0, timeout=8.0, site=None), Path(sys.argv[1]))
    runner.run([Cell("test", run.__name__, 1, run) for run in (passes, fails, skips, dies, sleeps)])
    runner.end = 0.0
    runner.run([Cell("test", "waits", 1, sleeps)])
    print(json.dumps(runner.results))


if __name__ == "__main__":
    main()
