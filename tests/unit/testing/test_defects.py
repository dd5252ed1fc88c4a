"""A suite that has never failed has not been shown to work: each seeded defect must be caught.

A `Faulty` backend is the reference with one thing wrong, either in what it is handed or in what it
gives back. The judge that every backend faces must refuse each of them.
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
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import Device, Problem
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing import judge

CPU = Device("cpu")
REFERENCE = registry()["reference"]


@dataclass
class Call:
    """One run, as a defect may tamper with it."""

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


def _nothing(call: Call) -> None: ...


def _keep(out: Tensor, call: Call) -> None: ...


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
    "two rows swapped": (_nothing, _swap_rows),
    "one token to the wrong expert": (_ids(_one_token_elsewhere), _keep),
    "last tile dropped": (_nothing, _drop_last_rows),
    "a block of columns lost": (_nothing, _zero_a_column_block),
    "gate and up swapped": (_swap_gate_and_up, _keep),
    "zero point off by one": (_packed("w13", "zero", lambda t: t + 1), _keep),
    "zero point ignored": (_packed("w2", "zero", lambda t: t * 0), _keep),
    "one group's scale wrong": (_packed("w2", "scale0", _unit_scale), _keep),
    "scales of two experts swapped": (_packed("w13", "scale0", lambda t: t.roll(1, 0)), _keep),
    "second scale level ignored": (_packed("w2", "scale1", lambda t: torch.full_like(t, 0x3F800000)), _keep),
    "minimum ignored": (_packed("w13", "minimum1", lambda t: t * 0), _keep),
    "codes of one row shifted": (_packed("w13", "codes", lambda t: torch.cat([t[:, 1:2], t[:, 1:]], 1)), _keep),
    "nibbles swapped": (_packed("w2", "codes", lambda t: (t << 4) | (t >> 4) if t.dtype == torch.uint8 else t), _keep),
    "everything halved": (_nothing, lambda out, call: out.mul_(0.5)),
    "one percent off": (_nothing, lambda out, call: out.mul_(1.01)),
    "padded rows left as they were": (_nothing, _leave_padded_rows),
    "minus one taken for expert zero": (_ids(lambda ids: ids.clamp(min=0)), _keep),
    "bias counted twice": (_packed("w13", "bias", _floats(lambda b: b * 2)), _keep),
    "bias of down dropped": (_packed("w2", "bias", _floats(lambda b: b * 0)), _keep),
    "bias of down not weighted": (_nothing, _bias_after_weighting),
    "routing weights ignored": (_weights(torch.ones_like), _keep),
    "last slot dropped": (_ids(lambda ids: torch.cat([ids[:, :-1], ids[:, -1:] * 0 - 1], 1)), _keep),
    "weights on the output instead": (_weights_on_output, _keep),
    "act-order ignored": (_packed("w13", "perm", _natural), _keep),
    "clamp forgotten": (_no_clamp, _keep),
    "garbage past the count computed": (_ignore_counts, _keep),
    "groups one row late": (_late_offsets, _keep),
    "eight-bit inputs asked, sixteen given": (_no_activation_quantisation, _keep),
}  # fmt: skip


def test_the_reference_itself_passes() -> None:
    assert judge.check_backend(Faulty(_nothing, _keep), CPU) > 100


@pytest.mark.parametrize("defect", sorted(DEFECTS))
def test_defect_is_caught(defect: str) -> None:
    with pytest.raises(judge.Misjudged):
        judge.check_backend(Faulty(*DEFECTS[defect]), CPU)


def test_there_are_at_least_twenty() -> None:
    assert len(DEFECTS) >= 20
