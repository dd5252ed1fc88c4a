"""`ModelExperts`: pushing the tensors of a whole model, in any order, with and without headers; refits; files."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor

from lancebill import ModelExperts, Placement, RoutedExperts
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import Claim
from lancebill.errors import (
    BadValue,
    CheckpointProblems,
    DuplicateTensor,
    LaunchError,
    MissingTensor,
    SpecError,
    UnexpectedTensor,
)
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.layer import collect
from lancebill.layer.parts import pull
from lancebill.layer.recipe import LoadOptions
from lancebill.moe.activation import Activation
from lancebill.testing.checkpoints import Generated, Geometry, generate, save, small_size

PLACEMENTS = (
    Placement(),
    Placement(tp_rank=1, tp_size=2, pad_to=96),
    Placement(ep_rank=1, ep_size=2),
    Placement(tp_rank=1, tp_size=2, ep_rank=0, ep_size=2, redundant=1, strategy="round_robin"),
)


def _shuffled(made: Generated, seed: int = 0) -> list[tuple[str, Tensor]]:
    pairs = list(made.tensors.items())
    random.Random(seed).shuffle(pairs)
    return pairs


def _pull(made: Generated, layer: int = 0, **options: Any) -> RoutedExperts:
    experts = ModelExperts(made.config, tensors=made.headers, **options)
    return RoutedExperts(pull(experts.recipe(layer), made.read))


def _assert_same(a: RoutedExperts, b: RoutedExperts, what: object = None) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left), what


def _generate(example: Example, layers: int = 1) -> Generated:
    row = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    form = (
        next((form for form in row.forms if form.stacked), row.forms[0]) if example.name == "gpt-oss" else row.forms[0]
    )
    return generate(example, row, form, small_size(example, 3, layers))


@pytest.mark.parametrize("fmt", registry())
def test_every_format_pushed_in_any_order_equals_the_files(fmt: str) -> None:
    """Headers known or not, whole or a rank's share.

    Every tensor is made on the device of those it is made from: one on the default device fails here, as on a GPU.
    """
    for number, example in enumerate(registry()[fmt].examples()):
        made = _generate(example)
        options: dict[str, Any] = {"backend": "reference", "placement": PLACEMENTS[number % len(PLACEMENTS)]}
        options["router"] = False  # there are experts alone
        want = _pull(made, **options)
        for headers in (made.headers, None):
            experts = ModelExperts(made.config, tensors=headers, **options)
            with torch.device("meta"):
                assert not list(experts.divert(_shuffled(made, number)))
                experts.finish()
            _assert_same(experts.finish()[0], want, (example.name, headers is None))
            assert experts.settled and experts.layer(0) is experts.finish()[0]


@pytest.mark.parametrize("form", [0, 1], ids=["each", "stacked"])
@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
def test_tensors_are_released_while_the_model_is_pushed(
    form: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In file order only one expert (stacked: one layer) is held; without headers two, because the first waits."""
    monkeypatch.setattr(collect, "BATCH_BYTES", 0)
    size = Geometry(experts=8, hidden=64, intermediate=64, layers=4)
    row = names.find_family({"model_type": "qwen3_moe"})
    example = next(e for e in registry()["fp8"].examples() if e.bias)
    made = generate(example, row, row.forms[form], size)
    experts = ModelExperts(made.config, tensors=made.headers if known else None)
    held: list[weakref.ref[Tensor]] = []
    most = 0
    for name in sorted(made.tensors):
        tensor = made.tensors[name].clone()
        held.append(weakref.ref(tensor))
        assert experts.push(name, tensor) is not None
        del tensor
        held = [reference for reference in held if reference() is not None]
        most = max(most, len(held))
    experts.finish()
    of_one = 3 * len(row.forms[form].names)  # codes, scales and bias
    assert most < (1 if known else 2) * of_one


def test_claims_tell_experts_routers_and_others_apart() -> None:
    experts = ModelExperts(make_checkpoint("fp8", family="deepseek_v3").config)
    claims = {
        "model.layers.7.mlp.experts.3.up_proj.weight_scale_inv": Claim(7, expert=3),
        "model.layers.7.mlp.experts.gate_up_proj": Claim(7),
        "model.layers.7.mlp.gate.e_score_correction_bias": Claim(7, router="correction"),
        "model.layers.7.mlp.gate.weight": None,
        "model.layers.7.mlp.shared_experts.up_proj.weight": None,
        "model.layers.7.self_attn.o_proj.weight": None,
    }
    assert {name: experts.claim(name) for name in claims} == claims


def test_divert_takes_only_experts_out_of_a_stream() -> None:
    made = make_checkpoint("dense", "bf16", "deepseek_v3")
    bias, other = torch.arange(4.0), torch.ones(2)
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1)]
    stream = [*((name, bias) for name in names), ("lm_head.weight", other)]
    experts = ModelExperts(made.config)
    assert [name for name, _ in experts.divert([*made.tensors.items(), *stream])] == [n for n, _ in stream]
    layers = experts.finish()
    assert layers[1].router_correction is not None and torch.equal(layers[1].router_correction, bias)
    assert layers[1].load_weights([*stream, *made.tensors.items()]) == {n for n in made.tensors if ".layers.1." in n}


@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
def test_finish_names_everything_that_is_missing_in_all_layers(known: bool) -> None:
    made = make_checkpoint("gptq")
    missing = ["model.layers.0.mlp.experts.2.up_proj.scales", "model.layers.1.mlp.experts.3.down_proj.qweight"]
    experts = ModelExperts(made.config, tensors=made.headers if known else None)
    rest = [(name, tensor) for name, tensor in made.tensors.items() if name not in missing]
    assert not list(experts.divert(rest))
    assert not experts.settled
    with pytest.raises(CheckpointProblems) as caught:
        experts.finish()
    assert len(caught.value.problems) == 2 and all(name in str(caught.value) for name in missing)
    with pytest.raises(CheckpointProblems, match=r"layer 1.*\n.*expert 3, down"):
        experts.layer(1)
    for name in missing:
        experts.push(name, made.tensors[name])
    assert experts.settled
    for index, layer in experts.finish().items():
        _assert_same(layer, _pull(made, index))


def test_an_expert_that_never_came_is_named_without_headers() -> None:
    made = make_checkpoint("gptq")
    experts = ModelExperts(made.config, layers=[0])
    lost = "model.layers.0.mlp.experts.1."
    assert not list(experts.divert((n, t) for n, t in made.tensors.items() if not n.startswith(lost)))
    with pytest.raises(CheckpointProblems) as caught:
        experts.finish()
    assert {p.expected for p in caught.value.problems} == {n for n in made.tensors if n.startswith(lost)}
    with pytest.raises(MissingTensor, match="no tensor name matches"):
        raise _only_problem(ModelExperts(made.config, layers=[1]))


def _only_problem(experts: ModelExperts) -> Exception:
    with pytest.raises(CheckpointProblems) as caught:
        experts.finish()
    (problem,) = caught.value.problems
    return problem


def test_repeated_unknown_and_late_tensors_are_refused() -> None:
    made = make_checkpoint("gptq")
    name = "model.layers.0.mlp.experts.0.up_proj.scales"
    for headers in (made.headers, None):
        experts = ModelExperts(made.config, tensors=headers)
        experts.push(name, made.tensors[name])
        with pytest.raises(DuplicateTensor, match=r"up_proj\.scales"):
            experts.push(name, made.tensors[name])
        rest = ((other, tensor) for other, tensor in made.tensors.items() if other != name)
        assert not list(experts.divert(rest))
        with pytest.raises(DuplicateTensor):
            experts.push(name, made.tensors[name])
        reason = "packed without this tensor" if headers is None else "not in the checkpoint"
        with pytest.raises(UnexpectedTensor, match=f"up_proj.bias: .*{reason}"):
            experts.push("model.layers.0.mlp.experts.0.up_proj.bias", torch.zeros(SIZE.intermediate))
        experts.finish()


def test_a_bad_tensor_can_be_pushed_again() -> None:
    """The layer stays unsettled: rows of the expert may be half written."""
    made = make_checkpoint("deepseek_v4", "fp8-F8_E8M0", "deepseek_v4")
    layer = _pull(made)
    name = "model.layers.0.ffn.experts.1.w3.scale"
    scale = made.tensors[name].clone()
    scale.view(torch.uint8)[0, 0] = 255
    own = {n: t for n, t in made.tensors.items() if n.startswith("model.layers.0.ffn.experts.1.")}
    with pytest.raises(BadValue, match=r"expert 1, up.*NaN"):
        layer.load_weights({**own, name: scale}.items())
    assert not layer.settled
    with pytest.raises(CheckpointProblems, match="expert 1"):
        layer.finish()
    assert layer.load_weights(own.items()) == set(own)
    _assert_same(layer.finish(), _pull(made))


def test_a_refit_that_is_dropped_may_start_anew() -> None:
    """What is half written stays unsettled until its expert comes again."""
    made = make_checkpoint("deepseek_v4", "fp8-F8_E8M0", "deepseek_v4")
    layer = _pull(made)
    own = {n: t for n, t in made.tensors.items() if n.startswith("model.layers.0.ffn.experts.1.")}
    layer.load_weights(list(own.items())[:-1])
    assert not layer.settled
    layer.drop_refit()
    assert layer.settled and not layer.missing()
    _assert_same(layer.finish(), _pull(made))
    name = "model.layers.0.ffn.experts.1.w3.scale"
    scale = own[name].clone()
    scale.view(torch.uint8)[0, 0] = 255
    with pytest.raises(BadValue):
        layer.load_weights({**own, name: scale}.items())
    layer.drop_refit()
    assert not layer.settled and {problem.expected for problem in layer.missing()} == set(own)
    layer.load_weights(own.items())
    _assert_same(layer.finish(), _pull(made))


@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
def test_a_model_is_refitted_in_place(known: bool) -> None:
    old, new = make_checkpoint("gptq", seed=1), make_checkpoint("gptq", seed=2)
    experts = ModelExperts(old.config, tensors=old.headers if known else None)
    addresses: dict[int, int] = {}
    for made in (old, new, old):
        first, *rest = _shuffled(made, 5)
        experts.push(*first)
        assert not experts.settled
        assert not list(experts.divert(rest))
        layers = experts.finish()
        assert experts.settled and sorted(layers) == [0, 1]
        now = {index: layer.packed["w13"]["codes"].data_ptr() for index, layer in layers.items()}
        assert now == (addresses or now)
        addresses = now
        for index, layer in layers.items():
            _assert_same(layer, _pull(made, index))


def test_layers_of_other_ranks_are_claimed_and_dropped() -> None:
    made = make_checkpoint("gptq")
    experts = ModelExperts(made.config, tensors=made.headers, layers=[1])
    assert not list(experts.divert(made.tensors.items()))
    assert list(experts.finish()) == [1]


def test_files_are_read_layer_by_layer(tmp_path: Any) -> None:
    made, done = make_checkpoint("gptq"), []
    experts = ModelExperts.from_checkpoint(save(made, tmp_path / "m"), progress=done.append)
    planned = experts.recipe(1)
    assert planned.choice.problem.experts == SIZE.experts and not done
    _assert_same(experts.layer(1), _pull(made, 1))
    assert sum(done) == planned.bytes
    assert sorted(experts.finish()) == [0, 1] and experts.settled
    assert sum(done) == planned.bytes + experts.recipe(0).bytes
    other = make_checkpoint("gptq", seed=3)
    assert not list(experts.divert(other.tensors.items()))
    _assert_same(experts.finish()[1], _pull(other, 1))


def test_a_pushed_layer_is_made_once() -> None:
    made = make_checkpoint("dense", "bf16")
    coming = RoutedExperts.from_config(made.config, 0)
    coming.load_weights(made.tensors.items())
    assert coming.settled and coming.finish() is coming.finish()
    with pytest.raises(LaunchError, match="finished"):
        coming.load_weights(made.tensors.items())


def test_top_k_and_activation_of_the_engine_must_be_the_checkpoints() -> None:
    made = make_checkpoint("gptq")
    x, ids, weights = make_inputs()
    layer = _pull(made, top_k=SIZE.top_k, activation="silu")
    assert layer(x, topk_ids=ids, topk_weights=weights).shape == x.shape
    with pytest.raises(SpecError, match=r"layer 0, top_k: .*expected 2, as config.json states; got 3"):
        _pull(made, top_k=3)
    for given in ("gelu", Activation("silu", limit=7.0)):
        with pytest.raises(
            SpecError, match=r"layer 0, activation: .*expected silu, as .*; got (gelu|silu \(limit 7\))"
        ):
            _pull(made, activation=given)


def test_what_needs_headers_says_so() -> None:
    """Without them neither layers nor sizes are known."""
    config = make_checkpoint("gptq").config
    with pytest.raises(SpecError, match="gpu_memory is not known"):
        ModelExperts(config, gpu_memory="1 GB")
    with pytest.raises(SpecError, match="which layers have experts"):
        ModelExperts(config).fill_random()
    with pytest.raises(MissingTensor, match="headers of the checkpoint"):
        ModelExperts(config).recipe(0)
    with pytest.raises(SpecError, match="a number of experts or an amount of memory"):
        LoadOptions(gpu_experts=1, gpu_memory="1 GB")
