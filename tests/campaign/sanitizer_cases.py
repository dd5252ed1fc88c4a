"""The layers that run under compute-sanitizer: small, and together they reach every branch of the GPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

SPECS = (
    "mxfp4", "nvfp4", "int4", "int4-g32", "int4-g64", "int4-g128", "int4-zp", "int4-g32-zp", "int4-g128-zp", "int8",
    "int8-g128", "fp8", "fp8-block",
)  # fmt: skip
HOPPER, AMPERE, SMALL_AMPERE = "sm_90", "sm_80", "sm_86"  # a Hopper GPU runs the PTX of older GPUs' kernels


@dataclass(frozen=True)
class Case:
    """One layer and one batch."""

    spec: str = "mxfp4"
    activations: str = "bf16"
    tokens: int = 18
    experts: int = 4
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 128
    routing: str = "uniform"
    dispatch: str = "indexed"
    activation: str = "silu"
    bias: bool = False
    act_order: bool = False
    weight_on_input: bool = False
    pre_scale: bool = False
    linear: bool = False  # one matrix, no experts
    processors: int = 0  # SMs that the backend believes to have; 0: the real number
    gpu: str = HOPPER  # whose kernels

    @property
    def rows(self) -> int:
        """Rows of the input in this dispatch form."""
        return self.tokens * {"indexed": 1, "contiguous": self.top_k, "batched": self.experts}[self.dispatch]

    @property
    def label(self) -> str:
        """The fields that differ from the defaults."""
        defaults = vars(Case())
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value != defaults[name]) or "plain"


def matrix() -> Iterator[Case]:
    """Every case with the kernels of each GPU. Of a card with less shared memory: the specs, whose pipelines differ."""
    yield from layers()
    older = [case for case in layers() if not case.activations.startswith("fp8")]
    yield from (replace(case, gpu=AMPERE) for case in older)
    yield from (Case(spec, "bf16", 60, gpu=SMALL_AMPERE) for spec in SPECS)


def layers() -> Iterator[Case]:
    """Up to 32 slots take the decode kernels, if they rarely share an expert; with more, the rows of an expert decide
    the tiles."""
    for tokens, experts in ((5, 16), (18, 4)):
        yield from (Case(spec, "bf16", tokens, experts) for spec in SPECS)
        yield from (Case(spec, "fp8", tokens, experts) for spec in ("mxfp4", "nvfp4", "int4-g128", "fp8", "fp8-block"))
        yield from (Case(spec, "int8", tokens, experts) for spec in ("int4", "int4-g128-zp", "int8", "int8-g128"))
        for few in (Case("mxfp4", "bf16", tokens, experts), Case("mxfp4", "fp8", tokens, experts)):
            yield replace(few, hidden=288, intermediate=96)  # partial tiles and slices
            yield replace(few, routing="holes", bias=True, activation="swigluoai")
            yield replace(few, activation="relu2_no_mul")
            yield replace(few, top_k=1, weight_on_input=True)
            yield replace(few, pre_scale=True)
            yield replace(few, linear=True, experts=1, top_k=1, dispatch="contiguous")
        yield Case("mxfp4", "fp8-static", tokens, experts)
        yield Case("int4-g128", "int8-static", tokens, experts)
        yield Case("int4-g128", "fp16", tokens, experts)
        yield Case("int4-g128", "bf16", tokens, experts, act_order=True)
        yield from (Case("int4-g128-h128", act, tokens, experts) for act in ("bf16", "int8"))
        yield from (Case(spec, act, tokens, experts, dispatch=form)
                    for spec, act in (("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int8", "int8"))
                    for form in ("contiguous", "batched"))  # fmt: skip
    whole = Case(tokens=16, experts=48, hidden=1536, intermediate=768)  # as many tiles as blocks: chunks are tiles
    pieces = Case(tokens=1, experts=2, hidden=2304, intermediate=768)  # few tiles: blocks share them
    for few in (whole, pieces, replace(whole, activations="fp8"), replace(pieces, activations="fp8")):
        yield from (few, replace(few, bias=True, activation="swigluoai"))
        yield replace(few, bias=True, activation="relu2_no_mul", intermediate=1536)
    one = Case(tokens=12, experts=1, top_k=1, linear=True, dispatch="contiguous", hidden=2304, intermediate=768)
    yield from (one, replace(one, tokens=3, bias=True), replace(one, hidden=256, bias=True))  # pieces; whole units
    for spec, activations in (("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g128", "fp8"), ("int4-g128", "int8")):
        few = Case(spec, activations, 20, experts=16, hidden=1024, intermediate=512, processors=1)
        # One block computes many tiles, of several stages and of one.
        yield from (few, replace(few, hidden=128), replace(few, intermediate=128), replace(few, tokens=5))
    for spec, activations in (("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int8", "int8")):
        every = Case(spec, activations)
        yield replace(every, tokens=20, experts=16)  # few rows for each expert: the smallest tiles
        yield replace(every, tokens=60)
        yield replace(every, tokens=200, routing="zipf")
        yield replace(every, tokens=200, routing="one")
        yield replace(every, tokens=700, routing="zipf")  # four rows for each dispatch block
        yield replace(every, tokens=1100, hidden=128, intermediate=64)  # dispatch in three launches
        yield replace(every, tokens=4200, hidden=128, intermediate=64, routing="holes")  # larger dispatch chunks


def problem_of(case: Case) -> Any:
    from lancebill.moe.activation import Activation
    from lancebill.testing.layers import layer_problem

    limit = 7.0 if case.activation == "swigluoai" else None
    problem = layer_problem(
        case.spec, case.activations, hidden=case.hidden, intermediate=case.intermediate, experts=case.experts,
        top_k=case.top_k, activation=Activation(case.activation, limit=limit), bias=case.bias,
        act_order=case.act_order, weight_on_input=case.weight_on_input,
    )  # fmt: skip
    w2 = None if case.linear else problem.w2
    return replace(problem, dispatch=case.dispatch, pre_scale=case.pre_scale, w2=w2)


def backend_of(case: Case) -> Any:
    from lancebill.backends.registry import registry

    return registry()["hopper" if case.gpu == HOPPER else "ampere"]


def device_of(case: Case) -> Any:
    from lancebill.moe.device import parse_device

    return parse_device(case.gpu)


def kernels_of(case: Case) -> list[Any]:
    """The kernels of a case, as a Hopper GPU takes them."""
    plan = backend_of(case).plan(problem_of(case), case.rows, device_of(case))
    return [replace(step.source, ptx=case.gpu != HOPPER) for step in backend_of(case).steps(plan)]


def supported_cases() -> tuple[list[Case], dict[str, str]]:
    """Cases that the backend supports, and the reason for each of the others."""
    supported, refused = [], {}
    for case in dict.fromkeys(matrix()):
        reasons = [str(reason) for reason in backend_of(case).check(problem_of(case), device_of(case))]
        if reasons:
            refused[case.label] = reasons[0]
        else:
            supported.append(case)
    return supported, refused


def compute(case: Case) -> Any:
    """The result on the CPU. Rows without an expert are zeros."""
    import torch

    from lancebill.moe.dispatch import Indexed, to_batched, to_contiguous
    from lancebill.moe.layout import as_integer
    from lancebill.testing.layers import make_layer, routing

    torch.manual_seed(0)
    problem = problem_of(case)
    layer = make_layer(problem, backend_of(case).name, "cpu", distinct=2)
    for name, held in layer.weights.items():
        if case.pre_scale:
            held["pre_scale"] = as_integer(torch.rand(case.experts, problem.matrices[name].k) + 0.5)
        if problem.activations.static:
            held["input_scale"] = as_integer(torch.rand(case.experts) * 0.01 + 0.01)
    weights = {name: {role: t.cuda() for role, t in held.items()} for name, held in layer.weights.items()}
    x = torch.randn(case.tokens, case.hidden).to(problem.input.storage)
    routed: Any = routing(problem, case.tokens, 1, "cpu", case.routing)
    if case.routing == "holes":  # ids that are not experts
        invalid = torch.tensor([-1, case.experts, -9, 1 << 20]).repeat(case.tokens)[: routed.ids.numel()]
        routed = Indexed(torch.where(routed.ids < 0, invalid.view_as(routed.ids), routed.ids).int(), routed.weights)
    if case.dispatch == "contiguous":
        x, routed, _ = to_contiguous(x, routed, case.experts)
    elif case.dispatch == "batched":
        x, routed, _ = to_batched(x, routed, case.experts, case.tokens)
        x = x.nan_to_num(0.0)
    moved = type(routed)(*(tensor if tensor is None else tensor.cuda() for tensor in vars(routed).values()))
    fill = float("nan") if isinstance(routed, Indexed) else 0.0
    shape = (*x.shape[:-1], problem.w13.n if problem.w2 is None else problem.hidden)
    out = torch.full(shape, fill, dtype=x.dtype).cuda()
    plan = layer.backend.plan(problem, case.rows, device_of(case))
    real = torch.cuda.get_device_properties(0).multi_processor_count
    properties = SimpleNamespace(multi_processor_count=case.processors or real)
    with patch.object(torch.cuda, "get_device_properties", lambda device: properties):
        layer.backend.run(plan, x.cuda(), moved, weights, out)
    return out.cpu()


def use_tiles_of_large_layers() -> None:
    """Make small layers use the tiles that are reserved for large ones."""
    from lancebill.backends.hopper.tuning.policy import data

    for entry in (*data()["16-bit"], *data()["8-bit"]):
        entry.pop("units_from", None)
