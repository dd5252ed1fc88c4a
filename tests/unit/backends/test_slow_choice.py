"""A layer that torch's operators compute because no backend has kernels for it says so, once."""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_checkpoints import make_checkpoint

from lancebill.backends import oracle, slow_choice
from lancebill.backends.oracle import Choice
from lancebill.backends.registry import registry
from lancebill.errors import UnsupportedProblem
from lancebill.formats import registry as formats
from lancebill.layer.packed_module import PackedModule
from lancebill.moe.layout import W2, W13, MatrixShape
from lancebill.moe.problem import BATCH_INVARIANT, Problem
from lancebill.numbers.dtypes import F32
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing.checkpoints import save
from lancebill.testing.layers import layer_problem

SLOW = ("reference", "torch-cpu")
DEVICES = ("sm_90", "sm_75", "sm_100", "cpu")
SIZES = {"hidden": 256, "intermediate": 256, "experts": 4, "top_k": 2}
META = torch.device("meta")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of a process in which nothing was said yet."""
    monkeypatch.setattr(slow_choice, "_SAID", set())
    caplog.set_level(logging.WARNING, "lancebill")
    return caplog


def made(choice: Choice) -> PackedModule:
    """A layer that has taken this choice, without memory."""
    layout, problem = choice.backend.layout(choice.problem), choice.problem
    packed = {name: layout.allocate(shape, problem.experts, META) for name, shape in problem.matrices.items()}
    return PackedModule(choice, packed)


def problem_of(spec: QuantSpec, k: int) -> Problem:
    return Problem(MatrixShape(W13, 512, k, spec), MatrixShape(W2, k, 256, spec), experts=2, global_experts=2, top_k=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", formats())
def test_a_layer_warns_once_if_and_only_if_no_backend_has_kernels(
    fmt: str, device: str, warnings: pytest.LogCaptureFixture
) -> None:
    slow = set()
    for example in formats()[fmt].examples():
        spec = example.scheme.spec
        choice = oracle.explain(problem_of(spec, 256), device)
        before = len(warnings.messages)
        made(choice)
        new = warnings.messages[before:]
        assert bool(new) == (choice.backend.name in SLOW and spec not in slow), example.name
        for text in new:
            slow.add(spec)
            assert text.startswith(f"no kernels for {spec} x bf16 on {choice.device}: {choice.backend.name}")
            assert all(f"\n  {name}: " in text for name in registry() if name != choice.backend.name)
        made(oracle.explain(problem_of(spec, 512), device))  # another size is nothing new
        made(oracle.explain(problem_of(spec, 256), device, "reference"))  # as asked
        assert len(warnings.messages) == before + len(new)
    assert device != "sm_75" or slow


def test_every_kind_of_inputs_and_device_is_said(warnings: pytest.LogCaptureFixture) -> None:
    whole = layer_problem("mxfp4", "bf16", **SIZES)
    wide = replace(whole, input=F32, activations=ACTIVATIONS["fp32"])
    linear = replace(whole, w2=None, experts=1, global_experts=1, top_k=1)
    for problem, device, found in (
        (whole, "sm_90", ""),
        (wide, "sm_90", "what would help: dtype=torch.bfloat16 (hopper)"),
        (wide, "sm_80", "what would help: dtype=torch.bfloat16 (ampere)"),
        (whole, "sm_75", "hopper: needs an sm_90 GPU, not sm_75"),
        (linear, "sm_75", "ampere: needs a GPU of compute capability 80"),
        (replace(whole, experts=0), "sm_100", ""),  # a part of a split layer
        (layer_problem("int6", "bf16", **SIZES), "sm_90", 'what would help: weights="int8" (hopper) or'),
    ):
        warnings.clear()
        made(oracle.explain(problem, device))
        assert len(warnings.messages) == bool(found)
        assert found in "".join(warnings.messages)
    assert "what would help" not in slow_choice._reasons(oracle.explain(whole, "sm_75"))  # nothing does


def test_questions_and_copies_say_nothing(warnings: pytest.LogCaptureFixture) -> None:
    choice = oracle.explain(layer_problem("mxfp4", "bf16", **SIZES), "sm_75")
    oracle.select(choice.problem, "sm_75")
    assert choice.table() and not warnings.messages
    layer = made(choice)
    copy.deepcopy(layer).adopt(choice, layer.packed)
    assert len(warnings.messages) == 1


def test_choices_slower_than_plain_tensors_are_refused_where_that_is_asked() -> None:
    quantised, plain = (layer_problem(spec, "bf16", **SIZES) for spec in ("mxfp4", "bf16"))
    for problem, device, backend in (
        (quantised, "sm_90", "auto"), (quantised, "cpu", "auto"), (quantised, "cpu", "torch-cpu"),
        (plain, "cpu", "torch-cpu"), (plain, "sm_75", "reference"),
    ):  # fmt: skip
        slow_choice.refuse_slow(oracle.select(problem, device, backend))
    for problem, device in ((plain, "cpu"), (quantised, "sm_75"), (plain, "sm_90")):
        with pytest.raises(UnsupportedProblem, match="no kernels for"):
            slow_choice.refuse_slow(oracle.select(problem, device))
    invariant = replace(plain, order=BATCH_INVARIANT)
    assert oracle.explain(invariant, "cpu").backend.name == "reference"


# Every way to a layer on a CPU whose native kernels are switched off, each in the words of a user.
DOORS = """
import torch, lancebill
from lancebill.layer.from_tensors import ExpertTensors
from lancebill.layer.model_experts import ModelExperts
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.numbers.codec import quantize
from lancebill.numbers.spec_names import parse_spec

path = {path!r}
opened = Checkpoint.open(path)
def pushed(layer):
    layer.load_weights((name, opened.read(name)) for name in opened.headers)
    return layer.finish()
def tensors():
    codes = torch.randint(0, 255, (2, 64, 64), dtype=torch.uint8)
    scales = torch.ones(2, 64, dtype=torch.bfloat16)
    down = ExpertTensors(codes[:, :, :32], (scales,))
    return RoutedExperts.from_tensors(ExpertTensors(codes, (scales,)), down, "int8", top_k=1)
linear = lambda **how: QuantizedLinear.from_weight(quantize(torch.randn(64, 64), parse_spec("int8-g32")), **how)
doors = {{
    "explain": lambda: lancebill.explain(RoutedExperts.from_checkpoint(path, 0, backend="torch-cpu").problem, "cpu"),
    "by name": lambda: RoutedExperts.from_checkpoint(path, 0, backend="reference"),
    "checkpoint": lambda: RoutedExperts.from_checkpoint(path, 0),
    "again": lambda: RoutedExperts.from_checkpoint(path, 1),
    "config": lambda: pushed(RoutedExperts.from_config(opened.config, 0, tensors=opened.headers)),
    "model": lambda: ModelExperts.from_checkpoint(opened, dtype=torch.float16).layer(0),
    "random": lambda: RoutedExperts.random(opened.config, 0, weights="mxfp4", tensors=opened.headers),
    "tensors": tensors,
    "linear": linear,
    "linear by name": lambda: linear(backend="torch-cpu", dtype=torch.float32),
    "linear refused": lambda: linear(dtype=torch.float32, refuse_slow=True),
    "moved": lambda: RoutedExperts.from_checkpoint(path, 0).to("cpu"),
}}
import sys
for name, door in doors.items():
    print("---", name, file=sys.stderr, flush=True)
    door()
"""


def test_every_door_says_it_in_a_process_without_handlers(tmp_path: Path) -> None:
    """In the words that a user sees: nobody has configured the logging of a worker or of a script."""
    path = save(make_checkpoint("gptq", "int4"), tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", DOORS.format(path=str(path))],
        capture_output=True, text=True, env={**os.environ, "LANCEBILL_NATIVE": "off"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in done.stderr.split("--- ")[1:]}
    warned = re.compile("^no kernels for .* x .* on cpu: torch-cpu computes this", re.MULTILINE)
    counts = {door: len(warned.findall(text)) for door, text in said.items()}
    silent = {"explain", "by name", "again", "config", "linear by name", "moved"}
    assert counts == {door: door not in silent for door in said}
    assert "cpu: switched off (LANCEBILL_NATIVE=off)" in said["checkpoint"]
