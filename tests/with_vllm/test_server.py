"""vLLM's own server, started by `lancebill serve` and `lancebill bench-serve`, with the openai client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

import engine  # noqa: E402
import models  # noqa: E402
import tiny  # noqa: E402
import transformers  # noqa: E402

from lancebill.cli.engines import running_server  # noqa: E402

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
SIZES = [word for name, size in engine.SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
# The engine's process computes: a worker of its own would import vLLM once more. `test_ranks` has such workers.
ONE_PROCESS = ["--distributed-executor-backend", "uni"]
OPTIONS = ["--engine", "vllm", "--weights", "int4-g32", "--dtype", "float32", "--enforce-eager", *ONE_PROCESS, *SIZES]


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    made = models.plain_model("mixtral", folder, seed=5, vocab_size=128)  # the words of the tokenizer
    for name in ("config.json", "generation_config.json"):  # answers are never cut short
        facts = json.loads((made / name).read_text())
        (made / name).write_text(json.dumps(facts | {"eos_token_id": None}))
    tiny.save_tokenizer(transformers, made)
    return made


def test_lancebill_serve_is_the_server_of_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with running_server([str(model), *OPTIONS, "--name", "tiny", "--api-key", "secret"]) as url:
        client = openai.OpenAI(base_url=url, api_key="secret", timeout=60, max_retries=0)
        assert [each.id for each in client.models.list().data] == ["tiny"]
        asked = {"model": "tiny", "prompt": list(engine.PROMPTS[0]), "max_tokens": engine.TOKENS, "temperature": 0}
        made = client.completions.create(**asked, extra_body={"return_token_ids": True, "ignore_eos": True})
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "w3 w4"}], "max_tokens": 5, "temperature": 0}
        pieces = [event.choices[0].delta.content or "" for event in client.chat.completions.create(**chat, stream=True)]
        whole = client.chat.completions.create(**chat).choices[0].message.content
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=60) as page:
            metrics = page.read().decode()
    want = engine.reference(model, weights="int4-g32").tokens[0]
    assert made.choices[0].token_ids == want
    assert "".join(pieces) == whole and len(whole.split()) == 5
    assert "vllm:generation_tokens_total" in metrics


def test_bench_serve_starts_a_server(model: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    load = ["--input-len", "5", "--output-len", "4", "--num-prompts", "6", "--concurrency", "3", "--json"]
    words = [sys.executable, "-m", "lancebill", "bench-serve", str(model), *load, *OPTIONS, "--api-key", "secret"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["requests"], found["failed"]) == (6, 0)
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(24)
    assert "engine: vLLM" in done.stderr and "lancebill's" in done.stderr
