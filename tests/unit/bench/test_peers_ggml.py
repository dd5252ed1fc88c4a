"""llama.cpp as a peer: the same blocks as our GGUF format, and the same results where its library is installed."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lancebill.bench import peers_ggml
from lancebill.bench.check import check_output
from lancebill.bench.peers_ggml import FOLDER, Ggml, depends_on_openmp, stored_as
from lancebill.bench.workload import Weights, batches
from lancebill.errors import SpecError
from lancebill.formats import registry
from lancebill.moe.model_shapes import parse_shape
from lancebill.moe.problem import Problem
from lancebill.native import build
from lancebill.numbers.codec import quantize
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec

K_SCALES = "uint6-g256:fp16-min.g32:uint6-min.g256"
SPECS = {
    "mxfp4": "MXFP4",
    "int4-g32:fp16": "Q4_0",
    "int8-g32:fp16": "Q8_0",
    f"uint4-g32:{K_SCALES}": "Q4_K",
    f"uint5-g32:{K_SCALES}": "Q5_K",
    "int6-g16:int8-g256:fp16": "Q6_K",
    "iq4-g32:fp16": "IQ4_NL",
    "iq4-g32:uint6b32-g256:fp16": "IQ4_XS",
}


def problem_of(spec: str, inputs: str = "bf16") -> Problem:
    return parse_shape("4,256,256,2").problem(parse_spec(spec), ACTIVATIONS[inputs])


@pytest.mark.parametrize("spec", SPECS)
def test_blocks_are_those_of_gguf(spec: str) -> None:
    example = next(example for example in registry()["gguf"].examples() if example.name == SPECS[spec])
    weight = quantize(torch.randn(8, 256, generator=torch.Generator().manual_seed(0)), example.scheme.spec)
    stored = example.scheme.encode(weight)["codes"]
    assert torch.equal(stored_as(problem_of(spec)).encode(weight), stored.flatten(1))


@pytest.mark.parametrize("scale", ["fp16", "bf16"])
def test_wider_groups_have_their_scale_in_every_block(scale: str) -> None:
    wide, spec = problem_of(f"int4-g128:{scale}"), parse_spec("int4-g32:fp16")
    weight = quantize(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)), wide.w13.spec)
    repeated = weight.scales[0].half().repeat_interleave(4, dim=-1)
    narrow = replace(weight, spec=spec, scales=(repeated,))
    assert torch.equal(stored_as(wide).encode(weight), stored_as(problem_of("int4-g32:fp16")).encode(narrow))


def test_scales_that_fp16_cannot_hold_are_refused() -> None:
    weight = quantize(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)) * 1e-7, parse_spec("int4-g128"))
    with pytest.raises(SpecError, match="fp16"):
        stored_as(problem_of("int4-g128")).encode(weight)


def test_other_weights_are_refused() -> None:
    with pytest.raises(SpecError, match="other weights"):
        stored_as(problem_of("nvfp4"))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(peers_ggml, "find_spec", lambda name: None)
    peers_ggml.library.cache_clear()
    with pytest.raises(ImportError, match=f"cyllama.*{FOLDER}"):
        peers_ggml.library()


def test_libraries_that_use_openmp_are_known(tmp_path: Path) -> None:
    source, cxx = tmp_path / "it.cpp", build.compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    source.write_text('extern "C" void count(int *n) {\n#pragma omp parallel\n  ++*n;\n}\n')
    for flags in ([], ["-fopenmp"]):
        path = tmp_path / f"lib{len(flags)}.so"
        if subprocess.run([cxx, "-shared", "-fPIC", *flags, str(source), "-o", str(path)], check=False).returncode:
            pytest.skip("the compiler has no OpenMP")
        assert depends_on_openmp(ctypes.CDLL(str(path))) == bool(flags)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("spec", [*SPECS, "int4-g128"])
def test_results(spec: str, tokens: int) -> None:
    try:
        peers_ggml.library()
    except ImportError as missing:
        pytest.skip(str(missing))
    problem = problem_of(spec)
    weights = Weights(problem, torch.device("cpu"))
    (batch,) = batches(problem, tokens, "uniform", 1, torch.device("cpu"))
    got = Ggml(problem, weights)(batch.x, batch.ids, batch.weights)
    assert check_output("llama.cpp", problem_of(spec, "int8"), weights, batch, got) < 0.03
