"""Tensors of a GPU that are pushed on several streams: what reads them waits for those. The GPU is a fake."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_checkpoints import make_checkpoint
from torch import Tensor

from lancebill import ModelExperts, RoutedExperts
from lancebill.formats.stored import Stored
from lancebill.testing.checkpoints import Generated

GPU = torch.device("cuda", 1)
STREAMS = ("first", "second", "third")


class Streams:
    """The streams of a GPU: which one is current, and what each one waits for, reads and keeps."""

    def __init__(self) -> None:
        self.current = "default"
        self.pushed: set[str] = set()
        self.behind: set[tuple[str, str]] = (
            set()
        )  # a stream, and one whose pushed tensors are written before it goes on
        self.reads: list[str] = []
        self.kept: set[int] = set()

    def push(self, stream: str, experts: ModelExperts | RoutedExperts, pairs: list[tuple[str, Tensor]]) -> None:
        self.current = stream
        for name, tensor in pairs:
            self.behind = {(reader, writer) for reader, writer in self.behind if writer != stream}
            self.pushed.add(stream)
            taken = (
                experts.push(name, tensor)
                if isinstance(experts, ModelExperts)
                else experts.load_weights([(name, tensor)])
            )
            assert taken, name

    def read(self) -> None:
        late = {writer for writer in self.pushed - {self.current} if (self.current, writer) not in self.behind}
        assert not late, f"{self.current} reads what {late} may not have written"
        self.reads.append(self.current)


class FakeStream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, event: FakeEvent) -> None:
        self.streams.behind.add((self.name, event.stream))


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name

    def __reduce__(self) -> Any:
        raise TypeError("events cannot be copied")


class OnGpu(Tensor):
    """Memory of the CPU that says it is a GPU's."""

    device = GPU
    streams: Streams

    def to(self, *where: Any, **how: Any) -> Tensor:
        self.streams.read()
        return self.as_subclass(Tensor).to(*where, **how)

    def record_stream(self, stream: Any) -> None:
        self.streams.kept.add(self.data_ptr())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fakes = Streams()
    monkeypatch.setattr(OnGpu, "streams", fakes, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)

    def current_stream(device: torch.device) -> FakeStream:
        assert device == GPU, "the tensor's GPU, not the current one"
        return FakeStream(fakes, fakes.current)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return fakes


def _parts(made: Generated) -> list[list[tuple[str, Tensor]]]:
    """The tensors in as many parts as there are streams; each has some of every expert."""
    pairs = [(name, tensor.as_subclass(OnGpu)) for name, tensor in made.tensors.items()]
    return [pairs[number :: len(STREAMS)] for number in range(len(STREAMS))]


@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
@pytest.mark.parametrize("gpu_experts", [None, 2], ids=["whole", "split"])
@pytest.mark.parametrize(("fmt", "family"), [("gptq", "qwen3_moe"), ("mxfp4", "gpt_oss")])
def test_tensors_are_read_behind_the_streams_that_write_them(
    streams: Streams, known: bool, gpu_experts: int | None, fmt: str, family: str
) -> None:
    made = make_checkpoint(fmt, "", family, layers=1)
    options: dict[str, Any] = {"backend": "reference", "router": False, "layers": [0], "gpu_experts": gpu_experts}
    whole = ModelExperts(made.config, tensors=made.headers if known else None, **options)
    plain = ModelExperts(made.config, tensors=made.headers, **options)
    assert not list(plain.divert(made.tensors.items()))
    want = plain.finish()[0].state_dict()
    for stream, part in zip(STREAMS, _parts(made)):
        streams.push(stream, whole, part)
    streams.current = "last"
    layer = whole.finish()[0]
    reads = len(streams.reads)
    for stream, part in zip(reversed(STREAMS), _parts(made)):  # a refit
        streams.push(stream, layer, part)
    copied = copy.deepcopy(layer)
    streams.current = "last"
    layer.finish()
    assert len(streams.reads) >= 2 * reads > 0
    assert streams.kept == {tensor.data_ptr() for tensor in made.tensors.values()}
    for each in (layer, copied):
        assert all(torch.equal(tensor, want[name]) for name, tensor in each.state_dict().items())


@pytest.mark.parametrize("known", [True, False], ids=["headers", "no-headers"])
def test_a_router_is_read_behind_the_stream_that_writes_it(streams: Streams, known: bool) -> None:
    made = make_checkpoint("mxfp4", "", "gpt_oss", layers=1)
    name = "model.layers.0.mlp.router.bias"
    headers = {**made.headers, name: Stored("F32", (4,))} if known else None
    experts = ModelExperts(made.config, tensors=headers, layers=[0], backend="reference")
    streams.push("first", experts, [(name, torch.arange(4.0).as_subclass(OnGpu))])
    streams.push("second", experts, [(name, tensor.as_subclass(OnGpu)) for name, tensor in made.tensors.items()])
    streams.current = "last"
    bias = experts.finish()[0].router_bias
    assert bias is not None and torch.equal(bias, torch.arange(4.0)) and streams.reads[-1] == "last"
