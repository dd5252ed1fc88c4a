"""Several ranks, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
