"""The kernel cache: whole entries or none, damage found, one build a key, and a switch that forbids compiling."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from colibri.jit.cache import ENV_FORBID, SUFFIX, Cache, MissingKernel, parse, render
from colibri.jit.compile import Binary

CODE = Binary(b"\x7fELF code\nwith a newline", "kernel", 1024, 256, 64, ({"swizzle": 3, "block_size": [8, 64]},))


def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "kernels", also=())


def test_entries_render_and_parse() -> None:
    assert parse(render(CODE)) == CODE


def test_build_runs_once(tmp_path: Path) -> None:
    calls = []
    store = cache(tmp_path)
    assert store.find("key") is None and store.keys() == []
    for _ in range(3):
        assert store.get("key", "label", lambda: calls.append(1) or CODE) == CODE
    assert len(calls) == 1 and store.keys() == ["key"]
    assert not list(store.folder.glob("*.part"))
    assert cache(tmp_path).get("key", "label", lambda: pytest.fail("must not build")) == CODE


def test_the_folder_is_its_owners(tmp_path: Path) -> None:
    store = cache(tmp_path)
    store.get("key", "label", lambda: CODE)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [b"", b"{}", b"[]\n", b"not json\n", b"not json\ncode"]
    + [render(CODE)[:-1], render(CODE) + b"x", render(CODE) + b"\0", render(CODE)[1:]],
)
def test_damaged_entries_are_built_again(tmp_path: Path, damage: bytes) -> None:
    store = cache(tmp_path)
    store.get("key", "label", lambda: CODE)
    (store.folder / f"key{SUFFIX}").write_bytes(damage)
    assert store.find("key") is None
    assert store.get("key", "label", lambda: CODE) == CODE
    assert store.find("key") == CODE


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    store = cache(tmp_path)

    def fail() -> Binary:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError):
        store.get("key", "label", fail)
    assert store.find("key") is None
    assert store.keys() == [] and not list(store.folder.glob("*.part"))


def test_threads_share_one_build(tmp_path: Path) -> None:
    store, calls = cache(tmp_path), []
    threads = [
        threading.Thread(target=lambda: store.get("key", "label", lambda: calls.append(1) or CODE)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_shipped_entries_come_first_and_are_never_removed(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / f"key{SUFFIX}").write_bytes(render(CODE))
    (shipped / f"bad{SUFFIX}").write_bytes(b"damaged")
    store = Cache(tmp_path / "mine", also=(shipped,))
    assert store.get("key", "label", lambda: pytest.fail("must not build")) == CODE
    assert store.find("bad") is None and (shipped / f"bad{SUFFIX}").exists()


def test_compiling_can_be_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENV_FORBID == "COLIBRI_NO_COMPILE"
    store = cache(tmp_path)
    for value in ("1", "yes"):
        monkeypatch.setenv(ENV_FORBID, value)
        with pytest.raises(MissingKernel, match=f"{ENV_FORBID} forbids") as caught:
            store.get("key", "the-label", lambda: pytest.fail("must not build"))
        assert "the-label" in str(caught.value)
    for value in ("0", ""):
        monkeypatch.setenv(ENV_FORBID, value)
        assert store.get(f"key{value}", "the-label", lambda: CODE) == CODE
