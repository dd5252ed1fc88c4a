"""The kernel cache: atomic writes, damage detection, one build per key, a private folder, forbidden compilation."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from lancebill.errors import CacheError, CompileError, MissingKernel
from lancebill.jit import build as builder
from lancebill.jit import compile as compiler
from lancebill.jit.cache import ENV_FORBID, MADE_BY, SUFFIX, Cache, parse_entry, read_entry, render_entry
from lancebill.jit.compile import Binary, KernelSource, compiler_version, source_digest
from lancebill.jit.ship import MOST_KERNELS, ship_kernels

CODE = Binary(b"\x7fELF code\nwith a newline", "kernel", 1024, 256, 64, ({"swizzle": 3, "block_size": [8, 64]},))
SOURCE = KernelSource(
    "lancebill.backends.gpu.kernels.dispatch_combine", "count_ids", (("ids", "*i32"),), (("CHUNK", 1), ("E", 2))
)
KEY = SOURCE.key(compiler_version())


def cache(tmp_path: Path, **options: bool) -> Cache:
    return Cache(tmp_path / "kernels", tmp_path / "shipped", **options)


def entry(store: Cache) -> Path:
    return store.folder / f"{KEY}{SUFFIX}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def never() -> Binary:
    pytest.fail("must not build")


# Entries ---------------------------------------------------------------------------------------------------


def test_entries_render_and_parse() -> None:
    assert parse_entry("key", render_entry("key", CODE)) == CODE
    with pytest.raises(ValueError, match="belongs to another key"):
        parse_entry("other", render_entry("key", CODE))


def test_a_kernel_is_built_once(tmp_path: Path) -> None:
    calls = []
    store = cache(tmp_path)
    assert store.find(SOURCE) is None and store.keys() == []
    for _ in range(3):
        assert store.get(SOURCE, lambda: calls.append(1) or CODE) == CODE
    assert len(calls) == 1 and store.keys() == [KEY]
    assert names(store.folder) == {entry(store).name}  # no lock or temporary file remains
    assert cache(tmp_path).get(SOURCE, never) == CODE


def test_a_damaged_entry_is_built_again(tmp_path: Path) -> None:
    """Truncated anywhere, any bit flipped, extended, replaced, or with another key: never read as a kernel."""
    store = cache(tmp_path)
    store.get(SOURCE, lambda: CODE)
    whole = entry(store).read_bytes()
    damaged = [whole[:n] for n in range(len(whole))] + [whole + b"x", whole + b"\0", b"{}", b"not json\ncode"]
    damaged += [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(len(whole))]
    damaged.append(render_entry("another key", CODE))
    for data in damaged:
        entry(store).write_bytes(data)
        assert store.find(SOURCE) is None, data
    assert store.get(SOURCE, lambda: CODE) == CODE
    assert entry(store).read_bytes() == whole


def test_a_failed_build_leaves_no_files(tmp_path: Path) -> None:
    store = cache(tmp_path)

    def fail() -> Binary:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError):
        store.get(SOURCE, fail)
    assert store.find(SOURCE) is None and not names(store.folder)
    assert store.get(SOURCE, lambda: CODE) == CODE


def test_the_key_covers_every_compiler_input() -> None:
    other = [replace(SOURCE, arch=100), replace(SOURCE, constants=()), replace(SOURCE, options=(("num_warps", 8),))]
    keys = {KEY, SOURCE.key("triton 0"), *(source.key(compiler_version()) for source in other)}
    assert len(keys) == 5
    assert source_digest("lancebill.backends.gpu.kernels.dispatch_combine") != source_digest(
        "lancebill.backends.hopper.kernels.gemm"
    )


def test_the_digest_covers_imported_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "moving"
    package.mkdir()
    files = {"__init__": "", "a": "from moving import b\nfrom moving.c import y\n", "b": "x = 1\n", "c": "y = 1\n"}
    files["d"] = "z = 1\n"
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest("moving.a")

    first = digest()
    (package / "d.py").write_text("z = 2\n")
    assert digest() == first, "the digest covers a file that is not imported"
    seen = {first}
    for name in ("a", "b", "c"):
        (package / f"{name}.py").write_text(files[name] + "# changed\n")
        assert digest() not in seen
        seen.add(digest())
    source_digest.cache_clear()


# Concurrency -------------------------------------------------------------------------------------------------


def test_threads_share_one_build(tmp_path: Path) -> None:
    store, calls = cache(tmp_path), []
    source_digest.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(store.get, SOURCE, lambda: calls.append(1) or CODE) for _ in range(8)]
    assert [thread.result() for thread in running] == [CODE] * 8
    assert len(calls) == 1


# A fork, because a new process would take seconds to import everything.
fork = multiprocessing.get_context("fork")


def start_builder(tmp_path: Path, pause: float) -> ForkProcess:
    """A process that writes a line to the log when it builds, and takes `pause` seconds to do so."""

    def build() -> Binary:
        with (tmp_path / "log").open("a") as file:
            file.write("built\n")
        time.sleep(pause)
        return CODE

    def run() -> None:
        assert cache(tmp_path).get(SOURCE, build) == CODE

    process = fork.Process(target=run)
    process.start()
    return process


def test_processes_share_one_build(tmp_path: Path) -> None:
    running = [start_builder(tmp_path, 0.5) for _ in range(4)]
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"
    assert names(tmp_path / "kernels") == {f"{KEY}{SUFFIX}"}


def test_a_killed_builder_releases_its_lock(tmp_path: Path) -> None:
    process = start_builder(tmp_path, 600)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join(60)
    store = cache(tmp_path)
    assert (store.folder / f"{KEY}.lock").exists()
    (store.folder / f"{KEY}.part").write_bytes(b"half of")
    assert store.get(SOURCE, lambda: CODE) == CODE
    assert names(store.folder) == {f"{KEY}{SUFFIX}"}


# The folder ----------------------------------------------------------------------------------------------------


def test_the_folder_has_mode_700(tmp_path: Path) -> None:
    store = cache(tmp_path)
    store.get(SOURCE, lambda: CODE)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    store.folder.chmod(0o755)  # others can read but not write: accepted, and corrected
    entry(store).unlink()
    store.get(SOURCE, lambda: CODE)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    store = cache(tmp_path)
    store.get(SOURCE, lambda: CODE)
    store.folder.chmod(mode)
    for access in (lambda: store.find(SOURCE), lambda: store.get(SOURCE, never)):
        with pytest.raises(CacheError, match="other users can write") as caught:
            access()
        assert caught.value.where == str(store.folder) and "LANCEBILL_CACHE" in str(caught.value)
    store.folder.chmod(0o700)
    assert store.find(SOURCE) == CODE


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cache(tmp_path)
    store.get(SOURCE, lambda: CODE)
    other_user = 4321
    if os.geteuid() == 0:
        os.chown(store.folder, other_user, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: other_user)
    with pytest.raises(CacheError, match="another user"):
        store.get(SOURCE, never)


def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    store = cache(tmp_path)
    store.get(SOURCE, lambda: CODE)
    link = tmp_path / "link"
    link.symlink_to(store.folder)
    assert Cache(link, tmp_path / "shipped").find(SOURCE) == CODE
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a link")
    os.lchown(link, 4321, -1)
    with pytest.raises(CacheError, match="another user"):
        Cache(link, tmp_path / "shipped").find(SOURCE)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_below_one_that_everyone_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    above = tmp_path / "above"
    store = Cache(above / "mine" / "kernels", tmp_path / "shipped")
    store.get(SOURCE, lambda: CODE)
    (tmp_path / "link").symlink_to(store.folder)
    above.chmod(mode)
    for folder in (store.folder, tmp_path / "link"):
        if mode == 0o1777:  # sticky: others cannot rename what is not theirs
            assert Cache(folder, store.shipped).find(SOURCE) == CODE
        else:
            with pytest.raises(CacheError, match="everyone can replace"):
                Cache(folder, store.shipped).find(SOURCE)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "change",
    [_pipe, lambda path: path.chmod(0o602), lambda path: os.chown(path, 4321, -1)],
    ids=["pipe", "mode", "owner"],
)
def test_an_entry_that_others_may_have_written_is_built_again(tmp_path: Path, change: Callable[[Path], None]) -> None:
    store = cache(tmp_path)
    store.get(SOURCE, lambda: CODE)
    try:
        change(entry(store))
    except PermissionError:
        pytest.skip("only root can change the owner of a file")
    assert store.find(SOURCE) is None
    os.mkfifo(store.folder / f"{KEY}.part")  # where the new entry is written first
    assert store.get(SOURCE, lambda: CODE) == CODE and store.find(SOURCE) == CODE
    assert stat.S_IMODE(entry(store).stat().st_mode) == 0o600 and names(store.folder) == {entry(store).name}


def test_without_a_folder_kernels_are_built_but_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Cache(tmp_path / "file" / "kernels", tmp_path / "shipped")
    with caplog.at_level(logging.WARNING, "lancebill"):
        assert store.get(SOURCE, lambda: CODE) == CODE
    assert "cannot be stored" in caplog.text
    with pytest.raises(CacheError, match="cannot be stored"):
        Cache(store.folder, store.shipped, must_keep=True).get(SOURCE, never)


def test_on_a_full_disk_kernels_are_built_but_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file size limit of 100 bytes: the kernel is usable and no partial file remains."""

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        store = cache(tmp_path)
        assert store.get(SOURCE, lambda: CODE) == CODE and "cannot be stored" in caplog.text
        assert not list(store.folder.iterdir()) and store.find(SOURCE) is None
        store = cache(tmp_path, must_keep=True)
        with pytest.raises(CacheError, match="File too large"):
            store.get(SOURCE, lambda: CODE)
        assert not list(store.folder.iterdir()) and store.find(SOURCE) is None

    process = fork.Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == 0


# Shipped kernels and compilation --------------------------------------------------------------------------------


def test_shipped_kernels_are_found_with_any_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cache(tmp_path)
    store.get(SOURCE, lambda: CODE)
    size = ship_kernels([SOURCE], store, store.shipped)
    assert size == entry(store).stat().st_size
    monkeypatch.setattr(compiler, "version", lambda name: "99.0")
    compiler_version.cache_clear()
    try:
        assert compiler_version() == "triton 99.0"
        elsewhere = Cache(tmp_path / "other", store.shipped)
        assert elsewhere.get(SOURCE, never) == CODE and not elsewhere.folder.exists()
        (store.shipped / f"{KEY}{SUFFIX}").write_bytes(b"damaged")
        assert elsewhere.find(SOURCE) is None and (store.shipped / f"{KEY}{SUFFIX}").exists()
        assert elsewhere.get(SOURCE, lambda: CODE) == CODE and elsewhere.keys() != [KEY]
    finally:
        compiler_version.cache_clear()


def test_shipping_replaces_all_kernels_and_limits_their_size(tmp_path: Path) -> None:
    store = cache(tmp_path)
    many = [replace(SOURCE, constants=(("CHUNK", i), ("E", 2))) for i in range(MOST_KERNELS + 1)]
    with pytest.raises(CacheError, match="is not compiled"):
        ship_kernels(many[:1], store, store.shipped)
    for source in many:
        store.get(source, lambda: CODE)
    for chosen in (many[:3], many[3:4]):
        ship_kernels(chosen, store, store.shipped)
        expected = {MADE_BY, *(f"{source.key(compiler_version())}{SUFFIX}" for source in chosen)}
        assert names(store.shipped) == expected
    with pytest.raises(CacheError, match="too large"):
        ship_kernels(many, store, store.shipped)
    assert read_entry(store.shipped, many[3].key(compiler_version())) == CODE  # the previous kernels are still there


def test_compiling_can_be_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENV_FORBID == "LANCEBILL_NO_COMPILE"
    store = cache(tmp_path)
    for value in ("1", "yes"):
        monkeypatch.setenv(ENV_FORBID, value)
        with pytest.raises(MissingKernel, match=f"{ENV_FORBID} forbids") as caught:
            store.get(SOURCE, never)
        assert SOURCE.label in str(caught.value)
    for value in ("0", ""):
        monkeypatch.setenv(ENV_FORBID, value)
        assert store.get(replace(SOURCE, arch=len(value)), lambda: CODE) == CODE


def test_compiling_on_first_use_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    builder._warn_once.cache_clear()
    for chunk in (1, 2):
        source = replace(SOURCE, module="lancebill.backends.hopper.kernels.none", constants=(("CHUNK", chunk),))
        with caplog.at_level(logging.INFO, "lancebill"), pytest.raises((CompileError, ModuleNotFoundError)):
            builder.get_binary(source, cache(tmp_path))
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and "lancebill kernels build" in warned[0].getMessage()
    assert len(caplog.records) == 3


def test_a_process_compiles_one_kernel_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for different kernels: the compiler's settings and the redirected stdout are global to the process."""
    inside, most = [0], [0]

    def build(source: KernelSource) -> Binary:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return CODE

    monkeypatch.setattr(builder, "compile_kernel", build)
    sources = [replace(SOURCE, constants=(("CHUNK", n), ("E", 2))) for n in range(4)]
    threads = [threading.Thread(target=builder.get_binary, args=(source, cache(tmp_path))) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache(tmp_path).keys()) == 4 and most == [1]
