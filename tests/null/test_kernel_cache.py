"""The store of compiled kernels, without any kernel: entries are found whole or built again."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.jit.cache import ENV_FORBID, SUFFIX, Cache, MissingKernel, parse, render
from colibri.jit.compile import Binary

BINARY = Binary(b"\x7fELF\ncode\n", "kernel", 1024, 128, 64, ({"box": [64, 64]},))


def _never() -> Binary:
    raise AssertionError("built again")


def test_entries_are_what_was_put_in(tmp_path: Path) -> None:
    assert parse(render(BINARY)) == BINARY
    cache = Cache(tmp_path / "kernels", also=())
    assert cache.find("key") is None and cache.keys() == []
    assert cache.get("key", "label", lambda: BINARY) == BINARY
    assert Cache(tmp_path / "kernels", also=()).get("key", "label", _never) == BINARY
    assert cache.keys() == ["key"]
    assert cache.folder.stat().st_mode & 0o777 == 0o700, "code from it is run: nobody else may write it"
    assert not list(cache.folder.glob("*.part"))


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"not json\ncode", render(BINARY)[:-1], b"[]\n", render(BINARY) + b"\0"]
)
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: bytes) -> None:
    cache = Cache(tmp_path, also=())
    (tmp_path / f"key{SUFFIX}").write_bytes(damage)
    assert cache.find("key") is None
    assert cache.get("key", "label", lambda: BINARY) == BINARY
    assert cache.find("key") == BINARY


def test_kernels_that_came_with_the_package_are_only_read(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / f"key{SUFFIX}").write_bytes(render(BINARY))
    (shipped / f"bad{SUFFIX}").write_bytes(b"damaged")
    cache = Cache(tmp_path / "own", also=(shipped,))
    assert cache.get("key", "label", _never) == BINARY
    assert cache.find("bad") is None and (shipped / f"bad{SUFFIX}").exists()


def test_compiling_can_be_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, also=())
    for value, forbidden in (("1", True), ("yes", True), ("0", False), ("", False)):
        monkeypatch.setenv(ENV_FORBID, value)
        if forbidden:
            with pytest.raises(MissingKernel, match=f"{ENV_FORBID} forbids"):
                cache.get("key", "gemm", _never)
        else:
            assert cache.get(f"key{value}", "gemm", lambda: BINARY) == BINARY


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, also=())

    def fail() -> Binary:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.get("key", "label", fail)
    assert cache.find("key") is None and cache.keys() == []
