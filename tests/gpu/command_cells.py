"""Cells of commands, and of what else a user does with a whole model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import tiny
import torch
import transformers
from cells import Cell, Notes, Place
from model_cells import TOKENS, plain_model, requantise_experts, source
from torch import Tensor
from whole_model import NEAR, requantise_rest, row_error

import lancebill
from lancebill.backends.cpu import native
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.errors import UnsupportedProblem
from lancebill.formats import registry
from lancebill.integrations.transformers.pack_in_memory import pack_experts
from lancebill.integrations.transformers.packed_experts import set_activations
from lancebill.integrations.transformers.pretrained import reload_experts
from lancebill.numbers.spec_names import parse_spec

PROMPT = "w1 w2 w3"
CONVERTED = ("mxfp4", "nvfp4-div", "int4-g32", "int4-g32-zp", "fp8-channel", "fp8-block", "int8", "nf4", "bf16")
# Of experts' inputs. fp8 keeps three bits, so rounding moves a row by 2^-4 / sqrt(3); two layers with two matrices each
# move it by twice that, and the worst row by up to four times.
ROUNDED = {None: NEAR, "int8": 2 * NEAR, "fp8": 4 * 2**-4 / 3**0.5}
SERVED_SECONDS = 100.0


def command_cells() -> Iterator[Cell]:
    commands: dict[str, Callable[[Place], Notes | None]] = {
        "generate": run_generate, "generate split": partial(run_generate, more=("--gpu-experts", "3")),
        "generate --weights --rest": partial(run_generate, more=("--weights", "mxfp4", "--rest", "int8")),
        "chat": run_chat, "serve": run_serve, "eval": run_eval,
        "bench": run_bench, "bench split": partial(run_bench, more=("--split", "8")),
    }  # fmt: skip
    for name, run in commands.items():
        yield Cell("command", name, 2, run)
    for spec in CONVERTED:
        yield Cell("command", f"convert --device to {spec}", 2, partial(run_convert, spec))
    models: dict[str, Callable[[Place], Notes | None]] = {
        "set_activations": run_set_activations, "reload_experts": run_reload, "moved away and back": run_moved,
        "pack_experts": run_pack_experts, "default device": run_default_device,
        "fp16": partial(run_dtype, torch.float16), "fp32": partial(run_dtype, torch.float32),
        "long prompt and batches": run_sizes,
    }  # fmt: skip
    for name, run in models.items():
        yield Cell("model", name, 2, run)


def stored(place: Place) -> Path:
    """A model with a tokenizer, its experts and attention in GPTQ's form."""
    folder = source(place.folder / "source", vocab_size=128)
    example = next(e for e in registry()["gptq"].examples() if e.name == "int4-g32:fp16-zp-gptq-actorder")
    quant = {**example.config.quant, "dynamic": {"-:.*lm_head.*": {}}}
    packed, plain = place.folder / "model", place.folder / "plain"
    tiny.quantized_copy(folder, packed, plain, quant, example.scheme, lambda m: ".experts." in m or "_attn." in m)
    tiny.save_tokenizer(transformers, packed)
    return packed


def _call(*words: object, typed: str | None = None) -> Any:
    from typer.testing import CliRunner

    from lancebill.cli.main import app

    done = CliRunner().invoke(app, [str(word) for word in words], input=typed)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def run_generate(place: Place, more: tuple[str, ...] = ()) -> Notes:
    if "--gpu-experts" in more and (native.library() is None or place.device == "cpu"):
        raise SkipTest("needs a GPU and the C++ library")
    words = ("generate", stored(place), PROMPT, "--max-tokens", 5, "--device", place.device, "--json", *more)
    found, again = (json.loads(_call(*words).stdout) for _ in range(2))
    (answer,), (repeated,) = found["answers"], again["answers"]
    assert answer["tokens"] == 5 and answer["text"] == repeated["text"], (answer, repeated)
    return {"layers": found["layers"]}


def run_chat(place: Place) -> None:
    words = ("chat", stored(place), "--system", "w9", "--max-tokens", 3, "--device", place.device)
    done = _call(*words, typed="w1 w2\n\n/clear\nw3\n/quit\nw4\n")
    answers = [line for line in done.stdout.splitlines() if line.startswith("w")]
    assert len(answers) == done.output.count("3 tokens, first after") == 2, done.output  # some tokens have no text


def run_serve(place: Place) -> None:
    """Two requests at once, of which one streams; then the server is asked to end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", str(stored(place)), "--device", place.device, "--engine", "transformers", "--name", "tiny"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lancebill", *words, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=environment) as server:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server)
            body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answers = [json.loads(_post(url, {**body, "temperature": 0})) for _ in range(2)]
            texts = [answer["choices"][0]["message"]["content"] for answer in answers]
            assert texts[0] == texts[1] and len(texts[0].split()) == 4, texts
            streamed = _post(url, {**body, "temperature": 0, "stream": True}).decode().split("\n\n")
            events = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
            pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
            assert "".join(pieces) == texts[0], pieces
            server.send_signal(signal.SIGINT)
            assert server.wait(30) in (0, 130), server.returncode
        finally:
            server.kill()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SERVED_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, "the server ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError("the server did not come up")


def _post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        read: bytes = answer.read()
        return read


def run_eval(place: Place) -> None:
    """Perplexities of the stored model, on the device and in fp32 on the CPU, and exact match."""
    folder, text, questions = stored(place), place.folder / "text", place.folder / "questions"
    text.write_text(" ".join(f"w{n * n % 126 + 1}" for n in range(200)))
    questions.write_text("".join(json.dumps({"question": f"w{n}", "answer": "#### 3"}) + "\n" for n in range(3)))
    words = ("eval", folder, "--text", text, "--window", 32, "--stride", 16, "--json")
    on_device = ("--questions", questions, "--shots", 0, "--answer-tokens", 4, "--device", place.device)
    found, want = (
        json.loads(_call(*words, *more).stdout)["variants"]
        for more in ((*on_device, "--variant", "stored", "--variant", "mxfp4"), ("--dtype", "float32"))
    )
    got, exact = (each[0]["perplexity"]["value"] for each in (found, want))
    assert abs(got / exact - 1) < NEAR, (got, exact)


def run_bench(place: Place, more: tuple[str, ...] = ()) -> None:
    if more and (native.library() is None or place.device == "cpu"):
        raise SkipTest("needs a GPU and the C++ library")
    file = place.folder / "figures.json"
    words = ("bench", "--shape", "16,256,256,4", "--weights", "int4-g32", "--device", place.device, "--tokens", "1,40")
    _call(*words, "--repeats", 2, "--json", file, *more)
    assert json.loads(file.read_text())["meta"]


def run_convert(spec: str, place: Place) -> None:
    """A device writes the bytes that the CPU writes, up to codes between which rounding decides."""
    folder = source(place.folder / "source")
    fmt = {"nf4": ("--format", "bitsandbytes")}.get(spec, ())
    outputs = [place.folder / device for device in ("first", "second")]
    for device, output in zip((place.device, "cpu"), outputs):
        _call("convert", folder, output, "--to", spec, "--device", device, "--no-search", *fmt)
    with Checkpoint.open(outputs[0]) as ours, Checkpoint.open(outputs[1]) as theirs:
        assert ours.config.quant == theirs.config.quant and ours.headers == theirs.headers
        for name in theirs.headers:
            different = (_bytes(ours.read(name)) != _bytes(theirs.read(name))).float().mean()
            assert float(different) < 1e-3, f"{name}: {float(different):.1%} of the bytes differ"
    _call("generate", _with_tokenizer(outputs[0]), PROMPT, "--max-tokens", 2, "--device", place.device, "--json")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _with_tokenizer(folder: Path) -> Path:
    tiny.save_tokenizer(transformers, folder)
    return folder


# Whole models


@torch.no_grad()
def _check(ours: Any, reference: Any, bound: float = NEAR, tokens: Tensor = TOKENS) -> None:
    got, want = (model(tokens.to(model.device), use_cache=False).logits.float().cpu() for model in (ours, reference))
    error = row_error(got.flatten(0, 1), want.flatten(0, 1))
    assert error <= bound, f"the worst row of logits differs by {error:.3f} of their spread"


def _load(place: Place, **options: Any) -> tuple[Any, Any]:
    """A model on the device, everything quantised while loading, and the reference with the same numbers."""
    folder = source(place.folder / "source")
    reference = plain_model(folder)
    weights = {"experts": "int4-g32", "rest": "int8"}
    given = {"device": place.device, "dtype": torch.bfloat16, "weights": weights, **options}
    ours = lancebill.from_pretrained(folder, **given)
    requantise_experts(reference, parse_spec("int4-g32"))
    with torch.no_grad():
        requantise_rest(reference, ours)
    return ours, reference


def run_set_activations(place: Place) -> None:
    """In place where the layout stays, as with the reference; by loading the experts again where it does not."""
    ours, reference = _load(place, backend="reference")
    for name in ("int8", "fp8", None):
        set_activations(ours, name, torch.bfloat16)
        _check(ours, reference, ROUNDED[name])
    reload_experts(ours, backend="auto", weights="int4-g128")
    fresh = plain_model(place.folder / "source")
    requantise_experts(fresh, parse_spec("int4-g128"))
    with torch.no_grad():
        requantise_rest(fresh, ours)
    for name in ("int8", "fp8", None):
        try:
            set_activations(ours, name, torch.bfloat16)
        except UnsupportedProblem:
            reload_experts(ours, activations=name)
        _check(ours, fresh, ROUNDED[name])


def run_reload(place: Place) -> None:
    ours, reference = _load(place)
    reload_experts(ours, weights="mxfp4")
    fresh = plain_model(place.folder / "source")
    requantise_experts(fresh, parse_spec("mxfp4"))
    with torch.no_grad():
        requantise_rest(fresh, ours)
    _check(ours, fresh)
    if native.library() is not None:
        reload_experts(ours, weights="int4-g32", gpu_experts=3)
        _check(ours, reference)


def run_moved(place: Place) -> None:
    if place.device == "cpu":
        raise SkipTest("needs a second device")
    ours, reference = _load(place)
    for device in ("cpu", place.device):
        _check(ours.to(device), reference)
    ours.generate(TOKENS.to(place.device), max_new_tokens=3, do_sample=False)


def run_pack_experts(place: Place) -> None:
    folder = source(place.folder / "source")
    ours, reference = (plain_model(folder) for _ in range(2))
    ours = ours.to(place.device, torch.bfloat16)
    pack_experts(ours, weights="int4-g32")
    requantise_experts(reference, parse_spec("int4-g32"))
    _check(ours, reference)
    ours.generate(TOKENS.to(place.device), max_new_tokens=3, do_sample=False)


def run_default_device(place: Place) -> None:
    """Set while the model is loaded, and while it computes."""
    folder = stored(place)
    reference = plain_model(place.folder / "plain")
    with torch.device(place.device):
        ours = lancebill.from_pretrained(folder, device=place.device, dtype=torch.bfloat16)
        _check(ours, reference, tokens=TOKENS)
        ours.generate(TOKENS.to(place.device), max_new_tokens=3, do_sample=False)
    assert not ours.lancebill_rest.dequantized, ours.lancebill_rest.dequantized
    _check(ours, reference)


def run_dtype(dtype: torch.dtype, place: Place) -> None:
    ours, reference = _load(place, dtype=dtype)
    _check(ours, reference)
    ours.generate(TOKENS.to(place.device), max_new_tokens=3, do_sample=False)


def run_sizes(place: Place) -> None:
    """Prompts of many tokens, and many short ones: other kernels and other programs."""
    ours, reference = _load(place)
    for shape in ((1, 1), (1, 60), (5, 3), (33, 2), (40, 40)):
        _check(ours, reference, tokens=torch.randint(3, 120, shape))
    for batch in (1, 5, 33, 5):
        prompt = torch.randint(3, 120, (batch, 7), device=place.device)
        made = ours.generate(prompt, max_new_tokens=8, do_sample=False)
        assert made.shape[0] == batch
