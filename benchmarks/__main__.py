"""Measures a subject, or writes the tables of the documents.

python -m benchmarks --list                          the subjects
python -m benchmarks SUBJECT --list                  its cases, in the order in which they are measured
python -m benchmarks SUBJECT --help                  its options
python -m benchmarks SUBJECT LABEL=VALUE,... --OPTION    cases with these labels only, or with other values of them
python -m benchmarks report [--check]                README.md and docs/ from the records
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.runner import SUBJECTS, Run, Subject, chosen_cases

MODULES = ("gpu", "gpu_calls", "cpu", "models", "loading", "hybrid", "accuracy", "vllm", "vllm_load")
CAMPAIGN = ("abuse", "sanitize", "split_models")  # in tests/campaign: what tries to break things
GRACE = 120.0  # seconds after the limit, within which a case that has begun must end


def main(words: Sequence[str]) -> None:
    if words and words[0] == "report":
        from benchmarks import report

        report.main(check="--check" in words)
        return
    sys.path.append(str(ROOT / "tests" / "campaign"))
    for module in (*(f"benchmarks.{name}" for name in MODULES), *CAMPAIGN):
        import_module(module)
    if words and words[0] in SUBJECTS:
        measure(SUBJECTS[words[0]], words[1:])
        return
    print("\n".join(f"{name:18} {subject.title.splitlines()[0]}" for name, subject in SUBJECTS.items()))
    if not words or words[0] not in ("--list", "-l"):
        print(__doc__)
        sys.exit(0 if words and words[0] in ("--help", "-h") else 2)


def measure(subject: Subject, words: Sequence[str]) -> None:
    options = parser_of(subject).parse_args(words)
    given = {name: values.split(",") for name, _, values in (word.partition("=") for word in options.cases)}
    cases = chosen_cases(list(subject.cases()), given)
    if options.list:
        print("\n".join(map(str, cases)))
        return
    if options.seconds < float("inf"):
        faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True)  # in case another library hangs
    run = Run(subject, cases, options)
    subject.measure(run)
    run.finish()
    faulthandler.cancel_dump_traceback_later()


def parser_of(subject: Subject) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {subject.name}", description=subject.title,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("cases", nargs="*", metavar="LABEL=VALUE,...", type=label, help="see --list")
    for name, (default, help) in subject.options.items():
        add_option(parser, f"--{name.replace('_', '-')}", default, help)
    parser.add_argument("--device", default=subject.device, help=f"default: {subject.device}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case is begun after this time")
    parser.add_argument("--note", default="", help="a remark for the record")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results")
    parser.add_argument("--list", action="store_true", help="print the cases")
    return parser


def label(word: str) -> str:
    if "=" not in word:
        raise argparse.ArgumentTypeError(f"{word}: expected LABEL=VALUE")
    return word


def add_option(parser: argparse.ArgumentParser, flag: str, default: Any, help: str) -> None:
    """By its default: False is a switch, a tuple a list, a type has no default."""
    if default is False:
        parser.add_argument(flag, action="store_true", help=help)
    elif isinstance(default, tuple):
        kind = type(default[0])
        shown = ",".join(map(str, default))
        parser.add_argument(
            flag, default=default, help=f"{help}; default: {shown}",
            type=lambda text: tuple(kind(word) for word in text.split(",") if word),
        )  # fmt: skip
    elif isinstance(default, type):
        parser.add_argument(flag, type=default, help=help)
    else:
        parser.add_argument(flag, type=type(default), default=default, help=f"{help}; default: {default}")


if __name__ == "__main__":
    main(sys.argv[1:])
