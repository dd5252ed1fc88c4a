"""The checkpoints that vLLM is tested with can be written: those tests run seldom, and what they call changes."""

from __future__ import annotations

import sys

import pytest
from project import ROOT

sys.path.append(str(ROOT / "tests" / "with_vllm"))

import kinds


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_has_a_scheme_for_its_spec(kind: str) -> None:
    target = kinds.target_of(kind)
    assert target.scheme().spec == target.spec
