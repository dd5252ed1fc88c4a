"""Compiles Gluon and Triton kernels ahead of time. Needs no GPU and does not query one."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import io
import json
import logging
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
from lancebill.jit.join_wgmma import join_wgmma

log = logging.getLogger("lancebill")
# Warnings of ptxas about serialised wgmma and ignored register limits. Such a kernel is too slow to use.
FATAL_WARNINGS = re.compile(r"C75(?:1[0-4])|C7602")
HOPPER = 90  # the first with wgmma and programmatic dependent launch
SCRATCH_POINTERS = 2  # unused parameters that Triton appends to ours
_OPTIONS = {"enable_fp_fusion": True}  # the default up to Triton 3.9, but not later
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
    """One configuration of one kernel: all inputs of the compiler but the source text.

    `arguments` maps run-time arguments to types: a `Desc`, or Triton's spelling (`*bf16`, `i32`,
    `fp32`). `aligned` names the arguments that are multiples of 16. `constants` are compile-time values. `arch` is the
    compute capability to compile for (80 = sm_80). `ptx`: keep PTX, which the driver of a newer GPU compiles.
    """

    module: str
    kernel: str
    arguments: tuple[tuple[str, str | Desc], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    arch: int = 90
    ptx: bool = False

    def key(self, compiler: str) -> str:
        """Cache key: a hash of the sources, the compiler version and the configuration."""
        parts = [_own_digest(), source_digest(self.module), compiler, repr(self)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def label(self) -> str:
        """The kernel and its constants, for messages."""
        target = "" if self.arch == HOPPER else f" for sm_{self.arch}{' as PTX' * self.ptx}"
        return f"{self.kernel}({', '.join(f'{k}={v}' for k, v in self.constants)}){target}"

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU runs the machine code: code of an older minor version, but from sm_90 on only its own, because
        Triton then compiles for all features of one GPU (sm_90a)."""
        if self.arch >= HOPPER:
            return self.arch == capability
        return self.arch // 10 == capability // 10 and self.arch <= capability


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what a launch needs: name, shared memory, threads, tensor-map layouts.

    `cubin` is machine code, or PTX that ends with a zero byte.
    """

    cubin: bytes
    name: str
    shared: int
    threads: int
    registers: int
    descs: tuple[dict[str, Any], ...] = field(default=())
    spills: int = 0  # bytes of registers

    def facts(self) -> dict[str, Any]:
        """Everything but the cubin, for JSON."""
        facts = asdict(self)
        facts.pop("cubin")
        return facts


@cache
def _own_digest() -> str:
    """A hash of this module and the PTX pass: changing them changes the binaries, so it must change the keys."""
    files = (Path(__file__), Path(__file__).with_name("join_wgmma.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


@cache
def source_digest(module: str) -> str:
    """A hash of the kernel's file and all files below the same top-level package that it imports, directly or not."""
    package = module.partition(".")[0]
    digest, seen, pending = hashlib.sha256(), set[str](), [module]
    while pending:
        name = pending.pop()
        spec = importlib.util.find_spec(name) if name not in seen else None
        seen.add(name)
        if spec is None or spec.origin is None:
            continue  # already hashed, or a name inside a module
        text = Path(spec.origin).read_bytes()
        digest.update(name.encode() + b"\0" + text + b"\0")
        pending += sorted(_imported(ast.parse(text), package) - seen)
    return digest.hexdigest()


def _imported(tree: ast.AST, package: str) -> set[str]:
    """Modules below `package` that a file imports; may include names that are not modules."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            found = importlib.util.find_spec(node.module or "")
            is_package = found is not None and found.submodule_search_locations is not None
            modules |= {f"{node.module}.{name.name}" for name in node.names} if is_package else {node.module or ""}
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names if name.name.startswith(f"{package}.")}
    return modules


@cache
def compiler_version() -> str:
    """The installed compiler; part of each kernel's key."""
    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:
        return "none"


def compile_kernel(source: KernelSource) -> Binary:
    """Compile; raises if registers spill or ptxas warns of serialised wgmma."""
    try:
        import triton
    except ImportError as error:
        raise CompileError(f"{source.label} is not in the cache and Triton is not installed", hint=_INSTALL) from error
    from triton.backends.compiler import GPUTarget

    report = _ThreadOutput()
    with _triton_settings(), redirect_stdout(report):
        try:
            compiled = triton.compile(
                _ast(source), target=GPUTarget("cuda", source.arch, 32), options={**_OPTIONS, **dict(source.options)}
            )
        except Exception as error:
            raise CompileError(f"{source.label} does not compile: {_root_cause(error)}") from error
    if source_digest.__wrapped__(source.module) != source_digest(source.module):
        raise CompileError(f"the sources of {source.label} changed while it was compiled", hint="restart the process")
    _check_parameters(source, compiled.asm["ptx"])
    registers, spills = _check_report(source, report.getvalue())
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise CompileError(f"{source.label} needs scratch memory, which our launcher does not provide")
    return Binary(
        f"{compiled.asm['ptx']}\0".encode() if source.ptx else compiled.asm["cubin"],
        meta.name,
        int(meta.shared),
        32 * int(meta.num_warps),
        registers,
        tuple(_to_json_types(d) for d in (meta.tensordesc_meta or ())),
        spills,
    )


def _root_cause(error: BaseException) -> BaseException:
    """The innermost error: Triton wraps it once for each nested call."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _ThreadOutput(io.StringIO):
    """Captures what this thread prints (the ptxas report); output of other threads goes to the real stdout."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._stdout = get_ident(), sys.stdout

    def write(self, text: str) -> int:
        return super().write(text) if get_ident() == self._thread else self._stdout.write(text)


@contextmanager
def _triton_settings() -> Iterator[None]:
    """Disable Triton's cache, which misses some files our sources depend on, and line tables, which double a cubin.

    Make ptxas print its report, and add our PTX pass.
    """
    from triton import knobs

    with knobs.compilation.scope(), knobs.nvidia.scope(), knobs.runtime.scope():
        knobs.compilation.always_compile, knobs.compilation.disable_line_info = True, True
        knobs.nvidia.dump_ptxas_log = True
        knobs.runtime.add_stages_inspection_hook = _add_ptx_pass
        yield


def _add_ptx_pass(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook for compiler stages: edit the PTX before ptxas.

    Newer versions also call the hook without arguments, to get a name and a hash for their cache key.
    """
    if not arguments:
        return "edit", _own_digest()
    _, stages, _, _, capability = arguments
    make_ptx, edit = stages["ptx"], join_wgmma if capability >= HOPPER else without_dependent_launch
    stages["ptx"] = lambda source, metadata: edit(make_ptx(source, metadata))
    return None


def without_dependent_launch(ptx: str) -> str:
    """The PTX without waits for a dependent launch, which older GPUs do not have: their kernels run one by one."""
    return re.sub(r"griddepcontrol\.\w+;", "", ptx)


def _ast(source: KernelSource) -> Any:
    """The kernel as Triton's compiler takes it: with its signature, constants and alignment."""
    kernel = getattr(importlib.import_module(source.module), source.kernel)
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

    bits = {"i32": 32, "bf16": 16, "fp16": 16, "fp8e4nv": 8, "i8": 8}[desc.dtype]
    layout = gl.NVMMASharedLayout(desc.swizzle, bits, desc.rank)
    return f"tensordesc<{desc.dtype}{list(desc.box)},{layout!r}>"


def _to_json_types(meta: Any) -> dict[str, Any]:
    """Tuples become lists, as they will be when the entry is read from the cache."""
    return dict(json.loads(json.dumps(meta)))


def _check_parameters(source: KernelSource, ptx: str) -> None:
    """Raise if this Triton gives the kernel another number of parameters than our launcher passes."""
    passed = sum(1 if isinstance(kind, str) else 1 + 2 * kind.rank for _, kind in source.arguments) + SCRATCH_POINTERS
    count = len(set(re.findall(rf"\.param .*\b{source.kernel}_param_(\d+)\b", ptx)))
    if count != passed:
        raise CompileError(
            f"{compiler_version()} gives {source.label} another number of parameters", expected=passed, got=count
        )


def _check_report(source: KernelSource, report: str) -> tuple[int, int]:
    """Registers, and bytes of them that spill. Raises if ptxas warns of serialised wgmma, and on Hopper if any spill.

    On other GPUs a kernel that spills is slower but right: an assembler that we have not seen must not stop a layer.
    """
    used = re.search(r"Used (\d+) registers", report)
    if used is None:
        raise CompileError(f"ptxas printed no report for {source.label}", got=report[-200:])
    fatal = FATAL_WARNINGS.search(report)
    if fatal:
        raise CompileError(f"{source.label}: ptxas warning {fatal[0]}")
    spills = re.search(r"(\d+) bytes spill stores", report)
    spilled = int(spills[1]) if spills else 0
    if spilled and source.arch == HOPPER:
        raise CompileError(f"{source.label} spills {spilled} bytes of registers")
    if spilled:
        log.warning("%s spills %d bytes of registers", source.label, spilled)
    return int(used[1]), spilled
