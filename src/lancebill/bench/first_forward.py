"""Time from a fresh process to the first result of a layer, with or without compiled kernels in the cache.

The parent starts `python -m lancebill.bench.first_forward` with a JSON request. The child starts its clock after
`import torch` and stops it when the result is available. The time includes our imports, the CUDA context, buffers for
all experts (uninitialised: the values do not affect the time), loading or compiling kernels, and one call.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from lancebill.errors import LaunchError

COMPILING = "compiling %s"  # the log message of `jit.build` for each kernel it compiles


@dataclass(frozen=True)
class FirstForward:
    """The request: a layer, in the spelling of the command line."""

    shape: str
    weights: str
    activations: str
    device: str
    tokens: int
    backend: str


@dataclass(frozen=True)
class FirstForwardTime:
    """Seconds after `import torch`, and the number of kernels that were compiled."""

    backend: str
    seconds: float
    compiled: int


def first_forward(request: FirstForward, timeout: float = 600.0) -> FirstForwardTime:
    """Measure in a fresh process."""
    command = [sys.executable, "-m", "lancebill.bench.first_forward", json.dumps(asdict(request))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise LaunchError(
            "the measuring process failed", where=request.backend, got=(done.stderr.strip() or "no message")[-800:]
        )
    return FirstForwardTime(**json.loads(done.stdout.splitlines()[-1]))


class _CompileCounter(logging.Handler):
    """Counts log messages about compiled kernels."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.msg == COMPILING


def _measure(request: FirstForward) -> FirstForwardTime:
    import torch

    start = time.perf_counter()
    from lancebill.backends import oracle
    from lancebill.layer.parts import LayerParts
    from lancebill.layer.routed_experts import RoutedExperts
    from lancebill.moe.device import parse_device
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    compiled = _CompileCounter()
    logging.getLogger("lancebill").addHandler(compiled)
    logging.getLogger("lancebill").setLevel(logging.INFO)
    device = parse_device(request.device)
    problem = parse_shape(request.shape).problem(parse_spec(request.weights), parse_activation(request.activations))
    choice = oracle.select(problem, device, request.backend)
    layout = choice.backend.layout(choice.problem)
    packed = {n: layout.allocate(s, problem.experts, device.torch) for n, s in problem.matrices.items()}
    layer = RoutedExperts(LayerParts(choice, packed))
    x = torch.randn(request.tokens, problem.hidden, dtype=torch.float32, device=device.torch).to(problem.input.storage)
    slots = torch.arange(request.tokens * problem.top_k, dtype=torch.int32, device="cpu")
    ids = slots.view(-1, problem.top_k) % problem.experts
    routed = torch.full(ids.shape, 1 / problem.top_k, dtype=torch.float32, device="cpu")
    float(layer(x, topk_ids=ids.to(x.device), topk_weights=routed.to(x.device)).sum())
    return FirstForwardTime(choice.backend.name, round(time.perf_counter() - start, 3), compiled.count)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(FirstForward(**json.loads(sys.argv[1]))))))
