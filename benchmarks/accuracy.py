"""What kernels, rounding and servers do to a real model: perplexity, divergence, questions. No text is part of this."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lancebill
from benchmarks.gpu import compile_kernels
from benchmarks.runner import Case, Run, subject
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.cli.engines import running_server
from lancebill.demo.model import EXPERTS, build, dense_tensors
from lancebill.demo.vocabulary import read_metadata, save_tokenizer
from lancebill.errors import LaunchError
from lancebill.evaluate.load import Server
from lancebill.evaluate.paired import bootstrap, mcnemar
from lancebill.evaluate.perplexity import Perplexity, perplexity, windows
from lancebill.evaluate.perplexity import batches as window_batches
from lancebill.evaluate.questions import Question, prompt, read_questions, score
from lancebill.evaluate.run import NEXT, Variant, answers
from lancebill.integrations.transformers.packed_experts import packed_experts, set_activations
from lancebill.integrations.transformers.pretrained import reload_experts
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.layers import layer_problem

GGUF = (Path, "the demo's model, SmolLM2-135M-Instruct.Q4_1.gguf")
TEXT = (Path, "a text file, such as WikiText-2's test set")

# Perplexity ----------------------------------------------------------------------------------------------

DENSE, MIXTURE = "fp32, dense model", "fp32, mixture of experts"
# Relative bounds: kernels to reference with bf16 activations, and with 8-bit activations.
KERNEL_BOUNDS, EIGHT_BIT_BOUND = {"bf16": 1e-3}, 1e-2


def perplexity_cases() -> list[Case]:
    pairs = [f"{weights} x {activations}" for weights in ("mxfp4", "int4-g32") for activations in ("bf16", "int8")]
    return Case.product(variant=(DENSE, MIXTURE, *pairs))


@subject(
    "perplexity", perplexity_cases, gguf=GGUF, text=TEXT, backend=("auto", "compared with the reference"),
    moe=(Path, "folder of the mixture of experts; written if missing"), tokens=(int, "only the first of the text"),
    window=(2048, "tokens"), batch=(1, "windows in one batch"), dtype=("float32", "of all but the quantised experts"),
)  # fmt: skip
def perplexities(run: Run) -> None:
    """Perplexity of a real model: mixture of experts against dense model, and kernels against the reference.

    The dense model in fp32; the mixture of experts made from it, in fp32, which must give the same result; and the
    mixture with quantised experts, with a backend's kernels and with `reference` on the same quantised weights. Windows
    do not overlap.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    chosen = run.options
    with tempfile.TemporaryDirectory(prefix="lancebill-bench-") as scratch:
        moe = chosen.moe or Path(scratch) / "moe"
        if not moe.exists():
            build(chosen.gguf, moe)
        text = chosen.text.read_text(encoding="utf-8")
        ids = transformers.AutoTokenizer.from_pretrained(moe)(text, return_tensors="pt").input_ids[0][: chosen.tokens]
        run.facts |= {"model": chosen.gguf.name, "text": chosen.text.name, "tokens": ids.numel()}
        run.facts |= {"window": chosen.window, "extent": "its beginning" if chosen.tokens else "the whole test set"}
        compile_kernels(_launched(run, ids), run.device)
        measure = partial(perplexity, tokens=ids, window=chosen.window, stride=chosen.window, batch=chosen.batch)
        dense: Perplexity | None = None
        for case in (case for case in run.cases if not run.late(case)):
            with run.attempt(case):
                if case["variant"] == DENSE:
                    dense = measure(dense_model(chosen.gguf).to(run.device))
                    run.add(case, {"perplexity": dense.value, "stderr": dense.stderr, "backend": "", "difference": ""})
                elif case["variant"] == MIXTURE:
                    model = lancebill.from_pretrained(moe, device=run.device, dtype=torch.float32)
                    _compared(run, case, model, measure(model), dense, "{:.1e} from dense")
                else:
                    _quantised(run, case, moe, measure)


def _compared(
    run: Run, case: Case, model: Any, found: Perplexity, other: Perplexity | None, said: str, **more: Any
) -> None:
    figures: dict[str, Any] = {"perplexity": found.value, "stderr": found.stderr, "backend": backend_of(model), **more}
    if other is None:
        run.add(case, figures)
        return
    differs = abs(found.value / other.value - 1)
    name = "dense" if case["variant"] == MIXTURE else "reference"
    run.add(case, {**figures, "differs_by": differs, "difference": said.format(differs)}, {name: other.value})


def _quantised(run: Run, case: Case, moe: Path, measure: Callable[[Any], Perplexity]) -> None:
    """Kernels and reference on the same quantised weights."""
    spec, activations = case["variant"].split(" x ")
    dtype = vars(torch)[run.options.dtype]
    ours, judge = (lancebill.from_pretrained(moe, device=run.device, dtype=dtype) for _ in range(2))
    reload_experts(ours, weights=spec, activations=activations, backend=run.options.backend)
    reload_experts(judge, weights=spec, backend="reference")
    set_activations(judge, activations, dtype)
    assert backend_of(judge) == "reference"
    bound = KERNEL_BOUNDS.get(activations, EIGHT_BIT_BOUND)
    _compared(run, case, ours, measure(ours), measure(judge), "{:.3%} from reference", bound=bound)


def _launched(run: Run, ids: Tensor) -> Iterator[tuple[Any, int]]:
    spans = window_batches(windows(ids.numel(), run.options.window, run.options.window), run.options.batch)
    counts = {len(span) * (span[0][1] - span[0][0]) for span in spans}
    sizes = {"hidden": 576, "intermediate": 192, "experts": 8, "top_k": 8}
    pairs = [case["variant"].split(" x ") for case in run.cases if " x " in case["variant"]]
    yield from ((layer_problem(*pair, **sizes), count) for pair in pairs for count in counts)


def dense_model(gguf: Path) -> Any:
    """The original dense model, from the same file."""
    import transformers

    metadata = read_metadata(gguf)
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    config = transformers.LlamaConfig(
        vocab_size=llama["vocab_size"], hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"], num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"], num_key_value_heads=llama["attention.head_count_kv"],
        max_position_embeddings=llama["context_length"], rope_theta=llama["rope.freq_base"], tie_word_embeddings=True,
        rms_norm_eps=round(llama["attention.layer_norm_rms_epsilon"], 9),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with Checkpoint.open(gguf) as checkpoint:
        tensors = {name: tensor.float() for name, tensor in dense_tensors(checkpoint, metadata)}
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model


def backend_of(model: Any) -> str:
    return ",".join(sorted({m.experts.choice.backend.name for _, m in packed_experts(model)}))


# Rounding ------------------------------------------------------------------------------------------------

SPECS = (  # every number type that `convert` writes, with every kind of block
    "mxfp4", "nvfp4", "mxfp8", "mxfp6-e2m3", "nf4", "bnbfp4-g64", "fp8-block", "fp8-block:e8m0", "fp8-channel",
    "fp8-g64", "fp8-tensor", "ternary-g256:fp16", "int4-g128", "int4-g32", "int4-g64", "int4-channel", "int2-g64",
    "int3-g64", "int5-g64", "int6-g64", "int7-g64", "int8-g64", "int8", "int2-g64-zp", "int3-g64-zp", "int4-g128-zp",
    "int4-g32-zp", "int5-g64-zp", "int6-g64-zp", "int7-g64-zp", "int8-g64-zp", "mxfp4-h32", "int4-g64-h64",
)  # fmt: skip
BATCH = 4  # windows that are computed together


@subject("rounding", lambda: Case.product(weights=SPECS), gguf=GGUF, text=TEXT,
         windows=(32, "parts of the text, at equal distances"), window=(512, "tokens in one of them"))  # fmt: skip
def rounding(run: Run) -> None:
    """What scale search gives: rounding error, time, perplexity and divergence of each spec, with and without it.

    The demo's mixture computes exactly what its dense model computes. So each expert's matrices are quantised and
    dequantised, put back into the dense model, and that is measured in fp32: no kernel takes part. Rounding runs on one
    CPU core, as a thread of `convert` does, and its CPU time counts. The divergence (Kullback-Leibler, nats) says how
    far the predictions are from those of the stored weights, token by token: with few tokens it tells two ways of
    rounding apart where perplexity does not. Standard errors are those of the windows' means, because the tokens of a
    window depend on each other; of two ways of rounding, of the differences on the same windows.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    chosen = run.options
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(read_metadata(chosen.gguf), Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(chosen.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    starts = torch.linspace(0, len(ids) - chosen.window, chosen.windows).long().tolist()
    text = torch.stack([ids[start : start + chosen.window] for start in starts])
    model = dense_model(chosen.gguf).to(run.device)
    experts = {name: matrix.detach().cpu().clone() for name, matrix in feed_forward(model)}
    stored = list(predictions(model, text))
    run.facts |= {"model": chosen.gguf.name, "text": chosen.text.name, "tokens": text.numel(), "window": chosen.window}
    run.facts["stored_perplexity"] = Perplexity(Scores.of(stored, text, stored).losses.flatten()).value
    for case in (case for case in run.cases if not run.late(case)):
        figures, scores, seconds = {}, {}, {}
        for name, search in (("plain", False), ("search", True)):
            to = partial(quantize, spec=parse_spec(case["weights"]), search=search)
            figures[f"{name}_error"], seconds[name] = round_experts(model, experts, to)
            scores[name] = Scores.of(predictions(model, text), text, stored)
            figures[f"{name}_divergence"] = float(scores[name].divergences.mean())
            figures[f"{name}_perplexity"] = Perplexity(scores[name].losses.flatten()).value
        more = (scores["search"].losses - scores["plain"].losses).mean(1)
        figures |= {"more_loss": float(more.mean()), "more_loss_stderr": float(more.std()) / len(more) ** 0.5}
        run.add(case, {**figures, "seconds_ratio": seconds["search"] / seconds["plain"]})


@dataclass(frozen=True)
class Scores:
    """Of every token but the first of each window, in nats: [windows, tokens - 1]."""

    losses: Tensor
    divergences: Tensor  # from the predictions with the stored weights

    @classmethod
    def of(cls, predicted: Iterable[Tensor], text: Tensor, stored: list[Tensor]) -> Scores:
        losses, divergences = [], []
        for batch, expected, found in zip(text.split(BATCH), stored, predicted):
            targets = batch[:, 1:, None].to(found.device)
            losses.append(-found.gather(2, targets).squeeze(2).double().cpu())
            divergences.append((expected.exp() * (expected - found)).sum(-1).double().cpu())
        return cls(torch.cat(losses), torch.cat(divergences))


@torch.no_grad()
def predictions(model: Any, text: Tensor) -> Iterator[Tensor]:
    """Log-probabilities [windows, tokens - 1, vocabulary], a batch at a time."""
    for batch in text.split(BATCH):
        yield F.log_softmax(model(batch.to(model.device)).logits[:, :-1].float(), dim=-1)


def feed_forward(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The matrices that the mixture splits into experts."""
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{index}.{name}", layer.mlp.get_submodule(name).weight


def round_experts(model: Any, experts: dict[str, Tensor], to: Callable[[Tensor], Any]) -> tuple[float, float]:
    """Replace every matrix by its rounded form; the relative RMS error, and seconds of CPU time."""
    threads, squares, energy, seconds = torch.get_num_threads(), 0.0, 0.0, 0.0
    torch.set_num_threads(1)
    for name, weight in feed_forward(model):
        axis, parts = int(name.endswith("down_proj")), []
        for part in experts[name].chunk(EXPERTS, dim=axis):
            part = part.contiguous()
            start = time.process_time()
            rounded = to(part)
            seconds += time.process_time() - start
            parts.append(dequantize(rounded))
        result = torch.cat(parts, dim=axis)
        squares += float((result.double() - experts[name]).square().sum())
        energy += float(experts[name].double().square().sum())
        weight.data.copy_(result)
    torch.set_num_threads(threads)
    return (squares / energy) ** 0.5, seconds


# Questions -----------------------------------------------------------------------------------------------

READINGS = ("strict", "flexible")
QUESTIONS: dict[str, Any] = {
    "questions": (Path, "JSON lines with `question` and `answer`, in GSM8K's format"),
    "examples": (Path, "questions for the few-shot prompt"),
    "shots": (3, "few-shot examples"),
    "limit": (int, "only the first questions"),
    "model": (Path, "a checkpoint"),
    "tokens": (192, "most tokens of an answer"),
}


def _read(run: Run) -> tuple[list[Question], list[Question]]:
    """The questions, and the examples of the prompt."""
    chosen = run.options
    known = read_questions(chosen.questions)
    examples = read_questions(chosen.examples)[: chosen.shots] if chosen.examples else []
    run.facts |= {"shots": len(examples), "tokens": chosen.tokens}
    return known, examples


@subject("questions", lambda: Case.product(variant=("stored", "mxfp4")), batch=(256, "questions"), **QUESTIONS)
def questions(run: Run) -> None:
    """Exact match of variants of a model on questions, each tested against the first variant.

    A variant is weights[/activations[/backend]]. If the time is over, only questions that all variants answered count.
    """
    import transformers

    known, examples = _read(run)
    asked, found = known[: run.options.limit], dict[Case, list[str]]()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.options.model)
    texts = [prompt(question, examples) for question in asked]
    for case in run.cases:
        variant = Variant.parse(case["variant"])
        how = {name: value for name in ("weights", "activations") if (value := getattr(variant, name)) is not None}
        model = lancebill.from_pretrained(run.options.model, device=run.device, backend=variant.backend, **how)
        found[case] = []
        for first in range(0, len(texts), run.options.batch):
            if not run.late(f"{case}, questions from {first} on"):
                found[case] += answers(model, tokenizer, texts[first : first + run.options.batch], run.options.tokens)
    count = min(map(len, found.values()))
    run.facts["questions"] = count
    add_scores(run, {case: given[:count] for case, given in found.items()}, asked[:count])


def add_scores(
    run: Run, given: dict[Case, list[str]], asked: Sequence[Question], more: dict[Case, dict[str, Any]] | None = None
) -> None:
    """A row for each variant: shares of right answers, and McNemar's exact p-value against the first variant."""
    scores = {case: score(texts, asked) for case, texts in given.items()}
    first = next(iter(scores.values()))
    for case, own in scores.items():
        figures: dict[str, Any] = {}
        for name in READINGS:
            figures |= {name: own[name].value, f"{name}_stderr": own[name].stderr}
            figures |= {} if own is first else {f"{name}_p": mcnemar(first[name].right, own[name].right)}
        run.add(case, figures | (more or {}).get(case, {}))


@subject(
    "serve-accuracy", lambda: Case.product(variant=("stored", "mxfp4", "mxfp4/int8")), **QUESTIONS,
    url=(("",), "NAME=URL of running servers, which are asked instead"), api_key=(str, "of running servers"),
    likelihood=(0, "solutions whose likelihood is asked; needs vLLM"), completions=(False, "continue a text: no chat"),
    engine=(str, "vllm or transformers"), options=("", "words for `lancebill serve`"),
    concurrency=(32, "questions at a time"), timeout=(600.0, "seconds to wait for an answer"),
)  # fmt: skip
def serve_accuracy(run: Run) -> None:
    """The same of `lancebill serve`, which is started for each variant, or of running servers.

    `--likelihood N` also asks how likely the first N reference solutions are, a finer score for models that solve few
    questions. The server's completions page must support `echo` with `logprobs`, as vLLM's does.
    """
    chosen = run.options
    known, examples = _read(run)
    asked, solved = known[: chosen.limit], known[: chosen.likelihood]
    run.facts |= {"questions": len(asked), "solutions": len(solved), "chat": not chosen.completions}
    given, read = dict[Case, list[str]](), dict[Case, list[Reading]]()
    for case, address in servers(run):
        with address as url:
            server = Server(url, chosen.timeout, chosen.api_key)
            model = server.model()
            with ThreadPoolExecutor(chosen.concurrency) as pool:
                given[case] = list(pool.map(lambda each: ask(server, model, prompt(each, examples), run), asked))  # noqa: B023
                read[case] = list(pool.map(lambda each: read_solution(server, model, each), solved))  # noqa: B023
    first = next(iter(read.values()))
    add_scores(run, given, asked, {case: likelihood(own, first) for case, own in read.items()} if solved else None)


def servers(run: Run) -> Iterator[tuple[Case, AbstractContextManager[str]]]:
    """Each variant, and a server of it."""
    chosen = run.options
    for pair in filter(None, chosen.url):
        name, _, url = pair.partition("=")
        yield Case.of(variant=name), nullcontext(url)
    for case in () if any(chosen.url) else run.cases:
        variant = Variant.parse(case["variant"])
        options = {"--engine": chosen.engine, "--weights": variant.weights, "--activations": variant.activations}
        words = [word for option, value in options.items() if value is not None for word in (option, value)]
        yield case, running_server([str(chosen.model), *words, "--backend", variant.backend, *chosen.options.split()])


def ask(server: Server, model: str, text: str, run: Run) -> str:
    """A greedy answer."""
    page, asked = "chat/completions", {"messages": [{"role": "user", "content": text}]}
    if run.options.completions:
        page, asked = "completions", {"prompt": text}  # type: ignore[dict-item]
    body = {"model": model, "temperature": 0, "max_tokens": run.options.tokens, "stop": [NEXT], **asked}
    choice = _choice(server, page, body)
    return str(choice["text"] if run.options.completions else choice["message"]["content"] or "").split(NEXT)[0]


def _choice(server: Server, page: str, body: dict[str, Any]) -> Any:
    response = server.request("POST", page, body)
    if response.status != 200:
        raise LaunchError("the server refused a question", got=f"{response.status} {response.read(300)!r}")
    return json.loads(response.read())["choices"][0]


@dataclass(frozen=True)
class Reading:
    """Of one reference solution: nats of each token, and the token that the model finds likeliest in its place."""

    nats: tuple[float, ...]
    likeliest: tuple[str, ...]


def read_solution(server: Server, model: str, question: Question) -> Reading:
    """Of a question's solution after the question alone, without examples."""
    text = prompt(question, ())
    asked = {"model": model, "prompt": f"{text} {question.worked}", "echo": True, "logprobs": 1, "max_tokens": 0}
    found = _choice(server, "completions", {**asked, "temperature": 0})["logprobs"]
    places = [i for i, offset in enumerate(found["text_offset"]) if offset >= len(text)]
    top = [max(found["top_logprobs"][i], key=found["top_logprobs"][i].__getitem__) for i in places]
    return Reading(tuple(-found["token_logprobs"][i] for i in places), tuple(top))


def likelihood(readings: Sequence[Reading], first: Sequence[Reading]) -> dict[str, Any]:
    """Mean nats of a token; the difference to the first variant, of means of solutions; and equal likeliest tokens."""
    mine = [nats for each in readings for nats in each.nats]
    facts: dict[str, Any] = {"nats": sum(mine) / len(mine), "solution_tokens": len(mine)}
    if readings is first:
        return facts
    # The tokens of a solution are not independent of each other.
    means = [torch.tensor([sum(each.nats) / len(each.nats) for each in side], dtype=torch.float64)
             for side in (first, readings)]  # fmt: skip
    pair = bootstrap(*means)
    pairs = [two for a, b in zip(first, readings, strict=True) for two in zip(a.likeliest, b.likeliest, strict=True)]
    facts |= {"more_nats": pair.mean, "more_nats_stderr": pair.stderr, "nats_p": pair.p}
    return facts | {"same_likeliest": sum(a == b for a, b in pairs) / len(pairs)}
