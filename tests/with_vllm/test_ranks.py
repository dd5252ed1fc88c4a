"""Several ranks, and the server, in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import engine
import models

MINUTES = 60
PARALLEL = {
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import engine
if __name__ == "__main__":
    engine.set_environment()
    with engine.engine(sys.argv[2], {"mode": "require"}, **json.loads(sys.argv[3])) as llm:
        made = engine.ask(llm)
    print("ANSWERS", json.dumps([made.tokens, made.logprobs]))
"""


@pytest.mark.parametrize("kind", PARALLEL)
def test_two_ranks(kind: str, folder: Path, tmp_path: Path) -> None:
    model = models.converted("qwen3_moe", "ct-int4", folder)
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(Path(__file__).parent), str(model), json.dumps(PARALLEL[kind])]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=5 * MINUTES, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "lancebill's" in done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))
    got = engine.Answers(*json.loads(line.removeprefix("ANSWERS")))
    want = engine.reference(model)
    assert got.tokens == want.tokens and got.distance(want) <= 1e-5


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=MINUTES) as answer:
        parsed: dict[str, Any] = json.load(answer)
    return parsed


def wait(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 4 * MINUTES
    while time.monotonic() < end:
        assert process.poll() is None, process.stdout.read()[-3000:] if process.stdout else ""
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail("the server did not start")


def test_the_server(folder: Path) -> None:
    model = models.converted("qwen3_moe", "ct-int4", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    words += ["--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init", "--served-model-name", "tiny"]
    words += [word for name, size in engine.SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        wait(f"http://127.0.0.1:{port}/health", process)
        prompt = list(engine.PROMPTS[0])
        body = {"model": "tiny", "prompt": prompt, "max_tokens": engine.TOKENS, "temperature": 0, "ignore_eos": True}
        made = post(f"http://127.0.0.1:{port}/v1/completions", {**body, "return_token_ids": True})
        assert made["choices"][0]["token_ids"] == engine.reference(model).tokens[0]
    finally:
        process.terminate()
        process.wait(timeout=MINUTES)
