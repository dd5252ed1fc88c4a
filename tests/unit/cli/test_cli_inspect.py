"""`lancebill inspect`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import FINE, PROBLEM, SIZE, call, checkpoint, example_of, parsed

from lancebill.checkpoint.resolve import naming as names
from lancebill.testing.checkpoints import generate, save
from lancebill.testing.models import write_model


def test_inspect_describes_a_checkpoint(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "compressed-tensors", "mxfp4-pack-quantized-mxfp4")
    summary = parsed(call("inspect", source, "--json"))
    assert (summary["format"], summary["family"]) == ("compressed-tensors", "qwen3_moe")
    assert (summary["layers"], summary["experts"], summary["hidden"], summary["intermediate"]) == (
        2,
        4,
        256,
        256,
    )
    (group,) = summary["groups"]
    assert group["layers"] == "0-1"
    assert group["w13"]["spec"] == group["w2"]["spec"] == "mxfp4"
    assert group["w13"]["bits_per_weight"] == summary["bits_per_weight"] == 4.25
    assert summary["bytes"]["experts"] == 2 * 4 * 3 * 256 * 256 * 17 // 32
    assert summary["problems"] == 0
    text = call("inspect", source)
    assert text.exit_code == FINE
    for word in ("compressed-tensors", "2 layers x 4 experts", "mxfp4", "4.250", "835.58 kB"):
        assert word in text.stdout


def test_inspect_groups_layers_by_spec(tmp_path: Path) -> None:
    row = names.find_family({"model_type": "qwen3_moe"})
    example = example_of("gptq", "int4-g64:fp16-gptq")
    generated = generate(example, row, row.forms[0], replace(SIZE, layers=3))
    other = generate(example_of("dense", "bf16"), row, row.forms[0], replace(SIZE, layers=3))
    tensors = {n: t for n, t in generated.tensors.items() if ".layers.1." not in n}
    tensors |= {n: t for n, t in other.tensors.items() if ".layers.1." in n}
    quant = {**generated.config.quant, "dynamic": {r"-:model\.layers\.1\.": {}}}
    source = save(
        replace(generated, tensors=tensors, config=replace(generated.config, quant=quant)), tmp_path / "mixed"
    )
    groups = parsed(call("inspect", source, "--json"))["groups"]
    assert [(g["layers"], g["w2"]["spec"]) for g in groups] == [("0, 2", "int4-g64:fp16"), ("1", "bf16")]


def test_inspect_plans_memory_and_lists_a_layer(model: Path) -> None:
    summary = parsed(call("inspect", model, "--memory", "--tp", 2, "--ep", 4, "--layer", 1, "--json"))
    assert [(r["tp_rank"], r["ep_rank"]) for r in summary["memory"]["ranks"]] == [
        (t, e) for e in range(4) for t in (0, 1)
    ]
    assert sum(rank["final"] for rank in summary["memory"]["ranks"]) == summary["bytes"]["experts"]
    assert summary["layer"]["tensors"][0]["tensor"] == "model.layers.1.mlp.experts.0.gate_proj.weight"
    text = call("inspect", model, "--tp", 2, "--layer", 0).stdout
    assert "peak while loading" in text and "model.layers.0.mlp.experts.0.down_proj.weight" in text


def test_inspect_says_what_a_gpu_holds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lancebill.bench import ceilings

    monkeypatch.setattr(ceilings, "read_rate", lambda device: 2.0)
    whole = parsed(call("inspect", model, "--gpu", "1GiB", "--json"))
    split, experts = whole["split"], whole["experts"]
    assert set(split["gpu_experts"].values()) == {experts} and split["most_tokens_per_second"] is None
    split_bytes = split["gpu_expert_bytes"]
    each = split_bytes // (whole["layers"] * experts)
    held = split["other_bytes"] + each * (whole["layers"] + 1)
    split = parsed(call("inspect", model, "--gpu", f"{held}B", "--json"))["split"]
    assert list(split["gpu_experts"].values()) == [2] + [1] * (whole["layers"] - 1)
    missing = whole["layers"] * experts - whole["layers"] - 1
    assert split["host_expert_bytes"] == missing * each
    assert split["most_tokens_per_second"] == pytest.approx(2e9 / split["cpu_bytes_per_token"], rel=1e-2)
    assert "in host memory" in call("inspect", model, "--gpu", f"{held}B").stdout
    for ranks, cut, kept in ((("--tp", 2), 2, 1), (("--ep", 2), 1, 2), (("--tp", 2, "--ep", 2), 2, 2)):
        whole_rank = parsed(call("inspect", model, "--gpu", "1GiB", *ranks, "--json"))["split"]
        assert set(whole_rank["gpu_experts"].values()) == {experts // kept}
        assert whole_rank["gpu_expert_bytes"] == split_bytes // (cut * kept)
        none = call("inspect", model, "--gpu", f"{split['other_bytes']}B", *ranks)
        reads = parsed(call("inspect", model, "--gpu", f"{split['other_bytes']}B", "--json"))["split"]
        told = parsed(call("inspect", model, "--gpu", f"{split['other_bytes']}B", *ranks, "--json"))["split"]
        assert "rank 0 of tp" in none.stdout and told["cpu_bytes_per_token"] == reads["cpu_bytes_per_token"]


def test_inspect_says_that_a_gpu_is_too_small(tmp_path: Path) -> None:
    write_model(tmp_path / "model", SIZE)
    told = call("inspect", tmp_path / "model", "--gpu", "10B")
    assert "too small: these tensors do not fit" in told.stdout and "tokens/s" not in told.stdout
    split = parsed(call("inspect", tmp_path / "model", "--gpu", "10B", "--json"))["split"]
    assert split["other_bytes"] > 10 and split["most_tokens_per_second"] is None
    assert told.exit_code == 1 and not split["fits"]
    refused = call("inspect", tmp_path / "model", "--gpu", 24)
    assert refused.exit_code == 2 and "24GiB" in refused.output


def test_inspect_rejects_impossible_shards_and_layers(model: Path) -> None:
    result = call("inspect", model, "--memory", "--tp", 3, "--json")
    assert result.exit_code == PROBLEM
    assert parsed(result)["error"]["error"] == "ShardError"
    result = call("inspect", model, "--layer", 9)
    assert result.exit_code == PROBLEM
    assert "0-1" in result.stderr
