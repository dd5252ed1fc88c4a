"""Refit: other weights are pushed into a live layer, a thousand times; each time it equals a fresh load, bit for bit.

    python tests/campaign/refits.py --refits 1000 --record

Formats, families' first naming forms, the order of tensors and how many come in one call are random. The layer is
called before and after, so that prepared calls exist; its results must be those of the fresh layer. The number of
tensors written must be the number in the checkpoint. tests/gpu does the same with captured graphs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally
from torch import Tensor

from lancebill.checkpoint.resolve.naming import find_family
from lancebill.formats.base import Example
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.testing.checkpoints import Generated, Geometry, generate
from lancebill.testing.conformance import DEFAULT_FAMILY, all_examples

REFITS_A_LAYER = 5


def refit_one_layer(rng: random.Random, example: Example, tally: Tally) -> None:
    """A layer that is refitted several times."""
    row = find_family({"model_type": example.config.model.get("model_type", DEFAULT_FAMILY)})
    size = Geometry(experts=rng.randint(2, 4), hidden=example.k, intermediate=example.k)
    first = generate(example, row, row.forms[0], size, seed=rng.getrandbits(20))
    live = _loaded(first)
    _called(live, size)
    for _ in range(REFITS_A_LAYER):
        other = generate(example, row, row.forms[0], size, seed=rng.getrandbits(20))
        written = push(rng, live, other)
        fresh = _loaded(other)
        if written != set(other.tensors):
            tally.add(f"{example.name}: wrote {len(written)} of {len(other.tensors)} tensors")
        elif not all(torch.equal(a, b) for a, b in zip(live.state_dict().values(), fresh.state_dict().values())):
            tally.add(f"{example.name}: the packed weights differ from a fresh load")
        else:
            same = torch.equal(_called(live, size), _called(fresh, size))
            tally.add(None if same else f"{example.name}: the result differs from that of a fresh layer")


def push(rng: random.Random, layer: RoutedExperts, made: Generated) -> set[str]:
    pairs = list(made.tensors.items())
    rng.shuffle(pairs)
    written, step = set[str](), rng.randint(1, len(pairs))
    for start in range(0, len(pairs), step):
        written |= layer.load_weights(pairs[start : start + step])
    layer.finish()
    return written


def _loaded(made: Generated) -> RoutedExperts:
    layer = RoutedExperts.from_config(made.config, 0, router=False)
    layer.load_weights(made.tensors.items())
    return layer.finish()


def _called(layer: RoutedExperts, size: Geometry) -> Tensor:
    x = torch.randn(3, size.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    return layer(x, topk_ids=ids, topk_weights=torch.full((3, 2), 0.5)).nan_to_num()


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    total = tallies["refits"]
    return {"F1": total.figure(f"CPU: {total.cases:,} refits, {total.failures} differ from a fresh load")}


def main() -> None:
    part = Part("refits", __doc__, figures, refits=1000, seed=0)
    torch.set_num_threads(1)
    rng, tally, examples = random.Random(part.arguments.seed), Tally(), list(all_examples())
    while tally.cases < part.arguments.refits:
        refit_one_layer(rng, rng.choice(examples)[1], tally)
        part.report_now_and_then({"refits": tally})
    part.finish({"refits": tally}, {"formats": len({fmt.name for fmt, _ in examples})})


if __name__ == "__main__":
    main()
