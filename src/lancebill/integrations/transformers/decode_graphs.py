"""The decode steps of one batch size, captured: a step copies the model's inputs to fixed places and replays a graph.

A graph replays kernels, but not the model's Python code. Python code that depends on the position would therefore give
wrong results. To detect it, the first graph of each kind is compared with the model one token after the capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lancebill.backends.base import Reason
from lancebill.errors import LancebillError
from lancebill.integrations.transformers.decode_cache import DecodeCache, span_of
from lancebill.integrations.transformers.filled_constants import FilledConstants
from lancebill.integrations.transformers.step_modules import Swap, find_swaps, swapped

LEAST_COSINE = 0.98  # 16-bit models differ a little with the kernel that attends; a wrong position differs much more
CACHE, MASK = "past_key_values", "attention_mask"

Call = Callable[[], Any]  # the model on fixed inputs


class Recorder(Protocol):
    """Makes a replay of a call: a function that computes the same on the same tensors."""

    def record(self, call: Call) -> Call: ...


@contextmanager
def no_garbage() -> Iterator[None]:
    """Collect garbage before, not within: a graph of a dropped model, freed during a capture, would end the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaRecorder:
    """CUDA graphs with one memory pool: they are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, call: Call) -> Call:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            call()  # whatever is made once on a stream (workspaces of libraries, kernels) must exist before a capture
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        captured = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        with no_garbage(), captured, FilledConstants():
            result = call()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class Inputs:
    """The arguments of a step: tensors, which are copied, and the rest, which is part of the graph."""

    tensors: dict[str, Tensor]
    rest: tuple[tuple[str, Hashable], ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Inputs:
        named = {name: value for name, value in given.items() if name != CACHE}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        return cls(tensors, tuple((name, value) for name, value in named.items() if name not in tensors))

    @property
    def kind(self) -> Hashable:
        """Inputs of the same kind can use the same graphs. A mask of tokens grows; its fixed copy does not."""
        shapes = ((name, () if name == MASK else t.shape, t.dtype) for name, t in self.tensors.items())
        return tuple(shapes), self.rest


class StepKind:
    """Graphs of one kind of inputs, by span, and the places they read from."""

    def __init__(self, inputs: Inputs, cache: DecodeCache) -> None:
        self.graphs: dict[int, Call] = {}
        self.unproven: int | None = None  # the span of a graph that is to be compared with the model
        self.moves, self.rest = cache.moves, dict(inputs.rest)
        with torch.inference_mode(False):
            self.places = {name: tensor.clone() for name, tensor in inputs.tensors.items() if name != MASK}
            mask = inputs.tensors.get(MASK)
            if mask is not None:  # tokens to come are never hidden
                self.places[MASK] = mask.new_ones(mask.shape[0], cache.capacity)

    def fill(self, inputs: Inputs) -> None:
        for name, tensor in inputs.tensors.items():
            if name != MASK:
                self.places[name].copy_(tensor)

    def fill_mask(self, mask: Tensor) -> None:
        self.places[MASK].fill_(1)
        self.places[MASK][:, : mask.shape[1]] = mask


class DecodeGraphs:
    """Runs the steps of one cache. `refused` says why its model's steps cannot be captured, once that is known."""

    def __init__(self, cache: DecodeCache, recorder: Recorder) -> None:
        self.cache, self.recorder = cache, recorder
        self.kinds: dict[Hashable, StepKind] = {}
        self.masked: StepKind | None = None  # the kind that holds the mask of the current sequences
        self.refused: Reason | None = None
        self.stamp: Hashable = None
        self.swaps: list[Swap] | None = None  # of the model with this stamp
        self.busy = False  # a call generates

    @property
    def count(self) -> int:
        return sum(len(kind.graphs) for kind in self.kinds.values())

    def restart(self, stamp: Hashable) -> None:
        """For new sequences. `stamp` changes when the model does: the graphs of another model are dropped."""
        if stamp != self.stamp:
            self.kinds.clear()
            self.swaps = None
        self.stamp, self.masked = stamp, None
        self.cache.restart()

    def run(self, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """One call of the model: a replayed step if it is one that can be replayed."""
        inputs = Inputs.of(given)
        if self.refused is None:
            self.refused = _unsuitable(inputs)
        if self.refused is not None or not _is_step(inputs):
            return model(**given)
        span = span_of(self.cache.length + 1)
        self.cache.grow(span)
        kind = self._kind(inputs)
        self.cache.point()
        kind.fill(inputs)
        if MASK in inputs.tensors and self.masked is not kind:
            kind.fill_mask(inputs.tensors[MASK])
            self.masked = kind
        if span in kind.graphs and kind.unproven is None:
            result = kind.graphs[span]()
            self.cache.advance()
            return result
        result = model(**given)  # as without graphs; the step is then repeated
        self.cache.advance(-1)
        try:
            if span in kind.graphs:
                self._prove(kind, span, result)
            else:
                self._capture(kind, span, model)
        except (RuntimeError, LancebillError) as error:
            self.refused = Reason("capture", f"the model cannot be captured: {str(error).splitlines()[0]}")
        finally:
            self.cache.advance()
        if self.refused is not None:
            self.kinds.clear()
        return result

    def _kind(self, inputs: Inputs) -> StepKind:
        """All kinds are dropped when the cache's memory has moved."""
        found = self.kinds.get(inputs.kind)
        moves = self.cache.moves
        if found is None or found.moves != moves:
            self.kinds = {key: kind for key, kind in self.kinds.items() if kind.moves == moves}
            found = self.kinds[inputs.kind] = StepKind(inputs, self.cache)
        return found

    def _capture(self, kind: StepKind, span: int, model: nn.Module) -> None:
        inputs, swaps = {**kind.places, **kind.rest, CACHE: self.cache}, self._find_swaps(model)

        def call() -> Any:
            with self.cache.step(span), swapped(swaps):
                return model(**inputs)

        with torch.inference_mode(False), torch.no_grad():
            graph = self.recorder.record(call)
        if not kind.graphs:
            kind.unproven = span
        kind.graphs[span] = graph

    def _find_swaps(self, model: nn.Module) -> list[Swap]:
        if self.swaps is None:
            self.swaps = find_swaps(model)
        return self.swaps

    def _prove(self, kind: StepKind, span: int, expected: Any) -> None:
        """Compare a graph with the model. Another one than the first is used unproven, but not before the first."""
        found, kind.unproven = kind.graphs[span]().logits.float(), None
        cosine = F.cosine_similarity(found, expected.logits.float(), dim=-1).min()
        if not cosine >= LEAST_COSINE:
            self.refused = Reason("capture", f"a captured step gives other logits (cosine {cosine:.3f})")


def _is_step(inputs: Inputs) -> bool:
    tokens = inputs.tensors.get("input_ids")
    return tokens is not None and tokens.dim() == 2 and tokens.shape[1] == 1


def _unsuitable(inputs: Inputs) -> Reason | None:
    odd = [name for name, value in inputs.rest if not isinstance(value, Hashable)]
    odd += [name for name, tensor in inputs.tensors.items() if name == MASK and tensor.dim() != 2]
    return Reason("inputs", f"the model is called with {odd[0]}") if odd else None
