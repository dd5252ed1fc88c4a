"""Mutation tests of the judge: it must reject a backend with any one of these defects.

A `Faulty` backend is the reference with one defect, either in its arguments or in its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lancebill.backends.base import Backend, Plan, Reason
from lancebill.backends.registry import registry
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing import judge

CPU = Device("cpu")
REFERENCE = registry()["reference"]


@dataclass
class Call:
    """The arguments of one run, which a defect may change."""

    plan: Plan
    x: Tensor
    dispatch: Dispatch
    weights: dict[str, Packed]


class Faulty(Backend):
    name = "faulty"

    def __init__(self, tamper: Callable[[Call], None], spoil: Callable[[Tensor, Call], None]) -> None:
        self.tamper, self.spoil = tamper, spoil

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        return iter(())

    def layout(self, problem: Problem) -> Layout:
        return REFERENCE.layout(problem)

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        return REFERENCE.plan(problem, tokens, device)

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        copied = {m: {n: t.clone() for n, t in ts.items()} for m, ts in weights.items()}
        call = Call(plan, x.clone(), dispatch, copied)
        self.tamper(call)
        out = REFERENCE.run(call.plan, call.x, call.dispatch, call.weights, out)
        self.spoil(out, call)
        return out


def _no_tampering(call: Call) -> None: ...


def _as_is(out: Tensor, call: Call) -> None: ...


def _problem(call: Call, **changes: object) -> None:
    call.plan = replace(call.plan, problem=replace(call.plan.problem, **changes))


def _ids(change: Callable[[Tensor], Tensor]) -> Callable[[Call], None]:
    def tamper(call: Call) -> None:
        if isinstance(call.dispatch, Indexed):
            call.dispatch = Indexed(change(call.dispatch.ids.clone()), call.dispatch.weights)

    return tamper


def _weights(change: Callable[[Tensor], Tensor]) -> Callable[[Call], None]:
    def tamper(call: Call) -> None:
        if isinstance(call.dispatch, Indexed):
            call.dispatch = Indexed(call.dispatch.ids, change(call.dispatch.weights.clone()))

    return tamper


def _packed(matrix: str, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Call], None]:
    def tamper(call: Call) -> None:
        if name in call.weights[matrix]:
            call.weights[matrix][name] = change(call.weights[matrix][name]).contiguous()

    return tamper


def _floats(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda t: change(t.view(torch.float32)).view(torch.int32)


def _one_token_elsewhere(ids: Tensor) -> Tensor:
    ids[0, 0] = (ids[0, 0] + 1) % 2
    return ids


def _swap_rows(out: Tensor, call: Call) -> None:
    if out.ndim == 2 and out.shape[0] > 3:
        out[[1, 2]] = out[[2, 1]]


def _drop_last_rows(out: Tensor, call: Call) -> None:
    if out.ndim == 2 and out.shape[0] > 2:
        out[-3:] = 0


def _zero_a_column_block(out: Tensor, call: Call) -> None:
    out[..., 16:24] *= 0


def _leave_padded_rows(out: Tensor, call: Call) -> None:
    if isinstance(call.dispatch, Indexed):
        out[(call.dispatch.ids < 0).all(1)] = float("nan")


def _swap_gate_and_up(call: Call) -> None:
    if call.plan.problem.activation.gated:
        for name, t in call.weights["w13"].items():
            if t.ndim > 1 and t.shape[1] % 2 == 0:
                call.weights["w13"][name] = t.roll(t.shape[1] // 2, 1)


def _ignore_counts(call: Call) -> None:
    if isinstance(call.dispatch, Batched):
        call.dispatch = Batched(call.dispatch.counts + 1)


def _late_offsets(call: Call) -> None:
    if isinstance(call.dispatch, Contiguous):
        offsets = call.dispatch.offsets.clone()
        offsets[1:-1] += 1
        call.dispatch = Contiguous(offsets.clamp(max=int(offsets[-1])))


def _unit_scale(t: Tensor) -> Tensor:
    flat = t.flatten(1)
    flat[:, :1] = flat[:, 1:2] + 1
    return t


def _bias_after_weighting(out: Tensor, call: Call) -> None:
    if isinstance(call.dispatch, Indexed) and "bias" in call.weights["w2"]:
        biases = call.weights["w2"]["bias"].view(torch.float32)
        ids, weights = call.dispatch.ids, call.dispatch.weights
        for token in range(out.shape[0]):
            for slot in range(ids.shape[1]):
                if ids[token, slot] >= 0:
                    out[token] += ((1 - weights[token, slot]) * biases[int(ids[token, slot])]).to(out.dtype)


def _no_activation_quantisation(call: Call) -> None:
    if call.plan.problem.activations.spec.quantized:
        _problem(call, activations=ACTIVATIONS["bf16"])


def _weights_on_output(call: Call) -> None:
    if call.plan.problem.weight_on_input:
        _problem(call, weight_on_input=False)


def _natural(perm: Tensor) -> Tensor:
    return torch.arange(perm.shape[1], dtype=perm.dtype).expand_as(perm)


def _no_clamp(call: Call) -> None:
    if call.plan.problem.activation.name == "silu":
        _problem(call, activation=Activation("silu"))


DEFECTS: dict[str, tuple[Callable[[Call], None], Callable[[Tensor, Call], None]]] = {
    "two rows swapped": (_no_tampering, _swap_rows),
    "one token to the wrong expert": (_ids(_one_token_elsewhere), _as_is),
    "last tile dropped": (_no_tampering, _drop_last_rows),
    "a block of columns lost": (_no_tampering, _zero_a_column_block),
    "gate and up swapped": (_swap_gate_and_up, _as_is),
    "zero point off by one": (_packed("w13", "zero", lambda t: t + 1), _as_is),
    "zero point ignored": (_packed("w2", "zero", lambda t: t * 0), _as_is),
    "one group's scale wrong": (_packed("w2", "scale0", _unit_scale), _as_is),
    "scales of two experts swapped": (_packed("w13", "scale0", lambda t: t.roll(1, 0)), _as_is),
    "second scale level ignored": (_packed("w2", "scale1", lambda t: torch.full_like(t, 0x3F800000)), _as_is),
    "minimum ignored": (_packed("w13", "minimum1", lambda t: t * 0), _as_is),
    "codes of one row shifted": (_packed("w13", "codes", lambda t: torch.cat([t[:, 1:2], t[:, 1:]], 1)), _as_is),
    "nibbles swapped": (_packed("w2", "codes", lambda t: (t << 4) | (t >> 4) if t.dtype == torch.uint8 else t), _as_is),
    "everything halved": (_no_tampering, lambda out, call: out.mul_(0.5)),
    "one percent off": (_no_tampering, lambda out, call: out.mul_(1.01)),
    "padding rows not written": (_no_tampering, _leave_padded_rows),
    "slot -1 treated as expert 0": (_ids(lambda ids: ids.clamp(min=0)), _as_is),
    "bias counted twice": (_packed("w13", "bias", _floats(lambda b: b * 2)), _as_is),
    "bias of down dropped": (_packed("w2", "bias", _floats(lambda b: b * 0)), _as_is),
    "bias of down not weighted": (_no_tampering, _bias_after_weighting),
    "routing weights ignored": (_weights(torch.ones_like), _as_is),
    "last slot dropped": (_ids(lambda ids: torch.cat([ids[:, :-1], ids[:, -1:] * 0 - 1], 1)), _as_is),
    "weights on the output instead": (_weights_on_output, _as_is),
    "act-order ignored": (_packed("w13", "perm", _natural), _as_is),
    "clamp forgotten": (_no_clamp, _as_is),
    "rows past the count computed": (_ignore_counts, _as_is),
    "groups one row late": (_late_offsets, _as_is),
    "activations not quantised": (_no_activation_quantisation, _as_is),
}  # fmt: skip


def test_the_reference_passes() -> None:
    assert judge.check_backend(Faulty(_no_tampering, _as_is), CPU) > 100


@pytest.mark.parametrize("defect", sorted(DEFECTS))
def test_defect_is_caught(defect: str) -> None:
    with pytest.raises(judge.Misjudged):
        judge.check_backend(Faulty(*DEFECTS[defect]), CPU)


def test_there_are_at_least_twenty_defects() -> None:
    assert len(DEFECTS) >= 20


def _tight() -> tuple[judge.Case, Tensor]:
    case = next(case for case in judge.cases() if case.tier != judge.EXACT)
    return case, judge.expected(case)


def test_what_the_worst_row_does_not_show_is_caught() -> None:
    case, want = _tight()
    with pytest.raises(judge.Misjudged, match="the median row"):
        judge.compare(case, want * 1.001, want, worst=0.1, median=1e-5)
    spoiled, smallest = want.clone(), int(want.norm(dim=0).argmin())
    spoiled[:, smallest] += 0.009 * want.norm(dim=1)
    with pytest.raises(judge.Misjudged, match=f"column {smallest}"):
        judge.compare(case, spoiled, want, worst=0.01, median=0.01)


def test_writing_outside_the_output_is_caught() -> None:
    def spoil(out: Tensor, call: Call) -> None:
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0.0)

    with pytest.raises(judge.Misjudged, match="outside its output"):
        judge.check_backend(Faulty(_no_tampering, spoil), CPU)
