"""Language models inside other models, and layers that predict further tokens: found, checked and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion import run_conversion

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.missing_layers import missing_layers
from lancebill.checkpoint.resolve.router_check import router_problems
from lancebill.cli.verify import examine
from lancebill.errors import UnexpectedTensor
from lancebill.formats import registry
from lancebill.testing.checkpoints import Generated, Geometry, generate, save

SIZE = Geometry(experts=4, hidden=32, intermediate=48, layers=3)
# Where published models have the language model: its tensors and its config.
PUBLISHED = [
    ("model.", ()),
    ("", ("text_config",)),
    ("language_model.model.", ("text_config",)),  # Kimi-VL, Llama-4
    ("language_model.model.", ("llm_config",)),  # InternVL
    ("model.language_model.", ("text_config",)),  # GLM-4.5V
    ("language.model.", ("language_config",)),  # DeepSeek-VL2
    ("llm.model.", ("llm_config",)),  # Ovis
    ("thinker.model.", ("thinker_config", "text_config")),  # Qwen3-Omni
    ("language_model.backbone.", ("llm_config",)),  # Nemotron-Nano-VL
]
MTP = "mtp.layers.0.mlp.experts.0.up_proj.weight"


def whole_model(family: str, **config: Any) -> Generated:
    """Experts in layers 1 and 2 with all that their routers have, and a dense layer 0."""
    row = names.find_family({"model_type": family})
    made = generate(next(iter(registry()["dense"].examples())), row, row.forms[0], SIZE)
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if ".layers.0." not in name}
    made.config = replace(made.config, model={**made.config.model, **config})
    for layer in range(SIZE.layers):
        made.tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(SIZE.hidden)
    for layer in (1, 2):
        made.tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(SIZE.experts, SIZE.hidden)
        for role in row.router.roles:
            name = row.router.roles[role][0].format(layer=layer)
            made.tensors[f"model.{name}"] = torch.randn(SIZE.experts)
    return made


def nested(model: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """The config inside that of a model which is not known."""
    for section in reversed(sections):
        model = {"model_type": "a_wrapper", "vision_config": {"hidden_size": 7, "num_hidden_layers": 9}, section: model}
    return dict(model)


@pytest.mark.parametrize(("prefix", "sections"), PUBLISHED)
def test_a_model_is_found_inside_another(prefix: str, sections: tuple[str, ...]) -> None:
    made = whole_model("deepseek_v3", first_k_dense_replace=1)
    made.config = replace(made.config, model=nested(made.config.model, sections))
    made.tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in made.tensors.items()}
    made.tensors["vision_tower.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(2, 2)
    manifest = manifests.build(made.config, made.headers)
    problems = [*manifest.problems, *missing_layers(manifest), *router_problems(manifest)]
    assert not problems and list(manifest.layers) == [1, 2], [problem.render() for problem in problems]
    assert (manifest.sizes.experts, manifest.sizes.layers) == (SIZE.experts, SIZE.layers)


def test_layers_that_predict_further_tokens_are_checked_and_kept(tmp_path: Path) -> None:
    """Numbered after the others, as DeepSeek-V3 has them, or below a prefix of their own, as Qwen3-Next."""
    made = whole_model("deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=1, n_group=1, topk_group=1)
    more = {"model.layers.2.eh_proj.weight": torch.randn(32, 64), MTP: torch.randn(48, 32)}
    made.tensors |= more
    source = save(made, tmp_path / "source")
    assert examine(source, strict=True).ok and examine(source).layers == 2
    for target in (("int8", None), ("fp8-block", "fp8"), ("bf16", None)):
        run_conversion(source, out := tmp_path / target[0], *target)
        assert examine(out, strict=True).ok and examine(out).layers == 2
        with Checkpoint.open(out) as written:
            assert all(torch.equal(written.read(name), tensor) for name, tensor in more.items())
    unstated = replace(made, config=replace(made.config, model={**made.config.model, "num_nextn_predict_layers": 0}))
    (problem,) = examine(save(unstated, tmp_path / "unstated")).problems
    assert isinstance(problem, UnexpectedTensor) and problem.where == "layers 2"
