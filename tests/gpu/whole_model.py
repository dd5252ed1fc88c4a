"""Takes a whole model through the doors of a user, and compares it with transformers' own on the same numbers.

The reference is transformers' model in fp32 with dequantised weights. It replays the experts that our model chose: one
flipped choice changes a row more than rounding does, and would hide what is compared. Routers are compared apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import lancebill
from lancebill.checkpoint.resolve.naming import find_family
from lancebill.errors import CannotEncode
from lancebill.integrations.transformers.graphed_generation import Decoding
from lancebill.integrations.transformers.packed_experts import PackedExperts, packed_experts
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.moe.router_tensors import RouterTensors, route_as_defined
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec import ALL
from lancebill.testing.recorders import PlainRecorder

NEAR = 0.03  # of the spread of a row's logits
Routes = list[tuple[str, Tensor, Tensor]]  # ids and weights of each call of an experts module, in order


@torch.no_grad()
def check_model(
    path: Path, reference: Any, device: str, folder: Path, tokens: Tensor, inputs: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """`from_pretrained`, logits, `generate`, `save_pretrained` and back. Returns what the record counts."""
    options = {"device": device, "dtype": torch.bfloat16, **options}
    ours = lancebill.from_pretrained(path, **options)
    requantise_rest(reference, ours)
    steps = _steps(reference, tokens, inputs)
    with recorded(ours) as routes:
        got = _logits(ours, steps)
    with replayed(reference, routes) as flips:
        want = _logits(reference, steps)
    worst = row_error(got, want)
    bound = NEAR if worst <= NEAR else max(NEAR, 2 * _error_of_bf16(reference, routes, steps, want, device) + 0.01)
    assert worst <= bound, f"the worst row of logits differs by {worst:.3f} of their spread, more than {bound:.3f}"
    check_routers(ours)
    if len(steps) > 1 and _generates(reference, tokens):
        check_generated(ours, reference, tokens, bound)
    saved = check_saved(path, ours, folder, steps, options)
    places = [place for _, place in packed_experts(ours)]
    return {
        "worst row": round(worst, 4),
        "bound": round(bound, 4),
        "other routes": flips,
        "saved": saved,
        "experts on": sorted({place.experts.choice.backend.name for place in places if place.experts is not None}),
        "rest on": sorted(set(ours.lancebill_rest.packed.values())),
        "dequantised": sorted(set(ours.lancebill_rest.dequantized.values())),
    }


def requantise_rest(reference: Any, ours: Any) -> None:
    """Give the reference the numbers of the matrices that were quantised while loading. No router is one of them."""
    rows = find_family(ours.config.to_dict()).mixtures
    for name in ours.lancebill_rest.requantized:
        assert all(row.router.gate_layer(f"{name}.weight") is None for row in rows), f"the router {name} was quantised"
        module = reference.get_submodule(name)
        numbers = requantised(module.weight, ours.lancebill_rest.specs[name])
        module.weight = nn.Parameter(numbers, requires_grad=False)  # the embedding that it was tied to keeps its own


def requantised(matrix: Tensor, spec: Any) -> Tensor:
    return dequantize(quantize(matrix.float().contiguous(), spec)).to(matrix.dtype)


Steps = list[tuple[Tensor, dict[str, Any]]]


def _steps(reference: Any, tokens: Tensor, inputs: Mapping[str, Any]) -> Steps:
    """The calls to compare: the prompt, then one token with the cache of the prompt, where the model can."""
    if inputs:
        return [(tokens, dict(inputs))]
    steps: Steps = [(tokens[:, :-1], {"use_cache": True}), (tokens[:, -1:], {"use_cache": True})]
    try:
        _logits(reference, steps)
    except Exception:  # whatever a family raises that is not made for it
        return [(tokens, {"use_cache": False})]
    return steps


def _logits(model: Any, steps: Steps) -> Tensor:
    """[rows, vocabulary] in fp32 on the CPU; later steps read the cache of the first."""
    found, cache = [], None
    for tokens, inputs in steps:
        given = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        more = {} if cache is None else {"past_key_values": cache}
        out = model(tokens.to(model.device), **given, **more)
        cache = getattr(out, "past_key_values", None)
        assert len(found) == 0 or cache is not None, "no cache"
        found.append(out.logits.float().cpu().flatten(0, 1))
    return torch.cat(found)


def row_error(got: Tensor, want: Tensor) -> float:
    """The root mean square error of the worst row, as a share of the spread of its logits."""
    assert got.shape == want.shape and bool(want.isfinite().all()), "the reference has logits that are not finite"
    errors = (got - want).pow(2).mean(1).sqrt() / want.std(1).clamp(min=1e-30)
    return float(errors.nan_to_num(nan=float("inf")).max())


def _error_of_bf16(reference: Any, routes: Routes, steps: Steps, want: Tensor, device: str) -> float:
    """How far transformers itself is from fp32 in bf16, with the same routes; 0 where it cannot compute in bf16."""
    narrow = copy.deepcopy(reference).to(device, torch.bfloat16)
    try:
        with replayed(narrow, routes):
            return row_error(_logits(narrow, steps), want)
    except RuntimeError:
        return 0.0


@contextmanager
def recorded(model: nn.Module) -> Iterator[Routes]:
    """The experts of each token. Modules that get only rows (Llama-4) record nothing.

    Not by hooks: a model with hooks does not decode in its usual way.
    """
    routes: Routes = []
    names = {place: name for name, place in packed_experts(model)}
    compute = PackedExperts.forward

    def forward(place: PackedExperts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if type(place) is PackedExperts and place in names:
            routes.append((names[place], ids.cpu().clone(), weights.float().cpu().clone()))
        return compute(place, rows, ids, weights)

    with patch.object(PackedExperts, "forward", forward):
        yield routes


@contextmanager
def replayed(model: nn.Module, routes: Routes) -> Iterator[list[int]]:
    """The model's experts get the recorded ids; rows that chose the same keep the model's own weights.

    Yields [rows with other experts, rows]. Parts of a model may share experts, which then have one name here.
    """
    flips, hooks, waiting = [0, 0], [], dict[nn.Module, list[tuple[Tensor, Tensor]]]()
    for name, ids, weights in routes:
        waiting.setdefault(model.get_submodule(name), []).append((ids, weights))
    for module in waiting:

        def replay(module: nn.Module, given: Any, named: Any) -> Any:
            bound = signature(module.forward).bind(*given, **named)
            _, ids_name, weights_name = bound.arguments
            own = bound.arguments[ids_name], bound.arguments[weights_name]
            ids, weights = (ours.to(theirs).view(theirs.shape) for ours, theirs in zip(waiting[module].pop(0), own))
            same = (ids.sort(-1).values == own[0].sort(-1).values).all(-1, keepdim=True)
            flips[0] += int((~same).sum())
            flips[1] += same.numel()
            bound.arguments[ids_name] = torch.where(same, own[0], ids)
            bound.arguments[weights_name] = torch.where(same, own[1], weights)
            return bound.args, bound.kwargs

        hooks.append(module.register_forward_pre_hook(replay, with_kwargs=True))
    yield flips
    for hook in hooks:
        hook.remove()


def check_routers(model: nn.Module) -> None:
    """Each layer's own routing, on its device, chooses the experts and weights of the definition."""
    for name, place in packed_experts(model):
        layer = place.experts
        if layer is None or layer.routing is None:
            continue
        generator = torch.Generator().manual_seed(5)
        columns = layer.problem.global_experts + layer.routing.zero_experts
        logits = torch.randn(64, columns, generator=generator)
        x, ids = torch.randn(64, layer.problem.w13.k, generator=generator), torch.arange(64)
        held = {key: None if tensor is None else tensor.cpu() for key, tensor in layer.named_buffers()}
        router = RouterTensors(*(held.get(f"router_{role}") for role in ("bias", "correction", "table")))
        where = next(layer.parameters()).device
        got = layer.executor.route(
            layer.routing, logits.to(where), RouterTensors(*(None if t is None else t.to(where) for t in router)),
            x.to(where), ids.to(where),
        )  # fmt: skip
        want = route_as_defined(layer.routing, logits, router, x, ids)
        ours, theirs = (
            torch.zeros(64, columns + 1).scatter_add_(1, routed.ids.long().cpu() % (columns + 1), routed.weights.cpu())
            for routed in (got, want)
        )
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), f"{name} routes differently"


def _generates(reference: Any, tokens: Tensor) -> bool:
    """Whether transformers itself can: some families cannot with so few layers, or without an image."""
    try:
        reference.generate(tokens[:, :-1], max_new_tokens=2, do_sample=False)
    except Exception:  # whatever a family raises that is not made for it
        return False
    return True


def check_generated(ours: Any, reference: Any, tokens: Tensor, bound: float) -> None:
    """A repeated call gives the same tokens, and so do its steps without graphs; each token is (nearly) the most
    probable one after those before it, by the reference with the routes of those steps."""
    prompt, decoding = tokens[:, :-1].to(ours.device), ours.lancebill_decoding

    def generated(**more: Any) -> Tensor:
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        made = ours.generate(prompt, **options, **more)
        return getattr(made, "sequences", made).cpu()  # type: ignore[no-any-return]

    _, again, found = (generated() for _ in range(3))  # graphs are made in the first
    assert torch.equal(again, found), "a repeated call generates other tokens"
    has_graphs = decoding.reason is None and decoding.native is None
    if has_graphs:
        ours.lancebill_decoding = Decoding(PlainRecorder)
        generated()
    with recorded(ours) as routes:
        plain = generated() if has_graphs else generated(disable_compile=True)
    ours.lancebill_decoding = decoding
    assert not has_graphs or torch.equal(plain, found), "graphs generate other tokens than the same steps without them"
    ends = ours.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends).flatten()
    _check_tokens(reference, plain, prompt.shape[1], ends, routes, 6 * bound)


def _check_tokens(reference: Any, tokens: Tensor, start: int, ends: Tensor, routes: Routes, bound: float) -> None:
    going, cache = torch.ones(len(tokens), dtype=torch.bool), None
    with replayed(reference, routes):
        for at in range(start, tokens.shape[1]):
            given = tokens[:, :at] if cache is None else tokens[:, at - 1 : at]
            out = reference(given, past_key_values=cache, use_cache=True)
            rows, cache = out.logits[:, -1], out.past_key_values
            gaps = (rows.max(1).values - rows.gather(1, tokens[:, at : at + 1]).squeeze(1)) / rows.std(1)
            worst = float(gaps[going].max()) if bool(going.any()) else 0.0
            assert worst <= bound, f"generated token {at - start} is {worst:.2f} spreads from the best"
            going &= ~torch.isin(tokens[:, at], ends)


def check_saved(path: Path, ours: Any, folder: Path, steps: Steps, options: Mapping[str, Any]) -> str:
    """A saved model, read back on the same device, has the same numbers.

    Where the modules outside the experts cannot be saved as they were quantised, the model is loaded as it is stored.
    Experts that were quantised while loading keep theirs only without a scale for the whole matrix (docs/numerics.md).
    """
    stored, refused = {key: value for key, value in options.items() if key != "weights"}, ""
    try:
        ours.save_pretrained(folder)
    except CannotEncode as error:
        refused, ours = f"as stored: {error.what}", lancebill.from_pretrained(path, **stored)
        ours.save_pretrained(folder)
    files = sorted(folder.glob("*.gguf"))
    again = lancebill.from_pretrained(files[0] if files else folder, **stored)
    got, want = (_logits(model, steps) for model in (again, ours))
    if "weights" in options and any(_is_scaled_whole(place) for _, place in packed_experts(ours)):
        assert bool(got.isfinite().all())
        return "experts rounded again"
    mine, read = (dict(model.named_parameters()) for model in (ours, again))
    different = [name for name in mine if name not in read or not torch.equal(mine[name], read[name])]
    different = [name for name in different if not _is_same_matrix(ours, again, name.rpartition(".")[0])]
    assert not different and len(mine) == len(read), f"read back with other numbers: {different[:3]}"
    error = row_error(got, want)
    assert error <= NEAR, f"read back, logits differ by {error:.3f} of their spread"
    return refused or "yes"


def _is_same_matrix(ours: nn.Module, again: nn.Module, module: str) -> bool:
    """Whether a linear's packed numbers mean the same: a format may store the divisor instead of the factor."""
    mine, read = ours.get_submodule(module), again.get_submodule(module)
    linears = isinstance(mine, QuantizedLinear) and isinstance(read, QuantizedLinear)
    return linears and torch.allclose(mine.weight, read.weight, rtol=2**-7, atol=0)  # type: ignore[union-attr]


def _is_scaled_whole(place: PackedExperts) -> bool:
    assert place.experts is not None
    matrices = place.experts.problem.matrices.values()
    return any(level.block == (ALL, ALL) for shape in matrices for level in shape.spec.scales)
