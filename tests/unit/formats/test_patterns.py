"""Regular expressions from configs: the results of `re`, in bounded time for any pattern."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator

import pytest

from lancebill.errors import UnsupportedFormat
from lancebill.formats import _patterns, registry
from lancebill.formats._patterns import compile_pattern
from lancebill.formats.base import Config, Module

NAME = "model.language_model.layers.10.mlp.experts.100.gate_proj"
HOSTILE = [
    r"(\w+\.?)*!",
    r"(a+)+$",
    "(?:.*.*)*x!",
    r"(\w|\w\w)*!",
    ".*e" * 20 + "z",
    "e?" * 50 + "!",
    "(?:){4000000000}!",
]
ATOMS = ["a", "b", "ab", "a-b", ".", r"\.", r"\d", "[ab]", "[^a]", r"\w", "1", "[a-c1]", "x", "{", "]", "-"]
GROUPS = ["({})", "(?:{})", "(?={})", "(?!{})"]
REPEATS = ["*", "+", "?", "*?", "+?", "{{2}}", "{{1,2}}", "{{0,}}", "{{,1}}", "??", "{{2,3}}?"]


def _pattern(g: random.Random, depth: int = 2) -> str:
    """A random pattern of all supported elements."""
    text = ""
    for _ in range(g.randint(0, 4)):
        if depth and g.random() < 0.25:
            atom = g.choice(GROUPS).replace("{}", _pattern(g, depth - 1))
        else:
            atom = g.choice([*ATOMS, "^", "$"])
        repeated = g.random() < 0.35 and atom not in ("^", "$")
        text += atom + (g.choice(REPEATS).replace("{{", "{").replace("}}", "}") if repeated else "")
    return f"{text}|{_pattern(g, 0)}" if depth and g.random() < 0.25 else text


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the bounded matcher even for simple patterns."""
    monkeypatch.setattr(_patterns, "_FEW_CHOICES", -1)
    compile_pattern.cache_clear()
    yield
    compile_pattern.cache_clear()


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("seed", range(4))
def test_bounded_matching_equals_re(seed: int) -> None:
    g, compared = random.Random(seed), 0
    while compared < 2000:
        pattern = _pattern(g)
        try:
            reference = re.compile(pattern)
        except re.error:
            with pytest.raises(UnsupportedFormat):
                compile_pattern(pattern, "key", "source")
            continue
        found = compile_pattern(pattern, "key", "source")
        for _ in range(8):
            name = "".join(g.choices("ab1.x{-", k=g.randint(0, 7)))
            assert bool(found.match(name)) == bool(reference.match(name)), (pattern, name)
            assert bool(found.search(name)) == bool(reference.search(name)), (pattern, name)
            compared += 1


@pytest.mark.parametrize("pattern", HOSTILE)
def test_no_pattern_takes_exponential_time(pattern: str) -> None:
    start = time.process_time()
    found = compile_pattern(pattern, "key", "source")
    assert not found.match(NAME) and not found.search(NAME)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("compressed-tensors", {"config_groups": {"g": {"targets": ["Linear"]}}, "ignore": [f"re:{HOSTILE[0]}"]}),
        ("compressed-tensors", {"config_groups": {"g": {"targets": [f"re:{HOSTILE[0]}"]}}}),
        ("gptq", {"bits": 4, "group_size": 64, "dynamic": {f"-:{HOSTILE[0]}": {}}}),
        ("auto-round", {"bits": 4, "group_size": 64, "extra_config": {HOSTILE[0]: {"bits": 16}}}),
        ("quark", {"global_quant_config": {}, "exclude": [f"re:{HOSTILE[0]}"]}),
        ("quark", {"global_quant_config": {}, "exclude": ["*e" * 40 + "!"]}),
        ("modelopt", {"quant_algo": "NVFP4", "exclude_modules": ["*e" * 40 + "!"]}),
        ("fp8", {"ignored_layers": ["*e" * 40 + "!"]}),
    ],
)
def test_formats_match_patterns_in_bounded_time(method: str, values: dict[str, object]) -> None:
    registry()[method].scheme(Config(quant=values, method=method), Module(NAME))


@pytest.mark.parametrize(
    "pattern", ["(", "[", "a{2}{3}", "(?i)a", r"(a)\1", "(?<=a)b", r"\bq", r"\x41", "(" * 40 + ")" * 40]
)
def test_unsupported_patterns_are_refused_by_name(pattern: str) -> None:
    with pytest.raises(UnsupportedFormat, match="'ignore' is not a supported regular expression"):
        compile_pattern(pattern, "ignore", "config.json")
