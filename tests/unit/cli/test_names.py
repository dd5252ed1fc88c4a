"""The tables of names repeat what the registries find."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lancebill.backends import oracle
from lancebill.backends.registry import registry as backends
from lancebill.bench import peers
from lancebill.checkpoint.write.target import ALIASES
from lancebill.cli import names
from lancebill.errors import SpecError
from lancebill.formats import registry as formats
from lancebill.layer.rules import CHECKPOINT
from lancebill.moe.model_shapes import NAMED, parse_shape


def test_the_tables_are_those_of_the_registries() -> None:
    assert tuple(backends()) == names.BACKENDS
    assert tuple(formats()) == names.FORMATS
    assert set(ALIASES) == set(names.FORMAT_ALIASES)
    assert {*peers.PEERS, *peers.FAMILIES} == set(names.PEERS)
    assert tuple(NAMED) == names.SHAPES
    assert (oracle.AUTO, CHECKPOINT) == (names.AUTO, names.CHECKPOINT)


def test_wrong_names_are_refused_as_the_registries_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_decided", lambda registry: False)
    for ours, theirs in (
        (lambda: names.check_backends("foo"), lambda: oracle.check_name("foo")),
        (lambda: names.check_shape("foo"), lambda: parse_shape("foo")),
    ):
        with pytest.raises(SpecError) as found:
            ours()
        with pytest.raises(SpecError) as expected:
            theirs()
        assert str(found.value) == str(expected.value)
    with pytest.raises(SpecError, match="no peer is called 'foo'"):
        names.check_peers(["torch", "foo"])


def test_names_of_other_packages_are_left_to_the_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(names, "entry_points", lambda group: [group])
    names.check_backends("theirs")
    names.check_format("theirs")
