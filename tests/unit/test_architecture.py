"""Rules of the house, read off the source: what imports what, what is never called, how big things get.

Each rule is a table or a number below; where the code has a reason to step aside, the reason stands
beside its name.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

import lancebill
from lancebill import errors

PACKAGE = Path(lancebill.__file__).parent
ROOT = PACKAGE.parent.parent
Node = TypeVar("Node", bound=ast.AST)
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

# Imports run one way -----------------------------------------------------------------------------------

# What a room (a package below lancebill) may import besides itself and `errors`. `formats` and `backends` never meet;
# `jit` knows nothing of experts.
BELOW = {
    "numbers": set[str](),
    "jit": set[str](),
    "moe": {"numbers"},
    "formats": {"numbers"},
    "checkpoint": {"numbers", "moe", "formats"},
    "backends": {"numbers", "moe", "jit"},
    "layer": {"numbers", "moe", "formats", "checkpoint", "backends"},
    "parallel": {"moe", "layer"},
    "evaluate": set[str](),
    "integrations": {"numbers", "moe", "formats", "checkpoint", "backends", "layer"},
    "bench": {"numbers", "moe", "jit", "backends", "layer"},
}
TOP = {"cli", "testing", "demo"}  # may import anything, but nothing below imports them


@cache
def _text(name: str) -> str:
    return FILES[name].read_text(encoding="utf-8")


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(_text(name))


def _module(dotted: str) -> str | None:
    """The file a dotted name below lancebill lives in; None for the package's own public names."""
    words = dotted.split(".")[1:]
    while words:
        for name in ("/".join(words) + ".py", "/".join(words) + "/__init__.py"):
            if name in FILES:
                return name
        words.pop()
    return None


@cache
def _imports(name: str) -> frozenset[str]:
    """Every file of ours that a file imports: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {_module(dotted) for dotted in names if dotted.partition(".")[0] == "lancebill"}
    return frozenset(found - {None, name})


def _room(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""


def test_imports_run_one_way() -> None:
    wrong = []
    for name in FILES:
        for imported in _imports(name):
            home, other = _room(name), _room(imported)
            if home in BELOW and other != home and other in TOP.union(BELOW) - BELOW[home]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


# What is never done --------------------------------------------------------------------------------------

# Nothing that comes from a file is run, and nothing is attached to or looked up on objects by name.
NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "setattr", "getattr", "hasattr", "delattr", "torch.load"}
NEVER_SAID = ("trust_remote_code", "__setattr__", "weights_only")
NAMED = {"name", "tensor", "module"}  # what variables that hold tensors' names are called
NAMES_DECIDE = {
    "checkpoint/resolve/naming.py": "the table of names",
    "checkpoint/write/save.py": "names of files",
    "bench/run.py": "names of devices",
    "testing/demo.py": "counts tensors for a line of text",
}
ENVIRONMENT = {
    "jit/cache.py": {"LANCEBILL_CACHE", "LANCEBILL_NO_COMPILE"},
    "backends/cpu/native/__init__.py": {"LANCEBILL_NATIVE"},
    "backends/cpu/native/build.py": set(),  # CXX
    "bench/peers_cpu.py": {"LANCEBILL_VLLM_OPS"},
    "demo/package.py": set(),  # where the desktop's standard puts caches
}


def _nodes(kind: type[Node], but: Container[str] = ()) -> Iterator[tuple[str, Node]]:
    """Every node of a kind in all files `but` some, with its place."""
    for name in FILES:
        if name not in but:
            for node in ast.walk(_tree(name)):
                if isinstance(node, kind):
                    yield f"{name}:{vars(node).get('lineno')}", node


def test_nothing_dangerous_is_called() -> None:
    assert not [place for place, node in _nodes(ast.Call) if ast.unparse(node.func) in NEVER_CALLED]
    imported = [(place, a.name) for place, node in _nodes(ast.Import) for a in node.names]
    imported += [(place, node.module or "") for place, node in _nodes(ast.ImportFrom)]
    assert not [place for place, module in imported if module.partition(".")[0] in NEVER_IMPORTED]
    assert not [(name, word) for name in FILES for word in NEVER_SAID if word in _text(name)]


def test_nothing_is_caught_and_forgotten() -> None:
    """Whoever catches everything raises again."""
    for place, node in _nodes(ast.ExceptHandler):
        everything = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        assert not everything or isinstance(node.body[-1], ast.Raise), place


def test_no_decision_on_the_name_of_a_class() -> None:
    said = [(place, ast.unparse(node)) for place, node in _nodes(ast.Compare)]
    said += [(place, ast.unparse(node.subject)) for place, node in _nodes(ast.Match)]
    decides = re.compile(r"__(class|name|qualname)__")
    assert not [(p, text) for p, text in said if decides.search(text) and text != "__name__ == '__main__'"]


def _words(node: ast.AST) -> bool:
    """A literal with letters in it; separators and wildcards alone decide nothing."""
    held = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return any(re.search("[A-Za-z]", text) for text in held)


def _is_name(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in NAMED) or (isinstance(node, ast.Attribute) and node.attr in NAMED)


def test_no_decision_on_part_of_a_tensors_name() -> None:
    """`"experts" in name`, `name.endswith(".bias")`: all of that is a row of the naming table."""
    found = []
    for place, node in _nodes(ast.Compare, but=NAMES_DECIDE):
        held = isinstance(node.ops[0], (ast.In, ast.NotIn)) and isinstance(node.left, ast.Constant)
        if held and _words(node.left) and _is_name(node.comparators[0]):
            found.append((place, ast.unparse(node)))
    for place, call in _nodes(ast.Call, but=NAMES_DECIDE):
        tests = isinstance(call.func, ast.Attribute) and call.func.attr in ("startswith", "endswith")
        if tests and _is_name(vars(call.func)["value"]) and any(_words(argument) for argument in call.args):
            found.append((place, ast.unparse(call)))
    assert not found


def _narrows(test: ast.expr) -> bool:
    """`x is not None` and `isinstance(x, ...)`: said for the type checker."""
    if isinstance(test, ast.BoolOp):
        return all(_narrows(value) for value in test.values)
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance"
    return isinstance(test, ast.Compare) and ast.unparse(test).endswith("is not None")


# What these say can only be wrong through a mistake of ours; everywhere else a mistake can be the user's.
OWN_MISTAKES = {
    "formats/axes.py": "strings written in formats, cuts computed by the loader",
    "numbers/weight.py": "act-order is folded by the loader before it cuts",
    "checkpoint/read/file_bytes.py": "buffers made two lines earlier",
    "checkpoint/load/load_experts.py": "what was loaded is what was planned",
    "backends/hopper/tuning/policy.py": "our own table",
    "jit/compile.py": "arguments of our own kernels",
    "jit/load.py": "arguments of our own launchers",
    "testing/gguf.py": "a writer for tests",
    "testing/layers.py": "a generator for tests",
    "testing/ptx.py": "an interpreter for tests",
    "testing/weights.py": "a generator for tests",
}


def test_assert_is_for_our_own_mistakes() -> None:
    assert not [place for place, node in _nodes(ast.Assert, but=OWN_MISTAKES) if not _narrows(node.test)]


def test_environment_variables_are_few_and_written_down() -> None:
    """The most that one of them changes is which kernels run."""
    assert {name for name in FILES if re.search(r"\bos\.(environ|getenv)\b", _text(name))} <= set(ENVIRONMENT)
    known = {variable for variables in ENVIRONMENT.values() for variable in variables}
    assert {word for name in FILES for word in re.findall(r"LANCEBILL_[A-Z_]+", _text(name))} <= known
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [variable for variable in known if f"`{variable}`" not in page]


# Values are frozen, and things stay small ----------------------------------------------------------------

CHANGING = {
    "numbers/codec.py:_Meter": "sums over chunks",
    "backends/hopper/layout.py:Rerounded": "counts over experts",
    "checkpoint/write/convert.py:Report": "grows layer by layer",
    "checkpoint/read/gguf.py:_Reader": "a place in a file",
    "checkpoint/resolve/manifest.py:Manifest": "collects layers and problems while it is built",
    "checkpoint/resolve/resolve_layer.py:Owned": "collects names while they are read",
    "cli/verify.py:Verdict": "collects findings",
    "evaluate/run.py:Result": "filled measure by measure",
    "testing/checkpoints.py:Generated": "tests damage it on purpose",
}
MOST_LINES, MEDIAN_LINES, MOST_FUNCTION_LINES = 400, 130, 60


def test_values_are_frozen() -> None:
    changing = set()
    for place, node in _nodes(ast.ClassDef):
        marks = [ast.unparse(d) for d in node.decorator_list]
        if any(mark.startswith("dataclass") and "frozen=True" not in mark for mark in marks):
            changing.add(f"{place.partition(':')[0]}:{node.name}")
    assert changing <= set(CHANGING)


def test_files_and_functions_are_small() -> None:
    lengths = {name: len(_text(name).splitlines()) for name in FILES}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert statistics.median(lengths.values()) <= MEDIAN_LINES
    sizes = {place: (node.end_lineno or 0) - node.lineno + 1 for place, node in _nodes(ast.FunctionDef)}
    assert not {place: size for place, size in sizes.items() if size > MOST_FUNCTION_LINES}


def test_everything_says_what_it_is_for() -> None:
    """Modules have a docstring, and public classes that are no variant of another."""
    assert not [name for name in FILES if not ast.get_docstring(_tree(name))]
    silent = []
    for place, node in _nodes(ast.ClassDef):
        inherited = {ast.unparse(base) for base in node.bases} - {"ABC", "nn.Module"}
        if not (inherited or node.name.startswith("_") or ast.get_docstring(node)):
            silent.append(f"{place} {node.name}")
    assert not silent


# Errors ----------------------------------------------------------------------------------------------------

# Raised where no test here can go.
UNREACHABLE = {"DriverError": "a CUDA driver that fails", "CompileError": "a compiler that refuses our kernels"}


def _error_classes() -> dict[str, str]:
    """Every error of ours and the file that defines it."""
    known, found = {"LancebillError"}, {"LancebillError": "errors.py"}
    for name in ("errors.py", *(n for n in FILES if n != "errors.py")):
        for node in ast.walk(_tree(name)):
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & known:
                known.add(node.name)
                found[node.name] = name
    return found


def test_errors_are_one_closed_tree() -> None:
    assert set(_error_classes().values()) == {"errors.py"}


def test_every_error_is_raised_tested_and_explained() -> None:
    made = {ast.unparse(node.func) for _, node in _nodes(ast.Call)}
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in sorted(set(_error_classes()) - {"LancebillError"}):
        assert f"`{name}`" in page, f"docs/errors.md does not explain {name}"
        assert name in made, f"nothing raises {name}"
        assert name in UNREACHABLE or re.search(rf"\b{name}\b", tests), f"no test knows {name}"


def test_an_error_says_the_same_five_facts() -> None:
    error = errors.WrongShape("'scale' in t", where="layer 3", expected=[1, 2], got=[2, 1], hint="transpose it")
    assert str(error) == "layer 3: 'scale' in t; expected [1, 2]; got [2, 1] (transpose it)"
    outer = error.within("model.safetensors")
    assert isinstance(outer, errors.WrongShape)
    assert outer.facts() == {**error.facts(), "where": "model.safetensors, layer 3"}
    many = errors.CheckpointProblems([error] * 21, where="here")
    assert "21 problems" in str(many) and "... and 1 more" in str(many)
    assert many.within("there").where == "there, here"


# Public names ------------------------------------------------------------------------------------------------

HEAVY = {"triton", "transformers", "gguf", "numpy", "compressed_tensors", "typer", "rich", "cuda", "vllm"}
LEAN = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import lancebill
spent, loaded = time.process_time() - start, set(sys.modules) - before
assert not torch.cuda.is_initialized()
print(spent, *sorted({name.partition(".")[0] for name in loaded}))
print(*sorted(name for name in loaded if name.startswith("lancebill.")))
"""


def test_importing_is_cheap() -> None:
    """No CUDA, nothing heavy, and almost nothing of our own until a name is used."""
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    spent, *roots = first.split()
    assert not set(roots) & HEAVY
    assert set(second.split()) <= {"lancebill.errors"}
    assert float(spent) < 0.2


def test_public_names_are_there() -> None:
    for name in lancebill.__all__:
        assert vars(lancebill).get(name) is not None or lancebill.__getattr__(name) is not None
    assert set(lancebill.__all__) <= set(dir(lancebill))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lancebill.nothing  # noqa: B018
