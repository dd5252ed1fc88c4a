"""Several launches handed to the driver as one: it is told once what they are, and repeats them for the price of one.

A launch costs the host a few microseconds, a graph of a dozen hardly more. Arguments are copied when a graph is made;
a launch whose arguments changed is set again before the next repetition.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence

from lancebill.jit import driver
from lancebill.jit.driver import Launch, by_value, check

_PROGRAMMATIC = 1  # an edge, and the port it leaves from: the next kernel may start before this one ends


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


def available() -> bool:
    """Whether this driver has graphs whose kernels may start early: those of CUDA 12.3 and later."""
    try:
        return driver.library().cuGraphAddDependencies_v2 is not None
    except AttributeError:
        return False


class Graph:
    """These launches in this order; `dependent`: each may start before its predecessor ends, as it may by itself."""

    def __init__(self, launches: Sequence[Launch], stream: int, *, dependent: bool) -> None:
        self.launches = launches
        cuda, graph, ready = driver.library(), ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuGraphCreate(ctypes.byref(graph), 0), "making a graph")
        # It stays as long as the ready one: its nodes are how launches of that are named.
        weakref.finalize(self, cuda.cuGraphDestroy, graph).atexit = False
        edge = _Edge(_PROGRAMMATIC, 0, _PROGRAMMATIC) if dependent else _Edge()
        self._described = [_described(launch) for launch in launches]
        nodes: list[ctypes.c_void_p] = []
        for described in self._described:
            node, none, one = ctypes.c_void_p(), ctypes.c_size_t(0), ctypes.c_size_t(1)
            code = cuda.cuGraphAddKernelNode_v2(ctypes.byref(node), graph, None, none, ctypes.byref(described))
            check(code, "adding a launch to a graph")
            if nodes:
                ends = ctypes.byref(nodes[-1]), ctypes.byref(node)
                check(cuda.cuGraphAddDependencies_v2(graph, *ends, ctypes.byref(edge), one), "ordering a graph")
            nodes.append(node)
        check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, ctypes.c_uint64(0)), "readying a graph")
        weakref.finalize(self, cuda.cuGraphExecDestroy, ready).atexit = False  # what still runs the driver waits for
        self._set = cuda.cuGraphExecKernelNodeSetParams_v2
        handle = by_value(ready.value)
        self._renewals = [(handle, by_value(node.value), ctypes.byref(of)) for node, of in zip(nodes, self._described)]
        self.go, self.arguments = cuda.cuGraphLaunch, (handle, by_value(stream))

    def resize(self) -> None:
        """Take over all launches' grids; each is to be renewed."""
        for described, launch in zip(self._described, self.launches):
            described.gx, described.gy = launch.config.gx, launch.config.gy

    def renew(self, numbers: Iterable[int]) -> None:
        """Take over the arguments that these launches have now."""
        for number in numbers:
            code = self._set(*self._renewals[number])
            if code:
                check(code, "changing a launch of a graph")


def _described(launch: Launch) -> _Node:
    config = launch.config
    sizes = (config.gx, config.gy, config.gz, config.bx, config.by, config.bz, config.shared)
    return _Node(launch.function, *sizes, launch.parameters, None, None, None)
