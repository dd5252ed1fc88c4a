"""The streams on which pushed tensors of a GPU are written: what reads a tensor later waits for its stream.

A tensor is read when its expert is complete, perhaps by another thread on another stream. Until then its writer may not
have finished, and afterwards its memory must not be used again before it was read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Arrivals:
    """The streams on which the tensors of one load were pushed."""

    def __init__(self) -> None:
        self._pushed: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # with an event after the last push

    def note(self, tensor: Tensor) -> None:
        """The tensor is pushed now: what is queued on the caller's current stream of its GPU writes it."""
        if tensor.device.type == "cuda":
            stream = torch.cuda.current_stream(tensor.device)
            self._pushed.setdefault(stream, torch.cuda.Event()).record(stream)

    def wait(self, tensors: Iterable[Tensor]) -> None:
        """Let the current streams read these tensors, which were pushed."""
        on_gpus = [tensor for tensor in tensors if tensor.device.type == "cuda"] if self._pushed else []
        for device in {tensor.device for tensor in on_gpus}:
            reading = torch.cuda.current_stream(device)
            for stream, event in self._pushed.items():
                if stream != reading:
                    reading.wait_event(event)
        for tensor in on_gpus:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def __reduce__(self) -> tuple[type[Arrivals], tuple[()]]:
        """Events cannot be copied; a copied tensor is written on the stream that copies it."""
        return Arrivals, ()
