"""Ahead-of-time compilation of Gluon and Triton kernels: no GPU is needed, and none is looked for."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import get_ident
from typing import Any

from lancebill.errors import CompileError
from lancebill.jit.join_wgmma import join

# Serialised wgmma and ignored register limits: a kernel that compiles with one of these is broken.
FATAL_WARNINGS = re.compile(r"C75(?:1[0-4])|C7602")
SCRATCH_POINTERS = 2  # unused parameters that Triton appends to ours
_OPTIONS = {"enable_fp_fusion": True}  # the default of all versions up to 3.9, and not of later ones
_INSTALL = "pip install 'lancebill[gpu]'"


@dataclass(frozen=True)
class Desc:
    """The type of a tensor-map argument: element type, box, shared-memory swizzle in bytes."""

    dtype: str
    box: tuple[int, ...]
    swizzle: int

    @property
    def rank(self) -> int:
        return len(self.box)


@dataclass(frozen=True)
class KernelSource:
    """One configuration of one kernel: everything that decides the binary.

    `arguments` maps run-time arguments to types: a `Desc`, or Triton's spelling (`*bf16`, `i32`,
    `fp32`). `aligned` names those that are multiples of 16. `constants` are compile-time values.
    """

    module: str
    kernel: str
    arguments: tuple[tuple[str, str | Desc], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    arch: int = 90

    def key(self, compiler: str) -> str:
        """Content address: the sources, the compiler and its version, the configuration."""
        parts = [_own_digest(), source_digest(self.module), compiler, repr(self)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def label(self) -> str:
        """For people: the kernel and its constants."""
        return f"{self.kernel}({', '.join(f'{k}={v}' for k, v in self.constants)})"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what launching it needs to know."""

    cubin: bytes
    name: str
    shared: int
    threads: int
    registers: int
    descs: tuple[dict[str, Any], ...] = field(default=())

    def facts(self) -> dict[str, Any]:
        """Everything but the code, for JSON."""
        facts = asdict(self)
        facts.pop("cubin")
        return facts


@cache
def _own_digest() -> str:
    """How we compile decides too."""
    files = (Path(__file__), Path(__file__).with_name("join_wgmma.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


@cache
def source_digest(module: str) -> str:
    """A hash over the kernel's file and the files of its package it imports: any edit there rebuilds."""
    package = module.rpartition(".")[0]
    digest, seen, waiting = hashlib.sha256(), set[str](), [module]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name) if name not in seen else None
        seen.add(name)
        if spec is None or spec.origin is None:
            continue  # a name inside a module, not a module
        text = Path(spec.origin).read_bytes()
        digest.update(name.encode() + b"\0" + text + b"\0")
        waiting += sorted(_imported(ast.parse(text), package) - seen)
    return digest.hexdigest()


def _imported(tree: ast.AST, package: str) -> set[str]:
    """Modules of `package` that a file may import."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {f"{package}.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith(f"{package}.")}
    return found


@cache
def compiler_version() -> str:
    """What would compile here; kernels of another version have other keys."""
    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:
        return "none"


def build(source: KernelSource) -> Binary:
    """Compile, and refuse spills and the warnings that mean serialised tensor-core work."""
    try:
        import triton
    except ImportError as error:
        raise CompileError(f"{source.label} is in no cache and Triton is not installed", hint=_INSTALL) from error
    from triton.backends.compiler import GPUTarget

    heard = _Heard()
    with _fresh_compiles(), redirect_stdout(heard):
        try:
            compiled = triton.compile(
                _ast(source), target=GPUTarget("cuda", source.arch, 32), options={**_OPTIONS, **dict(source.options)}
            )
        except Exception as error:
            raise CompileError(f"{source.label} does not compile: {_root(error)}") from error
    if source_digest.__wrapped__(source.module) != source_digest(source.module):
        raise CompileError(f"the sources of {source.label} changed while it was compiled", hint="start again")
    _check_parameters(source, compiled.asm["ptx"])
    registers = _check_report(source, heard.getvalue())
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise CompileError(f"{source.label} wants scratch memory from its launcher")
    return Binary(
        compiled.asm["cubin"],
        meta.name,
        int(meta.shared),
        32 * int(meta.num_warps),
        registers,
        tuple(_plain(d) for d in (meta.tensordesc_meta or ())),
    )


def _root(error: BaseException) -> BaseException:
    """The first error of a chain: Triton wraps one for each nested call."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _Heard(io.StringIO):
    """What this thread prints, the assembler's report; other threads go on printing where they did."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._beyond = get_ident(), sys.stdout

    def write(self, text: str) -> int:
        return super().write(text) if get_ident() == self._thread else self._beyond.write(text)


@contextmanager
def _fresh_compiles() -> Iterator[None]:
    """Triton's own cache is left out: it does not see every file our sources depend on.

    Line tables too: they double a binary's size. The assembler's report is printed.
    """
    from triton import knobs

    with knobs.compilation.scope(), knobs.nvidia.scope(), knobs.runtime.scope():
        knobs.compilation.always_compile, knobs.compilation.disable_line_info = True, True
        knobs.nvidia.dump_ptxas_log = True
        knobs.runtime.add_stages_inspection_hook = _join_products
        yield


def _join_products(*asked: Any) -> tuple[str, str] | None:
    """Triton's way to its assembler, with one more step. Newer versions first ask, with nothing, what it is called."""
    if not asked:
        return "join", _own_digest()
    _, stages, *_ = asked
    made = stages["ptx"]
    stages["ptx"] = lambda source, metadata: join(made(source, metadata))
    return None


def _ast(source: KernelSource) -> Any:
    kernel = vars(importlib.import_module(source.module))[source.kernel]
    names: list[str] = list(kernel.arg_names)
    kinds, values = dict(source.arguments), dict(source.constants)
    assert [name for name in names if name in kinds] == list(kinds), "run-time arguments in the kernel's order"
    assert set(names) == {*kinds, *values}, set(names) ^ {*kinds, *values}
    signature = {name: _type_name(kinds[name]) if name in kinds else "constexpr" for name in names}
    constants = {(names.index(name),): value for name, value in values.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned}
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constants, attributes)
    from triton.compiler import ASTSource

    return ASTSource(kernel, signature, constants, attributes)


def _type_name(desc: str | Desc) -> str:
    if isinstance(desc, str):
        return desc
    from triton.experimental.gluon import language as gl

    bits = {"i32": 32, "bf16": 16, "fp16": 16, "fp8e4nv": 8}[desc.dtype]
    layout = gl.NVMMASharedLayout(desc.swizzle, bits, desc.rank)
    return f"tensordesc<{desc.dtype}{list(desc.box)},{layout!r}>"


def _plain(meta: Any) -> dict[str, Any]:
    return dict(json.loads(json.dumps(meta)))


def _check_parameters(source: KernelSource, ptx: str) -> None:
    """A launcher lays arguments out as they were in the Triton it was written for; another may have others."""
    wanted = sum(1 if isinstance(kind, str) else 1 + 2 * kind.rank for _, kind in source.arguments) + SCRATCH_POINTERS
    found = len(set(re.findall(rf"\.param .*\b{source.kernel}_param_(\d+)\b", ptx)))
    if found != wanted:
        raise CompileError(f"{source.label} has other parameters in {compiler_version()}", expected=wanted, got=found)


def _check_report(source: KernelSource, report: str) -> int:
    """Registers; raises where the assembler spilled or warned of serialised products."""
    used = re.search(r"Used (\d+) registers", report)
    if used is None:
        raise CompileError(f"the assembler said nothing of {source.label}", got=report[-200:])
    fatal = FATAL_WARNINGS.search(report)
    if fatal:
        raise CompileError(f"{source.label}: {fatal[0]} from the assembler")
    spills = re.search(r"(\d+) bytes spill stores", report)
    if spills and int(spills[1]):
        raise CompileError(f"{source.label} spills {spills[1]} bytes of registers")
    return int(used[1])
