"""The figures of docs/reliability.md: what is counted, the target, and the command that measures it.

A figure is measured by a script of this folder, or held by tests of the suite, which suite.py runs and counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One row of the page; `tests` are those that hold it where no script measures it."""

    name: str
    what: str
    target: str
    script: str = "suite.py"
    tests: tuple[str, ...] = ()
    gpu: bool = False  # needs an sm_90 GPU

    @property
    def command(self) -> str:
        ours = self.script.split(" ")[0].endswith(".py")
        return f"python tests/campaign/{self.script}" if ours else self.script


UNIT = "tests/unit"
_CACHE = f"{UNIT}/jit/test_jit_cache.py"
_GPU_LAYER, _GPU_EXACT = "tests/gpu/test_gpu_layer.py", "tests/gpu/test_gpu_exact.py"

FIGURES: dict[str, tuple[Target, ...]] = {
    "Checkpoints": (
        Target(
            "R1", "hand-made corrupt files: the right error and place, no crash, no hang, no large allocation", "100 %",
            tests=(
                f"{UNIT}/checkpoint/test_corrupt.py", f"{UNIT}/checkpoint/test_corrupt_gguf.py",
                f"{UNIT}/checkpoint/test_counts.py",
            ),
        ),
        Target("R2", "mutated inputs of every reader: exceptions outside our own", "50 million, 0", "fuzz.py"),
        Target("R3", "every tensor left out, doubled, cut, of another shape or dtype: named", "100 %", "damage.py"),
        Target(
            "R4", "a bad value in each role: reported with its expert", "100 %",
            tests=(f"{UNIT}/checkpoint/test_check_values.py",),
        ),
        Target(
            "R5", "illegal and unknown config keys: an error that names the key", "100 %",
            tests=(
                f"{UNIT}/checkpoint/test_config.py", f"{UNIT}/checkpoint/test_routing_config.py",
                f"{UNIT}/formats/test_quark_config.py", f"{UNIT}/formats/test_compressed_tensors_config.py",
            ),
        ),
        Target(
            "R6", "`pickle`, `torch.load`, `eval`, `exec`, remote code in the package", "0",
            tests=(
                f"{UNIT}/test_architecture.py::test_nothing_from_a_file_is_executed",
                f"{UNIT}/test_architecture.py::test_one_module_calls_transformers_loaders",
            ),
        ),
        Target("R7", "checkpoints made by real tools, against an independent decoder", "3 a format", "tools.py"),
    ),
    "Numbers": (
        Target("N1", "all codes and midpoints of every dtype", "0 differ", tests=(f"{UNIT}/numbers/test_dtypes.py",)),
        Target(
            "N2", "round trips of formats, shards and layouts", "0 failures",
            tests=(f"{UNIT}/formats/test_formats.py", f"{UNIT}/numbers/test_bit_packing.py"),
        ),
        Target(
            "N3", "layers with exact results on every backend: bits, against float64", "2,000 cases, 0 differ",
            "exact.py", tests=(_GPU_EXACT,),
        ),
        Target("N4", "random problems against the reference", "100,000 a CPU level, 10,000 on the GPU", "kernels.py"),
        Target(
            "N5", "seeded defects that the judge catches", "100 % of 20", tests=(f"{UNIT}/testing/test_defects.py",)
        ),
        Target("N6", "perplexity against the reference backend", "within the stated bound",
               "python -m benchmarks perplexity"),
    ),
    "Determinism": (
        Target("D1", "repeats of a call beside a busy second stream or thread", "1,000, 0 differ", "kernels.py"),
        Target("D2", "rows in other batches, batch-invariant order", "1,000,000 a backend, 0 differ", "kernels.py"),
        Target(
            "D3", "plans in batch-invariant order do not depend on the batch", "100 %",
            tests=(f"{UNIT}/backends/test_hopper_backend.py",),
        ),
        Target("D4", "cost of the batch-invariant order at the median shape", "10 % at most",
               "python -m benchmarks gpu-layer", gpu=True),
        Target("D5", "the fast order differs somewhere", "must differ", "gpu.py", gpu=True),
    ),
    "Device safety": (
        Target("S1", "compute-sanitizer: memcheck, racecheck, synccheck, initcheck", "4 tools, 0 findings",
               "python -m benchmarks sanitize", gpu=True),
        Target("S2", "guard rows intact, padding and outputs start as NaN", "100 %", tests=(_GPU_LAYER,), gpu=True),
        Target(
            "S3", "register spills and local memory in shipped kernels", "0",
            tests=(
                f"{UNIT}/backends/test_hopper_compile.py::test_the_shipped_set_compiles",
                f"{UNIT}/backends/test_hopper_compile.py::test_binaries_use_no_local_memory",
            ),
        ),
        Target(
            "S4", "host synchronisations and allocations in a call; replay equals eager", "0, equal",
            tests=("tests/gpu/test_capture.py", "tests/gpu/test_gpu_work.py"), gpu=True,
        ),
        Target("S5", "soak: faults, memory drift", "2 h CPU, 20 min GPU: 0, < 1 MiB", "soak.py"),
    ),
    "Kernel cache": (
        Target("C1", "32 processes, one cold key: compilations, failures", "100 rounds, 1 and 0", "cache.py"),
        Target("C2", "kill -9 at random moments of convert, save, cache publish, refit", "1,000 each, 0 lost",
               "kills.py"),
        Target("C3", "an entry cut or flipped at 64 positions: rebuilt, never loaded", "100 %", "cache.py"),
        Target(
            "C4", "every compiler input changes the key", "100 %",
            tests=(
                f"{_CACHE}::test_the_key_covers_every_compiler_input",
                f"{_CACHE}::test_the_digest_covers_imported_files",
            ),
        ),
        Target(
            "C5", "folders and entries that others could write are refused", "100 %",
            tests=tuple(
                f"{_CACHE}::{name}"
                for name in (
                    "test_a_folder_that_others_can_write_is_refused", "test_a_folder_of_another_user_is_refused",
                    "test_a_link_of_another_user_is_refused",
                    "test_a_folder_below_one_that_everyone_can_write_is_refused",
                    "test_an_entry_that_others_may_have_written_is_built_again",
                )
            ),
        ),
        Target(
            "C6", "first call: shipped kernels in an empty cache", "published",
            "lancebill bench --device cuda:0 --shape deepseek-v4-flash --weights mxfp4 --first-forward", gpu=True,
        ),
    ),
    "Loading": (
        Target("L1", "peak / final GPU bytes of a layer", "1.05 at most", "loading.py", gpu=True),
        Target("L2", "peak host memory", "2 x largest slice + 256 MiB", "loading.py"),
        Target("L3", "bytes read / bytes of the local shard", "1.01 at most", "loading.py"),
        Target("L4", "a failing disk at every system call of load and convert", "100 % handled", "io_faults.py"),
        Target("L5", "load rate", "80 % of disk or PCIe", "loading.py", gpu=True),
    ),
    "Errors": (
        Target("E1", "every place that raises is reached by a test", "100 %", "suite.py --coverage 1"),
        Target("E2", "tests of errors pass under `python -O`", "all", "suite.py --optimized 1"),
        Target(
            "E3", "without a backend, every backend's reasons are listed", "100 %",
            tests=(f"{UNIT}/cli/test_explain.py",),
        ),
        Target("E4", "branch coverage of what runs without a GPU", "95 %", "suite.py --coverage 1"),
    ),
    "Native code": (
        Target("X1", "the library's tests under AddressSanitizer and UndefinedBehaviorSanitizer", "0 reports",
               "sanitizers.py"),
        Target("X2", "the library under ThreadSanitizer, with one caller and with several", "0 reports", "races.py"),
    ),
    "Refits": (
        Target("F1", "other weights pushed into a live layer: bits of a fresh load", "1,000, 0 differ", "refits.py"),
    ),
}  # fmt: skip
