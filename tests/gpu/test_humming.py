"""The Humming backend against the reference, and its layout against the package's own conversion."""

from __future__ import annotations

import pytest
import torch

from lancebill.backends.humming import BACKEND
from lancebill.backends.humming.layout import HummingLayout
from lancebill.bench.check import check_output
from lancebill.bench.peers_cuda import PEERS, compile_humming
from lancebill.bench.workload import Batch, Weights
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.layout import MatrixShape, PlainLayout
from lancebill.moe.model_shapes import parse_shape
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.testing.layers import layer_problem, make_layer, plausible_weight, routing, worst_row

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("humming")

DEVICE = Device("cuda", 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1])
SPECS = ["mxfp4", "int4-g128", "int4-g32", "int8", "fp8-block"]
BOUND = 1.2e-2  # hidden rows are stored in 16 bits, and exponentials are approximate


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("n", "k"), [(512, 256), (192, 384)])
def test_the_layout_equals_the_package_conversion(spec: str, n: int, k: int) -> None:
    """Bit for bit, for weights and scales of three experts."""
    from lancebill.backends.humming.package import make_matrix

    if spec == "fp8-block" and n % 128:
        pytest.skip("whole blocks only")
    shape, plain, own = MatrixShape("w13", n, k, parse_spec(spec)), PlainLayout(), HummingLayout()
    ours, canonical = own.allocate(shape, 3, "cuda"), plain.allocate(shape, 3, "cuda")
    for expert in range(3):
        weight = plausible_weight(shape, expert, "cuda")
        own.pack(shape, weight, {name: tensor[expert] for name, tensor in ours.items()})
        plain.pack(shape, weight, {name: tensor[expert] for name, tensor in canonical.items()})
    theirs = make_matrix(shape, 3, canonical, parse_activation("bf16"), torch.bfloat16).tensors
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].view(tensor.dtype)), name


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("tokens", "kind"), [(1, "uniform"), (5, "holes"), (70, "zipf"), (600, "one")])
def test_layers(spec: str, tokens: int, kind: str) -> None:
    problem = layer_problem(spec, "bf16", hidden=512, intermediate=256, experts=8, top_k=2)
    assert not list(BACKEND.check(problem, DEVICE))
    ours, reference = make_layer(problem, "humming"), make_layer(problem, "reference")
    x = torch.randn(tokens, problem.hidden, device="cuda").bfloat16()
    routed = routing(problem, tokens, 7, kind=kind)
    got, want = ours(x, routed), reference(x, routed, torch.empty_like(x, dtype=torch.float32))
    empty = (routed.ids < 0).all(1)
    assert not got[empty].any()
    assert worst_row(got[~empty], want[~empty]) < BOUND


def test_activations() -> None:
    for activation in (Activation("silu", limit=2.0), Activation("swigluoai", limit=7.0)):
        problem = layer_problem(
            "mxfp4", "bf16", hidden=512, intermediate=256, experts=8, top_k=2, activation=activation
        )
        x, routed = torch.randn(33, 512, device="cuda").bfloat16(), routing(problem, 33, 3)
        got, want = (make_layer(problem, name)(x, routed) for name in ("humming", "reference"))
        assert worst_row(got, want) < BOUND, activation


@pytest.mark.parametrize("name", ["humming-indexed", "humming-grouped"])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_peers_skip_the_slots_of_other_ranks(name: str, activations: str) -> None:
    """On one of two ranks, with kernels compiled ahead from the description of the layer alone."""
    problem = parse_shape("8,256,128,2").problem(parse_spec("mxfp4"), parse_activation(activations), ep=2)
    device = torch.device("cuda", 0)
    compile_humming(problem, (3, 70), device)
    weights = Weights(problem, device)
    peer = PEERS[name](problem, weights)
    for tokens in (3, 70):
        routed = routing(problem, tokens, 5, kind="holes")
        batch = Batch(torch.randn(tokens, problem.hidden, device=device).bfloat16(), routed.ids, routed.weights)
        check_output(name, problem, weights, batch, peer(batch.x, batch.ids, batch.weights))
