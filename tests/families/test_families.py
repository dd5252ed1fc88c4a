"""Every family of transformers with routed experts, judged by transformers on a tiny random model."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
from packaging.version import Version

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from judge import EXACT, check_left_experts, judge  # noqa: E402
from tiny_models import (  # noqa: E402
    CONFIG_MAPPING,
    JUDGED,
    MODELS,
    NEEDS,
    UNWRITABLE_NAMES,
    mixtures,
    plain_model,
    tiny_config,
    tiny_model,
)

import lancebill  # noqa: E402
from lancebill.checkpoint.resolve.naming import REMOTE_CODE, TABLE  # noqa: E402
from lancebill.cli.verify import examine  # noqa: E402
from lancebill.errors import UnsupportedFormat  # noqa: E402
from lancebill.integrations.transformers.packed_experts import packed_experts  # noqa: E402
from lancebill.integrations.transformers.pretrained import class_of, packed_class  # noqa: E402
from lancebill.testing.families import TRANSFORMERS, WITHOUT_ROW, families  # noqa: E402

HUB, STACKED = "hub", "stacked"
UNWRITABLE = {(name, HUB) for name in UNWRITABLE_NAMES}
SPELLINGS = [(name, names) for name in JUDGED for names in (HUB, STACKED) if (name, names) not in UNWRITABLE]


def release(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]


def check_unlisted(names: set[str], version: str) -> None:
    """Families without row and reason: an error, but only a warning where transformers is newer than the lists."""
    if names and release(version) > release(TRANSFORMERS):
        warnings.warn(f"new in transformers {version}, not read yet: {', '.join(sorted(names))}", stacklevel=2)
    else:
        assert names == set(), "transformers has families with experts that are not known here"


def test_only_a_newer_transformers_may_have_unlisted_families() -> None:
    major, minor = release(TRANSFORMERS)
    check_unlisted(set(), f"{major}.{minor}.0")
    for version in (f"{major}.{minor}.9", f"{major}.{minor - 1}.0", f"{major}.{minor}.0.dev0"):
        with pytest.raises(AssertionError, match="not known here"):
            check_unlisted({"a_new_one"}, version)
    for version in (f"{major}.{minor + 1}.0", f"{major + 1}.0.0rc1"):
        with pytest.warns(UserWarning, match="not read yet: a_new_one, b_new_one"):
            check_unlisted({"b_new_one", "a_new_one"}, version)


def test_every_family_has_a_row_or_a_reason() -> None:
    found = set(mixtures())
    check_unlisted(found - set(families()), transformers.__version__)
    if release(transformers.__version__) == release(TRANSFORMERS):
        assert set(families()) - found == set(), "a row or a reason for something that has no experts"
    ours = {name for row in TABLE for name in row.model_types}
    assert ours >= set(REMOTE_CODE) and not ours & WITHOUT_ROW.keys()


def test_every_user_of_the_experts_interface_is_a_family() -> None:
    """An independent list: the modelling files that use transformers' experts interface."""
    models = Path(transformers.__file__).parent / "models"
    users = {file.parent.name for file in models.glob("*/modeling_*.py") if "@use_experts" in file.read_text("utf-8")}
    packages = {CONFIG_MAPPING[name].__module__.split(".")[-2] for name in families() if name in CONFIG_MAPPING}
    assert "openai_privacy_filter" in users - packages, "it classifies tokens and is not causal"
    check_unlisted(users - packages - {"openai_privacy_filter"}, transformers.__version__)


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


@pytest.mark.parametrize("spelling", [HUB, STACKED])
def test_a_talker_keeps_its_own_experts(spelling: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Qwen3-Omni's thinker and talker both have experts, in layers of the same numbers."""
    if spelling == STACKED and not request.config.getoption("--all-spellings", default=False):
        pytest.skip("with --all-spellings")
    model = tiny_model("qwen3_omni_moe")
    model.save_pretrained(tmp_path, save_original_format=spelling == HUB)
    packed = lancebill.from_pretrained(tmp_path, **EXACT)
    names = [f"thinker.model.language_model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert [name for name, _ in packed_experts(packed)] == names
    check_left_experts(model, packed)


@pytest.mark.parametrize("name", WITHOUT_ROW)
def test_a_family_without_a_row_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    if name not in MODELS:
        pytest.skip("needs a newer transformers")
    config = tiny_config(name)
    plain_model(config).save_pretrained(tmp_path)
    (problem,) = examine(tmp_path).problems
    assert WITHOUT_ROW[name] in problem.what
    with pytest.raises(UnsupportedFormat, match=WITHOUT_ROW[name]):
        lancebill.from_pretrained(tmp_path)


def test_experts_behind_an_encoder_of_speech_are_replaced() -> None:
    config = CONFIG_MAPPING["nemo_speechlm"]()
    with torch.device("meta"):
        model = packed_class(class_of(config))(config)
    assert len(list(packed_experts(model))) == config.get_text_config().layers_block_type.count("moe")


def test_a_model_with_a_generate_of_its_own(tmp_path: Path) -> None:
    """DiffusionGemma refines canvases: it asks for its cache in another way than transformers' `generate` does."""
    if "diffusion_gemma" not in MODELS:
        pytest.skip("this transformers has no diffusion_gemma")
    tiny_model("diffusion_gemma").save_pretrained(tmp_path)
    ours = lancebill.from_pretrained(tmp_path)
    assert ours.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4) is not None
    assert "a way of its own" in str(ours.lancebill_decoding)
