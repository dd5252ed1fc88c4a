"""Refit on the GPU: other weights are pushed into a live layer with captured graphs; replays equal a fresh load.

    python tests/campaign/gpu_refits.py --refits 1000 --record

Each format that our GPU kernels take has a few checkpoints. Random ones are pushed into its live layer, tensors in
random order and in random pieces. The packed weights must then be those of a layer loaded from that checkpoint, and the
graphs, which were captured before the first push, must give its results, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from bookkeeping import Details, Figure, Part, Tallies, Tally
from refits import push
from torch import Tensor

from gpu import OURS
from lancebill.checkpoint.resolve.naming import find_family
from lancebill.errors import LancebillError
from lancebill.formats.base import Example
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.testing.checkpoints import Generated, Geometry, generate
from lancebill.testing.conformance import DEFAULT_FAMILY, all_examples

DEVICE = "cuda"
CHECKPOINTS, TOKENS, MOST_FORMATS = 4, (1, 33), 10


@dataclass
class Live:
    """A layer with a graph for each number of tokens, and what each checkpoint should make of it."""

    example: Example
    made: list[Generated]
    layer: RoutedExperts
    inputs: list[tuple[Tensor, Tensor, Tensor]]  # which the graphs read
    graphs: list[torch.cuda.CUDAGraph]
    outs: list[Tensor]
    states: list[dict[str, Tensor]]
    wanted: list[list[Tensor]]

    @classmethod
    def of(cls, rng: random.Random, example: Example) -> Live:
        row = find_family({"model_type": example.config.model.get("model_type", DEFAULT_FAMILY)})
        size = Geometry(experts=4, hidden=example.k, intermediate=example.k)
        made = [generate(example, row, row.forms[0], size, seed=rng.getrandbits(20)) for _ in range(CHECKPOINTS)]
        fresh, inputs = [loaded(one) for one in made], [_inputs(size, tokens) for tokens in TOKENS]
        live, graphs, outs = loaded(made[0]), [], []
        for given in inputs:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                outs.append(called(live, given))
        wanted = [[called(layer, given).clone() for given in inputs] for layer in fresh]
        return cls(example, made, live, inputs, graphs, outs, [dict(layer.state_dict()) for layer in fresh], wanted)

    def refit(self, rng: random.Random) -> str | None:
        """Push one of the checkpoints; what is wrong then."""
        number = rng.randrange(CHECKPOINTS)
        written = push(rng, self.layer, self.made[number])
        if written != set(self.made[number].tensors):
            return f"{self.example.name}: wrote {len(written)} of {len(self.made[number].tensors)} tensors"
        state = self.layer.state_dict()
        if not all(torch.equal(state[name], tensor) for name, tensor in self.states[number].items()):
            return f"{self.example.name}: the packed weights differ from a fresh load"
        for graph, out, want in zip(self.graphs, self.outs, self.wanted[number]):
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(out.nan_to_num(), want.nan_to_num()):
                return f"{self.example.name}: a replay with {len(out)} tokens differs from a fresh layer"
        return None


def loaded(made: Generated) -> RoutedExperts:
    layer = RoutedExperts.from_config(made.config, 0, device=DEVICE, backend=OURS, router=False)
    layer.load_weights(made.tensors.items())
    return layer.finish()


def called(layer: RoutedExperts, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, ids, weights = given
    return layer(x, topk_ids=ids, topk_weights=weights)


def _inputs(size: Geometry, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, size.hidden, generator=generator).bfloat16()
    ids = torch.rand(tokens, size.experts, generator=generator).topk(size.top_k).indices.to(torch.int32)
    return x.to(DEVICE), ids.to(DEVICE), torch.full((tokens, size.top_k), 0.5, device=DEVICE)


def lives(rng: random.Random) -> Iterator[Live]:
    """One layer for each format whose first example our kernels take."""
    seen = set[str]()
    for fmt, example in all_examples():
        if fmt.name in seen:
            continue
        try:
            live = Live.of(rng, example)
        except LancebillError as refused:
            print(f"{fmt.name}:{example.name} is not tried: {refused}"[:200], flush=True)
            continue
        seen.add(fmt.name)
        print(f"{fmt.name}:{example.name}", flush=True)
        yield live


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    refits, formats = tallies["refits"], tallies["formats"].cases
    reached = (
        f"GPU: {refits.cases:,} refits of {formats} formats beside captured graphs,"
        f" {refits.failures} differ from a fresh load"
    )
    return {"F1": refits.figure(reached)}


def main() -> None:
    part = Part("gpu_refits", __doc__, figures, device=DEVICE, refits=1000, seed=0)
    rng, tallies = random.Random(part.arguments.seed), {"refits": Tally(), "formats": Tally()}
    for live in lives(rng):
        tallies["formats"].add()
        for _ in range(-(-part.arguments.refits // MOST_FORMATS)):
            tallies["refits"].add(live.refit(rng))
        part.report_now_and_then(tallies)
        if tallies["formats"].cases == MOST_FORMATS:
            break
    part.finish(tallies)


if __name__ == "__main__":
    main()
