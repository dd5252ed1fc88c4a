"""From a fresh process to a first result: what a user waits for, with nothing compiled beforehand or everything.

The parent starts `python -m lancebill.bench.first_forward` with the question as JSON. The child's clock starts when torch is
imported and stops when a layer's result is there: our imports, the device's context, buffers for all experts (left
as they are: their numbers do not change the time), loading or compiling kernels, one call.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from lancebill.errors import LaunchError

COMPILING = "compiling %s"  # how `jit` announces each kernel it has to build


@dataclass(frozen=True)
class FirstForward:
    """A layer by the words of the command line."""

    shape: str
    weights: str
    activations: str
    device: str
    tokens: int
    backend: str


@dataclass(frozen=True)
class Answer:
    """Seconds after `import torch`, and how many kernels had to be compiled."""

    backend: str
    seconds: float
    compiled: int


def first_forward(question: FirstForward, timeout: float = 600.0) -> Answer:
    """Ask a process that knows nothing."""
    command = [sys.executable, "-m", "lancebill.bench.first_forward", json.dumps(asdict(question))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise LaunchError(
            "a fresh process failed", where=question.backend, got=(done.stderr.strip() or "nothing")[-800:]
        )
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


class _Compiled(logging.Handler):
    """Counts the kernels that had to be built."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.msg == COMPILING


def _answer(question: FirstForward) -> Answer:
    import torch

    start = time.perf_counter()
    from lancebill.backends import oracle
    from lancebill.layer.routed_experts import RoutedExperts
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.moe.problem import parse_device
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    compiled = _Compiled()
    logging.getLogger("lancebill").addHandler(compiled)
    logging.getLogger("lancebill").setLevel(logging.INFO)
    device = parse_device(question.device)
    problem = parse_shape(question.shape).problem(parse_spec(question.weights), parse_activation(question.activations))
    choice = oracle.select(problem, device, question.backend)
    layout = choice.backend.layout(choice.problem)
    layer = RoutedExperts()
    layer.adopt(choice, {n: layout.allocate(s, problem.experts, device.torch) for n, s in problem.matrices.items()})
    x = torch.randn(question.tokens, problem.hidden, device=device.torch).to(problem.input.storage)
    ids = torch.arange(question.tokens * problem.top_k, dtype=torch.int32).view(-1, problem.top_k) % problem.experts
    routed = torch.full(ids.shape, 1 / problem.top_k)
    float(layer(x, topk_ids=ids.to(x.device), topk_weights=routed.to(x.device)).sum())
    return Answer(choice.backend.name, round(time.perf_counter() - start, 3), compiled.count)


if __name__ == "__main__":
    print(json.dumps(asdict(_answer(FirstForward(**json.loads(sys.argv[1]))))))
