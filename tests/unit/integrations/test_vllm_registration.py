"""The vLLM plugin registers completely or not at all. vLLM's modules are stand-ins."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lancebill.integrations.vllm import plugin
from lancebill.integrations.vllm.hooks import Hook
from lancebill.integrations.vllm.registration import all_or_nothing, place_of

OURS = "lancebill.integrations.vllm"
STEPS = {
    "register_operator": "experts",
    "add_cpu_collectives": "cpu_collectives",
    "register_gguf": "gguf",
    "follow_reloads": "reloads",
    "refuse_sparse_patches": "reloads",
    "refuse_incomplete_saves": "saving",
    "adopt_layer_classes": "experts",
    "divert_models": "models",
    "register_dense_config": "dense_config",
}


class Owner:
    """A class of vLLM."""

    def kept(self) -> str:
        return "vLLM's"

    @staticmethod
    def static() -> str:
        return "vLLM's"


def test_a_failure_undoes_everything() -> None:
    table, names = {"a": 1}, ["x"]
    places = [(Owner, "kept"), (Owner, "static"), (Owner, "new")]

    def change() -> None:
        table.update(a=2, b=3)
        names.append("y")
        for _, name in places:
            setattr(Owner, name, lambda *_: "ours")

    with pytest.raises(ZeroDivisionError), all_or_nothing([table, names], places):
        change()
        raise ZeroDivisionError
    assert table == {"a": 1} and names == ["x"] and not hasattr(Owner, "new")
    assert Owner().kept() == Owner.static() == Owner().static() == "vLLM's"
    with all_or_nothing([table, names], []):
        table["a"] = 5
    assert table == {"a": 5}


def test_places_of_hooks_that_may_be_missing() -> None:
    assert place_of(Hook("json", "JSONEncoder.default")) == (json.JSONEncoder, "default")
    assert place_of(Hook("json", "dumps")) == (json, "dumps")
    for missing in (Hook("no.such.module", "f"), Hook("json", "NoClass.default")):
        owner, name = place_of(missing)
        with all_or_nothing([], [(owner, name)]):
            assert name in ("f", "default")


@pytest.mark.parametrize("failing", [*STEPS, None])
def test_registration_in_steps(failing: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The first step alone leaves something, an operator, which nothing else uses."""
    table: dict[str, str] = {}
    modules = {name: ModuleType(name) for name in set(STEPS.values())}

    def step(name: str) -> None:
        table[name] = "ours"
        if name == failing:
            raise RuntimeError(f"boom in {name}")

    for name, module in STEPS.items():
        setattr(modules[module], name, lambda name=name: step(name))
        monkeypatch.setitem(sys.modules, f"{OURS}.{module}", modules[module])
    hooks = SimpleNamespace(check_hooks=lambda: None, check_version=lambda: None)
    monkeypatch.setitem(sys.modules, f"{OURS}.hooks", hooks)
    custom_op = SimpleNamespace(op_registry_oot={})
    monkeypatch.setitem(sys.modules, "vllm.model_executor.custom_op", custom_op)
    for name, value in (("changed_containers", [table]), ("changed_attributes", [])):
        monkeypatch.setattr(f"{OURS}.registration.{name}", lambda value=value: value)
    plugin.register()
    assert list(table) == ([] if failing else list(STEPS)) and list(STEPS)[-1] == "register_dense_config"
    assert ("lancebill is not used" in caplog.text) == (failing is not None)
