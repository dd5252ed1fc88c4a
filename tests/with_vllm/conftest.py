"""These tests need vLLM, in an environment of its own: `nox -s vllm`, `nox -s vllm -- all`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import engine
import record

engine.set_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-all", action="store_true", help="every family and format, not a sample of them")
    parser.addoption("--vllm-record", action="store_true", help="write a file in benchmarks/results/vllm-cpu")
    parser.addoption("--vllm-rest", action="store_true", help="likewise with -n 0: without what passed before")
    parser.addoption("--vllm-seconds", type=float, help="with --vllm-record and -n 0: start no test after this time")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--vllm-record") and not hasattr(config, "workerinput"):  # workers report to the first process
        without = record.passed_before() if config.getoption("--vllm-rest") else frozenset()
        recorder = record.Recorder(config.getoption("--vllm-seconds"), without)
        config.pluginmanager.register(recorder, "vllm-record")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are made, once for all tests."""
    return tmp_path_factory.mktemp("models")
