"""Rules of the code base, checked on the source: imports, forbidden calls, sizes, unique names.

Each rule is a table or a number below. Every exception is listed with its reason, and a table that lists an
exception which no longer exists fails too.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Collection, Container, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import lancebill
from lancebill import formats
from lancebill.checkpoint.resolve import naming

PACKAGE = Path(lancebill.__file__).parent
ROOT = PACKAGE.parent.parent
Node = TypeVar("Node", bound=ast.AST)
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
FACADE = "__init__.py"  # lancebill/__init__.py names the public classes, and imports them when they are first used


@cache
def _text(name: str) -> str:
    return FILES[name].read_text(encoding="utf-8")


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(_text(name))


@cache
def _all_nodes(name: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(name)))


def _nodes(kind: type[Node], skip: Container[str] = ()) -> Iterator[tuple[str, Node]]:
    """Every node of a kind, with its file and line; `skip` names files to leave out."""
    for name in FILES:
        if name not in skip:
            for node in _all_nodes(name):
                if isinstance(node, kind):
                    yield f"{name}:{getattr(node, 'lineno', 0)}", node


def _file(place: str) -> str:
    return place.partition(":")[0]


# Imports -------------------------------------------------------------------------------------------------

# What each room (a package below lancebill) may import besides itself and `errors`. `formats` and `backends` do not
# import each other; `jit` does not know about experts.
BELOW = {
    "native": set[str](),
    "numbers": {"native"},
    "jit": set[str](),
    "moe": {"numbers"},
    "formats": {"numbers"},
    "checkpoint": {"numbers", "moe", "formats"},
    "backends": {"native", "numbers", "moe", "jit"},
    "split": {"native", "numbers", "moe", "jit", "backends"},
    "layer": {"numbers", "moe", "formats", "checkpoint", "backends", "split"},
    "parallel": {"moe", "layer"},
    "evaluate": set[str](),
    "serving": set[str](),
    "integrations": {"native", "numbers", "moe", "formats", "checkpoint", "backends", "split", "layer"},
    "bench": {"numbers", "moe", "formats", "jit", "backends", "split", "layer"},
}
TOP = {"cli", "testing", "demo"}  # may import every room; no other room imports them
CHECKPOINT_ORDER = ("", "read", "resolve", "load", "write")  # each imports only those before it; "" is checkpoint/*.py
MOST_LOOSE_MODULES = 3


def _module(dotted: str) -> str | None:
    """The file that defines a dotted name below lancebill; None for names of lancebill/__init__.py."""
    words = dotted.split(".")[1:]
    while words:
        for name in ("/".join(words) + ".py", "/".join(words) + "/__init__.py"):
            if name in FILES:
                return name
        words.pop()
    return None


@cache
def _imports(name: str) -> frozenset[str]:
    """The files of this package that a file imports: at the top, in functions and under TYPE_CHECKING."""
    imported = set()
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        imported |= {_module(dotted) for dotted in names if dotted.partition(".")[0] == "lancebill"}
    return frozenset(imported - {None, name})


def _room(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""


def test_rooms_import_only_rooms_below_them() -> None:
    assert {_room(name) for name in FILES} == {"", *BELOW, *TOP}, "BELOW and TOP must list every room"
    wrong = []
    for name in FILES:
        for imported in _imports(name):
            home, other = _room(name), _room(imported)
            if home in BELOW and other and other != home and other not in BELOW[home]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_checkpoint_rooms_import_in_order() -> None:
    """Reading does not know about loading, and nothing knows about writing."""

    def rank(name: str) -> int:
        path = name.split("/")[1:]
        return CHECKPOINT_ORDER.index(path[0] if len(path) > 1 else "")

    inside = [name for name in FILES if _room(name) == "checkpoint"]
    pairs = [(name, other) for name in inside for other in _imports(name) if other in inside]
    assert not [f"{name} imports {other}" for name, other in pairs if rank(other) > rank(name)]


def test_no_import_circles() -> None:
    """No group of modules imports each other, not even inside functions or for type checkers."""
    graph = {name: sorted(_imports(name) - {FACADE}) for name in FILES if name != FACADE}
    assert not [sorted(group) for group in _connected(graph) if len(group) > 1]


def _connected(graph: dict[str, list[str]]) -> list[list[str]]:
    """The strongly connected components of a graph (Kosaraju)."""
    order: list[str] = []
    reverse: dict[str, list[str]] = {name: [] for name in graph}
    for name, targets in graph.items():
        for target in targets:
            reverse[target].append(name)

    def visit(start: str, edges: dict[str, list[str]], seen: set[str], done: list[str]) -> None:
        if start not in seen:
            seen.add(start)
            for target in edges[start]:
                visit(target, edges, seen, done)
            done.append(start)

    seen: set[str] = set()
    for name in graph:
        visit(name, graph, seen, order)
    groups: list[list[str]] = []
    seen = set()
    for name in reversed(order):
        groups.append([])
        visit(name, reverse, seen, groups[-1])
    return groups


def test_circles_are_found() -> None:
    groups = _connected({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a", "c"]})
    assert sorted(sorted(group) for group in groups if group) == [["a"], ["b", "c"], ["d"]]


def test_few_loose_modules() -> None:
    """Code belongs in rooms: only a few modules are directly in the package."""
    loose = {name for name in FILES if "/" not in name} - {"__init__.py", "__main__.py"}
    assert len(loose) <= MOST_LOOSE_MODULES, loose


# Forbidden calls -----------------------------------------------------------------------------------------

# Files are data: nothing from a file is executed.
NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "torch.load"}
NEVER_WRITTEN = ("weights_only",)

# transformers' loaders can run code that a checkpoint names: one module calls them, and says no in every call.
LOADERS = "integrations/transformers/loaders.py"
LOADING = {"from_pretrained", "from_config", "_from_config", "for_model", "pipeline", "get_class_from_dynamic_module"}
LOADING_NAMES = re.compile(r"Auto[A-Z]\w*|pipelines?|dynamic_module_utils|get_class_\w+")

# Attributes are declared and accessed with a dot. Access by name hides a wrong name from the type checker, so nothing
# adds or removes attributes of our objects, and only these files look attributes up by name.
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "vars", "__setattr__", "__delattr__", "__getattribute__"}
LOOKUPS: dict[str, tuple[set[str], str]] = {
    "__init__.py": ({"getattr"}, "public names, imported when they are first used"),
    "backends/registry.py": ({"getattr"}, "BACKEND of a plugin module"),
    "formats/__init__.py": ({"getattr"}, "FORMAT of a plugin module"),
    "backends/call_signature.py": ({"getattr"}, "TensorGuards is private in torch and may be missing"),
    "bench/peers_ggml.py": ({"hasattr"}, "functions of OpenMP that a library may have"),
    "jit/graph.py": ({"hasattr"}, "functions that older CUDA drivers lack"),
    "jit/compile.py": ({"getattr"}, "a kernel, by the module and function name of its source"),
    "backends/gpu/kernels/gluon_names.py": ({"hasattr"}, "names that differ between Triton versions"),
    "integrations/transformers/experts_interface.py": ({"getattr"}, "attributes that only some model families set"),
    "integrations/transformers/fused_modules.py": ({"getattr"}, "an attribute that only some norms have"),
    "integrations/transformers/step_modules.py": ({"vars"}, "attributes that only some model families set"),
    "integrations/transformers/loaders.py": ({"vars"}, "finds the configs in a config"),
    "integrations/transformers/packed_experts.py": ({"getattr"}, "attributes that only some model families set"),
    "integrations/transformers/pretrained.py": ({"hasattr", "delattr"}, "removes keys of a transformers config"),
    "integrations/vllm/registration.py": ({"vars", "setattr", "delattr"}, "puts replaced functions of vLLM back"),
    "serving/whole_prompts.py": ({"vars"}, "attributes that only some rotary modules have, named by kind of layer"),
}

ENVIRONMENT = {
    "jit/cache.py": {"LANCEBILL_CACHE", "LANCEBILL_NO_COMPILE"},
    "moe/device.py": {"LANCEBILL_GPU"},
    "native/load.py": {"LANCEBILL_NATIVE"},
    "native/build.py": set(),  # CXX
    "bench/peers_cpu.py": {"LANCEBILL_VLLM_OPS"},
    "bench/peers_ggml.py": {"LANCEBILL_GGML"},
    "demo/package.py": set(),  # XDG_CACHE_HOME
    "integrations/vllm/plugin.py": {"LANCEBILL_VLLM"},
}


# Private names of torch, which its next version may not have.
PRIVATE_TORCH = {
    "backends/call_signature.py": "without them, calls are compared in full",
    "backends/gpu/linear_call.py": "without the first, torch.empty; the others as in executor.py",
    "layer/module_hooks.py": "without them, every module counts as one with hooks",
    "backends/gpu/executor.py": "the device and stream of a call: public functions make objects of them",
    "backends/gpu/route_program.py": "likewise",
    "backends/gpu/decode_attention.py": "likewise",
    "split/executor.py": "likewise",
    "split/gpu_queues.py": "likewise",
    "checkpoint/load/staging.py": "one launch for many copies",
    "integrations/transformers/decode_cache.py": "one launch for many fills",
    "integrations/transformers/pretrained.py": "what this CPU computes without conversion",
    "integrations/transformers/stored_matrix.py": "arguments of an operator, which may be lists of tensors",
    "integrations/vllm/other_weights.py": "a subclass whose results are plain tensors",
    "bench/ceilings.py": "operators without a public name",
    "bench/peers.py": "likewise",
    "bench/peers_cpu.py": "likewise",
    "bench/sustained.py": "likewise",
    "bench/timing.py": "likewise",
    "testing/recorders.py": "every operator of a call",
}


def test_private_names_of_torch_are_few() -> None:
    read = [(place, ast.unparse(node)) for place, node in _nodes(ast.Attribute)]
    imported = [(place, f"{node.module}.{a.name}") for place, node in _nodes(ast.ImportFrom) for a in node.names]
    private = {_file(place) for place, name in read + imported if re.match(r"torch\.([\w.]+\.)?_[a-zA-Z]", name)}
    assert private == set(PRIVATE_TORCH)


# Functions that make tensors on torch's default device, and of its default dtype, unless they are told others. Engines
# change both while they build models.
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
OF_INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}
OF_THE_DEFAULT_DTYPE = {
    "integrations/transformers/filled_constants.py": "a constant of the model, of the dtype it would have",
    "split/gpu_queues.py": "a view of a tensor",
}
GENERATORS = "testing/"  # for tests: in processes and contexts of their own


def test_tensors_are_made_on_a_named_device_and_of_a_named_dtype() -> None:
    unnamed: dict[str, set[str]] = {"device": set(), "dtype": set()}
    for place, node in _nodes(ast.Call):
        function = ast.unparse(node.func).removeprefix("torch.")
        if f"torch.{function}" != ast.unparse(node.func) or function not in FACTORIES or place.startswith(GENERATORS):
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for what in {"device"} if function in OF_INTEGERS else {"device", "dtype"}:
            if None not in given and (what not in given or re.search(r"\bNone\b", given[what])):
                unnamed[what].add(place)
    assert not unnamed["device"]
    assert {_file(place) for place in unnamed["dtype"]} == set(OF_THE_DEFAULT_DTYPE)


# Functions of torch.cuda that are about the current GPU or its current stream unless they are told another.
OF_THE_CURRENT_GPU = {
    "Stream", "current_device", "current_stream", "default_stream", "get_device_capability", "get_device_name",
    "get_device_properties", "is_current_stream_capturing", "max_memory_allocated", "max_memory_reserved",
    "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats", "reset_peak_memory_stats", "synchronize",
}  # fmt: skip
ASKS_FOR_THE_CURRENT_GPU = {
    "moe/device.py": "what torch means by a device without a number",
    "split/large_batches.py": "a capture has no device; the executor has made the layer's GPU the current one",
}


def test_gpus_are_named() -> None:
    """A layer may be on another GPU than the current one."""
    calls = [(place, node) for place, node in _nodes(ast.Call) if not node.args and not node.keywords]
    asks = {_file(place) for place, node in calls if re.fullmatch(
        rf"torch\.cuda\.({'|'.join(sorted(OF_THE_CURRENT_GPU))})", ast.unparse(node.func)
    )}  # fmt: skip
    assert asks == set(ASKS_FOR_THE_CURRENT_GPU)


# Where addresses of tensors leave torch: two modules that look at the device. Elsewhere they are compared, or the
# devices of the call were compared a few lines earlier, at less cost.
ADDRESSES = {
    "jit/address.py": "for kernels of a GPU",
    "native/address.py": "for the C++ libraries",
    "backends/base.py": "compared in every call: whether weights are where they were",
    "backends/cpu/decode_program.py": "likewise",
    "moe/router_tensors.py": "likewise",
    "split/host_calls.py": "likewise, and keys of what is kept",
    "split/moves.py": "compared",
    "split/large_batches.py": "compared",
    "backends/gpu/workspace.py": "compared",
    "backends/gpu/executor.py": "keys of what is kept",
    "backends/gpu/call.py": "alignment",
    "backends/gpu/pack_on_gpu.py": "alignment",
    "backends/cpu/unpack_on_gpu.py": "alignment",
    "backends/gpu/program.py": "fast calls: the signature has the device",
    "backends/gpu/linear_call.py": "likewise",
    "backends/gpu/route_program.py": "likewise",
    "backends/cpu/executor.py": "likewise",
    "backends/cpu/route.py": "likewise",
    "serving/ragged.py": "keys and values that it allocates",
    "checkpoint/load/staging.py": "places in a buffer of its own",
    "checkpoint/load/projections.py": "compared",
    "checkpoint/read/file_bytes.py": "bytes of a tensor of the CPU, which it asserts",
    "integrations/transformers/experts_interface.py": "keys of what is kept",
    "integrations/transformers/graphed_generation.py": "compared",
    "layer/compiled_op.py": "keys by which graphs find layers",
    "testing/recorders.py": "compared",
    "bench/peers_ggml.py": "other engines' calls",
    "bench/peers_kt.py": "likewise",
}


def test_addresses_of_tensors_are_taken_where_the_device_is_seen() -> None:
    taken = {_file(place) for place, node in _nodes(ast.Attribute) if node.attr == "data_ptr"}
    assert taken == set(ADDRESSES)


def test_nothing_from_a_file_is_executed() -> None:
    assert not [place for place, node in _nodes(ast.Call) if ast.unparse(node.func) in NEVER_CALLED]
    imported = [(place, a.name) for place, node in _nodes(ast.Import) for a in node.names]
    imported += [(place, node.module or "") for place, node in _nodes(ast.ImportFrom)]
    assert not [place for place, module in imported if module.partition(".")[0] in NEVER_IMPORTED]
    assert not [(name, word) for name in FILES for word in NEVER_WRITTEN if word in _text(name)]


def _loading(tree: ast.AST) -> Iterator[ast.AST]:
    """Where a file loads something with transformers: `x.from_pretrained`, called or not, and imports of loaders."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LOADING:
            yield node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            words = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            if any(LOADING_NAMES.fullmatch(word) for word in words):
                yield node


def _says_no(call: ast.Call) -> bool:
    return any(word.arg == "trust_remote_code" and ast.unparse(word.value) == "False" for word in call.keywords)


def test_one_module_calls_transformers_loaders() -> None:
    assert not [f"{name}: {ast.unparse(node)}" for name in FILES if name != LOADERS for node in _loading(_tree(name))]
    assert [name for name in FILES if "trust_remote_code" in _text(name)] == [LOADERS]
    calls = {id(node.func): node for node in _all_nodes(LOADERS) if isinstance(node, ast.Call)}
    loading = [node for node in _loading(_tree(LOADERS)) if isinstance(node, ast.Attribute)]
    silent = [ast.unparse(calls[id(node)]) for node in loading if not _says_no(calls[id(node)])]
    assert len(loading) >= 5 and silent == ["kind.from_pretrained(folder)"]  # of a GenerationConfig: values alone


def test_calls_of_loaders_are_found() -> None:
    for text in (
        "AutoConfig.from_pretrained(path)", "load = kind.from_pretrained", "transformers.pipeline('text-generation')",
        "from transformers import AutoTokenizer as T", "from transformers.dynamic_module_utils import resolve",
        "from transformers.pipelines import pipeline",
    ):  # fmt: skip
        assert list(_loading(ast.parse(text))), text
    for text in ("from_pretrained(path)", "tokenizer.save_pretrained(path)", "from transformers import CONFIG_MAPPING"):
        assert not list(_loading(ast.parse(text))), text


def test_attributes_are_not_accessed_by_name() -> None:
    used: dict[str, set[str]] = {}
    for place, call in _nodes(ast.Call):
        function = ast.unparse(call.func).rpartition(".")[2]
        if function in BY_NAME:
            used.setdefault(_file(place), set()).add(function)
    assert used == {name: allowed for name, (allowed, _) in LOOKUPS.items()}


def test_dict_of_an_object_is_only_read_to_copy_it() -> None:
    """`x.__dict__` is `vars(x)`: only `__getstate__` and `__setstate__` use it."""
    state = [node for _, node in _nodes(ast.FunctionDef) if node.name in ("__getstate__", "__setstate__")]
    allowed = {id(inner) for function in state for inner in ast.walk(function)}
    used = [(place, node) for place, node in _nodes(ast.Attribute) if node.attr == "__dict__"]
    assert not [place for place, node in used if id(node) not in allowed]


# An engine that loads us must go on without us, whatever fails.
SWALLOWS = {"integrations/vllm/plugin.py"}


def test_no_exception_is_swallowed() -> None:
    """A handler for every exception ends with raise."""
    for place, node in _nodes(ast.ExceptHandler, skip=SWALLOWS):
        catches_all = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        assert not catches_all or isinstance(node.body[-1], ast.Raise), place


def test_no_decision_on_the_name_of_a_class() -> None:
    conditions = [(place, ast.unparse(node)) for place, node in _nodes(ast.Compare)]
    conditions += [(place, ast.unparse(node.subject)) for place, node in _nodes(ast.Match)]
    class_name = re.compile(r"__(class|name|qualname)__")
    assert not [(p, text) for p, text in conditions if class_name.search(text) and text != "__name__ == '__main__'"]


def test_environment_variables_are_few_and_documented() -> None:
    """An environment variable may select kernels and folders, and nothing else."""
    assert {name for name in FILES if re.search(r"\bos\.(environ|getenv)\b", _text(name))} == set(ENVIRONMENT)
    allowed = {variable for variables in ENVIRONMENT.values() for variable in variables}
    assert {word for name in FILES for word in re.findall(r"LANCEBILL_[A-Z_]+", _text(name))} <= allowed
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [variable for variable in allowed if f"`{variable}`" not in page]


# Names of tensors ----------------------------------------------------------------------------------------

# Which tensor is what is decided by the naming table and by the suffixes that formats declare. No other code tests or
# cuts a tensor's name with a literal, whatever the variable or the constant is called.
STRING_TESTS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "find", "index"}
STRING_TESTS |= {"rfind", "rindex", "split", "rsplit", "replace", "count"}
NAMES_DECIDE = {
    "checkpoint/resolve/naming.py": "the naming table",
    "checkpoint/write/plan_output.py": "a written config lists its unquantised modules by name",
    "demo/generated.py": "adds up the bytes of the experts of a model it wrote",
    "demo/model.py": "renames the tensors of one known file",
    "formats/bitsandbytes.py": "tells its own suffixes from those of unquantised modules",
    "integrations/transformers/gguf_models.py": "every module's tensor in a GGUF file is `.weight`",
}


@cache
def _vocabulary() -> frozenset[str]:
    """Parts of tensor names: with a dot as formats declare suffixes, and the modules of the naming table."""
    examples = [example for fmt in formats.registry().values() for example in fmt.examples()]
    suffixes = {suffix for example in examples for part in example.scheme.parts for suffix in part.suffix}
    forms = [form for row in naming.TABLE for form in row.forms]
    spelled = " ".join(f"{form.home}.{name}" for form in forms for name in form.names.values())
    words = {word for word in re.split(r"[.\s]", spelled) if re.fullmatch(r"[a-z]\w*_\w+|experts|mlp|ffn", word)}
    return frozenset({suffix for suffix in suffixes if suffix.startswith(".")} | words | {".weight", ".bias"})


def _spells_a_tensor(text: str) -> bool:
    words = {word for word in text.split(".") if word}
    return bool(words & _vocabulary()) or any(f".{word}" in _vocabulary() and f".{word}" in text for word in words)


def _strings(node: ast.AST, constants: dict[str, set[str]]) -> set[str]:
    """The literals in an expression, also those behind names that the file assigns."""
    literals = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            literals.add(inner.value)
        elif isinstance(inner, ast.Name):
            literals |= constants.get(inner.id, set())
    return literals


@cache
def _constants(name: str) -> dict[str, set[str]]:
    """Every name that a file assigns a string literal, or a tuple of them, to."""
    constants: dict[str, set[str]] = {}
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.Tuple)):
            for target in node.targets:
                for word in re.findall(r"\w+", ast.unparse(target)):
                    constants.setdefault(word, set()).update(_strings(node.value, {}))
    return constants


def _name_tests(name: str, tree: ast.AST, constants: dict[str, set[str]]) -> Iterator[str]:
    """Places where a string is tested against, or cut at, a part of a tensor's name."""
    for node in ast.walk(tree):
        tested: Collection[ast.AST] = ()
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            literal = isinstance(node.left, (ast.Constant, ast.JoinedStr, ast.Name))
            tested = [node.left] if literal and any("." in text for text in _strings(node.left, constants)) else ()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STRING_TESTS:
            tested = node.args
        if any(_spells_a_tensor(text) for part in tested for text in _strings(part, constants)):
            yield f"{name}:{getattr(node, 'lineno', 0)} {ast.unparse(node)}"


def test_tensor_names_are_not_taken_apart() -> None:
    """`".experts." in name`, `name.endswith(".bias")`: that is a row of the naming table or a suffix of a format."""
    places = {name: list(_name_tests(name, _tree(name), _constants(name))) for name in FILES}
    assert not [place for name, hits in places.items() if name not in NAMES_DECIDE for place in hits]
    assert not [name for name in NAMES_DECIDE if not places[name] and name != "checkpoint/resolve/naming.py"]


def test_constants_do_not_hide_tensor_names() -> None:
    for text in ('name.endswith(".weight")', '".experts." in name', 'x = ".qweight"; y.removesuffix(x)'):
        tree = ast.parse(text)
        assert list(_name_tests("example", tree, {"x": {".qweight"}})), text
    for text in ('name.endswith(".json")', '"bias" in sources', 'text.split(",")', 'file.startswith(".")'):
        assert not list(_name_tests("example", ast.parse(text), {})), text


# Asserts -------------------------------------------------------------------------------------------------

# These asserts can only fail through a bug of ours. Everywhere else, wrong input can be the cause: raise an error.
OWN_BUGS = {
    "formats/axes.py": "strings written in formats, slices computed by the loader",
    "numbers/weight.py": "the loader folds act-order before it slices",
    "checkpoint/read/file_bytes.py": "buffers made two lines earlier",
    "checkpoint/load/load_experts.py": "what was loaded is what was planned",
    "checkpoint/load/expert_weights.py": "likewise",
    "backends/gpu/executor.py": "tensors checked and copied a few lines earlier",
    "backends/hopper/tuning/policy.py": "our own table",
    "jit/compile.py": "arguments of our own kernels",
    "testing/gguf.py": "a writer for tests",
    "testing/layers.py": "a generator for tests",
    "testing/ptx.py": "an interpreter for tests",
    "testing/weights.py": "a generator for tests",
}


def _narrows(test: ast.expr) -> bool:
    """`x is not None` and `isinstance(x, ...)`: written for the type checker."""
    if isinstance(test, ast.BoolOp):
        return all(_narrows(value) for value in test.values)
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance"
    return isinstance(test, ast.Compare) and ast.unparse(test).endswith("is not None")


def test_asserts_check_only_our_own_bugs() -> None:
    asserts = {_file(place) for place, node in _nodes(ast.Assert) if not _narrows(node.test)}
    assert asserts == set(OWN_BUGS)


# Frozen values, small files, unique names ----------------------------------------------------------------

MUTABLE = {
    "numbers/loss.py:LossMeter": "sums over chunks",
    "backends/gpu/layout.py:Rerounded": "counts over experts",
    "checkpoint/write/convert.py:Report": "grows layer by layer",
    "checkpoint/read/gguf.py:_Reader": "a position in a file",
    "checkpoint/resolve/manifest.py:Manifest": "collects layers and problems while it is built",
    "checkpoint/resolve/resolve_layer.py:ModuleTensors": "collects names while they are read",
    "cli/verify.py:VerifyReport": "collects problems",
    "evaluate/run.py:EvalResult": "filled measurement by measurement",
    "testing/checkpoints.py:Generated": "tests damage it on purpose",
}
MOST_LINES, MEDIAN_LINES, MOST_FUNCTION_LINES, MOST_README_LINES = 400, 130, 60, 130


def test_dataclasses_are_frozen() -> None:
    mutable = set()
    for place, node in _nodes(ast.ClassDef):
        marks = [ast.unparse(d) for d in node.decorator_list]
        if any(mark.startswith("dataclass") and "frozen=True" not in mark for mark in marks):
            mutable.add(f"{_file(place)}:{node.name}")
    assert mutable == set(MUTABLE)


def test_files_and_functions_are_small() -> None:
    lengths = {name: len(_text(name).splitlines()) for name in FILES}
    assert statistics.median(lengths.values()) <= MEDIAN_LINES
    native = [path for path in PACKAGE.rglob("*") if path.suffix in (".h", ".cpp")]
    lengths |= {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in native}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
    functions = [*_nodes(ast.FunctionDef), *_nodes(ast.AsyncFunctionDef)]
    sizes = {place: (node.end_lineno or 0) - node.lineno + 1 for place, node in functions}
    assert not {place: size for place, size in sizes.items() if size > MOST_FUNCTION_LINES}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for place, node in _nodes(ast.ClassDef):
        places.setdefault(node.name, []).append(place)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_modules_and_public_classes_have_docstrings() -> None:
    """Subclasses may rely on the docstring of their base."""
    assert not [name for name in FILES if not ast.get_docstring(_tree(name))]
    undocumented = []
    for place, node in _nodes(ast.ClassDef):
        bases = {ast.unparse(base) for base in node.bases} - {"ABC", "nn.Module"}
        if not (bases or node.name.startswith("_") or ast.get_docstring(node)):
            undocumented.append(f"{place} {node.name}")
    assert not undocumented
