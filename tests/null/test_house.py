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
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import colibri
from colibri import errors
from colibri.testing import tables

PACKAGE = Path(colibri.__file__).parent
ROOT = PACKAGE.parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

# Imports run one way -----------------------------------------------------------------------------------

# A module imports from rows above its own, and from its own package. A name stands for a module or a
# whole package of src/colibri.
ROWS = (
    ("errors",),
    ("dtypes", "stored", "axes", "packing", "activation", "dispatch", "simulation", "kernels", "jit"),
    ("quant", "routing", "tune"),
    ("grammar", "blocks"),
    ("weight", "scales"),
    ("recast", "layout"),
    ("codec", "formats", "problem"),
    ("inputs", "checkpoint"),
    ("backends", "rules", "shapes"),
    ("oracle",),
    ("report",),
    ("layer",),
    ("compiled", "recipe", "parallel"),
    ("push",),
    ("loading",),
    ("integrations", "bench", "evaluate"),
    ("cli",),
    ("testing",),
    ("demo",),
    ("",),  # colibri itself: the public names
)
ROW = {unit: number for number, units in enumerate(ROWS) for unit in units}
# Rows allow these, the design does not.
STRANGERS = {
    "backends": {"formats", "checkpoint", "stored"},
    "kernels": {"errors"},
    "jit": {"kernels"},
    "tune": set(ROW) - {"kernels", "tune", "errors"},
    "formats": {"layout", "activation", "dispatch", "routing", "kernels", "jit", "tune"},
}
# Inside functions only, where two modules need each other: who, whom.
LATE = {
    ("quant", "grammar"),  # a spec prints its name
    ("layer", "compiled"),
    ("layer", "loading"),  # `from_checkpoint` is a method of what it makes
    ("layer", "push"),
}


@lru_cache
def _tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def _unit(module: str) -> str:
    """The unit of the table a dotted name below colibri belongs to."""
    return module.removeprefix("colibri").lstrip(".").partition(".")[0]


def _imports(name: str) -> Iterator[tuple[str, bool]]:
    """(unit, inside a function or for type checkers only) for every import of ours."""

    def visit(node: ast.AST, late: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name} imports relatively"
                named = child.module or ""
                names = [f"colibri.{a.name}" for a in child.names] if named == "colibri" else [named]
            else:
                names = []
            yield from ((_unit(n), late) for n in names if n.partition(".")[0] == "colibri")
            typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from visit(child, late or typing or isinstance(child, ast.FunctionDef))

    return visit(_tree(name), False)


def _home(name: str) -> str:
    first = name.partition("/")[0].removesuffix(".py")
    return "" if first == "__init__" else first


def test_every_module_has_a_row() -> None:
    assert {_home(name) for name in FILES} == set(ROW)


@pytest.mark.parametrize("name", FILES)
def test_imports_run_one_way(name: str) -> None:
    home = _home(name)
    for unit, late in _imports(name):
        if unit == home or (late and (home, unit) in LATE):
            continue
        assert ROW[unit] < ROW[home], f"{name} imports colibri.{unit}, which is not above it"
        assert unit not in STRANGERS.get(home, set()), f"{name} must not know colibri.{unit}"


# What is never done --------------------------------------------------------------------------------------

# Nothing that comes from a file is run, and nothing is attached to or looked up on objects by name.
NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "setattr", "getattr", "hasattr", "delattr", "torch.load"}
NEVER_SAID = ("trust_remote_code", "__setattr__", "weights_only")
NAMED = {"name", "tensor", "module"}  # what variables that hold tensors' names are called
NAMES_DECIDE = {
    "checkpoint/naming.py": "the table of names",
    "checkpoint/save.py": "names of files",
    "bench/run.py": "names of devices",
    "testing/demo.py": "counts tensors for a line of text",
}
ENVIRONMENT = {
    "jit/cache.py": {"COLIBRI_CACHE", "COLIBRI_NO_COMPILE"},
    "demo/package.py": set(),  # where the desktop's standard puts caches
}


@pytest.mark.parametrize("name", FILES)
def test_nothing_dangerous_is_called(name: str) -> None:
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in NEVER_CALLED, f"{name}:{node.lineno} calls {called}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            roots = {a.name.partition(".")[0] for a in node.names} if isinstance(node, ast.Import) else {node.module}
            assert not roots & NEVER_IMPORTED, f"{name}:{node.lineno} imports {roots}"
        if isinstance(node, ast.ExceptHandler):
            everything = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            assert not everything or isinstance(node.body[-1], ast.Raise), f"{name}:{node.lineno} catches everything"
    text = FILES[name].read_text(encoding="utf-8")
    assert not [word for word in NEVER_SAID if word in text], name


@pytest.mark.parametrize("name", FILES)
def test_no_decision_on_the_name_of_a_class(name: str) -> None:
    for node in ast.walk(_tree(name)):
        if isinstance(node, (ast.Compare, ast.Match)):
            text = ast.unparse(node.subject if isinstance(node, ast.Match) else node)
            started = text == "__name__ == '__main__'"
            assert started or not re.search(r"__(class|name|qualname)__", text), f"{name}:{node.lineno}: {text}"


def _words(node: ast.AST) -> bool:
    """A literal with letters in it; separators and wildcards alone decide nothing."""
    held = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return any(re.search("[A-Za-z]", text) for text in held)


def _is_name(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in NAMED) or (isinstance(node, ast.Attribute) and node.attr in NAMED)


@pytest.mark.parametrize("name", [name for name in FILES if name not in NAMES_DECIDE])
def test_no_decision_on_part_of_a_tensors_name(name: str) -> None:
    """`"experts" in name`, `name.endswith(".bias")`: all of that is a row of the naming table."""
    for node in ast.walk(_tree(name)):
        found = False
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            found = isinstance(node.left, ast.Constant) and _words(node.left) and _is_name(node.comparators[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tests = node.func.attr in ("startswith", "endswith")
            found = tests and _is_name(node.func.value) and any(_words(a) for a in node.args)
        assert not found, f"{name}:{node.lineno}: {ast.unparse(node)}"


def _narrows(test: ast.expr) -> bool:
    """`x is not None` and `isinstance(x, ...)`: said for the type checker."""
    if isinstance(test, ast.BoolOp):
        return all(_narrows(value) for value in test.values)
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance"
    return isinstance(test, ast.Compare) and ast.unparse(test).endswith("is not None")


# What these say can only be wrong through a mistake of ours; everywhere else a mistake can be the user's.
OWN_MISTAKES = {
    "axes.py": "strings written in formats, cuts computed by the loader",
    "weight.py": "act-order is folded by the loader before it cuts",
    "checkpoint/raw.py": "buffers made two lines earlier",
    "tune/hopper.py": "our own table",
    "jit/compile.py": "arguments of our own kernels",
    "jit/load.py": "arguments of our own launchers",
    "testing/gguf.py": "a writer for tests",
    "testing/layers.py": "a generator for tests",
    "testing/ptx.py": "an interpreter for tests",
    "testing/weights.py": "a generator for tests",
}


@pytest.mark.parametrize("name", [name for name in FILES if name not in OWN_MISTAKES])
def test_assert_is_for_our_own_mistakes(name: str) -> None:
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Assert):
            assert _narrows(node.test), f"{name}:{node.lineno}: {ast.unparse(node)}"


def test_environment_variables_are_few_and_written_down() -> None:
    """None of them changes a result."""
    used = {n for n in FILES if re.search(r"\bos\.(environ|getenv)\b", FILES[n].read_text(encoding="utf-8"))}
    assert used <= set(ENVIRONMENT)
    said = "\n".join(path.read_text(encoding="utf-8") for path in DOCS)
    for name in FILES:
        found = set(re.findall(r"COLIBRI_[A-Z_]+", FILES[name].read_text(encoding="utf-8")))
        assert found == ENVIRONMENT.get(name, set())
        assert not [variable for variable in found if f"`{variable}`" not in said]


# Values are frozen, and things stay small ----------------------------------------------------------------

CHANGING = {
    "codec.py:_Meter": "sums over chunks",
    "backends/hopper/layout.py:Rerounded": "counts over experts",
    "checkpoint/convert.py:Report": "grows layer by layer",
    "checkpoint/gguf.py:_Reader": "a place in a file",
    "checkpoint/manifest.py:Manifest": "collects layers and problems while it is built",
    "checkpoint/resolve.py:Owned": "collects names while they are read",
    "cli/verify.py:Verdict": "collects findings",
    "testing/checkpoints.py:Generated": "tests damage it on purpose",
}
MOST_LINES, MEDIAN_LINES, MOST_FUNCTION_LINES = 400, 130, 60


def test_values_are_frozen() -> None:
    changing = set()
    for name in FILES:
        for node in ast.walk(_tree(name)):
            if isinstance(node, ast.ClassDef):
                marks = [ast.unparse(d) for d in node.decorator_list]
                if any(mark.startswith("dataclass") and "frozen=True" not in mark for mark in marks):
                    changing.add(f"{name}:{node.name}")
    assert changing == set(CHANGING)


def test_files_and_functions_are_small() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert statistics.median(lengths.values()) <= MEDIAN_LINES
    long = {}
    for name in FILES:
        for node in ast.walk(_tree(name)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                size = node.end_lineno - node.lineno + 1
                if size > MOST_FUNCTION_LINES:
                    long[f"{name}:{node.name}"] = size
    assert not long


@pytest.mark.parametrize("name", FILES)
def test_everything_says_what_it_is_for(name: str) -> None:
    """Modules have a docstring, and public classes that are no variant of another."""
    tree = _tree(name)
    assert ast.get_docstring(tree), f"{name} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            inherited = {ast.unparse(base) for base in node.bases} - {"ABC", "nn.Module"}
            assert inherited or ast.get_docstring(node), f"{name}:{node.name} has no docstring"


# Errors ----------------------------------------------------------------------------------------------------

# Raised where no test here can go.
UNREACHABLE = {"DriverError": "a CUDA driver that fails", "CompileError": "a compiler that refuses our kernels"}


def _error_classes() -> dict[str, str]:
    """Every error of ours and the file that defines it."""
    known, found = {"ColibriError"}, {"ColibriError": "errors.py"}
    for name in ("errors.py", *(n for n in FILES if n != "errors.py")):
        for node in ast.walk(_tree(name)):
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & known:
                known.add(node.name)
                found[node.name] = name
    return found


def test_errors_are_one_closed_tree() -> None:
    """In errors.py; `jit` stands alone and has its own."""
    homes = set(_error_classes().values())
    assert all(home == "errors.py" or home.startswith("jit/") for home in homes), homes


def test_every_error_is_raised_tested_and_explained() -> None:
    made: set[str] = set()
    for name in FILES:
        made |= {ast.unparse(node.func) for node in ast.walk(_tree(name)) if isinstance(node, ast.Call)}
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in sorted(set(_error_classes()) - {"ColibriError"}):
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
before, start = set(sys.modules), time.perf_counter()
import colibri
spent, loaded = time.perf_counter() - start, set(sys.modules) - before
assert not torch.cuda.is_initialized()
print(spent, *sorted({name.partition(".")[0] for name in loaded}))
print(*sorted(name for name in loaded if name.startswith("colibri.")))
"""


def test_importing_is_cheap() -> None:
    """No CUDA, nothing heavy, and almost nothing of our own until a name is used."""
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    spent, *roots = first.split()
    assert not set(roots) & HEAVY
    assert set(second.split()) <= {"colibri.errors"}
    assert float(spent) < 0.2


def test_public_names_are_there() -> None:
    for name in colibri.__all__:
        assert vars(colibri).get(name) is not None or colibri.__getattr__(name) is not None
    assert set(colibri.__all__) <= set(dir(colibri))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        colibri.nothing  # noqa: B018


# What is said is true ------------------------------------------------------------------------------------------


COMING = {"kernels"}  # a command that hints speak of before it is there


def test_commands_that_are_spoken_of_exist() -> None:
    from colibri.cli.main import app

    commands = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    said = {path.name: path.read_text(encoding="utf-8") for path in (*DOCS, *FILES.values())}
    for name, text in said.items():
        spoken = set(re.findall(r"[`$] ?colibri ([a-z]+)\b", text))
        assert spoken <= commands | COMING, f"{name} speaks of {spoken - commands}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_that_are_spoken_of_exist(path: Path) -> None:
    """Every `src/...`, `tests/...`, `docs/...` and every module path in the documents."""
    text = path.read_text(encoding="utf-8")
    for spoken in re.findall(r"`((?:src|tests|docs|benchmarks|scripts)/[\w./-]+)`", text):
        assert (ROOT / spoken).exists(), f"{path.name} speaks of {spoken}"
    for spoken in re.findall(r"`(?!src/|tests/|docs/|benchmarks/|scripts/)(\w+(?:/\w+)*\.py)`", text):
        assert spoken in FILES, f"{path.name} speaks of {spoken}"
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for spoken in re.findall(r"`(test_\w+)`", text):
        assert spoken in _names("tests"), f"{path.name} speaks of {spoken}"
    for spoken in re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.\w+)*`", text):
        assert spoken in _names("src") or spoken in FOREIGN, f"{path.name} speaks of {spoken}"
    for owner, member in re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)`", text):
        assert member in _names("src"), f"{path.name} speaks of {owner}.{member}"


FOREIGN = {"AssertionError"}


@lru_cache
def _names(folder: str) -> frozenset[str]:
    """Every function, class, field and variable defined below a folder."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(found)


def test_the_page_of_formats_is_up_to_date() -> None:
    written = (ROOT / tables.PAGE).read_text(encoding="utf-8")
    assert written == tables.page(), "run `python -m colibri.testing.tables > docs/formats.md`"


def test_every_feature_has_its_row() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-D]\d+) \|", text, re.MULTILINE)
    wanted = [f"{letter}{i}" for letter, count in (("A", 15), ("C", 11), ("D", 24)) for i in range(1, count + 1)]
    assert rows == wanted
