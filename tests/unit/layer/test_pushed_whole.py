"""What `ModelExperts` calls complete: routers, layers and experts that never came, and tensors that were refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_checkpoints import ROWS, SIZE, make_checkpoint

from lancebill import ModelExperts
from lancebill.errors import CheckpointProblems, LaunchError, MissingTensor
from lancebill.formats import registry
from lancebill.formats.stored import Stored
from lancebill.testing.checkpoints import Generated, generate

BIAS, CORRECTION = "model.layers.0.mlp.router.bias", "model.layers.0.mlp.gate.e_score_correction_bias"


def _with_router(family: str) -> tuple[Generated, dict[str, Stored], str]:
    """Experts of a layer whose router has one more tensor than its matrix: all headers, and that tensor's name."""
    if family == "gpt_oss":
        example = next(e for e in registry()["mxfp4"].examples() if e.name == "gpt-oss")
        form = next(form for form in ROWS[family].forms if form.stacked)
        made, name = generate(example, ROWS[family], form, replace(SIZE, layers=1)), BIAS
    else:
        made, name = make_checkpoint("dense", "bf16", family, layers=1), CORRECTION
    return made, {**made.headers, name: Stored("F32", (SIZE.experts,))}, name


@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_a_layer_that_routes_needs_its_router(family: str, known: bool) -> None:
    """It would route otherwise than the model. An engine that routes itself says so, and gives experts alone."""
    made, headers, name = _with_router(family)
    given: dict[str, Any] = {"tensors": headers if known else None, "layers": [0], "backend": "reference"}
    experts, without = ModelExperts(made.config, **given), ModelExperts(made.config, router=False, **given)
    for each in (experts, without):
        assert not list(each.divert(made.tensors.items()))
    assert not experts.settled
    with pytest.raises(CheckpointProblems) as caught:
        experts.finish()
    (problem,) = caught.value.problems
    assert isinstance(problem, MissingTensor) and problem.where == "layer 0, router"
    assert name.endswith(str(problem.expected).split(" or ")[0])
    experts.push(name, torch.arange(4.0))
    assert experts.settled and experts.finish()[0].route(torch.randn(3, 128), torch.randn(3, 4)).ids.shape == (3, 2)
    with pytest.raises(LaunchError, match=r"no routing.*router=False"):
        without.finish()[0].route(torch.randn(3, 128), torch.randn(3, 4))
