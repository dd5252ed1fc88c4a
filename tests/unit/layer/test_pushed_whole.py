"""What `ModelExperts` calls complete: routers, layers and experts that never came, and tensors that were refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_checkpoints import ROWS, SIZE, make_checkpoint

from lancebill import ModelExperts, Placement
from lancebill.errors import BadValue, CheckpointProblems, LaunchError, MissingTensor, UnexpectedTensor
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


def _without(made: Generated, *layers: int) -> list[tuple[str, torch.Tensor]]:
    return [(n, t) for n, t in made.tensors.items() if not any(f".layers.{layer}." in n for layer in layers)]


def _absent(experts: ModelExperts) -> list[str]:
    with pytest.raises(CheckpointProblems) as caught:
        experts.finish()
    return [f"{problem.where}: {problem.what}" for problem in caught.value.problems]


def test_without_headers_a_layer_that_never_came_is_missed() -> None:
    """Only between those that came: the stages of a pipeline have some layers each."""
    made = make_checkpoint("gptq", layers=4)
    assert made.config.model["num_hidden_layers"] == 4
    experts = ModelExperts(made.config)
    assert not experts.settled and _absent(experts) == ["config.json: no tensor of an expert was pushed"]
    assert not list(experts.divert(_without(made, 1, 2)))
    assert not experts.settled and _absent(experts) == ["layers 1 to 2: no tensor was pushed"]
    assert not list(experts.divert(_without(made, 0, 3)))
    assert experts.settled and sorted(experts.finish()) == [0, 1, 2, 3]
    stage = ModelExperts(made.config)
    assert not list(stage.divert(_without(made, 0, 3)))
    assert stage.settled and sorted(stage.finish()) == [1, 2]


def test_layers_without_experts_are_no_gaps() -> None:
    """As the config says, or the other tensors of these layers show; but a router has experts."""
    made = make_checkpoint("gptq", layers=3)
    dense, gate = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate.weight"
    given: tuple[tuple[dict[str, Any], list[str], list[str]], ...] = (
        ({"decoder_sparse_step": 2}, [], []),
        ({"decoder_sparse_step": 2}, [dense], []),
        ({"decoder_sparse_step": 2}, ["model.layers.0.input_layernorm.weight"], ["layer 1: no tensor was pushed"]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, [], ["layer 1: no tensor was pushed"]),
        ({}, [dense], []),
        ({}, [dense, gate], ["layer 1: a router was pushed but no experts"]),
    )
    for keys, others, want in given:
        experts = ModelExperts(replace(made.config, model={**made.config.model, **keys}))
        list(experts.divert([*_without(made, 1), *((name, torch.zeros(1)) for name in others)]))
        assert experts.settled == (not want)
        assert (_absent(experts) if want else list(experts.finish())) == (want or [0, 2])


@pytest.mark.parametrize("first", [True, False])
def test_experts_that_the_model_does_not_have_are_refused(first: bool) -> None:
    made = make_checkpoint("gptq", layers=1)
    name, tensor = next(iter(made.tensors.items()))
    experts = ModelExperts(made.config, placement=Placement(ep_rank=0, ep_size=2))
    if not first:
        assert not list(experts.divert(made.tensors.items()))  # other ranks' experts among them
    with pytest.raises(UnexpectedTensor, match=r"experts\.4\..*no such expert; expected experts 0 to 3"):
        experts.push(name.replace(".experts.0.", ".experts.4."), tensor)


def _spoilt(made: Generated, experts: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All tensors with a NaN scale in each of these experts, and the right tensors of these experts."""
    tensors = {name: tensor.clone() for name, tensor in made.tensors.items()}
    for expert in experts:
        tensors[f"model.layers.0.ffn.experts.{expert}.w3.scale"].view(torch.uint8)[0, 0] = 255
    own = tuple(f"model.layers.0.ffn.experts.{expert}." for expert in experts)
    return tensors, {name: tensor for name, tensor in made.tensors.items() if name.startswith(own)}


@pytest.mark.parametrize("bad", [(1,), (0, 2)], ids=["one", "two"])
@pytest.mark.parametrize("given", ["headers", "no-headers", "refit", "split", "split-refit"])
def test_an_error_is_only_of_the_experts_that_are_bad(given: str, bad: tuple[int, ...]) -> None:
    """Experts are packed together, when the last of them comes. Only the bad ones must be pushed again."""
    made = make_checkpoint("deepseek_v4", "fp8-F8_E8M0", "deepseek_v4", layers=1)
    options: dict[str, Any] = {"layers": [0], "router": False}
    options |= {"gpu_experts": 2} if given.startswith("split") else {}
    whole = ModelExperts(made.config, tensors=made.headers, **options)
    list(whole.divert(made.tensors.items()))
    want = whole.finish()[0].state_dict()
    experts = ModelExperts(made.config, tensors=None if given == "no-headers" else made.headers, **options)
    if given.endswith("refit"):
        list(experts.divert(made.tensors.items()))
        experts.finish()[0].packed["w13"]["codes"].zero_()
    tensors, own = _spoilt(made, bad)
    errors = []
    for name, tensor in tensors.items():
        try:
            experts.push(name, tensor)
        except (BadValue, CheckpointProblems) as error:
            errors.append(str(error))
    assert all(any(f"layer 0, expert {expert}, up" in error for error in errors) for expert in bad)
    assert not any(f"expert {expert}, " in error for error in errors for expert in range(4) if expert not in bad)
    assert not experts.settled
    with pytest.raises(CheckpointProblems) as caught:
        experts.finish()
    assert {problem.expected for problem in caught.value.problems} == set(own)
    list(experts.divert(own.items()))
    assert experts.settled
    got = experts.finish()[0].state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("refit", [False, True])
def test_a_bad_expert_comes_again_to_both_parts_of_a_split_layer(refit: bool) -> None:
    """Host memory has a copy of it as well, which waits for all others."""
    made = make_checkpoint("deepseek_v4", "fp8-F8_E8M0", "deepseek_v4", layers=1)
    options: dict[str, Any] = {"layers": [0], "router": False, "gpu_experts": 2, "moves": "recency"}
    experts = ModelExperts(made.config, tensors=made.headers, **options)
    if refit:
        list(experts.divert(made.tensors.items()))
        experts.finish()
    tensors, own = _spoilt(made, (1,))
    errors = 0
    for name, tensor in tensors.items():
        try:
            experts.push(name, tensor)
        except BadValue:
            errors += 1
            list(experts.divert(own.items()))
    assert errors == 1 and experts.settled and experts.finish()[0].settled


def test_a_layer_that_is_planned_from_bad_experts_can_be_pushed_again() -> None:
    """Without headers it is planned, and packed at once, when the second of its two experts is whole."""
    made = make_checkpoint("deepseek_v4", "fp8-F8_E8M0", "deepseek_v4", layers=1)
    placement = Placement(ep_rank=0, ep_size=2)
    experts = ModelExperts(made.config, router=False, placement=placement)
    tensors, own = _spoilt(made, (1,))
    with pytest.raises(BadValue, match="expert 1, up"):
        list(experts.divert(tensors.items()))
    list(experts.divert((name, tensor) for name, tensor in own.items()))
    assert experts.settled and experts.finish()[0].problem.experts == 2


@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
def test_tensors_without_values_are_refused(known: bool) -> None:
    """An error of its own, and the right tensor may come after it."""
    made, headers, router = _with_router("glm4_moe")
    experts = ModelExperts(made.config, tensors=headers if known else None, layers=[0])
    correction = torch.zeros(SIZE.experts)
    for name, tensor in ((router, correction), *list(made.tensors.items())[:2], *list(made.tensors.items())[-1:]):
        for bad, match in ((tensor.to("meta"), "no values.*meta device"), (tensor.to_sparse(), "not dense")):
            with pytest.raises(LaunchError, match=f"{name} .*{match}"):
                experts.push(name, bad)
        experts.push(name, tensor)
        for other, rest in list(made.tensors.items())[2:-1]:
            if name == router:
                experts.push(other, rest)
    layer = experts.finish()[0]
    for name, tensor in ((router, correction), next(iter(made.tensors.items()))):
        with pytest.raises(LaunchError, match="no values"):
            layer.load_weights([(name, tensor.to("meta"))])
    assert layer.settled


def test_random_weights_do_not_replace_pushed_ones() -> None:
    made = make_checkpoint("gptq")
    experts = ModelExperts(made.config, tensors=made.headers)
    with pytest.raises(CheckpointProblems):
        experts.finish()  # nothing was pushed, so there is nothing to lose
    assert sorted(experts.fill_random()) == [0, 1]
    pushed = ModelExperts(made.config, tensors=made.headers)
    list(pushed.divert(_without(made, 0)))
    with pytest.raises(LaunchError, match=r"layers 1: tensors were pushed"):
        pushed.fill_random()
    pushed.layer(1)
    assert sorted(pushed.fill_random()) == [0, 1] and pushed.settled
