"""Records the arguments of vLLM's hooks from its source, without importing it.

python tests/with_vllm/signatures.py VERSION FOLDER [VERSION FOLDER ...] > tests/unit/integrations/vllm_signatures.json
(FOLDER contains the package `vllm`.)
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from lancebill.integrations.vllm import hooks


def arguments(root: Path, module: str, name: str) -> list[str] | None:
    """The arguments of a function, or the annotated fields of a class; None if there is no such name."""
    if not _file(root, module).exists():
        return None
    tree = ast.parse(_file(root, module).read_text(encoding="utf-8"))
    first, _, rest = name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == first:
            return _parameters(node)
        if isinstance(node, ast.ClassDef) and node.name == first:
            return _fields(node) if not rest else _member(root, module, tree, node, rest)
        if isinstance(node, ast.ImportFrom) and any(alias.name == first for alias in node.names):
            return arguments(root, _absolute(module, root, node), name)
    return None


def _member(root: Path, module: str, tree: ast.Module, node: ast.ClassDef, name: str) -> list[str] | None:
    """A method of a class or of its bases."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == name:
            return _parameters(item)
    for base in node.bases:
        if isinstance(base, ast.Name):
            found = arguments(root, module, f"{base.id}.{name}")
            if found is not None:
                return found
    return None


def _parameters(node: ast.FunctionDef) -> list[str]:
    every = node.args
    extra = [arg.arg for arg in (every.vararg, every.kwarg) if arg is not None]
    return [arg.arg for arg in (*every.posonlyargs, *every.args, *every.kwonlyargs)] + extra


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def _file(root: Path, module: str) -> Path:
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _absolute(module: str, root: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    words = module.split(".") if _file(root, module).name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*words[: len(words) - node.level + 1], node.module or ""]).strip(".")


def record(root: Path) -> dict[str, list[str] | None]:
    optional = (*hooks.BALANCING_HOOKS, *hooks.NARROW_HOOKS, *hooks.STOCK_HOOKS, *hooks.RELOAD_HOOKS, *hooks.SAVE_HOOKS)
    return {
        str(hook): arguments(root, hook.module, hook.name) for hook in (*hooks.HOOKS, *optional, *hooks.PATCH_HOOKS)
    }


if __name__ == "__main__":
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    print(json.dumps({version: record(Path(folder)) for version, folder in pairs}, indent=1))
