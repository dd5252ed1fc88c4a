"""Every public door, under a default device and dtype of torch that somebody has changed, and under its own.

`python doors.py DEVICE DTYPE FOLDER` prints the doors whose results differ, or that fail. One process: what a door
keeps for later calls is made under the changed defaults first.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from commands import call
from layer_checkpoints import make_checkpoint, make_inputs
from torch import Tensor, nn

import lancebill
from lancebill import Checkpoint, ExpertTensors, ModelExperts, QuantizedLinear, RoutedExperts
from lancebill.errors import UnsupportedProblem
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.checkpoints import save
from lancebill.testing.layers import plausible_weight

TOKENS = (3, 70)
SPECS = ("mxfp4", "int4-g32-zp", "int8", "fp8-channel", "nvfp4", "nf4-g64")
FORMATS = (
    ("gptq", "", "qwen3_moe"), ("awq", "", "qwen3_moe"), ("mxfp4", "", "gpt_oss"), ("fp8", "block", "qwen3_moe"),
    ("gguf", "", "gguf"), ("bitsandbytes", "", "qwen3_moe"), ("dense", "bf16", "gpt_oss"),
)  # fmt: skip
BACKENDS = ("auto", "torch-cpu", "reference")
ON_CPU: dict[str, Any] = {"device": "cpu"}
Door = Callable[[Path], Any]
DOORS: dict[str, Door] = {}


def door(function: Door) -> Door:
    DOORS[function.__name__] = function
    return function


def _inputs() -> list[tuple[Tensor, Tensor, Tensor]]:
    with torch.device("cpu"):
        plain = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return [make_inputs(tokens) for tokens in TOKENS]
        finally:
            torch.set_default_dtype(plain)


def _outputs(layer: RoutedExperts) -> list[Tensor]:
    """Each call twice, the second through what the first has left; and with the routing inside, if there is one."""
    made = []
    for x, ids, weights in _inputs():
        made += [layer(x, ids, weights) for _ in range(2)]
        if layer.routing is not None:
            logits = weights.new_zeros(len(x), layer.problem.global_experts)
            logits[:, 1] += x[:, 0].float()
            made += [layer.forward_routed(x, logits) for _ in range(2)]
    return made


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@door
def checkpoint_read(folder: Path) -> Any:
    made = {}
    for fmt, *_ in FORMATS:
        with Checkpoint.open(folder / fmt) as checkpoint:
            made[fmt] = {name: checkpoint.read(name) for name in checkpoint.tensors}
    return made


@door
def layers_of_checkpoints(folder: Path) -> Any:
    made = {}
    for fmt, _, family in FORMATS:
        for backend in BACKENDS:
            try:
                layer = RoutedExperts.from_checkpoint(folder / fmt, 0, backend=backend, **ON_CPU)
            except UnsupportedProblem:
                continue
            made[fmt, family, backend] = _state(layer), _outputs(layer), _outputs(copy.deepcopy(layer).to("cpu"))
    assert {backend for _, _, backend in made} == set(BACKENDS)
    return made


@door
def split_layers(folder: Path) -> Any:
    made = {}
    for moves in ("off", "recency"):
        layer = RoutedExperts.from_checkpoint(folder / "gptq", 0, gpu_experts=2, moves=moves, **ON_CPU)
        made[moves] = [output.shape if moves != "off" else output for output in _outputs(layer)]
    return made


@door
def requantised_layers(folder: Path) -> Any:
    made = {}
    for spec in SPECS:
        for activations in (None, "int8"):
            options = {"weights": parse_spec(spec), "activations": activations, "backend": "reference"}
            layer = RoutedExperts.from_checkpoint(folder / "dense", 0, **options, **ON_CPU)
            made[spec, activations] = _state(layer), _outputs(layer)
    return made


@door
def pushed_layers(folder: Path) -> Any:
    made = {}
    for fmt, part, family in FORMATS:
        source = make_plain(fmt, part, family)
        for headers in (source.headers, None):
            given: dict[str, Any] = {"tensors": headers, "router": False, **ON_CPU}
            layer = RoutedExperts.from_config(source.config, 0, **given)
            layer.load_weights(source.tensors.items())
            whole = ModelExperts(source.config, **given)
            assert not list(whole.divert(source.tensors.items()))
            layers = whole.finish()
            layers[0].load_weights([(n, t) for n, t in source.tensors.items() if whole.claim(n).layer == 0])  # type: ignore[union-attr]
            layers[0].finish()
            lancebill.reserve(nn.ModuleList(layers.values()), 64)
            made[fmt, headers is None] = [_state(layer.finish()), *map(_state, layers.values()), _outputs(layers[0])]
    return made


@door
def stacked_layers(folder: Path) -> Any:
    def matrix(n: int, k: int) -> ExpertTensors:
        g = torch.Generator().manual_seed(n)
        codes = torch.randint(256, (4, n, k // 2), generator=g, device="cpu", dtype=torch.uint8)
        scales = torch.randint(118, 124, (4, n, k // 32), generator=g, device="cpu", dtype=torch.uint8)
        return ExpertTensors(codes, (scales,))

    w13, w2 = matrix(512, 128), matrix(128, 256)
    made = {}
    for rows in ("gate_up", "interleaved"):
        layer = RoutedExperts.from_tensors(w13, w2, "mxfp4", top_k=2, rows=rows, expert_map=[0, 1, 2, 3])
        made[rows] = _state(layer), _outputs(layer)
    return made


@door
def random_layers(folder: Path) -> Any:
    source = make_plain("gptq", "", "qwen3_moe")
    layer = RoutedExperts.random(source.config, 0, **ON_CPU)
    return _state(layer), _outputs(layer)


@door
def linears(folder: Path) -> Any:
    made = {}
    with Checkpoint.open(folder / "model") as checkpoint:
        name = "model.layers.0.self_attn.q_proj"
        made["stored"] = _linear(QuantizedLinear.from_checkpoint(checkpoint, name, weights="int4-g32", **ON_CPU))
    for spec in SPECS:
        weight = make_weight(spec)
        for backend in BACKENDS:
            try:
                linear = QuantizedLinear.from_weight(weight, backend=backend, **ON_CPU)
            except UnsupportedProblem:
                continue
            made[spec, backend] = _linear(linear)
            linear.refit(weight)
            made[spec, backend, "again"] = _linear(linear)
    return made


def _linear(linear: QuantizedLinear) -> Any:
    outputs = []
    for tokens in (1, 3, 70):
        x = torch.linspace(-1, 1, tokens * linear.in_features, dtype=torch.float32, device="cpu").bfloat16()
        outputs += [linear(x.view(tokens, -1)) for _ in range(2)]
    return _state(linear), outputs, linear.weight, linear.bias


@door
def models(folder: Path) -> Any:
    made: dict[str, Any] = {}
    rules: list[Any] = [None, {"experts": "mxfp4", "rest": "int8"}]
    for number, weights in enumerate(rules):
        model = lancebill.from_pretrained(folder / "model", weights=weights, **ON_CPU)
        ids = torch.arange(1, 10, dtype=torch.int64, device="cpu").view(1, -1)
        with torch.no_grad():
            made[f"logits {number}"] = model(ids, attention_mask=torch.ones_like(ids)).logits
        made[f"tokens {number}"] = model.generate(ids, max_new_tokens=5, do_sample=False)
        made[f"weights {number}"] = _state(model)
        made[f"packed {number}"] = sorted(model.lancebill_rest.specs)
        if weights is not None:
            saved = folder / f"saved-{threading.get_ident()}-{len(list(folder.iterdir()))}"
            model.save_pretrained(saved)
            made["saved"] = _files(saved)
        from lancebill.integrations.transformers.pretrained import reload_experts

        reload_experts(model, weights="int4-g32")
        made[f"reloaded {number}"] = _state(model)
    return made


@door
def engine(folder: Path) -> Any:
    from transformers import AutoTokenizer

    from lancebill.serving.engine import Answer, End
    from lancebill.serving.sampling import Sampling, Token
    from lancebill.serving.start import start

    model = lancebill.from_pretrained(folder / "model", **ON_CPU)
    app, about = start("tiny", model, AutoTokenizer.from_pretrained(folder / "model"), context=64)
    made = []
    try:
        for how in (
            Sampling(),
            Sampling(temperature=1.0, seed=1, presence_penalty=0.5, logit_bias={3: 2.0}, min_p=0.1),
        ):
            got: list[Any] = []
            ended = threading.Event()

            def collect(event: Token | End, got: list[Any] = got, ended: threading.Event = ended) -> None:
                got.append(event.reason if isinstance(event, End) else event.id)
                if isinstance(event, End):
                    ended.set()

            app.engine.submit([Answer([1, 2, 3, 4], 6, how, collect)])
            assert ended.wait(60)
            made.append(got)
    finally:
        app.engine.stop(0.0)
    return made, about


@door
def commands(folder: Path) -> Any:
    out = folder / f"converted-{len(list(folder.iterdir()))}"
    done = [call("convert", folder / "model", out, "--to", "mxfp4")]
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{i * 7 % 120}" for i in range(60)))
    judged = call("eval", folder / "model", "--text", text, "--window", 32, "--stride", 16, "--json")
    done += [call("verify", out), call("inspect", out), call("explain", out), judged]
    assert all(each.exit_code == 0 for each in done), [each.output for each in done]
    return _files(out), json.loads(judged.stdout)["variants"][0]["perplexity"]


@contextmanager
def changed(device: str, dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def make_plain(fmt: str, part: str, family: str) -> Any:
    return _MADE[fmt, part, family]


def make_weight(spec: str) -> Any:
    return _WEIGHTS[spec]


_MADE: dict[tuple[str, str, str], Any] = {}
_WEIGHTS: dict[str, Any] = {}


def prepare(folder: Path) -> None:
    """What doors are given: checkpoints and weights that were made under torch's own defaults."""
    import tiny
    import transformers

    assert tiny.save_model(transformers, "qwen3_moe", folder / "model")
    tiny.save_tokenizer(transformers, folder / "model")
    for fmt, part, family in FORMATS:
        _MADE[fmt, part, family] = made = make_checkpoint(fmt, part, family)
        save(made, folder / fmt)
    from lancebill.moe.layout import W13, MatrixShape

    for spec in SPECS:
        _WEIGHTS[spec] = plausible_weight(MatrixShape(W13, 128, 256, parse_spec(spec), True), 1)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        return alike and one.device.type == "cpu" and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def main(device: str, dtype: str, folder: Path, only: list[str]) -> None:
    prepare(folder)
    found: dict[str, Any] = {}
    chosen = {name: function for name, function in DOORS.items() if not only or name in only}
    with changed(device, getattr(torch, dtype)):
        for name, function in chosen.items():
            try:
                found[name] = function(folder)
            except Exception:
                found[name] = traceback.format_exc()
    problems = {}
    for name, function in chosen.items():
        if isinstance(found[name], str):
            problems[name] = found[name]
        elif not same(found[name], function(folder)):
            problems[name] = "other results"
    print(json.dumps({"doors": list(chosen), "problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
