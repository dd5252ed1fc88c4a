"""Cells of whole models: every format and family, every GGUF architecture, and pairs of specs."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest
from unittest.mock import patch

import tiny
import torch
import transformers
from cells import Cell, Notes, Place
from judge import INPUTS
from tiny_models import JUDGED, JUDGED_WITHIN, MODELS, NEEDS, UNWRITABLE_NAMES, tiny_model
from torch import Tensor
from whole_model import check_model, requantised

from lancebill.checkpoint.resolve.naming import TABLE
from lancebill.checkpoint.resolve.other_modules import find_module
from lancebill.cli.convert import run_conversion, target_of
from lancebill.errors import LancebillError, UnsupportedProblem
from lancebill.formats import registry
from lancebill.formats.base import Example, Format, Module, Part, Stored
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.integrations.transformers.gguf_rows import ROWS
from lancebill.integrations.transformers.packed_experts import expert_modules
from lancebill.numbers.codec import quantize
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.families import judged_types

FAMILY = "qwen3_moe"
# Every matrix has whole blocks of all formats.
SIZES = {"hidden_size": 256, "head_dim": 64, "vocab_size": 256}
ALL_EXPERTS = {"num_experts_per_tok": 8}  # no choice of experts that rounding could flip
INNER = {"moe_intermediate_size": 256, "intermediate_size": 256}
TOKENS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
OTHERWISE = {"dense": "nothing is quantised", "gguf": "all architectures"}  # formats without cells as the others have
ONE_FAMILY = ("deepseek_v4", "mxfp4")  # formats of one family's experts
PAIRS: tuple[tuple[str | None, Any], ...] = (
    (None, "int8"), ("mxfp4", None), ("mxfp4", "int8"), ("int4-g32", "int4-g32"), ("int4-g128", "mxfp4"),
    ("nvfp4", "fp8-channel"), ("fp8-block", "fp8-block"), ("int8", "int4-g32-zp"), ("mxfp8", "nvfp4"),
    ("fp8-channel", {"*.self_attn.*": "int8", "lm_head": "fp8-channel"}), ("int4-g32-zp:fp16", "fp8-block"),
)  # fmt: skip


def model_cells() -> Iterator[Cell]:
    for name, example in format_examples():
        yield Cell("format", f"{name} {example.name}", 1, partial(run_format, name, example))
    yield Cell("format", "deepseek_v4 fp8 and fp4", 1, run_deepseek_v4)
    yield Cell("format", "mxfp4 gpt-oss", 1, run_gpt_oss)
    for experts, rest in PAIRS:
        yield Cell("pair", f"{experts} and {rest}", 1, partial(run_pair, experts, rest))
    for name in dict.fromkeys(name for row in TABLE for name in judged_types(row)):
        yield Cell("family", name, 1, partial(run_family, name))
    for number, architecture in enumerate(gguf_models()):
        yield Cell("gguf", architecture, 1, partial(run_gguf, number))


def format_examples() -> Iterator[tuple[str, Example]]:
    """Of each format those whose specs no other one has, and at least one."""
    seen = set()
    for name, fmt in registry().items():
        examples = [] if name in (*OTHERWISE, *ONE_FAMILY) else list(fmt.examples())
        new = [example for example in examples if example.scheme.spec not in seen]
        for example in new or examples[:1]:
            if example.scheme.spec not in seen or not new:
                seen.add(example.scheme.spec)
                yield name, example


def gguf_models() -> list[str]:
    """Names of all models; without the library the architectures, which are skipped."""
    if importlib.util.find_spec("gguf") is None:
        return sorted(ROWS)
    from tiny_gguf_models import MODELS as files

    return [f"{architecture} {family}" for architecture, family, _ in files]


def source(folder: Path, family: str = FAMILY, **more: Any) -> Path:
    """An unquantised model in bf16, with tensors for each expert."""
    sizes = {**SIZES, **ALL_EXPERTS, **more}
    with patch.dict(tiny.COMMON, sizes), patch.dict(tiny.FAMILIES[family], {**INNER, **more}):
        if not tiny.save_model(transformers, family, folder):
            raise SkipTest(f"transformers {transformers.__version__} has no {family}")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def plain_model(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info["missing_keys"]
    return model.eval()


def run_format(name: str, example: Example, place: Place) -> Notes:
    """A checkpoint in which the format's config quantises whatever it does, attention included."""
    packed, plain = place.folder / "packed", place.folder / "plain"
    quant = dict(example.config.quant)
    if example.config.method:
        quant["quant_method"] = example.config.method
    needed = {role: shape for role, shape in example.inputs.items() if not _part(example, role).optional}
    inputs = {role: torch.full(shape, 0.05) for role, shape in needed.items()}
    chosen = chooser(registry()[name], example, inputs)
    tiny.quantized_copy(source(place.folder / "source"), packed, plain, quant, example.scheme, chosen, inputs)
    return check_model(packed, plain_model(plain), place.device, place.folder / "saved", TOKENS, {})


def _part(example: Example, role: str) -> Part:
    part = example.scheme.part(role)
    assert part is not None, role
    return part


def chooser(fmt: Format, example: Example, inputs: Mapping[str, Tensor]) -> Callable[[str], bool]:
    """Whether the format's config says that a module is stored by the example's scheme.

    Modules other than experts are left unquantised where their size does not follow from what is stored.
    """
    try:
        weight = quantize(torch.randn(example.n, example.k), example.scheme.spec)
        stored = tiny.encoded(example.scheme, replace(weight, inputs=inputs))
    except LancebillError as error:
        raise SkipTest(f"nothing writes {example.scheme.spec}: {error.what}") from error
    tensors = {_part(example, role).suffix[0]: tensor for role, tensor in stored.items()}
    headers = {suffix: Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for suffix, tensor in tensors.items()}
    try:
        find_module(example.config, {f"m{s}": h for s, h in headers.items()}, lambda name, _: tensors[name[1:]], "m")
        sized = True
    except LancebillError:
        sized = False

    def is_quantised(module: str) -> bool:
        if module.endswith((".gate", "norm", "embed_tokens")) or not (sized or ".experts." in module):
            return False
        return fmt.scheme(example.config, Module(module, headers)) == example.scheme

    return is_quantised


def run_deepseek_v4(place: Place) -> Notes:
    """Attention in blocks of fp8, experts in fp4."""
    folder = place.folder
    first = source(folder / "source", "deepseek_v4", q_lora_rank=128, o_lora_rank=128, moe_intermediate_size=128)
    examples = {example.name: example for example in registry()["deepseek_v4"].examples()}
    fp4, fp8 = examples["fp4-I8"], examples["fp8-F8_E8M0"]
    quant = {"quant_method": "fp8", **fp4.config.quant}
    copied = partial(tiny.quantized_copy, quant=quant)
    copied(first, folder / "attention", folder / "plain attention", scheme=fp8.scheme, is_quantised=_is_v4_attention)
    for before, packed, plain in (("attention", "packed", "-"), ("plain attention", "--", "plain")):
        copied(
            folder / before, folder / packed, folder / plain, scheme=fp4.scheme, is_quantised=lambda m: ".experts." in m
        )
    return check_model(folder / "packed", plain_model(folder / "plain"), place.device, folder / "saved", TOKENS, {})


def _is_v4_attention(module: str) -> bool:
    return module.endswith((".wq_a", ".wq_b", ".wkv", ".wo_b")) and "compressor" not in module


def run_gpt_oss(place: Place) -> Notes:
    """As it is published: MXFP4 experts with biases, everything else in bf16."""
    folder, packed = source(place.folder / "source", "gpt_oss"), place.folder / "packed"
    run_conversion(folder, packed, target_of("mxfp4", "mxfp4"), {"search": False})
    reference = plain_model(folder)
    with torch.no_grad():
        for layer in reference.model.layers:
            for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                for expert in stack:
                    expert.copy_(requantised(expert.T, parse_spec("mxfp4")).T)
    return check_model(packed, reference, place.device, place.folder / "saved", TOKENS, {})


@torch.no_grad()
def requantise_experts(reference: Any, spec: QuantSpec) -> None:
    """Give the reference the numbers of experts that were quantised while loading."""
    for layer in reference.model.layers:
        stacks = layer.mlp.experts
        for stack, halves in ((stacks.gate_up_proj, 2), (stacks.down_proj, 1)):
            for expert in stack:
                expert.copy_(torch.cat([requantised(half, spec) for half in expert.chunk(halves)]))


def run_pair(experts: str | None, rest: Any, place: Place) -> Notes:
    folder = source(place.folder / "source")
    reference = plain_model(folder)
    if experts is not None:
        requantise_experts(reference, parse_spec(experts))
    weights = {key: value for key, value in (("experts", experts), ("rest", rest)) if value is not None}
    return check_model(folder, reference, place.device, place.folder / "saved", TOKENS, {}, weights=weights)


def run_family(name: str, place: Place) -> Notes:
    """A tiny model in bf16, everything outside its experts quantised while loading."""
    if name in JUDGED_WITHIN:
        raise SkipTest(f"not on text alone; {JUDGED_WITHIN[name]} is")
    if name not in MODELS or name not in JUDGED:
        raise SkipTest(f"transformers {transformers.__version__} has no {name}")
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        raise SkipTest(f"needs {NEEDS[name]}")
    try:
        reference = tiny_model(name)
    except ValueError as error:  # a family that this version cannot make from its own config
        raise SkipTest(f"transformers {transformers.__version__}: {str(error).splitlines()[0][:80]}") from error
    with torch.no_grad():
        for tensor in reference.state_dict().values():  # not of what is computed from the config
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())
    try:
        list(expert_modules(reference))
    except UnsupportedProblem as error:
        raise SkipTest(f"{name}: {error.what}") from error
    narrow = copy.deepcopy(reference).to(torch.bfloat16)
    narrow.save_pretrained(place.folder / "model", save_original_format=name not in UNWRITABLE_NAMES)
    inputs, weights = INPUTS.get(name, {}), {"rest": "int8"}
    folder = place.folder / "saved"
    return check_model(place.folder / "model", reference, place.device, folder, TOKENS[:, :7], inputs, weights=weights)


def run_gguf(number: int, place: Place) -> Notes:
    if importlib.util.find_spec("gguf") is None:
        raise SkipTest("needs gguf")
    from tiny_gguf import write
    from tiny_gguf_models import MODELS as files
    from tiny_gguf_models import reference_of

    architecture, family, more = files[number]
    reference = reference_of(architecture, family, more)
    write(reference, architecture, place.folder / "model.gguf")
    length = 140 if architecture == "deepseek4" else 9  # a layer reads sums of 128 tokens
    tokens = torch.randint(1, 128, (2, length), generator=torch.Generator().manual_seed(1))
    return check_model(place.folder / "model.gguf", reference, place.device, place.folder / "saved", tokens, {})
