"""Loading for Hopper without a GPU: reports count the groups that the layout had to round again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lancebill.backends import oracle
from lancebill.backends.gpu.kernels import triton_version as compat
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import naming as names
from lancebill.formats import registry
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device
from lancebill.testing.checkpoints import Geometry, generate, save
from lancebill.testing.layers import layer_problem


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake sm_90 device with CPU memory."""
    monkeypatch.setattr(Device, "torch", property(lambda device: torch.device("cpu")))
    monkeypatch.setattr(compat, "triton_version", lambda: "3.6.0")


@pytest.mark.usefixtures("hopper")
def test_rounding_again_is_reported_at_load(tmp_path: Path) -> None:
    row = next(row for row in names.TABLE if row.family == "qwen3_moe")
    example = next(iter(registry()["mxfp4"].examples()))
    made = generate(example, row, row.forms[0], Geometry(experts=3, hidden=128, intermediate=128, layers=1, top_k=2))
    for name, tensor in made.tensors.items():
        if "scale" in name:  # one group of every row far below the others
            tensor[..., 0] = 60
            tensor[..., 1:] = 120
    folder = save(made, tmp_path / "m")
    pulled = RoutedExperts.from_checkpoint(folder, layer=0, device="sm_90", activations="fp8")
    assert pulled.report is not None and pulled.report.choice.backend.name == "hopper"
    (note,) = pulled.report.notes
    rows = 3 * (256 + 128)
    assert note.startswith(f"{rows} of {4 * rows} groups") and note in str(pulled.report)
    config = Checkpoint.open(folder).config.model
    coming = RoutedExperts.from_config(config, 0, tensors=made.headers, device="sm_90", activations="fp8")
    coming.load_weights(made.tensors.items())
    pushed = coming.finish()
    assert pushed.report is not None and pushed.report.notes == (note,)
    plain = RoutedExperts.from_checkpoint(folder, layer=0, device="sm_90")
    assert plain.report is not None and plain.report.notes == ()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_explain_warns_before_loading(activations: str) -> None:
    problem = layer_problem("mxfp4", activations, hidden=256, intermediate=128, experts=4, top_k=2)
    chosen = oracle.explain(problem, Device("cuda", 90)).chosen
    assert chosen is not None and chosen.plan is not None
    assert ("rounded again" in " ".join(chosen.plan.notes)) == (activations == "fp8")
