"""BitsAndBytes against values from its definition and the library's CPU functions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.load.layer_plan import plan_layer
from lancebill.checkpoint.load.load_experts import load_expert
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import axes as ax
from lancebill.formats import detect
from lancebill.formats.base import Config, Dense, Module, Scheme, Stored
from lancebill.formats.bitsandbytes import FORMAT, INT8, Bnb4Scheme, bnb4_scheme
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.moe.placement import Placement
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import BNB_FP4, NF4
from lancebill.numbers.spec import NF4_G64
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight, same_bits
from lancebill.testing.checkpoints import Generated

NAME = "model.layers.0.mlp.experts.0.gate_proj"


def library() -> Any:
    """The reference library. If it is not installed, only the tests that use it are skipped."""
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes judges this")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Run the library without torch.compile, which it uses for odd shapes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def config(kind: str = "nf4", model: dict[str, Any] | None = None, **values: Any) -> Config:
    quant = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind, **values}
    return Config(model or {}, quant, method="bitsandbytes")


def by_role(scheme: Scheme, tensors: dict[str, Tensor], n: int, k: int) -> dict[str, Tensor]:
    """Tensors by suffix to roles, each checked against its declaration."""
    found: dict[str, Tensor] = {}
    for part in scheme.parts:
        tensor = tensors.get(part.suffix[0])
        if tensor is None:
            assert part.optional, part.role
            continue
        dtype = DTYPE_NAMES[tensor.dtype]
        assert dtype in part.dtypes
        assert any(ax.fits(shape, tuple(tensor.shape)) for shape in part.shapes(n, k, dtype)), part.role
        found[part.role] = tensor
    assert len(found) == len(tensors)
    return found


def read(tensors: dict[str, Tensor], cfg: Config, n: int, k: int) -> tuple[Scheme, dict[str, Tensor]]:
    headers = {suffix: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for suffix, t in tensors.items()}
    scheme = FORMAT.scheme(cfg, Module(NAME, headers))
    return scheme, by_role(scheme, tensors, n, k)


def theirs(values: Tensor, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that bitsandbytes saves for a matrix, by suffix, and its dequantised values."""
    packed, state = library().functional.quantize_4bit(values, **options)
    tensors = {f".weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    return {".weight": packed, **tensors}, library().functional.dequantize_4bit(packed, state)


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


# ---- values of the definition


def test_values_of_the_definition() -> None:
    document = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [1, 4]}).encode()
    tensors = {
        ".weight": torch.tensor([[0x0F], [0x7A]], dtype=torch.uint8),
        ".weight.absmax": torch.tensor([2.0]),
        ".weight.quant_map": torch.tensor(NF4.table),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(document), dtype=torch.uint8),
    }
    scheme, stored = read(tensors, config(), 1, 4)
    values = dequantize(scheme.decode(stored, 1, 4)).flatten()
    assert values[:3].tolist() == [-2, 2, 0]
    assert values[3].item() == pytest.approx(0.4922246, abs=1e-7)


@pytest.mark.parametrize(("kind", "dtype"), [("nf4", NF4), ("fp4", BNB_FP4)])
def test_tables_equal_the_library(kind: str, dtype: Any) -> None:
    assert library().functional.get_4bit_type(kind, device="cpu").tolist() == list(dtype.table)


# ---- against the library


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_reads_what_the_library_wrote(kind: str, nested: bool, block: int) -> None:
    n, k = 96, 256
    tensors, expected = theirs(normal(n, k), quant_type=kind, compress_statistics=nested, blocksize=block)
    scheme, stored = read(tensors, config(kind, bnb_4bit_use_double_quant=nested), n, k)
    weight = scheme.decode(stored, n, k)
    assert same_bits(dequantize(weight), expected)
    assert weight.spec == parse_spec(f"{scheme.spec.dtype}-g{block}")


@pytest.mark.parametrize(("n", "k"), [(64, 80), (6, 96), (5, 33), (48, 32)])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_that_span_rows(n: int, k: int, nested: bool) -> None:
    """The sizes in the model's config determine the pieces of a row."""
    tensors, expected = theirs(normal(n, k), quant_type="nf4", compress_statistics=nested)
    scheme, stored = read(tensors, config(model={"hidden_size": k, "moe_intermediate_size": k}), n, k)
    weight = scheme.decode(stored, n, k)
    assert same_bits(dequantize(weight), expected)
    if not nested and n * k % 2 == 0:  # the padding nibble of an odd matrix is undefined
        again = scheme.encode(weight)
        assert all(same_bits(again[role], stored[role]) for role in ("codes", "scale", "table"))


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float16", "float32"])
def test_any_storage_dtype(storage: str) -> None:
    n, k = 32, 128
    dtype = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    tensors, expected = theirs(normal(n, k), quant_type="nf4", quant_storage=dtype[storage])
    scheme, stored = read(tensors, config(bnb_4bit_quant_storage=storage), n, k)
    weight = scheme.decode(stored, n, k)
    assert same_bits(dequantize(weight), expected)
    assert same_bits(scheme.encode(weight)["codes"], tensors[".weight"])


@pytest.mark.parametrize("name", ["nf4", "bnbfp4-g128"])
def test_the_library_reads_what_we_wrote(name: str) -> None:
    n, k = 64, 256
    quant, scheme = FORMAT.export(parse_spec(name), ["lm_head"])
    weight = quantize(normal(n, k, 1), scheme.spec)
    stored = scheme.encode(weight)
    tensors = {part.suffix[0]: stored[part.role] for part in scheme.parts if part.role in stored}
    packed = tensors.pop(".weight")
    state = library().functional.QuantState.from_dict(
        {s.removeprefix(".weight."): t for s, t in tensors.items()}, "cpu"
    )
    state.dtype = torch.float32  # the library rounds its result to this dtype
    assert same_bits(library().functional.dequantize_4bit(packed, state), dequantize(weight))
    cfg = Config(quant=quant, method=quant["quant_method"])
    assert detect(cfg) is FORMAT and isinstance(FORMAT.scheme(cfg, Module("lm_head")), Dense)
    again, _ = read({".weight": packed, **tensors}, cfg, n, k)
    assert again == scheme


def test_tensor_names_equal_the_library() -> None:
    layer = library().nn.Linear4bit(64, 32, bias=True, quant_type="nf4", compress_statistics=True)
    layer.load_state_dict({"weight": normal(32, 64), "bias": torch.ones(32)})
    saved = {f".{key}": tensor for key, tensor in layer.to("cpu").state_dict().items()}
    if ".weight.absmax" not in saved:
        pytest.skip("this build of bitsandbytes does not quantise modules on the CPU")
    scheme, stored = read(saved, config(), 32, 64)
    expected = library().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    weight = scheme.decode(stored, 32, 64)
    assert same_bits(dequantize(weight).to(expected.dtype), expected)
    assert weight.bias is not None and scheme.stored_size(stored.get) == (32, 64)


@pytest.mark.parametrize("nested", [False, True])
def test_shards_of_blocks_that_span_rows(nested: bool) -> None:
    """Two experts through the loader: a rank's weights are a slice of the library's values."""
    hidden, inter, judged = 96, 80, {}
    model = {"model_type": "qwen3_moe", "num_experts": 2, "hidden_size": hidden, "moe_intermediate_size": inter}
    made = Generated(config(model=model, bnb_4bit_use_double_quant=nested))
    for expert, name in itertools.product(range(2), ("gate_proj", "up_proj", "down_proj")):
        n, k = (hidden, inter) if name == "down_proj" else (inter, hidden)
        values = normal(n, k, seed=expert) * (1 + expert)  # the JSON documents of the experts differ in length
        tensors, judged[expert, name] = theirs(values, quant_type="nf4", compress_statistics=nested)
        made.tensors |= {f"model.layers.0.mlp.experts.{expert}.{name}{s}": t for s, t in tensors.items()}
    manifest = manifests.build(made.config, made.headers)
    manifest.check("here")
    for tp in (1, 2):
        for rank, expert in itertools.product(range(tp), range(2)):
            loaded = load_expert(made.read, plan_layer(manifest.layers[0], Placement(tp_rank=rank, tp_size=tp)), expert)
            share = slice(rank * inter // tp, (rank + 1) * inter // tp)
            gate, up, down = (judged[expert, name] for name in ("gate_proj", "up_proj", "down_proj"))
            assert same_bits(dequantize(loaded.w13), torch.cat([gate[share], up[share]]))
            assert same_bits(dequantize(loaded.w2), down[:, share].contiguous())


# ---- int8


def int8_tensors(n: int, k: int) -> dict[str, Tensor]:
    codes, rows, _ = library().functional.int8_vectorwise_quant(normal(n, k).half())
    return {".weight": codes, ".SCB": rows, ".weight_format": torch.zeros((), dtype=torch.uint8)}


def test_int8_rows() -> None:
    n, k = 48, 96
    tensors = int8_tensors(n, k)
    cfg = config(load_in_4bit=False, load_in_8bit=True)
    scheme, stored = read(tensors, cfg, n, k)
    weight = scheme.decode(stored, n, k)
    assert same_bits(
        dequantize(weight), library().functional.int8_vectorwise_dequant(tensors[".weight"], tensors[".SCB"])
    )
    assert weight.spec == INT8 == parse_spec(str(INT8))
    assert all(same_bits(scheme.encode(weight)[role], stored[role]) for role in stored)
    del stored["layout"]
    assert scheme.decode(stored, n, k).equals(weight)


def test_int8_can_be_written() -> None:
    quant, scheme = FORMAT.export(INT8, [])
    weight = quantize(normal(32, 64), INT8)
    stored = scheme.encode(weight)
    judged = library().functional.int8_vectorwise_dequant(stored["codes"], stored["scale"])
    assert same_bits(dequantize(weight), judged)
    assert (judged - normal(32, 64)).abs().max() < 4 / 127
    assert (
        quant["load_in_8bit"] is True
        and FORMAT.scheme(Config(quant=quant, method="bitsandbytes"), Module("m")) == scheme
    )


def test_int8_in_an_old_gpu_layout_is_refused() -> None:
    scheme = FORMAT.export(INT8, [])[1]
    stored = {**scheme.encode(quantize(normal(8, 32), INT8)), "layout": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(BadValue, match="weight_format"):
        scheme.decode(stored, 8, 32)


# ---- invalid files and configs


def ours(scheme: Scheme, weight: LogicalWeight) -> dict[str, Tensor]:
    """Tensors that we wrote; the library can read them (tested above)."""
    stored = scheme.encode(weight)
    return {part.suffix[0]: stored[part.role] for part in scheme.parts if part.role in stored}


def nested_sample() -> tuple[Scheme, dict[str, Tensor]]:
    """With quantised scales, which we read but do not write."""
    scheme = bnb4_scheme("nf4", 64, piece=64, nested=True)
    plain = sample()[1]
    state = document(plain, nested_blocksize=256, nested_offset=0.5)
    codes = torch.arange(plain["scale"].numel(), dtype=torch.uint8)
    nested = {"nested_scale": torch.ones(1), "nested_table": torch.linspace(-1, 1, 256)}
    return scheme, {**plain, **nested, "scale": codes, "state": state}


def spanning(k: int) -> LogicalWeight:
    """Rows of `k` columns, of which blocks of 64 span several; all scales are the same."""
    spec = parse_spec("nf4-g16")
    return replace(weight := quantize(normal(64, k), spec), scales=(torch.ones_like(weight.scales[0]),))


def sample() -> tuple[Scheme, dict[str, Tensor]]:
    return read(ours(FORMAT.export(NF4_G64, [])[1], quantize(normal(32, 128), NF4_G64)), config(), 32, 128)


def document(stored: dict[str, Tensor], **changes: Any) -> Tensor:
    state = {**json.loads(bytes(stored["state"].tolist())), **changes}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocksize": 128}, "blocksize"),
        ({"quant_type": "fp4"}, "quant_type"),
        ({"shape": [128, 32]}, "shape"),
        ({"shape": None}, "shape"),
        ({"nested_blocksize": 128}, "nested_blocksize"),
        ({"nested_offset": float("nan")}, "nested_offset"),
        ({"nested_offset": "1"}, "nested_offset"),
        ({"nested_offset": 10**400}, "nested_offset"),
        ({"nested_offset": -1e300}, "nested_offset"),
    ],
)
def test_a_contradicting_quant_state_is_refused(changes: dict[str, Any], message: str) -> None:
    scheme, stored = nested_sample()
    stored["state"] = document(stored, **changes)
    with pytest.raises(BadValue, match=message):
        scheme.decode(stored, 32, 128)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 60000, b"1" * 70000])
def test_a_quant_state_that_is_not_json_is_refused(text: bytes) -> None:
    scheme, stored = sample()
    stored["state"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(BadValue, match="quant_state"):
        scheme.decode(stored, 32, 128)


def test_another_table_is_refused() -> None:
    scheme, stored = sample()
    stored["table"][3] += 1e-6
    with pytest.raises(BadValue, match="quant_map"):
        scheme.decode(stored, 32, 128)


def test_double_quantisation_needs_all_its_tensors_and_cannot_be_written() -> None:
    scheme, stored = nested_sample()
    assert {p.role for p in scheme.parts if not p.optional} == set(stored)
    with pytest.raises(CannotEncode, match="double quantisation"):
        scheme.encode(scheme.decode(stored, 32, 128))


def test_blocks_that_span_rows_cannot_be_written() -> None:
    scheme = FORMAT.export(NF4_G64, [])[1]
    with pytest.raises(CannotEncode, match="groups of 16 columns"):
        scheme.encode(quantize(normal(8, 80), NF4_G64))


def test_scales_that_differ_within_a_block_are_refused() -> None:
    scheme, weight = bnb4_scheme("nf4", 64, piece=16), spanning(80)
    assert scheme.decode(scheme.encode(weight), 64, 80).equals(weight)
    weight.scales[0][0, 0] *= 2
    with pytest.raises(CannotEncode, match="differ within a block"):
        scheme.encode(weight)


def test_blocks_that_span_rows_need_the_model_sizes() -> None:
    scheme, stored = read(ours(bnb4_scheme("nf4", 64, piece=16), spanning(80)), config(), 64, 80)
    with pytest.raises(BadValue, match="pieces of 16 columns"):
        scheme.decode(stored, 64, 80)


@pytest.mark.parametrize("shape", [None, [1], [0, 4], [2.0, 4]])
def test_a_size_in_quant_state_that_is_none_is_refused(shape: Any) -> None:
    scheme, stored = sample()
    stored["state"] = document(stored, shape=shape)
    with pytest.raises(BadValue, match="not the size of a matrix"):
        scheme.stored_size(stored.get)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"load_in_4bit": False}, "neither"),
        ({"load_in_8bit": True}, "both"),
        ({"load_in_4bit": 1}, "load_in_4bit"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
        ({"bnb_4bit_quant_storage": "int64"}, "bnb_4bit_quant_storage"),
        ({"llm_int8_skip_modules": ["a", 3]}, "llm_int8_skip_modules"),
    ],
)
def test_unsupported_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        FORMAT.scheme(config(**values), Module(NAME))


def test_unquantised_modules() -> None:
    """By a float weight without scales; without stored tensors, by the config's list."""
    cfg = config(llm_int8_skip_modules=["lm_head", "mlp.gate"])
    plain = {".weight": Stored("BF16", (8, 8))}
    assert isinstance(FORMAT.scheme(cfg, Module(NAME, plain)), Dense)
    marked = {**plain, ".weight.quant_map": Stored("F32", (16,))}  # bf16 may be the storage of 4-bit codes
    assert isinstance(FORMAT.scheme(cfg, Module(NAME, marked)), Bnb4Scheme)
    assert isinstance(FORMAT.scheme(cfg, Module("model.layers.0.mlp.gate")), Dense)
    assert isinstance(FORMAT.scheme(cfg, Module("model.layers.0.mlp.gate_proj")), Bnb4Scheme)


@pytest.mark.parametrize("name", ["nf4-g48", "int8", "int4-g32", "nf4-g64:bf16", "fp8-block", "nf4-channel"])
def test_export_refuses_other_specs(name: str) -> None:
    with pytest.raises(CannotEncode, match="bitsandbytes stores"):
        FORMAT.export(parse_spec(name), [])
    assert FORMAT.export(NF4_G64, [])[1].spec == NF4_G64
