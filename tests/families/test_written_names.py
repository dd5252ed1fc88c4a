"""What `convert` and `save_pretrained` write for every family, judged by a plain load in transformers.

Experts are 0 or +-1/4, which every target stores up to the rounding of a scale, so a model keeps its logits whatever it
is converted to. The plan of a conversion claims that transformers loads the output, or says why not: both are tested.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import torch  # noqa: E402
from judge import INPUTS, TOKENS  # noqa: E402
from test_families import HUB, NEEDS, SPELLINGS, is_judged_by_default  # noqa: E402
from tiny_models import SIZES, tiny_model  # noqa: E402
from torch import Tensor  # noqa: E402

import lancebill  # noqa: E402
from lancebill.checkpoint.read.files import Checkpoint  # noqa: E402
from lancebill.checkpoint.resolve import naming as names  # noqa: E402
from lancebill.checkpoint.write.convert import ConvertOptions, convert, plan_conversion  # noqa: E402
from lancebill.checkpoint.write.target import choose_target  # noqa: E402
from lancebill.errors import CannotEncode  # noqa: E402
from lancebill.formats import registry  # noqa: E402
from lancebill.integrations.transformers.packed_experts import takes_routed_rows  # noqa: E402
from lancebill.integrations.transformers.pretrained import class_of  # noqa: E402
from lancebill.numbers.spec_names import parse_spec  # noqa: E402

# transformers asks for it before it dequantises these formats, and does not use it on a CPU.
ACCELERATE = ("quantizer_finegrained_fp8", "quantizer_mxfp4")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers as it is without further packages, and without its reports of what is missing."""
    for module in ACCELERATE:
        monkeypatch.setattr(f"transformers.quantizers.{module}.is_accelerate_available", lambda: True)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)


@dataclass(frozen=True)
class Saved:
    """A tiny model as transformers saved it."""

    folder: Path
    inputs: dict[str, Any]
    logits: Tensor
    packable: bool  # transformers' experts interface computes the experts

    @classmethod
    @torch.no_grad()
    def make(cls, name: str, folder: Path, *, hub_names: bool) -> Saved:
        model, inputs = tiny_model(name), INPUTS.get(name, {"use_cache": False})
        rows = names.find_family(model.config.to_dict()).mixtures
        generator = torch.Generator().manual_seed(11)
        for key, tensor in model.named_parameters():
            if any((claim := row.claim(key)) is not None and claim.router is None for row in rows):
                tensor.copy_(torch.randint(-1, 2, tensor.shape, generator=generator) * 0.25)
        model.save_pretrained(folder, save_original_format=hub_names)
        packable = any(takes_routed_rows(module) for module in model.modules())
        return cls(folder, inputs, model(TOKENS, **inputs).logits, packable)

    def converted(self, source: Path, to: str, fmt: str | None = None) -> tuple[Path, str | None]:
        """A folder with the converted model, and why transformers cannot load it, if the plan says so."""
        made = source.with_name(f"{source.name}-{fmt}-{to}".replace(":", "-").replace("/", ""))
        with Checkpoint.open(source) as checkpoint:
            plan = plan_conversion(checkpoint, choose_target(parse_spec(to), fmt), ConvertOptions())
            convert(checkpoint, made, plan, ConvertOptions())
        return made, plan.unread

    def check(self, folder: Path, unread: str | None, most: float = 2e-6) -> None:
        """Plain transformers loads the model, with every expert; or cannot load it, and the plan said so."""
        try:
            logits = self.load(folder)
            error = float((logits - self.logits).norm() / self.logits.norm())
            found = "" if error <= most else f"logits differ by {error:.1e}"
        except ImportError as error:
            pytest.skip(str(error))
        except Exception as error:  # whatever transformers raises for tensors that it cannot use
            found = f"{type(error).__name__}: {error}"
        assert bool(found) == bool(unread), f"the plan: {unread}; transformers: {found}"

    @torch.no_grad()
    def load(self, folder: Path) -> Tensor:
        """The logits of the model as plain transformers loads it, with all tensors and no others."""
        kind = class_of(transformers.AutoConfig.from_pretrained(folder))
        model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), {what: min(map(str, keys)) for what, keys in info.items() if keys}
        logits: Tensor = model(TOKENS, **self.inputs).logits
        return logits


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS, ids=lambda value: value)
def test_transformers_loads_what_is_written(
    name: str, spelling: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    every = request.config.getoption("--all-spellings", default=False)
    if not every and not is_judged_by_default((name, spelling)):
        pytest.skip("with --all-spellings")
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    saved = Saved.make(name, tmp_path / "saved", hub_names=spelling == HUB)
    int8, unread = saved.converted(saved.folder, "int8-channel:fp32")
    saved.check(int8, unread)
    dense, unread = saved.converted(int8, "fp32")
    saved.check(dense, unread)
    if not every:
        return
    saved.check(*saved.converted(saved.folder, "fp32"))
    if saved.packable:
        lancebill.from_pretrained(int8, weights="fp32").save_pretrained(tmp_path / "again")
        saved.check(tmp_path / "again", unread)
    if name != "deepseek_v4":  # which has a format of its own for FP8
        fp8, unread = saved.converted(saved.folder, "fp8-b8x8", "fp8")
        saved.check(fp8, unread)
        saved.check(*saved.converted(fp8, "fp32"))


def written_specs() -> Iterator[tuple[str, str, bool]]:
    """(format, spec, the first of those that transformers treats alike) of what `convert` writes."""
    formats = registry().values()
    specs = {str(spec): spec for spec in sorted({e.scheme.spec for f in formats for e in f.examples()}, key=str)}
    for fmt in formats:
        seen = set()
        for name, spec in specs.items():
            try:
                target = choose_target(spec, fmt.name)
            except CannotEncode:
                continue
            loading = fmt.in_transformers(target.spec)
            yield fmt.name, name, loading not in seen
            seen.add(loading)


@pytest.mark.parametrize(("fmt", "to", "first"), list(written_specs()), ids=str)
def test_formats_that_transformers_loads(
    fmt: str, to: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of a family whose experts it merges while loading; compared with the same numbers, unquantised.

    It rounds them to the dtype of the scales, so every token goes to all experts: none is near another choice.
    """
    if not first and not request.config.getoption("--all-spellings", default=False):
        pytest.skip("with --all-spellings")
    sizes = {"hidden_size": 384, "moe_intermediate_size": 384, "num_experts": 2, "num_experts_per_tok": 2}
    for key, size in sizes.items():  # 384: whole blocks of 128 and of 96
        monkeypatch.setitem(SIZES, key, size)
    saved = Saved.make("qwen3_moe", tmp_path / "saved", hub_names=True)
    try:
        made, unread = saved.converted(saved.folder, to, fmt)
    except CannotEncode as error:
        pytest.skip(str(error))
    dense, _ = saved.converted(made, "fp32")
    replace(saved, logits=saved.load(dense)).check(made, unread, most=0.02)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "granitemoe"])
def test_transformers_loads_gpt_oss_in_its_own_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("intermediate_size", "moe_intermediate_size"):
        monkeypatch.setitem(SIZES, size, 32)
    saved = Saved.make(name, tmp_path / "saved", hub_names=True)
    made, unread = saved.converted(saved.folder, "mxfp4", "gpt-oss")
    assert (unread is None) == (name == "gpt_oss")
    saved.check(made, unread, most=0.02)  # transformers dequantises to bf16
    saved.check(*saved.converted(made, "fp32"))


@torch.no_grad()
def test_an_output_matrix_that_is_tied_is_not_taken_for_a_quantised_one(tmp_path: Path) -> None:
    """No file stores it, but transformers has a linear module for it, which a config may target."""
    saved = Saved.make("cohere2_moe", tmp_path / "saved", hub_names=True)
    rules = {"experts": "int8-channel:fp32", "rest": {"*.self_attn.*": "int8-channel:fp32"}}
    packed = lancebill.from_pretrained(saved.folder, weights=rules, dtype=torch.float32, backend="reference")
    assert "int8-channel:fp32" in map(str, packed.lancebill_rest.specs.values())
    packed.save_pretrained(tmp_path / "again")
    wanted = packed(TOKENS, **saved.inputs).logits
    Saved(tmp_path / "again", saved.inputs, wanted, packable=True).check(tmp_path / "again", None)
