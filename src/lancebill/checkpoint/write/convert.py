"""From one checkpoint to another, matrix by matrix.

A few matrices are in work at once, each read, requantised and written by one thread. What goes where
was decided before (`target`); here numbers are moved, rounded only where they must be, and what the
rounding cost is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lancebill.checkpoint.load.load_experts import load_projection
from lancebill.checkpoint.load.worker_threads import ordered
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.manifest import Projection
from lancebill.checkpoint.resolve.other_modules import OtherModule, quantized_modules, row_chunks
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.checkpoint.write.target import GGUF, Job, Output, Target, plan
from lancebill.errors import UnsupportedFormat
from lancebill.formats.base import Scheme
from lancebill.numbers.codec import FLOOR, Loss, dequantize, loss, quantize, requantize
from lancebill.numbers.dtypes import ZERO16
from lancebill.numbers.spec import DENSE_F32
from lancebill.numbers.weight import INPUT_ROLES, LogicalWeight, stack

COPY_BYTES = 32 << 20  # of a tensor that is only copied, at a time

Progress = Callable[[int], None]


@dataclass
class Report:
    """What was written and what it cost."""

    target: Target
    layers: dict[int, Loss] = field(default_factory=dict)
    source_bytes: int = 0  # of the experts read
    written_bytes: int = 0  # of all tensors
    copied: int = 0  # tensors taken over byte for byte
    recast: tuple[str, ...] = ()  # modules outside the experts re-encoded exactly
    dequantized: tuple[str, ...] = ()  # modules outside the experts that are unquantised now
    dropped: dict[str, int] = field(default_factory=dict)  # activation-side tensors left behind, by role

    @property
    def total(self) -> Loss:
        total = Loss()
        for part in self.layers.values():
            total = total.merge(part)
        return total


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert: where to compute, how MX scales round, what to do with the rest."""

    device: str = "cpu"
    mx_rule: str = FLOOR
    overwrite: bool = False
    experts_only: bool = False


def prepare(source: Checkpoint, target: Target, options: ConvertOptions) -> Output:
    """Check the source whole and decide the output; reads headers only."""
    manifest = manifests.build(source.config, source.headers)
    manifest.check(str(source.path))
    if manifest.naming.family == GGUF and not options.experts_only:
        raise UnsupportedFormat(
            "only the experts of a GGUF file can be converted: its other tensors have other names and orders",
            where=str(source.path),
            hint="--experts-only writes a checkpoint of the experts alone",
        )
    others = [] if options.experts_only else quantized_modules(manifest, source.headers, source.read)
    return plan(manifest, target, source.headers, others, experts_only=options.experts_only)


def convert(
    source: Checkpoint,
    destination: str | Path,
    output: Output,
    options: ConvertOptions,
    progress: Progress = lambda _: None,
) -> Report:
    """Write `output`; `progress` is told the source bytes done."""
    report = Report(output.target, copied=len(output.copied), source_bytes=_expert_bytes(source, output))
    report.dropped = _inputs_left(output)
    report.recast = tuple(module.module for module in output.recast)
    report.dequantized = tuple(module.module for module in output.dequantized)
    with CheckpointWriter(destination, output.tensors, source=source.path, overwrite=options.overwrite) as out:
        out.write_json("config.json", output.config)
        for file in () if options.experts_only else source.other_files():
            out.copy_file(file)
        for name in output.copied:
            _copy(source, name, out, progress)
        for module in output.dequantized:
            _write_plain(source, module, output.plain_scheme, out, options)
            progress(_bytes(source, module))
        for module in output.recast:
            _write_recast(source, module, output.scheme, out)
            progress(_bytes(source, module))
        _Experts(source, output, options, out, report, progress).run()
    report.written_bytes = sum(shard.size for shard in out.shards)
    return report


def work_bytes(source: Checkpoint, output: Output) -> int:
    """What `progress` will have been told at the end."""
    modules = sum(_bytes(source, module) for module in (*output.dequantized, *output.recast))
    return sum(source.tensors[name].nbytes for name in output.copied) + modules + _expert_bytes(source, output)


class _Experts:
    """The experts' part of a conversion."""

    def __init__(
        self,
        source: Checkpoint,
        output: Output,
        options: ConvertOptions,
        out: CheckpointWriter,
        report: Report,
        progress: Progress,
    ) -> None:
        self.source, self.output, self.options = source, output, options
        self.out, self.report, self.progress = out, report, progress

    def run(self) -> None:
        for job, cost in ordered(self._convert, self.output.jobs):
            self.report.layers[job.layer] = self.report.layers.get(job.layer, Loss()).merge(cost)
            self.progress(sum(_bytes(self.source, p) // _shares(p) for p in job.sources))

    def _convert(self, job: Job) -> Loss:
        """One module of the output, start to end; returns what rounding it cost."""
        scheme, cost, made = self.output.scheme, Loss(), []
        for projection in job.sources:
            weight = _to(load_projection(self.source.read, projection), self.options.device)
            fitted, part = fit(weight, scheme, self.options.mx_rule)
            made.append(_to(fitted, "cpu"))
            cost = cost.merge(part)
        weight = made[0] if len(made) == 1 else stack(made)
        if len(made) > 1 and self.output.form.interleaved:
            weight = weight.rows(torch.arange(weight.n).view(2, -1).t().reshape(-1))
        self._write(job, scheme.encode(weight))
        return cost

    def _write(self, job: Job, tensors: Mapping[str, Tensor]) -> None:
        for role, tensor in tensors.items():
            name, expert = self.output.place(job, role)
            tensor = tensor.t() if self.output.flipped(job, role) else tensor
            if expert is None:
                self.out.write(name, tensor)
            elif self.output.form.flat and tensor.ndim:
                self.out.write(name, tensor, expert * tensor.shape[0])
            else:
                self.out.write(name, tensor.unsqueeze(0), expert)


def fit(weight: LogicalWeight, scheme: Scheme, mx_rule: str = FLOOR) -> tuple[LogicalWeight, Loss]:
    """The weight as `scheme` can hold it, exactly where possible, and what it cost.

    Output checkpoints are weight-only: activation-side tensors stay behind, and a pre-quantisation
    scale, which changes what the weights mean, is multiplied into them.
    """
    spec = scheme.spec
    if "pre_quant_scale" in weight.inputs:
        values = dequantize(weight) * weight.inputs["pre_quant_scale"].float().reshape(1, -1)
        weight = LogicalWeight(DENSE_F32, values, bias=weight.bias)
    weight = replace(weight, inputs={})
    result, cost = requantize(weight, spec, mx_rule=mx_rule, keep_order=scheme.act_order)
    if _zero_fits(result, scheme):
        return result, cost
    source = dequantize(weight)
    result = replace(quantize(source, spec, mx_rule=mx_rule), bias=weight.bias)
    return result, loss(source, result)


def _zero_fits(weight: LogicalWeight, scheme: Scheme) -> bool:
    if weight.zero is None or weight.spec.zero is None or weight.spec.zero.dtype != ZERO16:
        return True
    low, high = scheme.zero_range
    return low <= int(weight.zero.min()) and int(weight.zero.max()) <= high


def _to(weight: LogicalWeight, device: str) -> LogicalWeight:
    if weight.codes.device.type == torch.device(device).type:
        return weight

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return replace(
        weight,
        codes=weight.codes.to(device),
        scales=tuple(t.to(device) for t in weight.scales),
        zero=move(weight.zero),
        minimum=tuple(t.to(device) for t in weight.minimum),
        bias=move(weight.bias),
        perm=move(weight.perm),
        inputs={role: t.to(device) for role, t in weight.inputs.items()},
    )


def _copy(source: Checkpoint, name: str, out: CheckpointWriter, progress: Progress) -> None:
    """A tensor byte for byte, by rows so that a large one is never held whole."""
    info = source.tensors[name]
    if info.nbytes <= COPY_BYTES or not info.shape:
        out.write(name, source.read(name))
        progress(info.nbytes)
        return
    rows = max(1, COPY_BYTES * info.shape[0] // info.nbytes)
    for first in range(0, info.shape[0], rows):
        part = source.read(name, (slice(first, first + rows),))
        out.write(name, part, first)
        progress(part.nbytes)


def _write_plain(
    source: Checkpoint, module: OtherModule, scheme: Scheme, out: CheckpointWriter, options: ConvertOptions
) -> None:
    """A quantised module outside the experts, dequantised by rows."""
    weight = scheme.part("codes")
    assert weight is not None
    for first, part in row_chunks(module):
        loaded = replace(_to(load_projection(source.read, part), options.device), bias=None)
        made = _to(fit(loaded, scheme)[0], "cpu")
        out.write(module.module + weight.suffix[0], made.codes, first)
    bias = module.sources.get("bias")
    if bias is not None:
        out.write(f"{module.module}.bias", source.read(bias.tensor))


def _write_recast(source: Checkpoint, module: OtherModule, scheme: Scheme, out: CheckpointWriter) -> None:
    """A quantised module outside the experts, the same numbers in the new format."""
    weight = load_projection(source.read, module)
    for role, tensor in scheme.encode(fit(weight, scheme)[0]).items():
        part = scheme.part(role)
        assert part is not None
        out.write(module.module + part.suffix[0], tensor)


def _inputs_left(output: Output) -> dict[str, int]:
    """How many activation-side tensors of each role are not in the output."""
    projections = [p for job in output.jobs for p in job.sources]
    left = {
        (role, held.tensor, held.expert)
        for p in (*projections, *output.recast, *output.dequantized)
        for role, held in p.sources.items()
        if role in INPUT_ROLES
    }
    return dict(Counter(role for role, _, _ in sorted(left, key=str)))


def _bytes(source: Checkpoint, projection: Projection) -> int:
    """Stored bytes of a projection's own part of its tensors."""
    total = 0
    for held in projection.sources.values():
        info = source.tensors[held.tensor]
        experts = 1 if held.expert is None else info.shape[0] // (held.rows_per_expert or 1)
        total += info.nbytes // experts
    return total


def _shares(projection: Projection) -> int:
    """Over how many projections a stored module is spread: gate and up of a fused one."""
    return projection.stored_n // projection.n


def _expert_bytes(source: Checkpoint, output: Output) -> int:
    return sum(_bytes(source, p) // _shares(p) for job in output.jobs for p in job.sources)
