"""Disks that fail: every system call of loading, verifying, converting and saving a checkpoint fails once.

    python tests/campaign/io_faults.py --record

A preloaded library (fault_shim.c) makes the n-th call fail: with EIO, with ENOSPC, by transferring half of the bytes,
or as if the file ended. The action must then succeed with the right result (a half transfer is no error) or raise one
of our errors; the destination is unchanged, no hidden folder and no descriptor is left.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally
from conversion import dense_source, file_contents, run_conversion

from lancebill.checkpoint.write.publish import recover
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.cli.verify import examine
from lancebill.errors import LancebillError
from lancebill.formats.stored import Stored
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.testing.checkpoints import Geometry

SHIM = Path(__file__).with_name("fault_shim.c")
FAULTS = {"EIO": 1, "ENOSPC": 2, "half a transfer": 3, "end of file": 4}
SIZE = Geometry(experts=2, hidden=64, intermediate=64)
ELEMENTS = 1 << 10


@dataclass(frozen=True)
class Action:
    """`run` returns what it made, for comparison with a run without faults."""

    name: str
    run: Callable[[], object]
    destination: Path | None = None


def actions(folder: Path) -> list[Action]:
    source = dense_source(folder, size=SIZE)
    replaced = folder / "replaced"
    run_conversion(source, replaced, "mxfp4")

    def convert() -> object:
        run_conversion(source, replaced, "int4-g32", overwrite=True)
        return None

    def verify() -> object:
        report = examine(quantised, values=True)
        if report.problems:
            raise report.problems[0]
        return report.tensors

    def load_quantised() -> object:
        return _sums(RoutedExperts.from_checkpoint(quantised, layer=0))

    saved = folder / "saved"
    _save(saved)
    quantised = folder / "quantised"
    run_conversion(source, quantised, "int4-g32")
    return [
        Action("load", lambda: _sums(RoutedExperts.from_checkpoint(source, layer=0))),
        Action("load of int4", load_quantised),
        Action("verify", verify),
        Action("convert", convert, replaced),
        Action("save in shards", lambda: _save(saved), saved),
    ]


def _save(destination: Path) -> None:
    headers = {name: Stored("F32", (ELEMENTS,)) for name in "abcdef"}
    with CheckpointWriter(destination, headers, overwrite=True, max_shard_bytes=5 * ELEMENTS) as out:
        for name in headers:
            out.write(name, torch.arange(ELEMENTS).float())
        out.write_json("config.json", {"model_type": "qwen3_moe"})


def _sums(layer: RoutedExperts) -> object:
    return {name: tensor.view(torch.uint8).sum().item() for name, tensor in layer.state_dict().items()}


class Shim:
    """The preloaded library."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fault_watch(str(folder).encode())

    def arm(self, at: int = 0, fault: str | None = None, *, sticky: bool = False) -> None:
        self._library.fault_arm(ctypes.c_long(at), FAULTS[fault] if fault else 0, int(sticky))

    @property
    def calls(self) -> int:
        return int(self._library.fault_calls())


def try_every_call(shim: Shim, action: Action, tally: Tally) -> None:
    """Fail every call in every way."""
    before = _published(action)
    shim.arm()
    want, calls = (action.run(), shim.calls)
    after = _published(action)
    for at in range(calls):
        for fault in FAULTS:
            for sticky in (False, True):
                _restore(action, before)
                label = f"{action.name}, call {at}: {fault}{' from then on' if sticky else ''}"
                descriptors = _descriptors()
                shim.arm(at, fault, sticky=sticky)
                found = _raised(action, want)
                shim.arm()
                if sticky and action.destination is not None:
                    recover(action.destination)  # what could not be deleted, the next writer deletes
                found = found or _left(action, (before, after), _descriptors() - descriptors)
                tally.add(found and f"{label}: {found}")


def _raised(action: Action, want: object) -> str | None:
    """Anything but the right result or one of our errors."""
    try:
        return None if action.run() == want else "another result"
    except LancebillError:
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _left(action: Action, contents: tuple[object, object], descriptors: int) -> str | None:
    """What a failed action must not leave behind."""
    if action.destination is not None:
        hidden = [file.name for file in action.destination.parent.iterdir() if file.name.startswith(".")]
        if hidden:
            return f"left {hidden}"
        if _published(action) not in contents:
            return "the destination is neither the old nor the new checkpoint"
    return "left a descriptor open" if descriptors else None


def _published(action: Action) -> object:
    return None if action.destination is None else file_contents(action.destination)


def _restore(action: Action, content: object) -> None:
    if action.destination is not None and isinstance(content, dict):
        for file in action.destination.iterdir():
            file.unlink()
        for name, data in content.items():
            (action.destination / name).write_bytes(data)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    total, ways = Tally.total(tallies.values()), 2 * len(FAULTS)
    points = ", ".join(f"{tally.cases // ways} calls of {name}" for name, tally in tallies.items())
    reached = f"{points}, each in {ways} ways: {total.cases:,} faults, {total.failures} not handled"
    return {"L4": total.figure(reached)}


def main() -> None:
    if "LANCEBILL_FAULT_SHIM" not in os.environ:
        _run_preloaded()
    part = Part("io_faults", __doc__, figures)
    torch.set_num_threads(1)
    tallies = dict[str, Tally]()
    with tempfile.TemporaryDirectory() as folder:
        for action in actions(Path(folder)):
            tallies[action.name] = Tally()
            try_every_call(Shim(Path(folder)), action, tallies[action.name])
    part.finish(tallies)


def _run_preloaded() -> None:
    """Build the library and start this script again with it."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fault_shim.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(SHIM), "-o", str(library), "-ldl"], check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), "LANCEBILL_FAULT_SHIM": "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    main()
