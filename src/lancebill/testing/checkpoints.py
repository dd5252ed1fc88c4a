"""Generates small checkpoints of any format and family from random weights, with the formats' own `encode`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lancebill.checkpoint.resolve.naming import DOWN, GATE, GATE_UP, UP, NameForm, Naming, find_family
from lancebill.checkpoint.resolve.orientation import is_matrix_like
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.formats.base import Example, Part
from lancebill.formats.stored import DTYPE_NAMES, Config, Stored
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing.weights import random_example


@dataclass(frozen=True)
class Geometry:
    """Sizes of a generated model's experts."""

    experts: int = 4
    hidden: int = 128
    intermediate: int = 128
    layers: int = 1
    top_k: int = 2


def small_size(example: Example, experts: int = 2, layers: int = 1) -> Geometry:
    """Experts with `example.k` columns to share out between ranks. Long blocks need as many there, but nowhere else."""
    return Geometry(experts, hidden=example.k if example.k <= 512 else 256, intermediate=example.k, layers=layers)


@dataclass
class Generated:
    """A checkpoint in memory: config, tensors, and the weights that were encoded."""

    config: Config
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[tuple[int, int, str], LogicalWeight] = field(default_factory=dict)  # (layer, expert, stored name)

    @property
    def headers(self) -> dict[str, Stored]:
        return {name: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in self.tensors.items()}

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> Tensor:
        tensor = self.tensors[name]
        return (tensor[index] if index else tensor).clone()


def generate(example: Example, naming: Naming, form: NameForm, size: Geometry, *, seed: int = 0) -> Generated:
    """A checkpoint with `example`'s scheme and the tensor names of `form`, one of `naming`'s forms.

    It has biases if the example or the family has them. If layers have several mixtures, all of them are generated;
    `weights` belong to the first.
    """
    if naming.biased and example.scheme.part("bias") is not None:
        example = replace(example, bias=True)
    prefix = "model." if "model." in form.prefixes else form.prefixes[0]
    generated = Generated(_config(example.config, naming, form, size))
    rows = find_family(generated.config.model).mixtures if naming.beside else (naming,)
    for number, row in enumerate(rows):
        named = row.forms[naming.forms.index(form)]
        made = Generated(generated.config) if number else generated
        for layer in range(size.layers):
            for stored in named.names:
                _generate_projection(made, example, named, size, (prefix, layer, stored), seed + number)
        generated.tensors |= made.tensors
    return generated


def _generate_projection(
    generated: Generated, example: Example, form: NameForm, size: Geometry, at: tuple[str, int, str], seed: int
) -> None:
    prefix, layer, stored = at
    n, k = matrix_size(stored, size)
    pieces: dict[str, list[Tensor]] = {}
    for expert in range(size.experts):
        number = (layer * size.experts + expert) * 4 + (GATE, UP, DOWN, GATE_UP).index(stored)
        order_seed = number - number % 4 + (stored == DOWN)
        weight = random_example(example, n, k, seed * 1_000_003 + number, order_seed)
        generated.weights[layer, expert, stored] = weight
        module = form.module(prefix, layer, expert, stored)
        for role, tensor in example.scheme.encode(weight).items():
            part = example.scheme.part(role)
            assert part is not None
            tensor = _oriented(tensor, part, stored in form.transposed)
            name = module + part.usual_suffix(form.parameters)
            if form.stacked:
                pieces.setdefault(name, []).append(tensor)
            else:
                generated.tensors[name] = tensor
    for name, tensors in pieces.items():
        generated.tensors[name] = torch.cat(tensors) if form.flat and tensors[0].ndim else torch.stack(tensors)


def matrix_size(stored: str, size: Geometry) -> tuple[int, int]:
    """(n, k) of a stored projection."""
    if stored == DOWN:
        return size.hidden, size.intermediate
    return size.intermediate * (2 if stored == GATE_UP else 1), size.hidden


def _oriented(tensor: Tensor, part: Part, transposed: bool) -> Tensor:
    flips = transposed and tensor.ndim == 2 and is_matrix_like(part.axes[0])
    return tensor.t().contiguous() if flips else tensor


def _config(config: Config, naming: Naming, form: NameForm, size: Geometry) -> Config:
    model: Mapping[str, Any] = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "num_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "moe_intermediate_size": size.intermediate,
        "model_type": naming.model_types[0],
        "architecture": (*form.architectures, "qwen3moe")[0],  # GGUF's name of the family
        **config.model,
    }
    return Config(model, config.quant, config.method, config.source)


def save(generated: Generated, folder: Path) -> Path:
    """Write a generated checkpoint as a folder with config.json and safetensors."""
    with CheckpointWriter(folder, generated.headers) as writer:
        for name, tensor in generated.tensors.items():
            writer.write(name, tensor)
        quant = {"quant_method": generated.config.method, **generated.config.quant} if generated.config.method else None
        model = dict(generated.config.model)
        writer.write_json("config.json", model | {"quantization_config": quant} if quant else model)
    return folder
