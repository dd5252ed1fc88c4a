"""Compares a family's tiny model in transformers with the same checkpoint in lancebill.

Equal logits show that every expert was read and computed as transformers does; equal experts and weights for each
token show that the routing follows from the config and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import tiny_model
from torch import Tensor, nn

import lancebill
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.naming import find_family
from lancebill.checkpoint.resolve.router_check import router_problems
from lancebill.cli.verify import examine
from lancebill.errors import MissingTensor
from lancebill.integrations.transformers.packed_experts import packed_experts, takes_routed_rows
from lancebill.layer.model_experts import ModelExperts
from lancebill.layer.routed_experts import RoutedExperts

TOKENS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
INPUTS: dict[str, dict[str, Any]] = {
    # A diffusion model reads the prompt from its cache and refines a canvas.
    "diffusion_gemma": {"decoder_input_ids": TOKENS.flip(1)},
    # Tokens of text and of images have experts of their own.
    "ernie4_5_vl_moe": {"use_cache": False, "moe_mm_token_type_ids": TOKENS % 2},
}
EXACT = {"backend": "reference", "dtype": torch.float32}
# Families whose experts cannot be called with ids and weights: the block around them, and what it adds to their output.
BLOCKS: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "llama4": ("feed_forward", lambda block, x: block.shared_expert(x)),
    "jetmoe": ("mlp", lambda block, x: block.bias),
}


@torch.no_grad()
def judge(model_type: str, folder: Path, *, hub_names: bool) -> None:
    """Save a tiny model with the hub's names or transformers' own, and compare."""
    model = tiny_model(model_type)
    inputs = INPUTS.get(model_type, {"use_cache": False})
    want = model(TOKENS, **inputs).logits
    model.save_pretrained(folder, save_original_format=hub_names)
    report = examine(folder)
    assert report.layers and report.ok, [problem.render() for problem in report.problems]
    check_missing_router_tensors(folder)
    check_names_of_experts_taken_apart(model)
    if any(takes_routed_rows(module) for module in model.modules()):
        original, model = model, lancebill.from_pretrained(folder, **EXACT)
        check_left_experts(original, model)
        layers = {name: (place.experts, place) for name, place in packed_experts(model)}
    else:
        layers = dict(_blocks(model, folder))
    with recorded(model, layers) as calls:
        got = model(TOKENS, **inputs).logits
    error = (got - want).norm() / want.norm()
    assert error < 2e-6, f"logits differ by {error:.1e}"
    for name, (layer, _) in layers.items():
        if layer.routing is not None:
            check_routing(layer, *calls[name])
    if list(packed_experts(model)):
        check_narrow_dtypes(folder, inputs)


def check_narrow_dtypes(folder: Path, inputs: Any) -> None:
    """What transformers keeps in fp32 reaches no matrix of 16 bits."""
    for dtype in (torch.bfloat16, torch.float16):
        logits = lancebill.from_pretrained(folder, dtype=dtype, backend="reference")(TOKENS, **inputs).logits
        assert logits.isfinite().all()


def check_missing_router_tensors(folder: Path) -> None:
    """Without any one of the router's tensors a layer cannot route, and `verify` says which one is missing."""
    with Checkpoint.open(folder) as checkpoint:
        headers = checkpoint.headers
        routers = [row.router for row in find_family(checkpoint.config.model).mixtures]
        assert all(any(router.gate_layer(name) is not None for name in headers) for router in routers), "no gate"
        for name in headers:
            users = [router for router in routers if router.gate_layer(name) is not None or router.claim(name)]
            if not users:
                continue
            left = {other: stored for other, stored in headers.items() if other != name}
            problems = list(router_problems(manifests.build(checkpoint.config, left)))
            assert [type(problem) for problem in problems] == [MissingTensor] * len(users), f"no {name}: {problems}"
            for problem in problems:
                assert any(name.endswith(spelled) for spelled in str(problem.expected).split(" or "))


def check_names_of_experts_taken_apart(model: Any) -> None:
    """A tool that takes stacked experts apart names each below the module that held them, and its names are known."""
    rows = find_family(model.config.to_dict()).mixtures
    for home in (name for name, module in model.named_modules() if takes_routed_rows(module)):
        for row in (row for row in rows if row.has_experts_in(home)):
            halves = ("gate_proj", "up_proj", "down_proj") if row.forms[0].gated else ("up_proj", "down_proj")
            for name in (f"{home}.3.{half}.weight" for half in halves):
                claim = row.claim(name)
                assert claim is not None and claim.expert == 3, f"{name} is not known"


def check_left_experts(original: nn.Module, model: nn.Module) -> None:
    """Experts outside the language model, as of an encoder of images, are transformers' own, with their own weights."""
    replaced = [name for name, _ in packed_experts(model)]
    for name, module in original.named_modules():
        if takes_routed_rows(module) and name not in replaced:
            for left, own in zip(model.get_submodule(name).parameters(), module.parameters(), strict=True):
                assert torch.equal(left, own), f"{name} has other weights"


def _blocks(model: nn.Module, folder: Path) -> Iterator[tuple[str, tuple[RoutedExperts, nn.Module]]]:
    """Let lancebill compute the blocks around the experts."""
    experts = ModelExperts.from_checkpoint(folder, **EXACT)
    place, rest = BLOCKS[experts.naming.family]
    for index in experts.layers:
        names = [name for name, _ in model.named_modules() if name.endswith(f"layers.{index}.{place}")]
        layer, block = experts.layer(index), model.get_submodule(names[0])
        gate = _gate(model, layer, names[0])[1]

        def compute(module: nn.Module, given: Any, output: Any, layer: Any = layer, gate: Any = gate) -> Any:
            x = given[0].reshape(-1, given[0].shape[-1])
            made = layer.forward_routed(x, F.linear(x, gate.weight)) + rest(module, x)
            return (made, *output[1:]) if isinstance(output, tuple) else made.view(output.shape)

        block.register_forward_hook(compute)
        yield names[0], (layer, block)


Call = tuple[Tensor, Any]  # the logits, and what the experts were called with


@contextmanager
def recorded(model: nn.Module, layers: dict[str, tuple[RoutedExperts, nn.Module]]) -> Iterator[dict[str, Call]]:
    """The router's logits and the experts' arguments of one forward pass, by layer."""
    calls: dict[str, Call] = {}
    hooks = []
    for name, (layer, place) in layers.items():
        if layer.routing is None:
            continue
        seen: dict[str, Tensor] = {}
        path, gate = _gate(model, layer, name)
        for above in (path.rpartition(".")[0], path):  # LongCat reads the gate's weight without calling it
            hooks.append(model.get_submodule(above).register_forward_pre_hook(_keep(seen)))

        def record(module: nn.Module, given: Any, _: Any, name: str = name, seen: Any = seen, gate: Any = gate) -> None:
            x = seen["x"].reshape(-1, seen["x"].shape[-1])
            calls[name] = F.linear(x, gate.weight), given

        hooks.append(place.register_forward_hook(record))
    yield calls
    for hook in hooks:
        hook.remove()


def _keep(seen: dict[str, Tensor]) -> Callable[[nn.Module, Any], None]:
    def keep(module: nn.Module, given: Any) -> None:
        seen["x"] = given[0]

    return keep


def _gate(model: nn.Module, layer: RoutedExperts, experts: str) -> tuple[str, Any]:
    """The module of a layer's gate matrix, by its name in the naming table: the one nearest to the experts."""
    assert layer.refit is not None
    recipe = layer.refit.recipe
    gates = recipe.manifest.naming.router.gates(recipe.plan.layer.index)
    found = [(name, module) for name, module in model.named_modules() if f"{name}.weight" in gates]
    return max(found, key=lambda one: sum(a == b for a, b in zip(one[0].split("."), experts.split("."))))


def check_routing(layer: RoutedExperts, logits: Tensor, given: Any) -> None:
    """The same experts for each token, with the same weights; the order of slots may differ."""
    routed = layer.route(given[0].reshape(len(logits), -1), logits, TOKENS)
    if len(given) < 3:
        return  # the block routes by itself: equal logits compare its routing too
    ids, weights = (tensor.reshape(len(logits), -1) for tensor in given[1:3])
    real = ids < layer.problem.global_experts
    ours, theirs = (torch.zeros(logits.shape) for _ in range(2))
    ours.scatter_add_(1, routed.ids.long().clamp(min=0), routed.weights)
    theirs.scatter_add_(1, torch.where(real, ids, 0), torch.where(real, weights, 0.0))
    assert torch.equal(ours != 0, theirs != 0), "other experts were chosen"
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
