"""Which backend computes a problem on a device, and why not the others.

Every backend gives all its reasons. Of those that support the problem the one with the lowest estimate is chosen,
ties by name. An explicit request is honoured or refused with the whole table, never replaced by another backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lancebill.backends.base import Backend, Plan, Reason, Speed
from lancebill.backends.registry import registry
from lancebill.errors import SpecError, UnsupportedProblem
from lancebill.moe.device import Device, parse_device
from lancebill.moe.problem import Problem

AUTO = "auto"
TYPICAL_TOKENS = 64  # the batch size at which estimates are compared by default


@dataclass(frozen=True)
class Verdict:
    """One backend's answer: supported when there are no reasons."""

    backend: Backend
    reasons: tuple[Reason, ...]
    plan: Plan | None

    @property
    def supported(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Choice:
    """The chosen backend, the verdict of every backend, and the request."""

    problem: Problem
    device: Device
    requested: str
    verdicts: tuple[Verdict, ...]
    chosen: Verdict | None

    @property
    def backend(self) -> Backend:
        """The chosen backend; raises the table of reasons where there is none."""
        if self.chosen is None:
            raise self.refusal()
        return self.chosen.backend

    @property
    def has_kernels(self) -> bool:
        """Whether the chosen backend has kernels for the problem, instead of torch's operators."""
        return self.backend.speed is Speed.KERNELS

    @property
    def beats_plain(self) -> bool:
        """Whether the packed weights are computed faster than the same numbers as plain tensors: of torch's operators
        only those on quantised weights are, as few programs read these packed on a CPU."""
        quantized = any(shape.spec.quantized for shape in self.problem.matrices.values())
        return self.has_kernels or (quantized and self.backend.speed is Speed.TORCH)

    def refusal(self) -> UnsupportedProblem:
        """An error whose text is the table of reasons."""
        return UnsupportedProblem(self.table(), where=f"{self.requested} on {self.device}")

    def table(self) -> str:
        """Every backend and why, as text."""
        refused = "no backend computes this" if self.requested == AUTO else f"{self.requested} does not compute this"
        lines = [refused if self.chosen is None else f"{self.chosen.backend.name} computes this"]
        for verdict in self.verdicts:
            lines.append(f"  {verdict.backend.name}: {self.why(verdict)}")
        return "\n".join(lines)

    def why(self, verdict: Verdict) -> str:
        """Why a backend was chosen or not, in words."""
        if not verdict.supported:
            return "; ".join(str(reason) for reason in verdict.reasons)
        estimate = f"about {verdict.plan.estimate_us:,.0f} us" if verdict.plan else "no estimate"
        if self.chosen is not None and verdict.backend is self.chosen.backend:
            return f"chosen, {estimate}"
        if verdict.backend.on_request:
            return f"only on request, {estimate}"
        return f"supported, {'' if self.chosen is None else 'slower, '}{estimate}"

    def describe(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "choice": None if self.chosen is None else self.chosen.backend.name,
            "requested": self.requested,
            "device": str(self.device),
            "problem": self.problem.describe(),
            "backends": [
                {
                    "name": v.backend.name,
                    "supported": v.supported,
                    "reasons": [{"code": r.code, "text": r.text, "hint": r.hint} for r in v.reasons],
                    "estimate_us": v.plan.estimate_us if v.plan else None,
                }
                for v in self.verdicts
            ],
        }


def check_name(requested: str) -> None:
    """Raise if no backend has this name."""
    backends = registry()
    if requested != AUTO and requested not in backends:
        raise SpecError(f"no backend is called '{requested}'", expected=f"{AUTO} or one of {', '.join(backends)}")


def explain(
    problem: Problem, device: Device | torch.device | str, requested: str = AUTO, tokens: int = TYPICAL_TOKENS
) -> Choice:
    """The verdict of every backend, and the choice. Raises only for an unknown backend or device.

    `device` may be a name: `cpu`, `cuda:0`, or a kind of GPU that this machine need not have, such as `sm_90`.
    """
    backends = registry()
    device = device if isinstance(device, Device) else parse_device(device)
    check_name(requested)
    planned = replace(problem, experts=max(1, problem.experts))  # no backend plans for no experts
    verdicts = tuple(_verdict(backend, planned, device, tokens) for backend in backends.values())
    candidates = [v for v in verdicts if v.supported and requested in (v.backend.name, AUTO)]
    if requested == AUTO:
        candidates = [v for v in candidates if not v.backend.on_request]
    chosen = min(candidates, key=_cost, default=None)
    return Choice(problem, device, requested, verdicts, chosen)


def select(
    problem: Problem, device: Device | torch.device | str, requested: str = AUTO, tokens: int = TYPICAL_TOKENS
) -> Choice:
    """Like `explain`, but raises the table where no backend supports the problem."""
    choice = explain(problem, device, requested, tokens)
    if choice.chosen is None:
        raise choice.refusal()
    return choice


def _verdict(backend: Backend, problem: Problem, device: Device, tokens: int) -> Verdict:
    reasons = tuple(dict.fromkeys(backend.reasons(problem, device)))
    return Verdict(backend, reasons, None if reasons else backend.plan(problem, tokens, device))


def _cost(verdict: Verdict) -> tuple[float, str]:
    assert verdict.plan is not None
    return verdict.plan.estimate_us, verdict.backend.name
