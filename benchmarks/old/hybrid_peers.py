"""Other libraries beside the CPU's part, in a process of their own, because their threads may spin or never answer."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from hybrid_cells import beside_peer, cpu_part
from hybrid_experts import Experts

from lancebill.backends.cpu import native
from lancebill.bench import peers_kt
from lancebill.split.host_calls import use_host_threads
from lancebill.split.host_threads import HostThreads

LONGEST_S = 45.0  # between two results
Row = dict[str, Any]


def measure(layer: tuple[str, str, str], tokens: list[int], peers: list[str], threads: HostThreads) -> Iterator[Row]:
    """A row for each number of tokens. `layer` is its shape, spec and device."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, layer, tokens, peers, threads))
    process.start()
    theirs.close()
    rows: dict[int, Row] = {count: {} for count in tokens}
    try:
        while ours.poll(LONGEST_S):
            count, found = ours.recv()
            rows[count] |= found
        process.kill()
    except EOFError:  # it has ended
        pass
    process.join()
    for count, row in rows.items():
        yield {"tokens": count, **row, **({"ended_with": process.exitcode} if process.exitcode else {})}


def _work(
    results: Connection, layer: tuple[str, str, str], tokens: list[int], peers: list[str], threads: HostThreads
) -> None:
    """Sends (tokens, what was measured) as soon as it is known."""
    use_host_threads(threads)
    library = native.library()
    assert library is not None
    library.place_threads(threads.cpus, threads.spin_us)
    torch.set_num_threads(threads.count)
    peers_kt.MOST_TOKENS = max(tokens)
    experts = Experts(*layer)
    ours = {count: cpu_part(experts, count) for count in tokens}
    for count, row in ours.items():
        results.send((count, row))
    for name in peers:
        peer = experts.peer(name)
        for count in tokens:
            found = {f"{name} is absent": peer} if isinstance(peer, str) else beside_peer(experts, peer, count)
            row = {key if isinstance(peer, str) else f"{name}_{key}": value for key, value in found.items()}
            if "us" in found:
                row[f"{name}_over_ours"] = found["us"] / ours[count]["cpu_us"]
            results.send((count, row))
