"""The Ampere backend without a GPU: what it supports on which device, its configurations, and a sample of kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lancebill.backends import oracle
from lancebill.backends.ampere import shipped as ampere_shipped
from lancebill.backends.ampere.plan import make_plan
from lancebill.backends.ampere.steps import steps
from lancebill.backends.ampere.tuning import policy as tune
from lancebill.backends.gpu.cards import ARCHS, CARDS, nearest_card
from lancebill.backends.gpu.kernels import triton_version
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.gpu.shipped import TOKENS, problems
from lancebill.backends.gpu.target import compile_target
from lancebill.backends.hopper import shipped as hopper_shipped
from lancebill.backends.registry import registry
from lancebill.backends.shipped import shipped_for, targets_of
from lancebill.errors import SpecError
from lancebill.jit.build import get_binary
from lancebill.jit.cache import Cache
from lancebill.jit.compile import KernelSource
from lancebill.jit.targets import TARGETS
from lancebill.moe.device import Device
from lancebill.moe.model_shapes import NAMED
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED, Problem
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.testing.layers import layer_problem

RESERVED, REGISTERS = 1024, 65536  # shared memory of a block that the driver takes; registers of an SM
needs_triton = pytest.mark.skipif(triton_version.triton_version() is None, reason="needs Triton")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton were installed: plans need none."""
    monkeypatch.setattr(triton_version, "problem", lambda: None)


def qwen(weights: str, activations: str = "bf16") -> Problem:
    return NAMED["qwen3-30b-a3b"].problem(parse_spec(weights), parse_activation(activations))


def codes(problem: Problem, arch: int) -> set[str]:
    return {reason.code for reason in registry()["ampere"].check(problem, Device("cuda", arch))}


@pytest.mark.parametrize("weights", ["mxfp4", "int4-g128", "nvfp4", "fp8-block", "int8"])
def test_every_gpu_from_ampere_on_has_a_fast_backend(weights: str) -> None:
    """Hopper keeps its own; elsewhere `ampere` is chosen, with an estimate that follows the card."""
    estimates = {}
    for arch in ARCHS:
        chosen = oracle.select(qwen(weights), Device("cuda", arch)).chosen
        assert chosen is not None and chosen.plan is not None
        assert chosen.backend.name == ("hopper" if arch == 90 else "ampere")
        estimates[arch] = chosen.plan.estimate_us
    assert estimates[90] < estimates[80] < estimates[120] < estimates[89] < estimates[86] < estimates[87]


def test_reasons_of_devices_and_inputs() -> None:
    assert codes(qwen("mxfp4"), 75) == codes(qwen("mxfp4"), 100) == {"device"}
    assert {reason.code for reason in registry()["ampere"].check(qwen("mxfp4"), Device("cpu"))} == {"device"}
    assert codes(qwen("mxfp4", "fp8"), 80) == codes(qwen("mxfp4", "fp8"), 86) == {"activations"}
    assert codes(qwen("mxfp4", "fp8"), 89) == codes(qwen("mxfp4", "fp8"), 120) == set()
    assert codes(qwen("int4-g128", "int8"), 80) == codes(qwen("int8", "int8-static"), 120) == set()
    assert "spec" in codes(qwen("int5"), 80)


@pytest.mark.parametrize("backend", ["ampere", "hopper"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 6), (8, 2), (1, 1)])
def test_every_batch_size_has_a_plan(backend: str, experts: int, top_k: int) -> None:
    """Also where nearly all rows go to each expert, so that a batch is smaller than the tiles of its rule."""
    for weights, activations in (("mxfp4", "bf16"), ("int8", "int8"), ("int4-g128", "bf16")):
        problem = layer_problem(weights, activations, hidden=1024, intermediate=512, experts=experts, top_k=top_k)
        linear = replace(problem, w2=None, dispatch=CONTIGUOUS) if experts == 1 else None
        for order in ("fast", "batch-invariant"):
            for shape in filter(None, (problem, linear)):
                for tokens in range(1, 140):
                    plan = registry()[backend].plan(replace(shape, order=order), tokens, Device("cuda", 90))
                    assert isinstance(plan, GpuPlan) and plan.tokens >= tokens


def test_the_nearest_card_is_of_the_device_s_architecture() -> None:
    assert nearest_card(Device("cuda", 86)).name == "A10" and nearest_card(Device("cuda", 86, 0, 82)).name == "RTX 3090"
    assert nearest_card(Device("cuda", 80, 0, 132)).name == "A100"  # an H200 that counts as sm_80
    assert nearest_card(Device("cuda", 88)).arch in (87, 89)
    assert {card.arch for card in CARDS} == set(ARCHS)


def test_rates_of_cards_are_those_of_their_processors() -> None:
    """Per clock an SM multiplies a fixed number of int8 pairs: rates give clocks of 1.3 to 2.7 GHz. bf16 with fp32 sums
    has half that rate, on GeForce cards a quarter."""
    per_clock = {80: 2048, 86: 1024, 87: 2048, 89: 1024, 90: 4096, 120: 1024, 121: 1024}
    geforce = {"RTX 3090", "RTX 3060", "RTX 4090", "RTX 4060", "RTX 5090", "RTX 5080", "RTX 5060"}
    for card in CARDS:
        assert 1.29e9 < card.int8_tops * 1e12 / (2 * per_clock[card.arch] * card.processors) < 2.7e9, card
        assert card.int8_tops / card.tensor_tflops == pytest.approx(4 if card.name in geforce else 2, rel=0.02), card


def test_int8_inputs_are_estimated_at_their_own_rate() -> None:
    """Four times that of bf16 on a GeForce card, twice on others, where multiplying takes all the time."""
    for processors, ratio in ((82, 4), (72, 2)):
        device = Device("cuda", 86, 0, processors)
        times = [make_plan(qwen("int8", inputs), 1 << 16, device).estimate_us for inputs in ("bf16", "int8")]
        assert times[0] / times[1] == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("dispatch", [INDEXED, CONTIGUOUS, BATCHED])
@pytest.mark.parametrize("arch", [80, 90])
def test_nothing_is_planned_without_experts(arch: int, dispatch: str) -> None:
    """The oracle plans such a part of a split layer as one of one expert; nobody computes it."""
    problem, device = replace(qwen("mxfp4"), experts=0, dispatch=dispatch), Device("cuda", arch)
    for name in ("ampere", *(["hopper"] if arch == 90 else [])):
        with pytest.raises(SpecError, match="nothing to plan without experts"):
            registry()[name].plan(problem, 4, device)


def test_estimates_grow_with_tokens() -> None:
    for arch in ARCHS:
        times = [make_plan(qwen("mxfp4"), tokens, Device("cuda", arch)).estimate_us for tokens in TOKENS]
        assert times == sorted(times) and times[-1] > 3 * times[0]


@pytest.mark.parametrize("arch", [80, 90])
def test_few_experts_are_not_read_for_every_slot(arch: int) -> None:
    """32 slots of Mixtral's 8 experts would read each expert four times; those of many experts rarely meet."""

    def decodes(name: str, tokens: int) -> bool:
        problem = NAMED[name].problem(parse_spec("mxfp4"), parse_activation("bf16"))
        plan = oracle.select(problem, Device("cuda", arch)).backend.plan(problem, tokens, Device("cuda", arch))
        assert isinstance(plan, GpuPlan)
        return plan.decode

    assert [decodes("mixtral-8x7b", tokens) for tokens in (1, 2, 4, 16)] == [True, True, False, False]
    assert [decodes("deepseek-v4-flash", tokens) for tokens in (1, 4)] == [True, True]


def test_tiles_hold_few_rows_that_nobody_needs() -> None:
    """An expert's last rows are multiplied with fewer than 8 empty ones; more than 32 rows with fewer than 16."""
    for rows in (4, 8, 16, 40, 100):
        sizes = tune.rule(rows).sizes
        for rest in range(min(sizes) - 7, max(sizes) + 1):
            assert min(size for size in sizes if size >= rest) - rest < (8 if rest <= 32 else 16), (rows, rest)


def test_few_tiles_are_spread_over_all_processors() -> None:
    """Mixtral's w2 has 32 units of 8 experts: as pairs, 128 tiles for the 324 blocks of an A100. Single ones are
    three for an SM, or two where it has more SMs; those share its memory, and nothing is kept for others."""
    problem = NAMED["mixtral-8x7b"].problem(parse_spec("mxfp4"), parse_activation("bf16"))

    def tiles(tokens: int, processors: int) -> list[tuple[int, int]]:
        plan = make_plan(problem, tokens, Device("cuda", 80, processors=processors))
        return [(tile.units, tile.blocks) for name in problem.matrices for tile in plan.gemm(name).tiles]

    assert tiles(32, 108) == tiles(64, 108) == [(2, 3), (1, 3)]
    assert tiles(32, 132) == tiles(64, 132) == [(2, 3), (1, 2)]
    assert tiles(64, 28) == [(2, 3), (2, 3)]


def test_configurations_fit_the_card_s_shared_memory() -> None:
    """Of every shipped problem and batch: all resident blocks with all stages, and their registers."""
    for arch in ARCHS:
        room = nearest_card(Device("cuda", arch)).shared
        for problem in problems():
            if codes(problem, arch):
                continue
            for tokens in TOKENS:
                plan = make_plan(problem, tokens, Device("cuda", arch))
                for gemm in (plan.w13, plan.w2):
                    assert gemm is not None
                    for tile in gemm.tiles:
                        rows = 0 if plan.decode else max(tile.sizes)
                        stage = tile.slices * (rows + tile.units * gemm.form.slice_rows) * 128
                        assert tile.blocks * (tile.stages * stage + RESERVED) <= room
                        assert tile.registers * 128 * tile.blocks <= REGISTERS


@pytest.mark.parametrize("dispatch", [INDEXED, CONTIGUOUS, BATCHED])
def test_launches_pass_every_argument_to_kernels_of_one_target(dispatch: str) -> None:
    for weights, activations, arch in (("mxfp4", "bf16", 86), ("int4-g128", "fp16", 80), ("nvfp4", "bf16", 120)):
        problem = replace(qwen(weights, activations), dispatch=dispatch)
        problem = replace(problem, input=problem.activations.spec.dtype) if activations == "fp16" else problem
        for tokens in (1, 64, 4096):
            plan = make_plan(problem, tokens, Device("cuda", arch))
            for step in steps(plan):
                assert sorted(step.values) == sorted(name for name, _ in step.source.arguments)
                assert step.source.arch == compile_target(arch)
            assert plan.rule is not None and not plan.rule.overlap


def test_few_targets_serve_all_gpus() -> None:
    assert [compile_target(arch) for arch in ARCHS] == [80, 80, 80, 80, 90, 120, 121]
    assert targets_of(86) == ("sm_80",) and targets_of(89) == ("sm_80", "sm_89") and targets_of(121) == ()
    runs = [
        [KernelSource("m", "k", (), (), arch=arch).runs_on(gpu) for gpu in (80, 86, 89, 90, 120)] for arch in (80, 89)
    ]
    assert runs == [[True, True, True, False, False], [False, False, True, False, False]]
    assert KernelSource("m", "k", (), ()).runs_on(90) and not KernelSource("m", "k", (), (), arch=120).runs_on(121)
    assert [f"sm_{arch}" for arch in sorted((hopper_shipped.ARCH, *ampere_shipped.TARGETS))] == list(TARGETS)
    for target in TARGETS:
        sources = shipped_for(target)
        assert {f"sm_{source.arch}" for source in sources} == {target} and len(set(sources)) == len(sources) > 10


@needs_triton
def test_a_sample_of_kernels_compiles_for_an_older_gpu() -> None:
    """No spills. Machine code within an RTX card's limits; PTX that a newer driver can compile."""
    device = Device("cuda", 86)
    launches = [*steps(make_plan(qwen("mxfp4"), 1, device)), *steps(make_plan(qwen("mxfp4"), 16, device))[-3:]]
    for step in launches:
        found = get_binary(step.source, Cache())
        blocks = max(step.persistent, 1)
        assert (
            found.spills == 0
            and found.cubin[:4] == b"\x7fELF"
            and found.registers * found.threads * blocks <= REGISTERS
        )
        assert blocks * (found.shared + RESERVED) <= nearest_card(device).shared
    text = get_binary(replace(launches[-1].source, ptx=True), Cache()).cubin
    assert text.endswith(b"\0") and b".target sm_80" in text and b"griddepcontrol" not in text


def test_fp8_kernels_are_compiled_for_gpus_that_have_it() -> None:
    archs = {arch: make_plan(qwen("mxfp4", "fp8"), 64, Device("cuda", arch)).arch for arch in (89, 120)}
    assert archs == {89: 89, 120: 120}
    assert make_plan(qwen("int4-g128", "int8"), 64, Device("cuda", 89)).arch == 80


@needs_triton
def test_rows_are_rounded_to_fp8_once() -> None:
    """By one instruction. Triton's own conversion for sm_89 truncates to fp16 first, which moves numbers onto ties."""
    problem = layer_problem("mxfp4", "fp8", hidden=512, intermediate=256, experts=8, top_k=2)
    sources = {step.source.kernel: step.source for step in steps(make_plan(problem, 64, Device("cuda", 89)))}
    text = get_binary(replace(sources["prepare_rows"], ptx=True), Cache()).cubin.decode()
    assert ".target sm_89" in text and "cvt.rn.satfinite.e4m3x2.f32" in text and ".f16" not in text
