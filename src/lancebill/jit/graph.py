"""CUDA graphs of one or more launches, made with the driver API.

One launch costs the host a few microseconds, a graph of a dozen launches hardly more. The driver copies the arguments
when it instantiates the graph; a node whose arguments changed has to be updated before the next graph launch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence

from lancebill.jit import driver
from lancebill.jit.driver import Launch, by_value, check

_PROGRAMMATIC = 1  # edge type and port of a programmatic dependent launch: the next kernel may start early


class _Node(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        *((name, ctypes.c_void_p) for name in ("parameters", "extra", "kernel", "context")),
    ]


class _Edge(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_ubyte) for name in ("from_port", "to_port", "kind")),
        ("rest", ctypes.c_ubyte * 5),
    ]


def graphs_available() -> bool:
    """Whether the driver supports programmatic dependent launch in graphs (CUDA 12.3 and later)."""
    return hasattr(driver.library(), "cuGraphAddDependencies_v2")


class Graph:
    """These launches in this order; with `dependent`, each may start before its predecessor ends."""

    def __init__(self, launches: Sequence[Launch], stream: int, *, dependent: bool) -> None:
        self.launches = launches
        with driver.uncaptured():  # another stream or thread may capture, which forbids to instantiate a graph
            self._make(stream, dependent)

    def _make(self, stream: int, dependent: bool) -> None:
        launches, cuda = self.launches, driver.library()
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuGraphCreate(ctypes.byref(graph), 0), "creating a graph")
        # The graph must outlive its executable: updating a node of the executable names it by the graph's node.
        weakref.finalize(self, _destroy, cuda, cuda.cuGraphDestroy, graph).atexit = False
        edge = _Edge(_PROGRAMMATIC, 0, _PROGRAMMATIC) if dependent else _Edge()
        self._nodes = [_kernel_node(launch) for launch in launches]
        handles: list[ctypes.c_void_p] = []
        for node in self._nodes:
            handle, none, one = ctypes.c_void_p(), ctypes.c_size_t(0), ctypes.c_size_t(1)
            code = cuda.cuGraphAddKernelNode_v2(ctypes.byref(handle), graph, None, none, ctypes.byref(node))
            check(code, "adding a launch to a graph")
            if handles:
                ends = ctypes.byref(handles[-1]), ctypes.byref(handle)
                code = cuda.cuGraphAddDependencies_v2(graph, *ends, ctypes.byref(edge), one)
                check(code, "adding an edge to a graph")
            handles.append(handle)
        code = cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
        check(code, "instantiating a graph")
        # Safe while the graph still runs: the driver destroys it after it completes.
        weakref.finalize(self, _destroy, cuda, cuda.cuGraphExecDestroy, executable).atexit = False
        self._set_parameters = cuda.cuGraphExecKernelNodeSetParams_v2
        instance = by_value(executable.value)
        self._update_arguments = [
            (instance, by_value(handle.value), ctypes.byref(node)) for handle, node in zip(handles, self._nodes)
        ]
        self.launch_function, self.arguments = cuda.cuGraphLaunch, (instance, by_value(stream))

    def copy_grids(self) -> None:
        """Copy the grids of all launches; the caller then has to `update` every node."""
        for node, launch in zip(self._nodes, self.launches):
            node.gx, node.gy = launch.config.gx, launch.config.gy

    def update(self, indices: Iterable[int]) -> None:
        """Copy the current arguments of these launches into the graph."""
        for index in indices:
            code = self._set_parameters(*self._update_arguments[index])
            if code:
                check(code, "updating a launch in a graph")


def _destroy(cuda: ctypes.CDLL, destroy: Callable[[ctypes.c_void_p], int], handle: ctypes.c_void_p) -> None:
    """Whenever the graph is dropped, perhaps by the garbage collector: during a capture this would invalidate it."""
    with driver.uncaptured(cuda):
        destroy(handle)


def _kernel_node(launch: Launch) -> _Node:
    config = launch.config
    sizes = (config.gx, config.gy, config.gz, config.bx, config.by, config.bz, config.shared)
    return _Node(launch.function, *sizes, launch.parameters, None, None, None)
