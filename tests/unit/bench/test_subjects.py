"""Every subject of the benchmarks lists its cases and its options, and measures tiny ones where no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from benchmarks import __main__ as command
from benchmarks.runner import SUBJECTS, Case, Record, chosen_cases
from lancebill.backends.cpu import native

ON_CPU = "--device cpu"
TINY = {  # a line of each subject that needs no GPU and no other library, by the module that measures it
    "gpu": [
        f"gpu-layer part=qwen3-int8-bf16 shape=8x64x64x2 tokens=3 --rounds 1 {ON_CPU}",
        f"gpu-shapes shape=8x64x64x2:ep2 weights=mxfp4 activations=bf16 tokens=1,5 routing=zipf --beside , {ON_CPU}",
        f"gpu-older shape=8x64x64x2 weights=mxfp4 tokens=1 --beside , {ON_CPU}",
        f"gpu-linear size=64x64 weights=int8 rows=1 --repeats 1 {ON_CPU}",
        f"routing model=qwen3 tokens=2 --intermediate 64 {ON_CPU}",
        f"first-forward shape=8x64x64x2 weights=mxfp4 run=1 {ON_CPU}",
    ],
    "cpu": [
        "cpu-layer weights=mxfp4 tokens=1 threads=1 --experts 8 --repeats 1 --beside torch-grouped",
        "cpu-linear size=64x64 weights=Q4_K rows=1 --repeats 1",
    ],
    "models": [
        f"generate shape=tiny layers=1 experts=eager,mxfp4:bf16 sequences=1 --repeats 1 --tokens 3 {ON_CPU}",
        "cpu-prompts tokens=4 --layers 1 --turns 1",
        "cpu-streams what=step,prompt,parts sequences=1 --layers 1 --turns 1 --steps 1",
    ],
    "loading": [
        "memory weights=mxfp4 loader=lancebill --layers 1 --experts 8",
        "convert weights=mxfp4 search=without --gigabytes 0.01 --experts 2",
        "verify what=headers --gigabytes 0.5 --repeats 1",
        "pack checkpoint=mxfp4 source=memory threads=1 --experts 2",
    ],
}
RUN = "import sys; from benchmarks.__main__ import main; [main(line.split()) for line in sys.argv[1:]]"


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    command.main(["--list"])


def test_every_subject_has_a_title_cases_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name, subject in SUBJECTS.items():
        assert subject.title.splitlines()[0].endswith("."), name
        cases = list(subject.cases())
        assert cases and len(set(cases)) == len(cases), name
        capsys.readouterr()
        command.main([name, "--list"])
        assert capsys.readouterr().out.splitlines() == [str(case) for case in cases]
        with pytest.raises(SystemExit, match="0"):
            command.main([name, "--help"])
        shown = capsys.readouterr().out
        assert all(f"--{option.replace('_', '-')}" in shown for option in subject.options)


@pytest.mark.skipif(native.library() is None, reason="the C++ library is not built")
@pytest.mark.parametrize("module", TINY)
def test_tiny_cases_are_measured(module: str, tmp_path: Path) -> None:
    lines = [f"{line} --out {tmp_path / line.split()[0]}.json" for line in TINY[module]]
    done = subprocess.run([sys.executable, "-c", RUN, *lines], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in lines:
        record = Record.read(tmp_path / f"{line.split()[0]}.json")
        assert record.rows and "absent" not in record.facts, (line, record.facts.get("absent"))
        assert record.facts["command"].startswith("python -m benchmarks") and record.facts["commit"]


def test_labels_select_cases_or_replace_them() -> None:
    cases = [*Case.product(shape=("a",), tokens=(1, 16)), *Case.product(shape=("b",), tokens=(1,))]
    assert chosen_cases(cases, {"tokens": ["16", "1"]}) == [cases[1], cases[0], cases[2]]
    assert [str(case) for case in chosen_cases(cases, {"shape": ["b", "c"]})] == [
        "shape=b tokens=1", "shape=b tokens=16", "shape=c tokens=1", "shape=c tokens=16",
    ]  # fmt: skip
    assert chosen_cases(cases, {"shape": ["a"], "tokens": ["4"]}) == [Case.of(shape="a", tokens=4)]


def test_what_fails_is_noted_and_the_run_goes_on(tmp_path: Path) -> None:
    words = ["pack", "checkpoint=mxfp4,no such", "source=memory", "threads=1", "--experts", "2"]
    with pytest.raises(KeyError):
        command.main([*words, "--out", str(tmp_path / "a.json")])
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 1
    command.main(["pack", *words[1:], "--seconds", "0", "--out", str(tmp_path / "b.json")])
    late = Record.read(tmp_path / "b.json")
    assert not late.rows and set(late.facts["absent"].values()) == {"the time limit was reached"}
