"""Bound launches, and what a call changes about them.

A call stores the caller's addresses where all launches read them, and calls the driver once per launch or graph.
It does not allocate, synchronise or compute shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from lancebill.backends.call_signature import CallSignature
from lancebill.backends.gpu.bindings import Bindings
from lancebill.backends.limited_dict import LimitedDict
from lancebill.errors import ContextError
from lancebill.jit.driver import MapSlot, check_launch, launch_function, use_context
from lancebill.jit.graph import Graph, graphs_available
from lancebill.jit.load import MappedMatrix, encode_tensor_map
from lancebill.moe.problem import INDEXED

ALIGNMENT = 16  # bytes; the kernels require it of x and out
_MOST_KEPT = 64  # tensor maps and signatures, before all are dropped


class Program:
    """The launches of one (plan, weights, workspace, stream). `captured`: they become part of the caller's graph."""

    def __init__(self, bindings: Bindings, *, captured: bool = False) -> None:
        plan = bindings.plan
        self.bindings = bindings
        self.arguments = [launch.arguments for launch in bindings.launches]
        self.go = launch_function()
        self.use_graph = not captured and plan.graphed and graphs_available()
        # Changed by calls:
        self.tokens = -1
        self.caller: tuple[int, ...] = ()  # what the last call gave
        self.graph: Graph | None = None
        self.repeat: Callable[[], int] | None = None  # launches the graph, if it has the arguments of the last call
        self.outdated: set[int] = set()  # indices of launches whose arguments changed since the graph was updated
        self.all_changed = False  # this call changes every launch
        self.tensor_maps = LimitedDict[tuple[int, int], list[tuple[MapSlot, bytes]]](_MOST_KEPT)  # by x and tokens
        self.signatures = LimitedDict[tuple[int, bool], CallSignature](
            _MOST_KEPT
        )  # of indexed calls: tokens, expert map

    def run(self, tokens: int, caller: tuple[int, ...]) -> None:
        """Launch for the caller's tensors: addresses of x, out and edges, or of x, out, ids, weights and the expert map
        (0: none) and a `RoutingLayout`."""
        with self.bindings.lock:
            if caller != self.caller or tokens != self.tokens:
                self._point(tokens, caller)
            elif self.repeat is not None and not self.repeat():
                return
            self._launch()  # also after a launch that failed: it tries again, or raises

    def run_indexed(self, tokens: int, signature: CallSignature, given: tuple[Tensor, ...]) -> bool:
        """`run` for x, ids, weights, out (and the expert map), if the kernels can read these tensors as they are; else
        does nothing and returns False."""
        last = signature.last
        found = last if last.same(*given) else signature.match(*given)
        if found is None:
            return False
        x, ids, weights, out = given[0].data_ptr(), given[1].data_ptr(), given[2].data_ptr(), given[3].data_ptr()
        if (x | out) % ALIGNMENT or ids % 4 or weights % found.weight_bytes:
            return False
        expert_map = given[4].data_ptr() if len(given) > 4 else 0
        self.run(tokens, (x, out, ids, weights, expert_map, *found.layout))
        return True

    def signature(self, tokens: int, mapped: bool) -> CallSignature | None:
        """What the tensors of an indexed call with this many tokens must be; None if the plan does not support it."""
        plan = self.bindings.plan
        found = self.signatures.get((tokens, mapped))
        if found is None and plan.work == INDEXED and 0 < tokens <= plan.tokens:
            problem = plan.problem
            rows, slots = (tokens, problem.hidden), (tokens, problem.top_k)
            found = self.signatures[tokens, mapped] = CallSignature(
                rows, slots, problem.input.storage, self.bindings.device
            )
        return found

    def _launch(self) -> None:
        try:
            self._submit()
        except ContextError:  # a thread that has not used the GPU yet
            use_context(self.bindings.index)
            self._submit()

    def _submit(self) -> None:
        # Updating a graph node costs nearly as much as a launch, so a call that changes every launch uses no graph.
        if self.use_graph and not self.all_changed:
            self._submit_graph()
            return
        go = self.go
        for arguments in self.arguments:
            code = go(*arguments)
            if code:
                check_launch(code)
        self.all_changed = False

    def _submit_graph(self) -> None:
        """The same launches as one graph: less host time, no more device time."""
        graph, bindings = self.graph, self.bindings
        if graph is None:
            assert bindings.plan.rule is not None
            graph = self.graph = Graph(bindings.launches, bindings.stream, dependent=bindings.plan.rule.overlap)
        else:
            graph.update(self.outdated)
        self.outdated.clear()
        self.repeat = partial(graph.launch_function, *graph.arguments)
        code = self.repeat()
        if code:
            check_launch(code)

    def _point(self, tokens: int, caller: tuple[int, ...]) -> None:
        """Write sizes and what the caller gives into the launches' arguments.

        Resets `tokens` and `caller` first, so that the call after an interrupted one writes everything again.
        """
        bindings, same_rows = self.bindings, tokens == self.tokens and self.caller[:1] == caller[:1]
        self.caller, self.repeat = (), None
        if tokens != self.tokens:
            self.tokens = -1
            self.outdated.update(range(len(bindings.launches)))
            for resize in bindings.resizers:
                resize(tokens)
            if self.graph is not None:
                self.graph.copy_grids()
            self.tokens, self.all_changed = tokens, True
        elif self.use_graph:
            self.outdated |= bindings.with_caller
            self.all_changed = len(bindings.with_caller) == len(bindings.launches)
        bindings.caller[:] = caller  # type: ignore[call-overload]  # any sequence will do
        if bindings.mapped and not same_rows:
            for slot, value in self._maps(caller[0], tokens):
                slot.raw = value
        self.caller = caller

    def _maps(self, x: int, tokens: int) -> list[tuple[MapSlot, bytes]]:
        """Tensor maps of an input and their slots. Kept: allocators return the same addresses over and over."""
        found = self.tensor_maps.get((x, tokens))
        if found is None:
            bindings = self.bindings
            matrix = MappedMatrix(x, (tokens, bindings.plan.problem.hidden))
            found = [
                (launch.map_slot(name), encode_tensor_map(launch, name, matrix)) for launch, name in bindings.mapped
            ]
            self.tensor_maps[x, tokens] = found
        return found
