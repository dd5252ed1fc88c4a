"""Every family of transformers with routed experts, judged by transformers on a tiny random model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from judge import judge  # noqa: E402
from tiny_models import CONFIG_MAPPING, language_models, mixtures  # noqa: E402

from lancebill.checkpoint.resolve.naming import TABLE  # noqa: E402
from lancebill.testing.families import REMOTE_CODE, TRANSFORMERS, WITHOUT_ROW, families, judged_types  # noqa: E402

# Wrappers that cannot run on text alone.
JUDGED_WITHIN = {
    "nemo_speechlm": "nemotron_h",  # behind an encoder of speech
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",  # which its talker follows
}
HUB, STACKED = "hub", "stacked"
NEEDS = {"inkling_mm_model": "scipy"}  # packages that transformers imports to make the model
# transformers writes `blocks` for `layers` in the hub's names of Kimi-K2.5.
UNWRITABLE = {("kimi_k25", HUB)}
MODELS = set(language_models()) - JUDGED_WITHIN.keys()
JUDGED = [name for row in TABLE for name in judged_types(row) if name in MODELS]
SPELLINGS = [(name, names) for name in JUDGED for names in (HUB, STACKED) if (name, names) not in UNWRITABLE]


def test_every_family_has_a_row_or_a_reason() -> None:
    found = set(mixtures())
    assert found - set(families()) == set(), "transformers has families with experts that are not known here"
    if transformers.__version__.startswith(TRANSFORMERS):
        assert set(families()) - found == set(), "a row or a reason for something that has no experts"
    ours = {name for row in TABLE for name in row.model_types}
    assert ours >= set(REMOTE_CODE) and not ours & WITHOUT_ROW.keys()


def test_every_user_of_the_experts_interface_is_a_family() -> None:
    """An independent list: the modelling files that use transformers' experts interface."""
    models = Path(transformers.__file__).parent / "models"
    users = {file.parent.name for file in models.glob("*/modeling_*.py") if "@use_experts" in file.read_text("utf-8")}
    packages = {CONFIG_MAPPING[name].__module__.split(".")[-2] for name in families() if name in CONFIG_MAPPING}
    assert users - packages == {"openai_privacy_filter"}, "only this one classifies tokens and is not causal"


def is_judged_by_default(case: tuple[str, str]) -> bool:
    """The hub's spelling of a family's first model type; the second one of those that cannot be written."""
    name, spelling = case
    return spelling == HUB or (name, HUB) in UNWRITABLE


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS, ids=lambda value: value)
def test_equal_to_transformers(name: str, spelling: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("--all-spellings", default=False)
    if not every and not is_judged_by_default((name, spelling)):
        pytest.skip("with --all-spellings")
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    judge(name, tmp_path / "model", hub_names=spelling == HUB)
