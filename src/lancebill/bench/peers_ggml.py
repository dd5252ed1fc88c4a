"""llama.cpp's expert graph, computed by its library ggml on the CPU with the same weights.

The library comes with the package cyllama; `LANCEBILL_GGML` can name another folder that has it. Its C functions are
called directly. The graph equals llama.cpp's graph for gated experts. Weights are in ggml's preferred memory (repacked
for this CPU if supported), and its threads are kept between calls.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lancebill.bench.peer import Peer
from lancebill.bench.workload import Weights
from lancebill.errors import SpecError
from lancebill.formats.gguf import TYPES, gguf_scheme
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import BF16, F16
from lancebill.numbers.spec import group, int_spec
from lancebill.numbers.weight import LogicalWeight

FOLDER = "LANCEBILL_GGML"
_BLOCK = 32  # columns
_CPU = torch.device("cpu")
_F32, _I32 = 0, 26
_KINDS = {"Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39}  # ggml's type numbers
_PARTS = ("base", "cpu")  # libraries, in load order
_SLACK = 1 << 20  # bytes of a context for a graph and the tensors' headers
_REPACKED = b"CPU_REPACK"  # a buffer type that repacks weights on write
_MOST_THREADS = 512  # GGML_MAX_N_THREADS
_POINTERS = (  # functions that return a pointer
    "init", "new_tensor_2d", "new_tensor_3d", "mul_mat_id", "swiglu_split", "mul", "add", "view_2d", "new_graph",
    "get_data", "backend_cpu_init", "backend_cpu_buffer_type", "backend_cpu_reg", "backend_reg_dev_get",
    "backend_reg_get_proc_address", "backend_alloc_ctx_tensors_from_buft", "threadpool_new",
)  # fmt: skip
_OTHERS = (
    "build_forward_expand", "backend_graph_compute", "backend_cpu_set_n_threads", "backend_cpu_set_threadpool",
    "threadpool_params_init", "threadpool_free", "threadpool_pause", "backend_tensor_set", "backend_dev_supports_op",
    "backend_buffer_free", "free",
)  # fmt: skip


class _Context(ctypes.Structure):
    """The arguments of `ggml_init`."""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("without_data", ctypes.c_bool))


class _Pool(ctypes.Structure):
    """The arguments of `ggml_threadpool_new`."""

    _fields_ = (
        ("cpus", ctypes.c_bool * _MOST_THREADS), ("threads", ctypes.c_int), ("priority", ctypes.c_int),
        ("poll", ctypes.c_uint32), ("strict", ctypes.c_bool), ("paused", ctypes.c_bool),
    )  # fmt: skip


def _libraries() -> list[ctypes.CDLL]:
    """ggml and its CPU backend."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        package = find_spec("cyllama")
        if package is None or package.origin is None:
            raise ImportError(f"cyllama, which carries llama.cpp's library, is not installed; nor is {FOLDER} set")
        folder = str(Path(package.origin).parents[1])
    found = [sorted(Path(folder).glob(f"**/libggml-{part}*.so*")) for part in _PARTS]
    if not all(found):
        raise ImportError(f"no libggml-base and libggml-cpu below {folder}")
    return [ctypes.CDLL(str(files[0]), mode=ctypes.RTLD_GLOBAL) for files in found]


@lru_cache(maxsize=1)
def library() -> dict[str, Any]:
    """The functions of ggml and its CPU backend."""
    libraries = _libraries()
    functions = {}
    for name in (*_POINTERS, *_OTHERS):
        function = libraries[-1][f"ggml_{name}"]  # which also finds what it depends on
        if name in _POINTERS:
            function.restype = ctypes.c_void_p
        functions[name] = function
    functions["backend_buft_name"] = libraries[-1].ggml_backend_buft_name
    functions["backend_buft_name"].restype = ctypes.c_char_p
    functions["backend_dev_supports_op"].restype = ctypes.c_bool
    functions["init"].argtypes = [_Context]
    return functions


def uses_openmp() -> bool:
    """Whether ggml computes in OpenMP's threads, which it cannot put to sleep: like torch's, they spin for a while."""
    return any(depends_on_openmp(each) for each in _libraries())


def depends_on_openmp(loaded: ctypes.CDLL) -> bool:
    """A name is also found in what a library depends on; these are GCC's and LLVM's."""
    return hasattr(loaded, "GOMP_parallel") or hasattr(loaded, "__kmpc_fork_call")


class Ggml(Peer):
    """All experts in one graph; rows are quantised to 8 bits in blocks of 32 columns, as llama.cpp does."""

    activations = "int8"

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.functions, self.problem = library(), problem
        if str(problem.activation) != "silu" or any(shape.bias for shape in problem.matrices.values()):
            raise SpecError("llama.cpp is measured with silu experts without biases")
        kind, encode = stored_as(problem)
        self.backend, self.pool, self.threads = self._call("backend_cpu_init"), ctypes.c_void_p(), 0
        self._use_threads(torch.get_num_threads())
        half, wide, inner = problem.w13.n // 2, problem.hidden, problem.intermediate
        parts = {"gate": ("w13", slice(0, half)), "up": ("w13", slice(half, None)), "down": ("w2", slice(None))}
        sizes = {"gate": (wide, inner), "up": (wide, inner), "down": (inner, wide)}
        self.matrices, self.repacked = self._room(kind, sizes)
        for name, (matrix, rows) in parts.items():
            made = [encode(weights.logical(matrix, e).to(_CPU))[rows] for e in range(weights.distinct)]
            experts = torch.stack([made[e % weights.distinct] for e in range(problem.experts)])
            self.functions["backend_tensor_set"](
                self.matrices[name], ctypes.c_void_p(experts.data_ptr()), _size(0), _size(experts.nbytes)
            )
        self.graphs: dict[int, _Graph] = {}

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self._use_threads(torch.get_num_threads())
        graph = self.graphs.get(len(x)) or self.graphs.setdefault(len(x), self._graph(len(x)))
        self._write(graph.x, x.float().contiguous())
        self._write(graph.ids, ids.int().contiguous())
        self._write(graph.weights, weights.float().contiguous())
        self.functions["backend_graph_compute"](self.backend, graph.graph)
        out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
        ctypes.memmove(out.data_ptr(), self._data(graph.out), out.nbytes)
        return out.to(x.dtype)

    def sleep(self) -> None:
        """Until the next call: its threads would spin for a while, on cores that others may be timed on.

        Does nothing to OpenMP's threads (see `uses_openmp`).
        """
        self.functions["threadpool_pause"](self.pool)

    def _use_threads(self, count: int) -> None:
        """Compute with so many threads from now on; the library keeps them between calls."""
        if count == self.threads:
            return
        settings, old = _Pool(), self.pool
        self.functions["backend_cpu_set_n_threads"](self.backend, count)
        self.functions["threadpool_params_init"](ctypes.byref(settings), count)
        self.pool, self.threads = self._call("threadpool_new", ctypes.byref(settings)), count
        self.functions["backend_cpu_set_threadpool"](self.backend, self.pool)
        if old.value:
            self.functions["threadpool_free"](old)

    def _graph(self, tokens: int) -> _Graph:
        wide, inner, top_k = self.problem.hidden, self.problem.intermediate, self.problem.top_k
        rows = tokens * top_k * 4
        context = self._context(rows * (3 * inner + 3 * wide) + 4 * tokens * wide * (top_k + 2))
        x = self._call("new_tensor_3d", context, _F32, _size(wide), _size(1), _size(tokens))
        ids = self._call("new_tensor_2d", context, _I32, _size(top_k), _size(tokens))
        weights = self._call("new_tensor_3d", context, _F32, _size(1), _size(top_k), _size(tokens))
        gate = self._call("mul_mat_id", context, self.matrices["gate"], x, ids)
        up = self._call("mul_mat_id", context, self.matrices["up"], x, ids)
        hidden = self._call("swiglu_split", context, gate, up)
        slots = self._call(
            "mul", context, self._call("mul_mat_id", context, self.matrices["down"], hidden, ids), weights
        )
        line = wide * 4
        views = [
            self._call("view_2d", context, slots, _size(wide), _size(tokens), _size(top_k * line), _size(i * line))
            for i in range(top_k)
        ]
        out = views[0]
        for view in views[1:]:
            out = self._call("add", context, out, view)
        graph = self._call("new_graph", context)
        self.functions["build_forward_expand"](graph, out)
        return _Graph(graph, x, ids, weights, out)

    def _room(self, kind: int, sizes: dict[str, tuple[int, int]]) -> tuple[dict[str, ctypes.c_void_p], bool]:
        """Tensors for all experts, and whether the library repacks what is written to them."""
        registry = self._call("backend_cpu_reg")
        device = self._call("backend_reg_dev_get", registry, _size(0))
        for memory in (*self._preferred(registry, device), self._call("backend_cpu_buffer_type")):
            context = self._context(0, without_data=True)
            made = {
                name: self._call("new_tensor_3d", context, kind, _size(k), _size(n), _size(self.problem.experts))
                for name, (k, n) in sizes.items()
            }
            buffer = self._call("backend_alloc_ctx_tensors_from_buft", context, memory)
            repacked = self.functions["backend_buft_name"](memory) == _REPACKED
            if not repacked or all(self._computes(device, made[name], k) for name, (k, _) in sizes.items()):
                return made, repacked
            self.functions["backend_buffer_free"](buffer)
            self.functions["free"](context)
        raise AssertionError("plain memory holds every type")

    def _preferred(self, registry: ctypes.c_void_p, device: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """Memory that repacks, if the library has it."""
        address = self._call("backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        if not address.value:
            return []
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address.value)(device)
        found = [ctypes.c_void_p(each) for each in takewhile(bool, extra)]
        return [each for each in found if self.functions["backend_buft_name"](each) == _REPACKED]

    def _computes(self, device: ctypes.c_void_p, matrix: ctypes.c_void_p, columns: int) -> bool:
        """Whether the device multiplies rows with a tensor where it is."""
        context = self._context(0, without_data=True)
        rows = self._call("new_tensor_3d", context, _F32, _size(columns), _size(1), _size(1))
        ids = self._call("new_tensor_2d", context, _I32, _size(1), _size(1))
        product = self._call("mul_mat_id", context, matrix, rows, ids)
        known = bool(self.functions["backend_dev_supports_op"](device, product))
        self.functions["free"](context)
        return known

    def _context(self, data: int, *, without_data: bool = False) -> ctypes.c_void_p:
        return self._call("init", _Context(data + _SLACK, None, without_data))

    def _call(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.functions[name](*arguments))

    def _data(self, tensor: ctypes.c_void_p) -> int:
        return int(self.functions["get_data"](tensor))

    def _write(self, tensor: ctypes.c_void_p, values: Tensor) -> None:
        ctypes.memmove(self._data(tensor), values.contiguous().data_ptr(), values.nbytes)


class _Graph(NamedTuple):
    """A graph for one number of tokens, its inputs and its output."""

    graph: ctypes.c_void_p
    x: ctypes.c_void_p
    ids: ctypes.c_void_p
    weights: ctypes.c_void_p
    out: ctypes.c_void_p


def _size(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


class Storage(NamedTuple):
    """ggml's number of a type, and how its blocks are made."""

    kind: int
    encode: Callable[[LogicalWeight], Tensor]


def stored_as(problem: Problem) -> Storage:
    """The type that has the numbers of these weights. Wider groups have their scale once for each block."""
    kinds = {TYPES[name].spec: Storage(kind, partial(_blocks, name)) for name, kind in _KINDS.items()}
    for width, scale in product((32, 64, 128, 256), (F16, BF16)):
        kinds[int_spec(4, group(width), scale=scale)] = Storage(2, _nibbles)
    specs = {shape.spec for shape in problem.matrices.values()}
    found = kinds.get(specs.pop()) if len(specs) == 1 else None
    if found is None:
        expected = ", ".join(map(str, kinds))
        raise SpecError("llama.cpp is measured with other weights", expected=expected, got=problem.w13.spec)
    return found


def _blocks(name: str, weight: LogicalWeight) -> Tensor:
    """As a GGUF file has them."""
    return gguf_scheme(TYPES[name]).encode(weight)["codes"].flatten(1)


def _nibbles(weight: LogicalWeight) -> Tensor:
    """A scale, then 16 bytes: the first 16 codes of a block in the low halves, the others in the high ones."""
    low, high = weight.codes.unflatten(-1, (-1, 2, _BLOCK // 2)).unbind(-2)
    return _with_scales(weight, low | (high << 4))


def _with_scales(weight: LogicalWeight, codes: Tensor) -> Tensor:
    scales = weight.scales[0].repeat_interleave(codes.shape[-2] // weight.scales[0].shape[-1], dim=-1)
    if weight.spec.scales[0].dtype == BF16:
        half = scales.half()
        if not torch.equal(half.float(), scales.float()):
            raise SpecError("llama.cpp's scales are fp16, which cannot hold these bf16 ones")
        scales = half
    return torch.cat([scales.unsqueeze(-1).contiguous().view(torch.uint8), codes], dim=-1).flatten(1)


PEERS: dict[str, type[Peer]] = {"llama.cpp": Ggml}
