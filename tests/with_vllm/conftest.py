"""These tests need vLLM, in an environment of its own: `make test-vllm`, `make test-vllm-all`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import engine

engine.set_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-all", action="store_true", help="every family and format, not a sample of them")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are made, once for all tests."""
    return tmp_path_factory.mktemp("models")
