"""`RoutedExperts.from_tensors`: layers from what an engine holds equal layers from checkpoints, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_checkpoints import make_inputs
from torch import Tensor

from lancebill import ExpertTensors, ModelExperts, Placement, RoutedExperts
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import (
    BadValue,
    CheckpointProblems,
    LancebillError,
    LaunchError,
    SpecError,
    WrongDtype,
    WrongShape,
)
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.layer.from_tensors import INTERLEAVED, ROW_ORDERS, UP_GATE
from lancebill.layer.parts import pull
from lancebill.numbers.bit_packing import pack_bits
from lancebill.numbers.spec import FP8_TENSOR, TENSOR
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import FACTORS, LogicalWeight
from lancebill.testing.checkpoints import Generated, generate, small_size
from lancebill.testing.conformance import all_examples

EXPERTS = 2


def _generate(example: Example, experts: int = EXPERTS) -> Generated:
    row = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    return generate(example, row, row.forms[0], small_size(example, experts))


def _rows_in_order(gate: Tensor, up: Tensor, rows: str) -> Tensor:
    if rows == INTERLEAVED:
        return torch.stack((gate, up), 1).flatten(0, 1)
    return torch.cat((up, gate) if rows == UP_GATE else (gate, up))


def _packed(codes: Tensor, bits: int, packed: bool) -> Tensor:
    return pack_bits(codes, bits, torch.uint8) if packed and bits < 8 else codes


def _w13(made: Generated, rows: str, packed: bool, experts: range = range(EXPERTS)) -> ExpertTensors:
    pairs = [(made.weights[0, e, "gate"], made.weights[0, e, "up"]) for e in experts]
    spec = pairs[0][0].spec

    def joined(of: Any, block: tuple[int, int] = (1, 0)) -> Tensor:
        """A number for each whole matrix is [E, 2]; the rows of all else are in the engine's order."""
        if block == TENSOR:
            return torch.stack([torch.stack([of(w).reshape(()) for w in _in_order(pair, rows)]) for pair in pairs])
        return torch.stack([_rows_in_order(of(gate), of(up), rows) for gate, up in pairs])

    return ExpertTensors(
        joined(lambda w: _packed(w.codes, spec.dtype.bits, packed)),
        tuple(joined(lambda w, i=i: w.scales[i], s.block) for i, s in enumerate(spec.scales)),
        None if spec.zero is None else joined(lambda w: w.zero, spec.zero.block),
        tuple(joined(lambda w, i=i: w.minimum[i], s.block) for i, s in enumerate(spec.minimum)),
        None if pairs[0][0].bias is None else joined(lambda w: w.bias),
        joined(lambda w: w.inputs["input_scale"], TENSOR) if "input_scale" in pairs[0][0].inputs else None,
        _factors([gate for gate, _ in pairs]),
    )


def _factors(weights: list[LogicalWeight]) -> Tensor | None:
    return torch.stack([w.inputs[FACTORS] for w in weights]) if FACTORS in weights[0].inputs else None


def _in_order(pair: tuple[LogicalWeight, LogicalWeight], rows: str) -> tuple[LogicalWeight, LogicalWeight]:
    return pair[::-1] if rows == UP_GATE else pair


def _w2(made: Generated, packed: bool, experts: range = range(EXPERTS)) -> ExpertTensors:
    weights = [made.weights[0, e, "down"] for e in experts]
    spec = weights[0].spec
    return ExpertTensors(
        torch.stack([_packed(w.codes, spec.dtype.bits, packed) for w in weights]),
        tuple(torch.stack([w.scales[i] for w in weights]) for i in range(len(spec.scales))),
        None if spec.zero is None else torch.stack([w.zero for w in weights]),
        tuple(torch.stack([w.minimum[i] for w in weights]) for i in range(len(spec.minimum))),
        None if weights[0].bias is None else torch.stack([w.bias for w in weights]),
        torch.stack([w.inputs["input_scale"] for w in weights]) if "input_scale" in weights[0].inputs else None,
        _factors(weights),
    )


def _pull(made: Generated, **options: Any) -> RoutedExperts:
    return RoutedExperts(pull(ModelExperts(made.config, tensors=made.headers, **options).recipe(0), made.read))


def _assert_same(a: RoutedExperts, b: RoutedExperts, what: object) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left), what


def test_every_spec_equals_its_checkpoint() -> None:
    """Every spec of the registry that has natural columns, in each order of rows, packed and not, whole and cut."""
    examples = {str(example.scheme.spec): example for _, example in all_examples() if not example.scheme.act_order}
    assert len(examples) > 40
    placements = (Placement(), Placement(tp_rank=1, tp_size=2), Placement(ep_rank=1, ep_size=2))
    for number, (name, example) in enumerate(sorted(examples.items())):
        spec, made = example.scheme.spec, _generate(example)
        tall = any(level.block[0] > 1 for level in spec.levels)
        rows = ROW_ORDERS[number % (2 if tall else 3)]
        options: dict[str, Any] = {"backend": "reference", "placement": placements[number // 3 % 3]}
        packed = bool(number % 2)
        if "input_scale" in example.inputs and str(spec).startswith("fp8"):
            options["activations"] = "fp8-static"
        want = _pull(made, **options)
        w13, w2 = _w13(made, rows, packed), _w2(made, packed)
        with torch.device("meta"):  # nothing may be made on the default device
            layer = RoutedExperts.from_tensors(w13, w2, spec, rows=rows, top_k=2, **options)
        _assert_same(layer, want, (name, rows, packed))
        assert layer.report is not None and want.report is not None
        assert layer.report.kept == want.report.kept and layer.report.bytes == want.report.bytes


def test_gate_and_up_may_share_one_number() -> None:
    example = next(e for e in registry()["fp8"].examples() if e.scheme.spec == FP8_TENSOR)
    made = _generate(example)
    w13, w2 = _w13(made, UP_GATE, False), _w2(made, False)
    one = w13.scales[0][:, :1]
    alone, both = (
        RoutedExperts.from_tensors(replace(w13, scales=(scale,)), w2, FP8_TENSOR, rows=UP_GATE, top_k=2)
        for scale in (one, one.expand(-1, 2).contiguous())
    )
    _assert_same(alone, both, "one scale of both")


def test_an_engine_with_its_own_share_gives_an_expert_map() -> None:
    example = next(e for e in registry()["fp8"].examples() if e.bias)
    made = _generate(example, experts=3)
    whole = _pull(made)
    options: dict[str, Any] = {"spec": example.scheme.spec, "top_k": 2, "expert_map": [-1, 1, 0]}
    mine = range(2, 0, -1)  # slot 0 holds expert 2
    options |= {"w13": _w13(made, "gate_up", False, mine), "w2": _w2(made, False, mine)}
    part = RoutedExperts.from_tensors(**options)
    assert part.problem.experts == 2 and part.problem.global_experts == 3
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, whole.problem.hidden, generator=g).to(torch.bfloat16)
    ids = torch.tensor([[1, 2]] * 5)
    weights = torch.rand(5, 2, generator=g)
    want = whole(x, topk_ids=ids, topk_weights=weights)
    assert torch.equal(part(x, topk_ids=ids, topk_weights=weights), want)
    away = torch.tensor([[0, -1]] * 5)
    assert not part(x, topk_ids=away, topk_weights=weights).any()
    with pytest.raises(SpecError, match="expert map does not fit"):
        RoutedExperts.from_tensors(**{**options, "expert_map": [0, 2, -1]})
    with pytest.raises(SpecError, match="cannot be split"):
        RoutedExperts.from_tensors(**options, gpu_experts=1)


def test_dense_experts_and_activations_without_a_gate() -> None:
    g = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(4, n, k, generator=g).to(torch.bfloat16) for n, k in ((128, 64), (64, 128)))
    layer = RoutedExperts.from_tensors(
        ExpertTensors(w13), ExpertTensors(w2), "bf16", top_k=2, activation="relu2_no_mul", backend="reference"
    )
    assert layer.problem.intermediate == 128 and layer.routing is None
    with pytest.raises(LaunchError, match="has no routing"):
        layer.route(torch.randn(3, 64), torch.randn(3, 4))
    x, ids, weights = make_inputs()
    x = x[:, :64].contiguous()
    got = layer(x, topk_ids=ids, topk_weights=weights)
    hidden = torch.relu(torch.einsum("mh,eih->mei", x.float(), w13.float())).square()
    each = torch.einsum("mei,ehi->meh", hidden, w2.float())
    want = (each.gather(1, ids.unsqueeze(-1).expand(-1, -1, 64)) * weights.unsqueeze(-1)).sum(1)
    assert (got.float() - want).norm() / want.norm() < 0.01
    layer.load_weights([("layers.0.experts.gate.codes", w13.flip(0)), ("layers.0.experts.down.codes", w2.flip(0))])
    flipped = layer.finish()(x, topk_ids=3 - ids, topk_weights=weights)
    assert torch.equal(flipped, got), "refitted with the names of the report's errors"


def test_wrong_tensors_are_refused_with_all_reasons() -> None:
    made = _generate(next(e for e in registry()["mxfp4"].examples()))
    w13, w2 = _w13(made, "gate_up", True), _w2(made, True)

    def refused(kind: type[LancebillError], match: str, **changes: Any) -> None:
        arguments = {"w13": w13, "w2": w2, "spec": "mxfp4", "top_k": 2, "activation": "silu", **changes}
        with pytest.raises(kind, match=match):
            RoutedExperts.from_tensors(**arguments)

    refused(CheckpointProblems, "expected.*got", w2=replace(w2, scales=(w2.scales[0][:, :-1],)))
    refused(CheckpointProblems, "'scale' is missing", w2=replace(w2, scales=()))
    refused(CheckpointProblems, "'codes'", w13=replace(w13, codes=w13.codes[:, :, :-1]))
    refused(WrongShape, "expert dimension", w13=replace(w13, codes=w13.codes[0]))
    refused(SpecError, "order of the rows", rows="down_up")
    refused(SpecError, "fewer than 8 bits", spec="fp8-channel")
    refused(SpecError, "unknown activation", activation="tanh")
    refused(SpecError, "the activation is not known", activation=None)
    refused(SpecError, "how many experts a token is routed to", top_k=None)
    refused(SpecError, "each matrix", spec={"w13": "mxfp4"})
    refused(SpecError, "share blocks", spec="fp8-block", rows=INTERLEAVED)
    refused(WrongDtype, "no checkpoint holds", w2=replace(w2, codes=w2.codes.to(torch.complex64)))


def _small(spec: str, hidden: int = 64, inner: int = 32) -> tuple[ExpertTensors, ExpertTensors]:
    """w13 and w2 of two experts with one code in each byte."""
    g, made, level = torch.Generator().manual_seed(0), [], parse_spec(spec)
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        codes = torch.randint(1 << level.dtype.bits, (2, n, k), dtype=torch.uint8, generator=g)
        scales = torch.full((2, *level.scales[0].shape(n, k)), 0.01, dtype=level.scales[0].dtype.storage)
        zero = None if level.zero is None else torch.full((2, *level.zero.shape(n, k)), 8, dtype=torch.int32)
        made.append(ExpertTensors(codes, (scales,), zero))
    return made[0], made[1]


@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
def test_codes_and_zero_points_that_do_not_exist_are_refused(matrix: str) -> None:
    """On the CPU a code of more than its bits would change the code of another row."""

    def refused(spec: str, role: str, value: int, match: str) -> None:
        w13, w2 = _small(spec)
        tensor = getattr(w2 if matrix == "down" else w13, role)
        tensor[1, 33 if matrix == "up" else 3, 0] = value
        where = rf"layer 0, expert 1, {matrix} .*{match}"
        for backend in ("cpu", "reference"):
            with pytest.raises(BadValue, match=where):
                RoutedExperts.from_tensors(w13, w2, spec, top_k=1, backend=backend)

    for value in (16, 255):
        refused("int4-g32:fp16", "codes", value, f"codes out of range; expected 0 to 15; got 0 to {value}")
    zeros = {-20: "-20 to 8", 17: "8 to 17", 70_000: "8 to 70000"}
    for value, got in zeros.items():
        refused("int4-g32:fp16-zp", "zero", value, f"zero points out of range; expected 0 to 16; got {got}")


@pytest.mark.parametrize("spec", ["int8-channel:fp32", "int8-g32:fp16"])
def test_codes_of_8_bits_may_be_signed(spec: str) -> None:
    w13, w2 = _small(spec)
    signed = [replace(one, codes=(one.codes.int() - 128).to(torch.int8)) for one in (w13, w2)]
    want, layer = (RoutedExperts.from_tensors(*pair, spec, top_k=1) for pair in ((w13, w2), signed))
    _assert_same(layer, want, spec)
    with pytest.raises(CheckpointProblems, match="expected U8; got I8"):  # whose zero points are those of 0 to 255
        unsigned = [replace(one, codes=one.codes.view(torch.int8)) for one in _small("int8-g32:fp16-zp")]
        RoutedExperts.from_tensors(*unsigned, "int8-g32:fp16-zp", top_k=1)


def test_top_k_is_a_number_of_these_experts() -> None:
    w13, w2 = _small("int4-g32:fp16")
    for top_k in (9, 0, -1, True, 2.0):
        with pytest.raises(SpecError, match=f"top_k: .*got {top_k}"):
            RoutedExperts.from_tensors(w13, w2, "int4-g32:fp16", top_k=top_k)  # type: ignore[arg-type]
    part = RoutedExperts.from_tensors(w13, w2, "int4-g32:fp16", top_k=3, expert_map=[0, -1, 1, -1])
    assert part.problem.top_k == 3
