"""A small layer to benchmark, and `lancebill` in this process."""

from __future__ import annotations

import torch
from typer.testing import CliRunner, Result

from lancebill.cli.main import app
from lancebill.moe.model_shapes import Shape, parse_shape
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec

FINE, PROBLEM, USAGE = 0, 1, 2
CPU = torch.device("cpu")
SHAPE = parse_shape("4,64,64,2")


def problem_of(weights: str = "mxfp4", activations: str = "bf16", shape: Shape = SHAPE) -> Problem:
    return shape.problem(parse_spec(weights), ACTIVATIONS[activations])


def lancebill(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
