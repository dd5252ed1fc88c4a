"""Conformance tests for formats, run over each format's own examples; no test is specific to a format.

`check_format(fmt)` runs all of them. Authors of other formats can call it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lancebill.checkpoint.load.expert_weights import ExpertWeights
from lancebill.checkpoint.load.layer_plan import LayerPlan, plan_layer
from lancebill.checkpoint.load.load_experts import load_expert, load_experts
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP, NameForm, Naming
from lancebill.checkpoint.resolve.stored_layer import StoredLayer
from lancebill.errors import BadValue, CannotEncode, CheckpointError, MissingTensor, WrongDtype, WrongShape
from lancebill.formats import axes as ax
from lancebill.formats import detect, registry
from lancebill.formats.base import Example, Format, Module
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.moe.layout import PlainLayout
from lancebill.moe.placement import Placement
from lancebill.numbers.codec import dequantize
from lancebill.numbers.weight import LogicalWeight, same_bits
from lancebill.testing.checkpoints import Generated, generate, small_size
from lancebill.testing.weights import random_example

DEFAULT_FAMILY = "qwen3_moe"
IMPOSSIBLE_DTYPE = "F64"  # no format uses it


class Nonconforming(AssertionError):
    """A format fails a conformance test; the text says which."""


def check_format(fmt: Format) -> None:
    """Run every conformance test on every example."""
    for example in fmt.examples():
        check_round_trip(fmt, example)
        check_leave_one_out(example)
        check_wrong_headers(example)
        check_shards(example)
        check_nan_scales(example)


def check_round_trip(fmt: Format, example: Example) -> None:
    """decode(encode(w)) == w bit for bit; headers fit the parts; config + headers give the scheme."""
    weight = random_example(example, example.n, example.k, seed=1, order_seed=2)
    stored = example.scheme.encode(weight)
    headers: dict[str, Stored] = {}
    for role, tensor in stored.items():
        part = example.scheme.part(role)
        _require(part is not None, f"{example.name}: encode returns '{role}', which the scheme does not declare")
        assert part is not None
        dtype = DTYPE_NAMES[tensor.dtype]
        _require(dtype in part.dtypes, f"{example.name}: '{role}' encodes as {dtype}, declared {part.dtypes}")
        shapes = part.shapes(example.n, example.k, dtype)
        fits = any(ax.fits(shape, tuple(tensor.shape)) for shape in shapes)
        _require(fits, f"{example.name}: '{role}' encodes as {list(tensor.shape)}, declared {shapes}")
        headers[part.suffix[0]] = Stored(dtype, tuple(tensor.shape))
    _require(detect(example.config) is fmt, f"{example.name}: detect() returns another format")
    claims = [f.name for f in registry().values() if f.matches(example.config)]
    _require(claims == [fmt.name], f"{example.name}: these formats match the config: {claims}")
    resolved = fmt.scheme(example.config, Module("model.layers.0.mlp.experts.0.gate_proj", headers))
    _require(resolved == example.scheme, f"{example.name}: scheme() returns {resolved}, not {example.scheme}")
    back = example.scheme.decode(stored, example.n, example.k)
    _require(back.equals(weight), f"{example.name}: decode(encode(w)) is not w")


def check_leave_one_out(example: Example) -> None:
    """Without any one tensor, the manifest reports that tensor as missing, by name."""
    generated, row = _small(example)
    whole = manifests.build(generated.config, generated.headers, row)
    _require(not whole.problems, f"{example.name}: a complete checkpoint has problems {_texts(whole.problems)}")
    optional = {s for p in example.scheme.parts if p.optional for s in p.suffix}
    for name in generated.tensors:
        if row.forms[0].stacked and any(name.endswith(suffix) for suffix in optional):
            continue  # stacked and optional: leaving it out is legal
        left = {n: h for n, h in generated.headers.items() if n != name}
        problems = manifests.build(generated.config, left, row).problems
        named = any(isinstance(p, MissingTensor) and name in p.render() for p in problems)
        _require(named, f"{example.name}: without {name} the problems are {_texts(problems)}")


def check_wrong_headers(example: Example) -> None:
    """With any one tensor of wrong shape or dtype, the manifest names that tensor."""
    generated, row = _small(example)
    for name, header in generated.headers.items():
        shape = (*header.shape[:-1], header.shape[-1] + 1, 3) if header.shape else (3,)
        for wrong, kind in (
            (replace(header, shape=shape), WrongShape),
            (replace(header, dtype=IMPOSSIBLE_DTYPE), WrongDtype),
        ):
            problems = manifests.build(generated.config, {**generated.headers, name: wrong}, row).problems
            named = any(isinstance(p, (kind, MissingTensor)) and name in p.render() for p in problems)
            _require(named, f"{example.name}: {name} as {wrong} gives {_texts(problems)}")


def check_shards(example: Example) -> None:
    """The tensor-parallel shards concatenate to the whole matrix, bit for bit; packing them loses nothing."""
    generated, row = _small(example, experts=1)
    layer = manifests.build(generated.config, generated.headers, row).layers[0]
    form = layer.form
    gate, up, down = whole_matrices(generated, form, 0, 0)
    for tp in (1, 2, 4):
        shards = [_load_shard(generated, layer, rank, tp) for rank in range(tp)]
        halves = [dequantize(s.w13).chunk(2) if form.gated else (dequantize(s.w13),) for s in shards]
        got = [torch.cat([h[i] for h in halves]) for i in range(len(halves[0]))]
        want = [gate, up] if up is not None else [gate]
        for name, a, b in zip((GATE, UP), got, want):
            _require(same_bits(a, b), f"{example.name}: the shards of {name} at tp {tp} are not the whole matrix")
        columns = torch.cat([dequantize(s.w2) for s in shards], dim=1)
        _require(same_bits(columns, down), f"{example.name}: the shards of down at tp {tp} are not the whole matrix")


def check_nan_scales(example: Example) -> None:
    """encode and decode refuse a NaN in mini-float scales: it would make its whole block NaN."""
    weight = random_example(example, example.n, example.k, seed=1, order_seed=2)
    for i, level in enumerate(example.scheme.spec.scales):
        if level.dtype.nan_code is None:
            continue
        codes = weight.scales[i].clone()
        codes[-1, -1] = level.dtype.nan_code
        broken = replace(weight, scales=(*weight.scales[:i], codes, *weight.scales[i + 1 :]))
        stored = example.scheme.pack(broken)
        refused = _raises(CannotEncode, example.scheme.encode, broken)
        _require(refused, f"{example.name}: encode accepts a NaN in scale {i + 1}")
        refused = _raises(BadValue, example.scheme.decode, stored, example.n, example.k)
        _require(refused, f"{example.name}: decode accepts a NaN in scale {i + 1}")


def _raises(kind: type[Exception], function: Callable[..., object], *arguments: object) -> bool:
    try:
        function(*arguments)
    except kind:
        return True
    return False


def whole_matrices(
    generated: Generated, form: NameForm, layer: int, expert: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(gate, up, down) dequantised from the weights that a checkpoint was generated from.

    With act-order in down, the loader permutes gate's and up's rows and down's columns into down's sorted order;
    so does this function.
    """
    weights = {name: generated.weights[layer, expert, name] for name in form.names}
    down = dequantize(weights[DOWN])
    gate, up = _gate_and_up(weights, form)
    if weights[DOWN].perm is not None:
        order = weights[DOWN].perm.long()  # type: ignore[union-attr]
        gate, up, down = gate[order], None if up is None else up[order], down[:, order]
    return gate, up, down


def _gate_and_up(weights: dict[str, LogicalWeight], form: NameForm) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not form.fused:
        return dequantize(weights[GATE]), dequantize(weights[UP]) if form.gated else None
    fused = dequantize(weights[names.GATE_UP])
    if form.interleaved:
        return fused[0::2], fused[1::2]
    gate, up = fused.chunk(2)
    return gate, up


def _load_shard(generated: Generated, layer: StoredLayer, rank: int, tp: int) -> ExpertWeights:
    plan = plan_layer(layer, Placement(tp_rank=rank, tp_size=tp))
    weights = load_expert(generated.read, plan, 0)
    layout = PlainLayout()
    for shape, weight in ((plan.w13, weights.w13), (plan.w2, weights.w2)):
        _require(weight.spec == shape.spec, f"planned {shape.spec}, loaded {weight.spec}")
        rows = {name: t[0] for name, t in layout.allocate(shape, 1).items()}
        layout.pack(shape, weight, rows)
        same = same_bits(dequantize(layout.unpack(shape, rows)), dequantize(weight))
        _require(same, f"unpack(pack(w)) is not w for {shape}")
    if tp == 1:
        _check_loaded_together(generated, plan)
    return weights


def _check_loaded_together(generated: Generated, plan: LayerPlan) -> None:
    """Experts that are read and decoded together are the experts that are loaded one by one."""
    together = load_experts(generated.read, plan, plan.experts)
    for i, expert in enumerate(plan.experts):
        one, other = load_expert(generated.read, plan, expert), together.at(i)
        for matrix, a, b in (("w13", one.w13, other.w13), ("w2", one.w2, other.w2)):
            alike = replace(a, perm=None).equals(replace(b, perm=None))  # a missing act-order is the natural one
            _require(alike, f"{matrix} of expert {expert} differs when experts are loaded together")


def _small(example: Example, experts: int = 2) -> tuple[Generated, Naming]:
    """A small checkpoint of this example, in the family its config names or else the default family."""
    family = example.config.model.get("model_type", DEFAULT_FAMILY)
    row = names.find_family({"model_type": family})
    return generate(example, row, row.forms[0], small_size(example, experts)), row


def _texts(problems: list[CheckpointError]) -> list[str]:
    return [p.render() for p in problems[:4]]


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise Nonconforming(text)


def all_examples() -> Iterator[tuple[Format, Example]]:
    """(format, example) for every registered format."""
    for fmt in registry().values():
        for example in fmt.examples():
            yield fmt, example
