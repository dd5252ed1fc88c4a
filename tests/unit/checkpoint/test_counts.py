"""Counts in configs, headers and names are not believed: no loop or allocation grows with them.

Every row claims something about a checkpoint of 2 layers and 4 experts. The claim must be an error that names it, in
little time and memory.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.expected_headers import expected_headers
from lancebill.checkpoint.resolve.missing_layers import missing_layers
from lancebill.cli.verify import examine
from lancebill.errors import BadValue, LancebillError, MissingTensor
from lancebill.formats import registry
from lancebill.formats.stored import Stored
from lancebill.testing.checkpoints import Generated, Geometry, generate, save
from lancebill.testing.gguf import write_gguf

SIZE = Geometry(experts=4, hidden=256, intermediate=256, layers=2)
EXPERT = "model.layers.0.mlp.experts.{}.gate_proj.weight"
PEAK = 2 << 20


def _made(family: str, form: int) -> Generated:
    row = names.find_family({"model_type": family})
    dense = next(e for e in registry()["dense"].examples() if e.name == "bf16")
    return generate(dense, row, row.forms[form], SIZE)


EACH, STACKED = _made("qwen3_moe", 0), _made("qwen3_moe", 1)


def _texts(made: Generated, model: Mapping[str, Any], headers: Mapping[str, Stored]) -> list[str]:
    """All problems of the checkpoint with this config and these headers; fails if finding them takes long."""
    config = replace(made.config, model={**made.config.model, **model})
    tracemalloc.start()
    started = time.process_time()
    try:
        manifest = manifests.build(config, headers)
        problems = [*manifest.problems, *missing_layers(manifest)]
    except LancebillError as error:
        problems = [error]
    elapsed, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert elapsed < 1 and peak < PEAK
    return [problem.render() for problem in problems]


COUNTS: dict[str, tuple[dict[str, Any], str]] = {
    "10^9 experts": ({"num_experts": 10**9}, "'num_experts' is not a valid size"),
    "2^40 experts": ({"num_experts": 1 << 40}, "'num_experts' is not a valid size"),
    "the most experts": ({"num_experts": 1 << 14}, "16384"),
    "minus one expert": ({"num_experts": -1}, "got -1"),
    "2.5 experts": ({"num_experts": 2.5}, "got 2.5"),
    "experts as text": ({"num_experts": "4"}, "got '4'"),
    "experts of layers as text": ({"num_experts": ["4", "4"]}, "got ['4', '4']"),
    "experts of too few layers": ({"num_experts": [4]}, "got [4]"),
    "experts as a bool": ({"num_experts": True}, "got True"),
    "hidden of 2^40": ({"hidden_size": 1 << 40}, "'hidden_size' is not a valid size"),
    "intermediate as text": ({"moe_intermediate_size": "big"}, "'moe_intermediate_size'"),
    "top 5 of 4": ({"num_experts_per_tok": 5}, "more experts than there are; expected at most 4"),
    "top 10^9": ({"num_experts_per_tok": 10**9}, "'num_experts_per_tok'"),
    "10^9 layers": ({"num_hidden_layers": 10**9}, "layers 2 to 999999999: there are no tensors at all"),
    "three layers": ({"num_hidden_layers": 3}, "layer 2: there are no tensors at all"),
    "minus one layer": ({"num_hidden_layers": -1}, "'num_hidden_layers'"),
}


@pytest.mark.parametrize("made", [EACH, STACKED], ids=["each", "stacked"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_in_a_config(made: Generated, name: str) -> None:
    model, fragment = COUNTS[name]
    texts = _texts(made, model, made.headers)
    assert any(fragment in text for text in texts), texts
    assert len(texts) < 100


def _add(name: str) -> Callable[[dict[str, Stored]], None]:
    return lambda headers: headers.update({name: Stored("BF16", (256, 256))})


def _drop(start: str) -> Callable[[dict[str, Stored]], None]:
    def change(headers: dict[str, Stored]) -> None:
        for name in [name for name in headers if name.startswith(start)]:
            del headers[name]

    return change


HEADERS: dict[str, tuple[Generated, dict[str, Any], Callable[[dict[str, Stored]], None], str]] = {
    "expert 10^18": (EACH, {}, _add(EXPERT.format(10**18)), "the config has no such expert"),
    "expert 10^18, no count": (EACH, {"num_experts": None}, _add(EXPERT.format(10**18)), "too many experts"),
    "expert 9999, no count": (EACH, {"num_experts": None}, _add(EXPERT.format(9999)), "expected 10000 experts"),
    "expert 00": (EACH, {}, _add(EXPERT.format("00")), "not a projection"),
    "expert in Arabic digits": (EACH, {}, _add(EXPERT.format("\u0660")), "not a projection"),
    "layer 00": (EACH, {}, _add(EXPERT.format(0).replace("s.0.m", "s.00.m")), "not a projection"),
    "stacked 2^60": (
        STACKED,
        {"num_experts": None},
        lambda headers: headers.update({n: replace(h, shape=(1 << 60, *h.shape[1:])) for n, h in headers.items()}),
        "too many experts",
    ),
    "neither sizes nor matrices": (
        EACH,
        {"hidden_size": None, "moe_intermediate_size": None},
        lambda headers: headers.update({n: replace(h, shape=(64, 4, 256)) for n, h in headers.items()}),
        "follows neither from the config nor from the tensors",
    ),
    "no tensor of layer 0": (EACH, {}, _drop("model.layers.0."), "layer 0: there are no tensors at all"),
    "a router without experts": (EACH, {}, _add("model.layers.7.mlp.gate.weight"), "layer 7: the layer has a router"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_counts_in_names_and_shapes(name: str) -> None:
    made, model, change, fragment = HEADERS[name]
    headers = dict(made.headers)
    change(headers)
    texts = _texts(made, model, headers)
    assert any(fragment in text for text in texts), texts


def test_the_checkpoints_are_sound_without_the_claims() -> None:
    for made in (EACH, STACKED):
        assert not _texts(made, {}, made.headers)
        assert not _texts(made, {"num_experts": None, "num_hidden_layers": None}, made.headers)


def test_verify_reports_a_false_count(tmp_path: Path) -> None:
    false = replace(EACH.config, model={**EACH.config.model, "num_experts": 10**9})
    report = examine(save(replace(EACH, config=false), tmp_path / "each"))
    assert [type(p) for p in report.problems] == [BadValue]
    row = names.find_family({"model_type": "gguf"})
    example = next(iter(registry()["gguf"].examples()))
    made = generate(example, row, row.forms[0], SIZE)
    tensors = {name: (example.name, tensor) for name, tensor in made.tensors.items()}
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 10**9}
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    assert "'num_experts' is not a valid size" in str(examine(tmp_path / "x.gguf").problems[0])


def test_sections_in_sections_are_bounded() -> None:
    nested: dict[str, Any] = {}
    for _ in range(900):
        nested = {"text_config": nested}
    assert not _texts(EACH, nested, EACH.headers)


def test_a_layer_of_a_config_alone_is_bounded() -> None:
    config = replace(EACH.config, model={**EACH.config.model, "num_experts": 1 << 40})
    with pytest.raises(BadValue, match="num_experts"):
        expected_headers(config, names.find_family(config.model), 0)


def test_a_config_alone_must_state_the_sizes() -> None:
    model = {key: value for key, value in EACH.config.model.items() if key != "hidden_size"}
    with pytest.raises(MissingTensor, match="does not state the size"):
        expected_headers(replace(EACH.config, model=model), names.find_family(model), 0)


@pytest.mark.parametrize("row", names.TABLE, ids=lambda row: row.family)
def test_the_layer_of_a_config_alone_is_a_sound_one(row: names.Naming) -> None:
    """For every family: transposed, flat, stacked and single experts."""
    dense = next(e for e in registry()["dense"].examples() if e.name == "bf16")
    config = generate(dense, row, row.forms[0], replace(SIZE, layers=1)).config
    headers = expected_headers(config, row, 0)
    assert headers and not manifests.build(config, headers, row).problems


def test_experts_that_do_nothing_may_have_rows() -> None:
    """As transformers writes LongCat: nothing reads them."""
    row = names.find_family({"model_type": "longcat_flash"})
    stacked = next(form for form in row.forms if form.stacked)
    dense = next(e for e in registry()["dense"].examples() if e.name == "bf16")
    made = generate(dense, row, stacked, SIZE)
    config = replace(made.config, model={**made.config.model, "zero_expert_num": 2})
    wider = {name: replace(h, shape=(h.shape[0] + 2, *h.shape[1:])) for name, h in made.headers.items()}
    assert all(not manifests.build(config, headers, row).problems for headers in (made.headers, wider))
    without = replace(config, model={**config.model, "zero_expert_num": 0})
    assert manifests.build(without, wider, row).problems
