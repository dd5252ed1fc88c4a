"""torch's default device and dtype change no result: engines set both while they build models. See `helpers/doors.py`.

On `meta`, what is made on the default device has no numbers; on a GPU it would be where nobody reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from layer_checkpoints import make_checkpoint

pytest.importorskip("transformers")

from lancebill import QuantizedLinear, RoutedExperts, from_pretrained
from lancebill.errors import SpecError
from lancebill.numbers.torch_defaults import torch_defaults
from lancebill.testing.checkpoints import save

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("device", "dtype"), [("meta", "float16"), ("cpu", "float64"), ("meta", "bfloat16")])
def test_no_door_depends_on_the_defaults_of_torch(device: str, dtype: str, tmp_path: Path) -> None:
    folders = [*sys.path, str(TESTS / "helpers"), str(TESTS / "e2e")]
    command = [sys.executable, str(TESTS / "helpers" / "doors.py"), device, dtype, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["doors"]) >= 11 and not found["problems"], "\n".join(found["problems"].values())


def test_a_layer_or_model_without_a_device_goes_to_the_default_one(tmp_path: Path) -> None:
    """As torch's modules and transformers' models do. This one can hold no weights."""
    folder = save(make_checkpoint(), tmp_path / "m")
    module = "model.layers.0.mlp.experts.0.down_proj"
    for door in (
        lambda: from_pretrained(folder),
        lambda: RoutedExperts.from_checkpoint(folder, 0),
        lambda: QuantizedLinear.from_checkpoint(folder, module),
    ):
        with torch.device("meta"), pytest.raises(SpecError, match="unknown device 'meta'"):
            door()


def test_the_default_dtype_is_plain_until_the_last_thread_has_ended() -> None:
    """It belongs to the process: a thread that ends must not take it away from another, nor leave it."""
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with torch_defaults():
            inside.set()
            leave.wait(20)

    torch.set_default_dtype(torch.float64)
    try:
        thread = threading.Thread(target=work)
        with torch_defaults(), torch.device("meta"):
            assert torch.get_default_dtype() == torch.float32
            thread.start()
            assert inside.wait(20)
            with torch_defaults():
                assert torch.empty(0).device.type == "cpu"
            assert torch.empty(0).device.type == "meta"
        assert torch.get_default_dtype() == torch.float32, "the thread still needs it"
        leave.set()
        thread.join()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
