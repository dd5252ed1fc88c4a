"""A decode step of a whole model as a list of native steps: made once, then one call of the library for each token.

Steps read and write buffers of the program, fp32 rows for up to `most_rows` tokens. The program holds addresses of
weights; `current` says whether they are still where they were.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.backends.call_signature import RoutingLayout
from lancebill.backends.cpu import call
from lancebill.backends.cpu.call import FLOAT
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.native import Library, abi
from lancebill.backends.cpu.native.abi import DecodeStep
from lancebill.backends.cpu.plan import CpuPlan
from lancebill.backends.cpu.route import CpuRouting
from lancebill.backends.route_call import RouteCall
from lancebill.errors import UnsupportedProblem
from lancebill.moe.activation import Activation
from lancebill.moe.problem import CONTIGUOUS, FAST, INDEXED
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import Routing
from lancebill.native.address import host_address


@dataclass(frozen=True)
class DecodeHeads:
    """One attention: heads, their size, and how they attend."""

    layer: int
    queries: int
    keys: int
    dim: int
    angles: int  # rotated columns at the start of a head
    scale: float
    window: int | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class DecodeRows:
    """The rows of one call: angles `[rows, angles]`, and where each row's keys and values go."""

    cos: Tensor
    sin: Tensor
    positions: Sequence[int]
    capacities: Sequence[int]
    caches: Sequence[int]  # addresses of arrays of addresses: keys and values of each layer
    cache_type: torch.dtype
    picks: Sequence[int]  # rows whose results are wanted


class DecodeProgram:
    """Append steps in order, then `run`."""

    def __init__(self, native: Library, most_rows: int) -> None:
        self.native, self.most_rows = native, most_rows
        self._steps: list[abi.StepStruct] = []
        self._array: Any = None
        self._kept: list[object] = []  # what the steps point to
        self._watched: list[tuple[Callable[[], list[int]], list[int]]] = []
        self._calls: list[tuple[abi.LayerStruct, abi.WorkStruct]] = []  # those that need scratch memory
        self._dense_columns = 0  # the most of a dense matrix
        self._tiles = True  # of dense matrices, and blocks of queries: bits depend on the number of rows
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._scratch: dict[int, Tensor] = {}  # by number of threads

    def buffer(self, name: str, width: int) -> Tensor:
        """Rows of fp32 for the steps; the same ones for the same name and width. Memory is used when it is written."""
        found = self._buffers.get((name, width))
        if found is None:
            found = self._buffers[name, width] = torch.empty(self.most_rows, width, dtype=torch.float32, device="cpu")
        return found

    def pick(self, x: Tensor, out: Tensor) -> None:
        """From here on only the rows whose results are wanted."""
        self._add(DecodeStep.PICK, x, out, width=x.shape[1])

    def norm(self, x: Tensor, weights: Tensor, eps: float, out: Tensor) -> None:
        self._add(DecodeStep.NORM, x, out, width=x.shape[1], number=eps, what=self._address(weights))

    def dense(self, x: Tensor, matrices: Sequence[tuple[Tensor, Tensor | None]], out: Tensor) -> None:
        """Matrices as torch stores them, with their biases; the results are side by side."""
        structs = (abi.DenseStruct * len(matrices))()
        for struct, (weights, bias) in zip(structs, matrices):
            if not weights.is_contiguous() or weights.dtype not in FLOAT or weights.shape[1] != x.shape[1]:
                raise UnsupportedProblem(
                    "a decode step cannot read this matrix", got=f"{weights.dtype}, {weights.shape}"
                )
            struct.weights, struct.type = self._watch(weights), FLOAT[weights.dtype]
            struct.rows, struct.columns = weights.shape
            struct.bias = None if bias is None else self._address(bias)
        self._kept.append(structs)
        self._dense_columns = max(self._dense_columns, x.shape[1])
        self._add(DecodeStep.DENSE, x, out, count=len(matrices), what=ctypes.addressof(structs))

    def packed(self, x: Tensor, linear: CpuExecutor, out: Tensor) -> None:
        """One packed matrix."""
        plan, structs = self._planned(linear, CONTIGUOUS)
        offsets = torch.tensor([0, self.most_rows], dtype=torch.int64, device="cpu")
        self._kept.append(offsets)
        work = call.linear_work(plan, torch.float32, offsets)
        self._call(DecodeStep.PACKED, x, structs, work, out)

    def experts(
        self, x: Tensor, logits: Tensor, routing: Routing, router: RouterTensors, layer: CpuExecutor, out: Tensor
    ) -> None:
        """Routing from `logits`, and the experts."""
        made = RouteCall.make(routing, logits, router, None, None)
        bound = None if made is None else CpuRouting.bind(self.native, made)
        if bound is None or routing.hashed or routing.zero_experts or routing.expert_scale:
            raise UnsupportedProblem("a decode step cannot route like this", got=routing)
        plan, structs = self._planned(layer, INDEXED)
        ids = torch.zeros(self.most_rows, routing.top_k, dtype=torch.int32, device="cpu")
        weights = torch.zeros(self.most_rows, routing.top_k, dtype=torch.float32, device="cpu")
        route = abi.RoutingStruct.from_buffer_copy(bound.template)
        route.ids, route.weights = host_address(ids), host_address(weights)
        self._kept += [ids, weights, route, router]
        self._watched.append((lambda: list(router.addresses()), list(router.addresses())))
        self._add(DecodeStep.ROUTE, logits, logits, how=ctypes.addressof(route))
        work = call.with_layout(
            call.indexed_work(plan, self.most_rows, torch.float32), RoutingLayout.of(ids, weights, 0)
        )
        work.ids, work.weights = host_address(ids), host_address(weights)
        self._call(DecodeStep.EXPERTS, x, structs, work, out)

    def attention(self, qkv: Tensor, heads: DecodeHeads, out: Tensor) -> None:
        """Overwrites `qkv`: queries, keys and values of all heads."""
        struct = abi.HeadsStruct(
            heads.layer, heads.queries, heads.keys, heads.dim, heads.angles, heads.window or 0, heads.scale, heads.eps,
            None if heads.query_norm is None else self._address(heads.query_norm),
            None if heads.key_norm is None else self._address(heads.key_norm),
        )  # fmt: skip
        self._kept.append(struct)
        self._add(DecodeStep.ATTENTION, qkv, out, what=ctypes.addressof(struct))

    def add(self, x: Tensor, out: Tensor, factor: float = 1.0, gate: Tensor | None = None) -> None:
        """out += factor * x; with a `gate` [rows, 1] the factor is its sigmoid."""
        what = None if gate is None else host_address(gate)
        self._kept.append(gate)
        self._add(DecodeStep.ADD, x, out, width=x.shape[1], number=factor, what=what)

    def gate(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """The activation of gate columns times the up columns that follow them."""
        how = abi.LayerStruct(
            1, abi.ActivationKind[activation.name.upper()], activation.limit or 0.0, activation.alpha, activation.beta
        )
        self._kept.append(how)
        self._add(DecodeStep.GATE, x, out, width=out.shape[1], what=ctypes.addressof(how))

    def current(self) -> bool:
        """Whether all weights are where they were."""
        return all(now() == before for now, before in self._watched)

    def parts(self) -> dict[str, DecodeProgram]:
        """The steps in a program for each kind, to measure them; `head` is all that follows `pick`."""
        found: dict[str, DecodeProgram] = {}
        for step in self._steps:
            name = "head" if step.kind == DecodeStep.PICK or "head" in found else DecodeStep(step.kind).name.lower()
            if name not in found:
                found[name] = copy.copy(self)
                found[name]._steps, found[name]._array = [], None
            found[name]._steps.append(step)
        return found

    def run(self, rows: DecodeRows) -> None:
        """All steps, for as many rows as there are positions."""
        count, threads = len(rows.positions), torch.get_num_threads()
        if self._array is None:
            self._array = (abi.StepStruct * len(self._steps))(*self._steps)
        scratch = self._scratch.get(threads)
        if scratch is None:
            scratch = self._scratch[threads] = self._scratch_for(threads)
        positions, capacities = (ctypes.c_int64 * count)(*rows.positions), (ctypes.c_int64 * count)(*rows.capacities)
        caches, picks = (ctypes.c_void_p * count)(*rows.caches), (ctypes.c_int32 * len(rows.picks))(*rows.picks)
        struct = abi.DecodeStruct(
            ctypes.addressof(self._array), len(self._steps), count, threads, int(self.native.best),
            host_address(scratch), host_address(rows.cos), host_address(rows.sin), ctypes.addressof(positions),
            ctypes.addressof(capacities), ctypes.addressof(caches), FLOAT[rows.cache_type], len(picks),
            ctypes.addressof(picks), 0 if self._tiles else -1,
        )  # fmt: skip
        status = self.native.calls.lancebill_decode_step(ctypes.byref(struct))
        if status:
            self.native.raise_status(status)

    def _add(self, kind: DecodeStep, x: Tensor, out: Tensor, **fields: Any) -> None:
        self._kept += [x, out]
        step = abi.StepStruct(kind, input=host_address(x), out=host_address(out), in_stride=x.stride(0), **fields)
        step.out_stride = out.stride(0)
        self._steps.append(step)

    def _call(self, kind: DecodeStep, x: Tensor, structs: call.LayerStructs, work: abi.WorkStruct, out: Tensor) -> None:
        work.x, work.out = host_address(x), host_address(out)
        self._kept += [structs, work]
        self._calls.append((structs.layer, work))
        self._add(kind, x, out, what=ctypes.addressof(structs.layer), how=ctypes.addressof(work))

    def _planned(self, layer: CpuExecutor, form: str) -> tuple[CpuPlan, call.LayerStructs]:
        plan, structs = layer.structs_for(form, self.most_rows)
        self._tiles = self._tiles and plan.problem.order == FAST
        self._watched.append((layer.tensors.addresses, layer.tensors.addresses()))
        return plan, structs

    def _address(self, numbers: Tensor) -> int:
        """Of an fp32 copy, which the program keeps."""
        own = numbers.detach().to(torch.float32, copy=True).contiguous()
        self._kept.append(own)
        return host_address(own)

    def _watch(self, weights: Tensor) -> int:
        """The address of a matrix, which is not copied."""
        self._kept.append(weights)
        address = host_address(weights)
        self._watched.append((lambda: [weights.data_ptr()], [address]))
        return address

    def _scratch_for(self, threads: int) -> Tensor:
        sizes = [self.native.dense_bytes(self.most_rows, self._dense_columns)]
        for layer, work in self._calls:
            probe = abi.WorkStruct.from_buffer_copy(work)
            probe.threads = threads
            sizes.append(self.native.scratch_bytes(layer, probe))
        return torch.empty(max(sizes) + 64, dtype=torch.uint8, device="cpu")
