"""Every backend that computes on a CPU, on every level here: results that are exact in any order, against float64.

    python tests/campaign/exact.py --layers 1000 --record

Weights, scales and inputs are small integers and powers of two, so that every order of summation has the same result
(`lancebill.testing.judge`); it must be equal bit for bit. Specs, sizes and routings are random; each layer is computed
in the three forms of dispatch. Outputs start as NaN, and the rows around them must not be written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally

from lancebill.backends.base import Backend
from lancebill.backends.cpu import Cpu, native
from lancebill.backends.registry import registry
from lancebill.moe.device import Device
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED
from lancebill.numbers.spec import ALL, QuantSpec
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing import judge

CPU = Device("cpu")
SMALLEST_STEP = 32  # of sizes


def backends() -> Iterator[tuple[str, Backend]]:
    """The CPU kernels once for each level of this machine, and all others."""
    library = native.library()
    yield from ((f"cpu {level}", Cpu(level)) for level in (library.levels if library is not None else ()))
    yield from ((name, backend) for name, backend in registry().items() if name != "cpu")


def random_case(rng: random.Random) -> judge.Case:
    name = rng.choice(judge.SPECS)
    spec = parse_spec(name)
    hidden, inter = (step_of(spec) * rng.randint(1, 4) for _ in range(2))
    sizes = {"experts": rng.randint(3, 8), "hidden": hidden, "inter": inter, "tokens": rng.choice((1, 2, 5, 9, 17, 40))}
    label = f"{name} {' '.join(f'{key}={value}' for key, value in sizes.items())}"
    return judge.exact_case(label, spec, rng.getrandbits(32), **sizes)


def step_of(spec: QuantSpec) -> int:
    """Sizes are multiples of every block of scales."""
    sides = (side for level in (*spec.scales, *spec.minimum) for side in level.block if side != ALL)
    return max((SMALLEST_STEP, *sides))


def fault(backend: Backend, case: judge.Case) -> str | None:
    try:
        judge.check_case(backend, CPU, case)
    except judge.Misjudged as error:
        return f"{backend.name}: {error}"
    return None


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    each, total = (
        ", ".join(f"{tally.cases:,} on {name}" for name, tally in tallies.items() if tally.cases),
        Tally.total(tallies.values()),
    )
    return {"N3": total.figure(f"CPU: exact results: {each}; {total.failures} differ")}


def main() -> None:
    part = Part("exact", __doc__, figures, layers=1000, seed=0)
    torch.set_num_threads(1)
    rng, contestants = random.Random(part.arguments.seed), dict(backends())
    tallies = {name: Tally() for name in contestants}
    for _ in range(part.arguments.layers):
        layer = random_case(rng)
        for form in (INDEXED, CONTIGUOUS, BATCHED):
            case = judge.in_form(layer, form)
            for name, backend in contestants.items():
                if next(iter(backend.reasons(case.problem, CPU)), None) is None:
                    tallies[name].add(fault(backend, case))
        judge.in_form.cache_clear()
        judge.expected.cache_clear()
        part.report_now_and_then(tallies)
    part.finish(tallies)


if __name__ == "__main__":
    main()
