"""Help texts and usage errors must not wait for torch, or for transformers: one process asks for all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import contextlib, io, sys
import typer
from lancebill.cli.main import app

def walk(command, words=()):
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*words, name))

def answer(expected, *words, without="torch"):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            app(list(words))
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    assert code == expected and text.getvalue(), (words, code, text.getvalue())
    assert without not in sys.modules, words
    return text.getvalue()

commands = list(walk(typer.main.get_command(app)))
for words in commands:
    assert "bool" not in answer(0, *words, "--help").lower(), words  # flags have no type
    answer(2, *words, "--no-such-option")
answer(0, "--version")
answer(2, "no-such-command")
answer(2, "explain")
answer(2, "explain", "--shape", "8,64,64,2")
for command in ("explain", "inspect", "verify", "generate", "chat", "serve", "eval"):
    answer(2, command, "no/such/path")
assert "--install-completion" in answer(0, "--help")
answer(2, "convert", "no/such/path", "out", "--to", "mxfp4")
answer(2, "convert", ".", "out", "--to", "mxfp4", "--device", "abacus")
answer(2, "eval", ".")
answer(2, "bench", "--shape", "8,64,64,2", "--weights", "mxfp4", "--tokens", "many")
answer(2, "bench", "--shape", "8,64,64,2", "--weights", "mxfp4", "--json", "no/such/folder/file.json")
answer(2, "tune", "--shape", "8,64,64,2", "--tokens", "many")
answer(2, "kernels", "build", "--arch", "sm_70")
answer(2, "explain", "--shape", "8,64,64,2", "--weights", "mxfp4", "--device", "sm_99x")
answer(2, "serve", ".", "--api-key", "")
answer(2, "serve", ".", "--kept-tokens", "-1")
answer(2, "bench-serve", "http://localhost:1/v1", "--odd")
for wrong in (["--device", "tpu"], ["--dtype", "foo"], ["--gpu-memory", "3GiB"], ["--temperature", "nan"]):
    answer(2, "generate", ".", "w1", *wrong)
for command in (["generate", ".", "w1"], ["chat", "."], ["serve", ".", "--engine", "transformers"]):
    for wrong in ("--backend", "--weights", "--rest", "--activations"):
        answer(2, *command, wrong, "foo")
layer = ("--shape", "8,64,64,2", "--weights", "mxfp4")
for wrong in ("--weights", "--activations", "--backend", "--shape", "--device"):
    answer(2, "explain", *layer, wrong, "foo")
    answer(2, "bench", *layer, wrong, "foo")
answer(2, "bench", *layer, "--peers", "foo")
answer(2, "convert", ".", "out", "--to", "foo")
answer(2, "convert", ".", "out", "--to", "gptq")
answer(2, "convert", ".", "out", "--to", "mxfp4", "--format", "foo")
for wrong in ("--shape", "--weights", "--activations", "--device"):
    answer(2, "tune", "--shape", "8,64,64,2", wrong, "foo")
print(len(commands))
"""


def test_help_and_usage_errors_do_not_import_torch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15
