"""A plan bound to one layer's weights and one stream's scratch memory: launches ready to go.

Everything but the caller's tensors and the number of tokens is laid out once. A call stores the caller's addresses
where all launches read them and hands each launch to the driver: no allocation, no synchronisation, no shape logic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lancebill.backends.base import Fitting, Shortcut
from lancebill.backends.hopper import workspace
from lancebill.backends.hopper.plan import HopperPlan, Product, scratch
from lancebill.backends.hopper.step import CALL, COUNTERS, SCRATCH, Ref, Step, Value
from lancebill.backends.hopper.steps import steps
from lancebill.backends.hopper.tuning.policy import graphed
from lancebill.errors import ContextError
from lancebill.jit.driver import Launch, MapSlot, launched, launcher, use_context
from lancebill.jit.graph import Graph, available
from lancebill.jit.load import MappedMatrix, encoded, prepare
from lancebill.jit.load import Value as Bound
from lancebill.moe.layout import Packed
from lancebill.moe.problem import INDEXED

ALIGNMENT = 16  # bytes: addresses are multiples of it
_MOST_KEPT = 64  # facts of calls that differ in their tokens or in where they lie
_NUMBERS = {"x": 0, "out": 1, "ids": 2, "edges": 2, "weights": 3}  # of the caller's tensors


class Program:
    """Launches of one (plan, weights, stream)."""

    def __init__(self, plan: HopperPlan, weights: Mapping[str, Packed], device: torch.device, stream: int) -> None:
        assert plan.rule is not None
        self.plan, self.overlap = plan, plan.rule.overlap
        self.device, self.stream = device.index or 0, stream
        if device.type == "cuda":
            use_context(self.device)
        self.home, self.hidden = device, plan.problem.hidden
        self.most = plan.tokens if plan.work == INDEXED else 0  # tokens of a call by ids
        self.lock = workspace.lock(device, stream)
        sizes = scratch(plan)
        self.memory = workspace.buffer(device, stream, workspace.pieces(sizes)[1])
        packed = {name: _with_factors(plan.product(name), held) for name, held in weights.items()}
        self.factors = [held["pre_scale"] for name, held in packed.items() if held is not weights[name]]
        tensors: dict[str, Mapping[str, Tensor]] = {
            SCRATCH: workspace.views(self.memory, sizes),
            COUNTERS: {"all": workspace.counters(device, stream)},
            **packed,
        }
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        # Addresses of the caller's tensors, by their number: where every launch reads them.
        self.given = (ctypes.c_uint64 * (4 if plan.work == INDEXED else 3))()
        self.resizers: list[Callable[[int], None]] = []
        self.tokens = -1
        self.at: tuple[int, ...] = ()  # addresses of the last call
        self.mapped: list[tuple[Launch, str]] = []  # launches that read x through a tensor map
        self.known_maps: dict[tuple[int, int], list[tuple[MapSlot, bytes]]] = {}  # by address and number of tokens
        self.fittings: dict[int, Fitting] = {}  # of calls by ids, by number of tokens
        found = steps(plan)
        self.called = {i for i, step in enumerate(found) if any(_called(value) for value in step.values.values())}
        self.all_called = len(self.called) == len(found)
        self.launches = [self._bind(step, stream, tensors) for step in found]
        self.arguments = [launch.arguments for launch in self.launches]
        self.go = launcher()
        self.graphed = graphed(plan.tokens) and available()
        self.graph: Graph | None = None
        self.stale: set[int] = set()  # launches that the graph has with other arguments
        self.anew = False  # whether this call changes all launches

    def run(self, tokens: int, at: tuple[int, ...]) -> None:
        """Launch for this call's tensors, by their addresses: x, out, and ids and weights, or edges."""
        with self.lock:
            if at != self.at or tokens != self.tokens:
                self._point(tokens, at)
            self._launch()

    def run_indexed(self, tokens: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        """`run` for tensors that are just as the kernels take them; False, and nothing done, where one is not.

        The backend says what was wrong.
        """
        fitting = self.fitting(tokens)
        return fitting is not None and self.run_fitting(tokens, fitting, x, ids, weights, out)

    def run_fitting(self, tokens: int, fitting: Fitting, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        """`run_indexed` for a number of tokens whose `fitting` is known."""
        if not (fitting.alike(x, ids, weights, out) or fitting(x, ids, weights, out)):  # mostly without a call of ours
            return False
        at = x.data_ptr(), out.data_ptr(), ids.data_ptr(), weights.data_ptr()
        if (at[0] | at[1] | at[2] | at[3]) % ALIGNMENT:
            return False
        self.run(tokens, at)
        return True

    def fitting(self, tokens: int) -> Fitting | None:
        """What a call by ids of so many tokens must come as; None: the plan is not for it."""
        found = self.fittings.get(tokens)
        if found is None and 0 < tokens <= self.most:
            if len(self.fittings) >= _MOST_KEPT:
                self.fittings.clear()
            problem = self.plan.problem
            rows, slots = (tokens, problem.hidden), (tokens, problem.top_k)
            found = self.fittings[tokens] = Fitting(rows, slots, problem.input.storage, self.home)
        return found

    def _launch(self) -> None:
        try:
            self._hand_over()
        except ContextError:
            use_context(self.device)
            self._hand_over()

    def _hand_over(self) -> None:
        # To change a launch of a graph costs nearly what a launch costs.
        if self.graphed and not self.anew and not torch._C._cuda_isCurrentStreamCapturing():
            self._repeat()
            return
        go = self.go
        for arguments in self.arguments:
            code = go(*arguments)
            if code:
                launched(code)
        self.anew = False

    def _repeat(self) -> None:
        """The same launches as one: the host is done sooner, the device not later."""
        graph = self.graph
        if graph is None:
            graph = self.graph = Graph(self.launches, self.stream, dependent=self.overlap)
        else:
            graph.renew(self.stale)
        self.stale.clear()
        code = graph.go(*graph.arguments)
        if code:
            launched(code)

    def _point(self, tokens: int, at: tuple[int, ...]) -> None:
        """Sizes and addresses into the launches' arguments."""
        self.at = ()  # until all are there
        if tokens != self.tokens:
            self.tokens = -1  # whoever is interrupted leaves nothing that the next call takes for its own
            self.stale.update(range(len(self.launches)))
            for resize in self.resizers:
                resize(tokens)
            if self.graph is not None:
                self.graph.resize()
            self.tokens, self.anew = tokens, True
        else:
            self.stale |= self.called
            self.anew = self.all_called
        self.given[:] = at  # type: ignore[call-overload]  # any sequence will do
        if self.mapped:
            for map_slot, value in self._maps(at[0], tokens):
                map_slot.raw = value
        self.at = at

    def _maps(self, x: int, tokens: int) -> list[tuple[MapSlot, bytes]]:
        """The tensor maps of an input and where they go, kept: allocators give the same addresses again and again."""
        found = self.known_maps.get((x, tokens))
        if found is None:
            if len(self.known_maps) >= _MOST_KEPT:
                self.known_maps.clear()
            matrix = MappedMatrix(x, (tokens, self.hidden))
            found = [(launch.map_slot(name), encoded(launch, name, matrix)) for launch, name in self.mapped]
            self.known_maps[x, tokens] = found
        return found

    def _bind(self, step: Step, stream: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> Launch:
        """Names to addresses. Every launch may start before its predecessor ends, whoever launched that: kernels
        wait for it themselves before they touch what it wrote.

        Addresses alone are kept: a program does not keep a layer's weights alive.
        """
        values: dict[str, Bound] = {}
        for name, value in step.values.items():
            if isinstance(value, Ref):
                values[name] = _address(value, tensors)
            else:
                values[name] = 0 if callable(value) else value
        launch = prepare(step.source, self.device, stream, values, dependent=self.overlap)
        for name, value in step.values.items():
            if isinstance(value, Ref) and value.owner == CALL and value.mapped is not None:
                self.mapped.append((launch, name))
            elif isinstance(value, Ref) and value.owner == CALL:
                launch.share(name, ctypes.c_uint64.from_buffer(self.given, 8 * _NUMBERS[value.name]))
            elif callable(value):
                self.resizers.append(_follow(launch.integer_slot(name), value))
        self.resizers.append(self._grid(launch, step))
        return launch

    def _grid(self, launch: Launch, step: Step) -> Callable[[int], None]:
        resident = self.processors * step.persistent

        def resize(tokens: int) -> None:
            x, y = step.grid(tokens)
            launch.grid(min(x, resident) if resident else x, y)

        return resize


def again(program: Program, tokens: int, packed: Mapping[str, Packed]) -> Shortcut | None:
    """Further calls like the one a program was bound in: as many tokens, on its stream, the weights where they were.

    A function: to call an object takes the host longer.
    """
    fitting, run, device, stream = program.fitting(tokens), program.run_fitting, program.device, program.stream
    if fitting is None:
        return None
    codes = [held["codes"] for held in packed.values()]
    first, last = codes[0], codes[-1]
    first_at, last_at = addresses((first, last))

    def run_again(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        return (
            torch._C._cuda_getDevice() == device
            and torch._C._cuda_getCurrentRawStream(device) == stream
            and first.data_ptr() == first_at
            and last.data_ptr() == last_at
            and run(tokens, fitting, x, ids, weights, out)
        )

    return run_again


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


def _called(value: Value) -> bool:
    """Whether an argument is a tensor of the caller's."""
    return isinstance(value, Ref) and value.owner == CALL


def _with_factors(product: Product, packed: Packed) -> Packed:
    """Where only the other matrix has stored factors of its input, this one's are ones."""
    if not product.scaled or "pre_scale" in packed:
        return packed
    codes = packed["codes"]
    k = product.slices * product.form.slice_columns  # padded: no narrower than the input
    return {**packed, "pre_scale": torch.ones(codes.shape[0], k, device=codes.device)}


def _address(ref: Ref, tensors: Mapping[str, Mapping[str, Tensor]]) -> Bound:
    """A pointer, or the matrix behind a tensor map; 0 for what the caller brings."""
    if ref.owner == CALL:
        return 0
    tensor = tensors[ref.owner][ref.name]
    if ref.mapped is None:
        return tensor.data_ptr() + ref.offset
    count = tensor.numel()
    return MappedMatrix(tensor.data_ptr(), (count // ref.mapped, ref.mapped) if ref.mapped else (count,))


def _follow(slot: ctypes.c_int32, value: Callable[[int], int]) -> Callable[[int], None]:
    def resize(tokens: int) -> None:
        slot.value = value(tokens)

    return resize
